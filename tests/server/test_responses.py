"""Responses over HTTP, with the openai package as the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from engines import make_engine
from fakes import ScriptedRunner
from http_server import MODEL, Served, served
from PIL import Image
from pydantic import BaseModel
from random_logits import RandomLogitsRunner
from streaming import SlowRunner
from tiny import IM_END, VOCABULARY
from tiny_vision import write_tiny_vlm

from mlserve import LLM
from mlserve.client import image
from mlserve.engine.tokenizer import Tokenizer
from mlserve.model.plan import SequenceT, StepPlan, StepResult
from mlserve.request import TokenLogprob

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": False,
}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
)


class Verdict(BaseModel):
    """What a model is made to answer."""

    colour: Literal["red", "green"]
    certain: bool


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    """What it answers depends on every token of the prompt."""
    engine = make_engine(SlowRunner(128, 4), tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)
    with served(engine) as server:
        yield server


def scripted(tokenizer: Tokenizer, text: str, **config: Any) -> AbstractContextManager[Served]:
    """A server whose model says this, whatever it is asked."""
    script = [*tokenizer.encode(text, add_special_tokens=False), IM_END]
    engine = make_engine(
        ScriptedRunner(script), tokenizer, num_blocks=512, vocab_size=VOCABULARY, max_model_len=1024, eos=(IM_END,)
    )
    return served(engine, **{"tool_call_format": "hermes", **config})


def test_a_response_is_the_answer_of_a_chat(server: Served) -> None:
    client = server.client()
    response = client.responses.create(
        input="hello", instructions="be kind", max_output_tokens=9, metadata={"a": "b"}, user="me", **GREEDY
    )
    messages: Any = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(messages=messages, max_tokens=9, **GREEDY)
    assert response.output_text == chat.choices[0].message.content != ""
    assert response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 9
    assert response.usage.total_tokens == chat.usage.total_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert (response.object, response.model, response.error) == ("response", MODEL, None)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.metadata, response.user, response.instructions) == ({"a": "b"}, "me", "be kind")
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0, 1, 9)
    assert (response.tool_choice, response.tools, response.parallel_tool_calls) == ("auto", [], True)
    assert response.text.format.type == "text"
    assert response.model_extra["store"] is False
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert message.content[0].annotations == []


def test_the_cache_is_shared_with_chats(server: Served) -> None:
    client = server.client()
    first = client.responses.create(input="never said before", max_output_tokens=1, **GREEDY)
    messages: Any = [{"role": "user", "content": "never said before"}]
    chat = client.chat.completions.create(messages=messages, max_tokens=1, **GREEDY)
    again = client.responses.create(input="never said before", max_output_tokens=1, **GREEDY)
    salted = client.responses.create(
        input="never said before", max_output_tokens=1, extra_body={"cache_salt": "s"}, **GREEDY
    )
    cached = chat.usage.prompt_tokens_details.cached_tokens
    assert cached > first.usage.input_tokens_details.cached_tokens
    assert again.usage.input_tokens_details.cached_tokens == cached
    assert salted.usage.input_tokens_details.cached_tokens == 0


def test_a_stream_is_the_response_in_one_piece(server: Served) -> None:
    client = server.client()
    whole = client.responses.create(input="hello", max_output_tokens=9, **GREEDY)
    events = list(client.responses.create(input="hello", max_output_tokens=9, stream=True, **GREEDY))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert len(deltas) > 1
    assert "".join(delta.delta for delta in deltas) == whole.output_text
    assert {event.response.status for event in events[:2]} == {"in_progress"}
    added = events[2].item
    assert (added.status, added.content) == ("in_progress", [])
    assert {delta.item_id for delta in deltas} == {added.id}
    assert events[-4].text == events[-3].part.text == events[-2].item.content[0].text == whole.output_text
    assert same(events[-1].response) == same(whole)


def same(response: Any) -> dict[str, Any]:
    """A response without what is another's in each, such as its id, and without what the package adds to it."""
    shown: dict[str, Any] = response.to_dict()
    for item in shown["output"]:
        for part in [item, *item.get("content", [])]:
            for name in {"id", "call_id", "parsed", "parsed_arguments"} & set(part):
                del part[name]
    del shown["id"], shown["created_at"], shown["usage"]["input_tokens_details"]
    return shown


