"""Public bug reports about tool calls: what a model says, and what clients get of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from comparing import GREEDY
from engines import make_engine, run, step, submit
from fakes import ScriptedRunner

from mlserve.server.tools.deltas import Call, Delta, join
from mlserve.server.tools.formats import FORMATS, JSON_ANSWER
from mlserve.server.tools.parser import CallParser

ARGUMENTS = '{"n1": 2, "n2": 2}'
ANSWERS = {
    "hermes": f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3_json": f'{{"name": "add", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}]',
    "mistral-args": f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}",
    "pythonic": "[add(n1=2, n2=2)]",
    "json": f'{{"name": "add", "arguments": {ARGUMENTS}}}',
}


class Pieces:
    """Tokenizer of a scripted output: each token is a whole piece of text."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id].encode()


def new_parser(name: str) -> CallParser:
    form = JSON_ANSWER if name == "json" else FORMATS[name.removesuffix("-args")]
    return CallParser(form, tool_names=["add"], new_id=lambda: "abcdefghi")


def streamed_and_whole(name: str, pieces: list[str], prompt: list[int]) -> tuple[list[Delta], list[Delta]]:
    """The deltas of an engine's stream, and those of its output in one piece."""
    engine = make_engine(ScriptedRunner(list(range(len(pieces)))), Pieces(pieces))  # type: ignore[arg-type]
    params = replace(GREEDY, max_tokens=len(pieces))
    submit(engine, "only", prompt, params)
    parser, streamed = new_parser(name), []
    completed = None
    while engine.has_work():
        for output in step(engine):
            streamed += parser.feed(output.text)
            completed = output.completed or completed
    run(engine)
    assert completed is not None
    whole = new_parser(name)
    return streamed + parser.finish(), whole.feed(completed.outputs[0].text) + whole.finish()


@pytest.mark.parametrize("name", ANSWERS)
def test_5_09_streamed_calls_lose_nothing(name: str) -> None:
    """Cut into two deltas at every position, one delta per character, and all in one delta."""
    text = ANSWERS[name]
    cuts = [[text[:at], text[at:]] for at in range(1, len(text))]
    for pieces in ([text], list(text), *cuts):
        streamed, whole = streamed_and_whole(name, pieces, [1, 2, 3])
        assert join(streamed) == join(whole) == ("", (Call("abcdefghi", "add", ARGUMENTS),))
        assert json.loads(join(streamed)[1][0].arguments) == {"n1": 2, "n2": 2}


@pytest.mark.parametrize("name", ANSWERS)
def test_5_09_marks_in_the_prompt_are_no_calls(name: str) -> None:
    """The prompt says what would be a call; the model says something else."""
    prompt = list(ANSWERS[name].encode())
    streamed, whole = streamed_and_whole(name, ["No ", "call."], prompt)
    assert join(streamed) == join(whole) == ("No call.", ())
