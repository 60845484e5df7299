"""Facts out of free text, as JSON that a schema describes: whatever the model would like to say, the answer parses.

The embedded model is small: the form is always right, the facts nearly always.

python examples/json_answer.py
"""

import json
from typing import Any

from mlserve import LLM, Constraint, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Oslo", "Lima", "Paris"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
TEXTS = [
    "Mary Stone turned 71 last week. She lives in Lima with two cats.",
    "I'm Ivan, 34. I moved to Oslo for my new job as a baker.",
    "Since 2019 Lena Fischer, now 45, has been a pilot based in Paris.",
]


def main() -> list[dict[str, Any]]:
    """Run it; returns the answers."""
    llm = LLM()
    conversations = [
        [{"role": "user", "content": f"{text}\n\nWrite this person's name, age and city as JSON."}] for text in TEXTS
    ]
    params = SamplingParams(max_tokens=64, constraint=Constraint.json_schema(SCHEMA))
    answers = []
    for text, output in zip(TEXTS, llm.chat(conversations, params), strict=True):
        answer = json.loads(output.outputs[0].text)
        print(f"{text}\n  {answer}")
        answers.append(answer)
    return answers


if __name__ == "__main__":
    main()
