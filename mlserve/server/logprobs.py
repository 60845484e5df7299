"""Log-probabilities in the layouts of OpenAI's API, in step with the text that they belong to."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlserve.engine.tokenizer import Tokenizer
from mlserve.request import TokenLogprob

__all__ = ["CompletionLogprobs", "LogprobStream", "chat_logprobs"]


class LogprobStream:
    """Gives out the entries of a sequence's tokens once their text is out.

    Text may be held back, because it may be the start of a stop string; if it is, it never comes, and neither do the
    entries of tokens that stand in it alone. Tokens that the text leaves out, such as the one that ends an answer, have
    no entry.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_made = 0  # characters that the tokens so far complete
        self._num_out = 0  # characters that are out
        self._pending: deque[tuple[TokenLogprob, int, int]] = deque()  # entry, characters before it, and with it

    def advance(self, text: str, entries: Sequence[TokenLogprob], is_last: bool) -> list[TokenLogprob]:
        """The sequence's next text and entries; returns the entries that are due."""
        for entry in entries:
            if entry.token_id not in self._skipped:
                before = self._num_made
                self._num_made += len(self._characters.decode(self._tokenizer.token_bytes(entry.token_id)))
                self._pending.append((entry, before, self._num_made))
        self._num_out += len(text)
        due = []
        while self._pending:
            entry, before, after = self._pending[0]
            if after > self._num_out and not (is_last and before < self._num_out):
                break
            due.append(entry)
            self._pending.popleft()
        return due


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` of a chat's choice."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    content = [
        {**shown(e.token_id, e.logprob), "top_logprobs": [shown(*candidate) for candidate in e.top]} for e in entries
    ]
    return {"content": content, "refusal": None}


@dataclass(slots=True)
class CompletionLogprobs:
    """The `logprobs` of a completion's choice: parallel lists, with each token's offset in the text."""

    tokenizer: Tokenizer
    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token_id: int, entry: TokenLogprob | None) -> None:
        """The next token; a prompt's first has no entry."""
        text = self._text(token_id)
        self.tokens.append(text)
        self.text_offset.append(self.offset)
        self.offset += len(text)
        self.token_logprobs.append(None if entry is None else entry.logprob)
        self.top_logprobs.append(None if entry is None else self._top(text, entry))

    def take(self) -> dict[str, Any]:
        """What was added since the last call."""
        taken = {name: getattr(self, name) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return taken

    def _top(self, text: str, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and, as in OpenAI's API, the chosen one. Of those that look alike the likelier one."""
        return {text: entry.logprob} | {self._text(i): logprob for i, logprob in reversed(entry.top)}

    def _text(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id).decode(errors="replace")