def test_the_events_have_names_and_no_mark_at_their_end(server: Served) -> None:
    body = {"input": "hello", "max_output_tokens": 2, "stream": True, **GREEDY}
    text = server.http().post("/v1/responses", json=body).text
    blocks = text.removesuffix("\n\n").split("\n\n")
    for block in blocks:
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert blocks[-1].startswith("event: response.incomplete\n")
    assert "[DONE]" not in text


def test_the_stream_helper(tokenizer: Tokenizer) -> None:
    with scripted(tokenizer, "Hello, you.") as server:
        client = server.client()
        with client.responses.stream(input="hello", **GREEDY) as stream:
            snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert snapshots[-1] == final.output_text == "Hello, you."
        assert final.status == "completed"
        assert final.incomplete_details is None
        assert final.output[0].status == "completed"
        assert same(final) == same(client.responses.create(input="hello", **GREEDY))


def test_an_answer_without_text(tokenizer: Tokenizer) -> None:
    with scripted(tokenizer, "") as server:
        response = server.client().responses.create(input="hello", **GREEDY)
        assert (response.status, response.output_text, len(response.output)) == ("completed", "", 1)
        with server.client().responses.stream(input="hello", **GREEDY) as stream:
            assert same(stream.get_final_response()) == same(response)


def test_calls_of_tools(tokenizer: Tokenizer) -> None:
    with scripted(tokenizer, CALLS) as server:
        client = server.client()
        wanted: dict[str, Any] = {"input": "what is 1 + 2?", "tools": [ADD], **GREEDY}
        response = client.responses.create(**wanted)
        text, *calls = response.output
        assert text.content[0].text == "Let me see."
        assert [(call.type, call.name, call.status) for call in calls] == [("function_call", "add", "completed")] * 2
        assert [json.loads(call.arguments) for call in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        assert len({item.id for item in response.output}) == 3
        assert len({call.call_id for call in calls}) == 2
        assert response.tools[0].name == "add"

        with client.responses.stream(**wanted) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert same(final) == same(response)
        arguments = [event for event in events if event.type.startswith("response.function_call_arguments")]
        assert [(event.output_index, event.type.rpartition(".")[2]) for event in arguments] == [
            (1, "delta"), (1, "done"), (2, "delta"), (2, "done"),
        ]  # fmt: skip
        assert [event.name for event in arguments[1::2]] == ["add", "add"]

        one = client.responses.create(parallel_tool_calls=False, **wanted)
        assert [item.type for item in one.output] == ["message", "function_call"]
        assert one.parallel_tool_calls is False


def test_calls_and_their_results_go_back(tokenizer: Tokenizer, server: Served) -> None:
    """The output of a response is taken as input, and is what a chat makes of the same."""
    with scripted(tokenizer, CALLS) as talking:
        first = talking.client().responses.create(input="what is 1 + 2?", tools=[ADD], **GREEDY)
        again = [{"role": "user", "content": "what is 1 + 2?"}, *first.output]
        calls = [item for item in first.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "3"}]}
            for call in calls
        ]
        second = talking.client().responses.create(input=[*again, *results], tools=[ADD], **GREEDY)
        function = {name: ADD[name] for name in ("name", "description", "parameters")}
        made = [
            {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
        ]
        messages: Any = [
            {"role": "user", "content": "what is 1 + 2?"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": made},
            *({"role": "tool", "tool_call_id": call.call_id, "content": "3"} for call in calls),
        ]
        tools: Any = [{"type": "function", "function": function}]
        chat = talking.client().chat.completions.create(messages=messages, tools=tools, **GREEDY)
        assert second.usage.input_tokens == chat.usage.prompt_tokens
        assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens // 4 * 4 - 4
        cached = chat.usage.prompt_tokens_details.cached_tokens
        assert cached >= (chat.usage.prompt_tokens - 1) // 4 * 4  # token for token the same


def test_a_call_that_must_be(tokenizer: Tokenizer) -> None:
    with scripted(tokenizer, '{"name": "add", "arguments": {"a": 12, "b": 34}}') as server:
        client = server.client()
        for choice in ("required", {"type": "function", "name": "add"}):
            response = client.responses.create(input="go", tools=[ADD], tool_choice=choice, **GREEDY)
            (call,) = response.output
            assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 12, "b": 34})
            shown = response.tool_choice if isinstance(choice, str) else response.tool_choice.to_dict()
            assert shown == choice
        with client.responses.stream(input="go", tools=[ADD], tool_choice="required", **GREEDY) as stream:
            pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
            (call,) = stream.get_final_response().output
        assert len(pieces) > 1
        assert "".join(pieces) == call.arguments == '{"a": 12, "b": 34}'
        cut = client.responses.create(input="go", tools=[ADD], tool_choice="required", max_output_tokens=40, **GREEDY)
        (call,) = cut.output
        assert (cut.status, call.status) == ("incomplete", "incomplete")
        assert '{"a": 12, "b": 34}'.startswith(call.arguments)
        assert call.arguments.startswith('{"a": 1')


