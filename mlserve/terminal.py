"""A chat in the terminal: answers stream in, with what the cache saved and how fast it went."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from mlserve.errors import RequestError, StepError
from mlserve.llm import LLM
from mlserve.request import SamplingParams

__all__ = ["converse"]


def converse(
    llm_options: Mapping[str, Any], params: SamplingParams, system: str | None, adapter: str | None = None
) -> None:
    """Read a line, answer it, repeat.

    `/adapter NAME` lets another adapter go on, `/adapter` the base model; `/new` starts afresh; `/quit` or end of input
    ends it.
    """
    logging.basicConfig(level=logging.WARNING)
    llm = LLM(**llm_options)
    print(f"{llm.config.model.model}: type a message; /adapter NAME switches, /new starts afresh, /quit ends.")
    opening = [] if system is None else [{"role": "system", "content": system}]
    history = list(opening)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line == "/new":
            history = list(opening)
        elif line.split(maxsplit=1)[:1] == ["/adapter"]:
            adapter = line.removeprefix("/adapter").strip() or None
        elif line:
            history = _turn(llm, history, line, params, adapter)


def _turn(
    llm: LLM, history: list[dict[str, str]], line: str, params: SamplingParams, adapter: str | None
) -> list[dict[str, str]]:
    """One message and its answer. A refused, failed or interrupted turn leaves the history as it was."""
    asked = [*history, {"role": "user", "content": line}]
    answer, count, start = "", 0, time.monotonic()
    try:
        for output in llm.stream(asked, params, adapter=adapter):
            print(output.text, end="", flush=True)
            answer += output.text
            count += len(output.token_ids)
            if output.error is not None:
                raise StepError(output.error)
            if output.completed is not None:
                metrics = output.completed.metrics
    except (RequestError, StepError) as error:
        print(error)
        return history
    except KeyboardInterrupt:
        print("\n[stopped]")
        return history
    first = metrics.time_to_first_token or 0.0
    decoding = time.monotonic() - start - first
    speed = (count - 1) / decoding if count > 1 and decoding > 0 else 0.0
    print(
        f"\n[{metrics.cached_tokens} of {metrics.prompt_tokens} prompt tokens cached, first token {first:.2f} s, "
        f"{count} tokens at {speed:.1f} tokens/s]"
    )
    return [*asked, {"role": "assistant", "content": answer}]
