"""Short templates that treat tools as the published ones of their families do, and the same conversation for all."""

from __future__ import annotations

from typing import Any

# Qwen 2.5 and 3: tools in the system turn, results of tools as user turns. Wants arguments as objects.
QWEN = (
    "{%- if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\n"
    'Answer with <tool_call>\n{{ \'{\\"name\\": ..., \\"arguments\\": ...}\' }}\n</tool_call><|im_end|>\n{% endif %}'
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "<|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}{% endfor %}"
    "{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}"
)

# Llama 3.1 and 3.2: one call per turn, results from the role ipython.
LLAMA = (
    "{%- if tools is not none %}Environment: ipython\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\n'
    "{%- for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}"
    "{%- for message in messages %}"
    "{%- if 'tool_calls' in message %}"
    "{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at once!') }}{% endif %}"
    "{%- set call = message.tool_calls[0].function %}[assistant]"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}"
    "{%- elif message.role == 'tool' %}[ipython]{{ {'output': message.content} | tojson }}"
    "{%- else %}[{{ message.role }}]{{ message.content | trim }}{% endif %}{% endfor %}"
)

# Meta's other prompt for Llama 3.2.
PYTHONIC = (
    "{%- if tools is not none %}Respond in the format [func_name1(params_name1=params_value1), func_name2(params)]"
    "{{ tools | tojson }}{% endif %}"
    "{%- for message in messages %}[{{ message.role }}]"
    "{%- for call in message.tool_calls %}{{ call.function.name }}({% for key in call.function.arguments %}{{ key }}="
    "{{ call.function.arguments[key] }}{% endfor %}){% endfor %}{{ message.content }}{% endfor %}"
)

# Mistral 7B v0.3: tools before the last user turn; ids have nine characters.
MISTRAL = (
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}"
    "{%- if tools is not none %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ message.content }}[/INST]"
    "{%- elif message.tool_calls is defined %}[TOOL_CALLS] ["
    "{%- for call in message.tool_calls %}"
    "{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "{{- (call.function | tojson)[:-1] }}{{ ', \"id\": \"' + call.id + '\"}' }}{% endfor %}]"
    "{%- elif message.role == 'tool' %}"
    '[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{%- else %} {{ message.content }}{% endif %}{% endfor %}"
)

# SmolLM3: a variable of its own name, each tool as Python prints it; earlier calls are not laid out.
SMOLLM3 = (
    "{%- if xml_tools or python_tools %}{% for tool in xml_tools %}{{ tool | string }}{% endfor %}"
    "{{ '<tool_call>\\n{\\\"name\\\": <function-name>}\\n</tool_call>' }}{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
)

# SmolLM2 and Gemma 3: nothing about tools.
PLAIN = "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"

# Qwen3-Coder writes arguments in tags, which isn't one of our formats.
QWEN_CODER = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>\n<function=name>\n<parameter=p>"

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

# A question, a call as a client of OpenAI sends it, and its result.
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Tromsø?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Tromsø"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "-3"},
]