def test_tools_that_must_not_be_called(tokenizer: Tokenizer) -> None:
    with scripted(tokenizer, CALLS) as server:
        response = server.client().responses.create(input="go", tools=[ADD], tool_choice="none", **GREEDY)
        assert response.output_text == CALLS


def test_parse(tokenizer: Tokenizer) -> None:
    runner = RandomLogitsRunner(VOCABULARY)
    engine = make_engine(runner, tokenizer, num_blocks=512, vocab_size=VOCABULARY, eos=tokenizer.eos_token_ids)
    with served(engine) as server:
        client = server.client()
        found = set()
        for seed in range(4):
            wanted: dict[str, Any] = {"model": MODEL, "input": "which?", "extra_body": {"seed": seed}}
            response = client.responses.parse(text_format=Verdict, **wanted)
            assert response.status == "completed"
            assert isinstance(response.output_parsed, Verdict)
            assert response.text.format.name == "Verdict"
            found.add(response.output_parsed.colour)
            with client.responses.stream(text_format=Verdict, **wanted) as stream:
                assert stream.get_final_response().output_parsed == response.output_parsed
            again = client.responses.create(
                model=MODEL, input=[{"role": "user", "content": "which?"}, *response.output], max_output_tokens=1
            )
            assert again.usage.input_tokens > response.usage.input_tokens
        assert found == {"red", "green"}

        async def main() -> Any:
            async with openai.AsyncOpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
                return await client.responses.parse(text_format=Verdict, **wanted)

        assert asyncio.run(main()).output_parsed == response.output_parsed


def test_any_json_object(tokenizer: Tokenizer) -> None:
    with scripted(tokenizer, '{"a": [1]}') as server:
        text: Any = {"format": {"type": "json_object"}, "verbosity": "medium"}
        response = server.client().responses.create(input="go", text=text, **GREEDY)
        assert response.output_text == '{"a": [1]}'
        assert response.text.format.type == "json_object"
    with scripted(tokenizer, "no JSON") as server, pytest.raises(openai.InternalServerError):
        server.client().responses.create(input="go", text=text, **GREEDY)


