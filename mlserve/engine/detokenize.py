"""Output tokens to text, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from mlserve.engine.tokenizer import Tokenizer
from mlserve.request import SamplingParams

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    """The text of one sequence, in deltas. Joined, they are the text of all its tokens, whatever the chunks were.

    A delta never holds half a character, nor text that may turn out to be the beginning of a stop string:

        text so far:  [ given out | held back: may be the start of a stop string ][ bytes of an incomplete character ]

    Bytes that can't become a character are U+FFFD, as in `Tokenizer.decode`. The output goes on from the prompt, so a
    space at its beginning is kept.

    Generation stops at the stop string that is complete first; of those that end at the same character, at the longest.
    None counts before the sequence has `min_tokens` tokens. Cost per token: its own characters, times the stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stop_string: str | None = None  # the one that was found; the text has ended then
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._min_tokens = params.min_tokens
        self._keeps_stop = params.include_stop_str_in_output
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(params.stop)]
        self._held = ""
        self._num_tokens = 0

    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that is certain now. Empty once a stop string was found."""
        given = []
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            self._num_tokens += 1
            if token_id not in self._skipped:
                text = self._characters.decode(self._tokenizer.token_bytes(token_id))
                given.append(self._advance(text))
        return "".join(given)

    def finish(self) -> str:
        """The sequence has ended; returns what was held back. Call it once."""
        if self.stop_string is not None:
            return ""
        text = self._advance(self._characters.decode(b"", final=True))
        held, self._held = self._held, ""
        return text if self.stop_string is not None else text + held

    def _advance(self, text: str) -> str:
        if not self._matchers:
            return text
        text_before = len(self._held)
        pending = self._held + text
        for at, char in enumerate(text, start=text_before + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if complete and self._num_tokens >= self._min_tokens:
                self.stop_string = max(complete, key=len)
                self._held = ""
                return pending[: at if self._keeps_stop else at - len(self.stop_string)]
        certain = len(pending) - max(matcher.matched for matcher in self._matchers)
        self._held = pending[certain:]
        return pending[:certain]


class _Matcher:
    """Finds one string in a stream of characters (Knuth, Morris, Pratt 1977): amortised O(1) per character."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # the longest prefix of `stop` that the stream ends with; shorter than `stop`
        # borders[n]: the longest proper prefix of stop[:n] that it also ends with
        self._borders = [0, 0]
        for char in stop[1:]:
            border = self._borders[-1]
            while border and stop[border] != char:
                border = self._borders[border]
            self._borders.append(border + (stop[border] == char))

    def advance(self, char: str) -> bool:
        """Whether `stop` is complete with this character."""
        matched, stop = self.matched, self.stop
        while matched and stop[matched] != char:
            matched = self._borders[matched]
        matched += stop[matched] == char
        is_complete = matched == len(stop)
        self.matched = self._borders[matched] if is_complete else matched
        return is_complete