def test_images(tmp_path: Path) -> None:
    picture = image(Image.new("RGB", (28, 28), "red"))["image_url"]["url"]
    with served(LLM(str(write_tiny_vlm(tmp_path, "llava")), block_size=4, num_blocks=256).engine) as server:
        client = server.client()
        parts: Any = [
            {"type": "input_image", "image_url": picture, "detail": "auto"},
            {"type": "input_text", "text": "what?"},
        ]
        wanted: dict[str, Any] = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 4, **GREEDY}
        response = client.responses.create(**wanted)
        messages: Any = [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": picture}},
                    {"type": "text", "text": "what?"},
                ],
            }
        ]
        chat = client.chat.completions.create(messages=messages, max_tokens=4, **GREEDY)
        assert response.output_text == chat.choices[0].message.content != ""
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert chat.usage.prompt_tokens_details.cached_tokens > 16  # more than an image has
        assert response.model_extra["images"] == chat.model_extra["images"]
        (*_, last) = client.responses.create(stream=True, **wanted)
        assert last.response.model_extra["images"] == response.model_extra["images"]


def test_async_create_and_stream(server: Served) -> None:
    async def main() -> tuple[Any, str, list[str]]:
        async with openai.AsyncOpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
            whole = await client.responses.create(input="hello", max_output_tokens=9, **GREEDY)
            text = ""
            async for event in await client.responses.create(input="hello", max_output_tokens=9, stream=True, **GREEDY):
                text += event.delta if event.type == "response.output_text.delta" else ""
            async with client.responses.stream(input="hello", max_output_tokens=9, **GREEDY) as stream:
                kinds = [event.type async for event in stream]
            return whole, text, kinds

    whole, text, kinds = asyncio.run(main())
    assert whole.output_text == text != ""
    assert kinds[-1] == "response.incomplete"


class Likely(ScriptedRunner):
    """With the log-probabilities that it would have if it were sure."""

    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        result = super().run(plan)
        for row, token in result.token_ids.items():
            result.logprobs[row] = TokenLogprob(token, -0.5, ((token, -0.5), (1, -2.0)))
        return result


def test_logprobs(tokenizer: Tokenizer) -> None:
    script = [*tokenizer.encode("aö", add_special_tokens=False), IM_END]
    engine = make_engine(Likely(script), tokenizer, vocab_size=VOCABULARY, eos=(IM_END,))
    with served(engine) as server:
        client = server.client()
        wanted: dict[str, Any] = {"input": "hello", "include": ["message.output_text.logprobs"], **GREEDY}
        response = client.responses.create(top_logprobs=2, **wanted)
        entries = response.output[0].content[0].logprobs
        assert [entry.bytes for entry in entries] == [[97], [0xC3], [0xB6]]
        assert [entry.logprob for entry in entries] == [-0.5] * 3
        assert [top.logprob for top in entries[0].top_logprobs] == [-0.5, -2.0]
        with client.responses.stream(top_logprobs=2, **wanted) as stream:
            events = list(stream)
            assert same(stream.get_final_response()) == same(response)
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert [entry.logprob for delta in deltas for entry in delta.logprobs] == [-0.5] * 3
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        assert [entry.token for entry in done.logprobs] == [entry.token for entry in entries]
        assert client.responses.create(input="hello", **GREEDY).output[0].content[0].logprobs == []


class Failing(SlowRunner):
    """Breaks at the fifth token of an answer."""

    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        if any(len(sequence.token_ids) - sequence.num_prompt_tokens == 4 for sequence in plan.sequences):
            raise RuntimeError("broken")
        return super().run(plan)


def test_an_error_in_the_midst_of_a_stream(tokenizer: Tokenizer) -> None:
    engine = make_engine(Failing(128, 4), tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)
    with served(engine) as server:
        stream = server.client().responses.create(input="hello", stream=True, max_output_tokens=50, **GREEDY)
        events: list[Any] = []
        with pytest.raises(openai.APIError, match="broken") as raised:
            events.extend(event for event in stream)
        failed = events[-1]
        assert (failed.type, failed.response.status) == ("response.failed", "failed")
        assert failed.response.error.code == "server_error"
        assert failed.response.error.message == str(raised.value)
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert failed.response.output[0].content[0].text == text != ""
        server.wait_until_idle()
        with (
            pytest.raises(openai.APIError, match="broken"),
            server.client().responses.stream(input="hello", **GREEDY) as helped,
        ):
            helped.get_final_response()
        with pytest.raises(openai.InternalServerError, match="broken"):
            server.client().responses.create(input="hello", **GREEDY)
        assert server.client().responses.create(input="hello", max_output_tokens=3, **GREEDY).output_text


def test_an_error_is_an_event_of_the_api(tokenizer: Tokenizer) -> None:
    engine = make_engine(Failing(128, 4), tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)
    with served(engine) as server:
        text = server.http().post("/v1/responses", json={"input": "hello", "stream": True, **GREEDY}).text
        *_, failed, error = text.removesuffix("\n\n").split("\n\n")
        assert failed.startswith("event: response.failed\n")
        name, data = error.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert (name, body["type"]) == ("event: error", "error")
        assert body["message"] == body["error"]["message"]
        assert (body["code"], body["param"]) == ("server_error", None)
        assert body["sequence_number"] == json.loads(failed.partition("data: ")[2])["sequence_number"] + 1


def test_an_error_before_the_first_event_has_a_status(server: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        server.client().responses.create(model="other", input="hello", stream=True)
    with pytest.raises(openai.BadRequestError, match="tokens"):
        server.client().responses.create(model=MODEL, input="hello" * 1000, stream=True)


def test_a_client_that_leaves_frees_everything(server: Served) -> None:
    """An answer of 400 tokens would take as many steps."""
    wanted: dict[str, Any] = {"input": "hello", "max_output_tokens": 400, **GREEDY}

    def leave_a_stream() -> None:
        stream = server.client().responses.create(stream=True, **wanted)
        next(event for event in stream if event.type == "response.output_text.delta")
        stream.close()

    def leave_a_helper() -> None:
        with server.client().responses.stream(**wanted) as stream:
            next(iter(stream))

    def leave_a_whole_answer() -> None:
        server.leave_unanswered("/v1/responses", wanted)

    for leave in (leave_a_stream, leave_a_helper, leave_a_whole_answer):
        before = len(server.engine.runner.steps)
        leave()
        server.wait_until_idle()
        assert len(server.engine.runner.steps) - before < 300, leave


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("conversation", {"id": "conv_1"}),
        ("store", True),
        ("background", True),
        ("reasoning", {"effort": "low"}),
        ("truncation", "auto"),
        ("prompt", {"id": "pmpt_1"}),
        ("prompt_cache_key", "key"),
        ("service_tier", "flex"),
        ("max_tool_calls", 3),
        ("include", ["reasoning.encrypted_content"]),
        ("text", {"verbosity": "low"}),
        ("max_output_tokens", 0),
        ("metadata", {"a": "b" * 513}),
        ("n", 2),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(server: Served, name: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError, match=name) as raised:
        server.client().responses.create(input="hello", model=MODEL, extra_body={name: value})
    assert raised.value.param == name


def test_what_is_so_anyway_may_be_said(server: Served) -> None:
    response = server.client().responses.create(
        input="hello",
        store=False,
        background=False,
        truncation="disabled",
        service_tier="auto",
        max_output_tokens=1,
        stream=True,
        stream_options={"include_obfuscation": False},
        **GREEDY,
    )
    assert [event.type for event in response][-1] == "response.incomplete"


def test_contradictions(server: Served) -> None:
    def refusal(**options: Any) -> str:
        with pytest.raises(openai.BadRequestError) as raised:
            server.client().responses.create(input="hello", model=MODEL, **options)
        return str(raised.value)

    assert "include hasn't 'message.output_text.logprobs'" in refusal(top_logprobs=2)
    assert "calls of tools don't have" in refusal(include=["message.output_text.logprobs"], tools=[ADD])
    assert "stream_options is given without stream" in refusal(extra_body={"stream_options": {}})
    assert "parallel_tool_calls is given without tools" in refusal(parallel_tool_calls=True)


def test_earlier_responses_are_not_there(server: Served) -> None:
    response = server.client().responses.create(input="hello", max_output_tokens=1, **GREEDY)
    for act in (server.client().responses.retrieve, server.client().responses.delete):
        with pytest.raises(openai.NotFoundError):
            act(response.id)
