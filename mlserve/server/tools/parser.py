"""Finds calls in a model's answer while it is written.

An answer is content with calls in it. White space right before a call, and all of it between calls and behind the last
one, belongs to the calls. Whatever else is not part of a whole, well-formed call is content, character for character:

    text so far:  [ given out | held back: white space, and what may be the beginning of a mark or of a call ]

A model that writes freely may stop or go astray anywhere, and a client can't be told to forget a call. So a call is
given out when it is complete: its name and all of its arguments at once. Only where the answer is constrained to be a
call (`JSON_ANSWER`) are the name and the arguments given out as they come; if the answer is cut off there, then so are
the arguments, and `finish_reason` says why.

Text that was read as the beginning of a call, and turned out to be none, is not searched for other calls: what a model
quotes within a string must not become a call when the string is cut off.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Sequence

from mlserve.server.tools.deltas import CallArguments, CallStart, Content, Delta
from mlserve.server.tools.formats import ToolFormat
from mlserve.server.tools.grammar import TOOL_NAME, Mismatch, Scan
from mlserve.server.tools.json_scanner import WHITE_SPACE

__all__ = ["CallParser", "new_call_id"]

_ID_CHARS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Nine letters and digits: Mistral's templates take no other ids, and every other template takes these."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


class CallParser:
    """Content and calls of one answer. Joined, the deltas are the same however the text is cut.

    form: how the model writes calls.
    tool_names: the tools of the request; bare calls to others are content.
    end_of_turn: literals of tokens that end an answer (`<|im_end|>`), for when special tokens are kept: one at the very
        end of the text is left out.
    new_id: makes the ids of calls.
    """

    def __init__(
        self,
        form: ToolFormat,
        *,
        tool_names: Collection[str],
        end_of_turn: Sequence[str] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._form = form
        self._end_of_turn = tuple(literal for literal in end_of_turn if literal)  # a token may have no text
        self._held_back = [literal for literal in (form.opener[:-1], *self._end_of_turn) if literal]
        self._found = _Found(form.streams_arguments, tool_names, new_id)
        self._scan: Scan | None = None  # of the call that may be going on
        self._raw: list[str] = []  # what it has used and what becomes content if it fails
        self._held = ""  # in content: white space and the beginning of a mark
        self._at_start = True  # nothing but white space so far
        self._after_call = False  # nothing but white space since a call

    @property
    def num_calls(self) -> int:
        """Calls that are complete, or begun where arguments are streamed."""
        return self._found.num_begun

    def feed(self, text: str) -> list[Delta]:
        """Take the next piece of the answer."""
        while text:
            text = self._read_content(text) if self._scan is None else self._read_call(self._scan, text)
        return self._found.take()

    def finish(self) -> list[Delta]:
        """The answer has ended; returns what was held back. Call it once."""
        if self._scan is not None:
            left = "".join(self._raw)
            self._held = "" if self._found.may_end_with(left.strip(WHITE_SPACE)) else left
            self._after_call = False
        for literal in self._end_of_turn:
            if self._held.endswith(literal):
                self._held = self._held.removesuffix(literal)
                break
        if not (self._after_call and not self._held.strip(WHITE_SPACE)):
            self._found.content(self._held)
        return self._found.take()

    def _read_content(self, text: str) -> str:
        """Returns what is left behind the beginning of a call, or nothing."""
        text, self._held = self._held + text, ""
        behind_space = text.lstrip(WHITE_SPACE)
        if not behind_space:
            self._held = text
            return ""
        if self._at_start:
            self._at_start = False
            if behind_space[0] in self._form.bare:
                self._begin(text[: len(text) - len(behind_space)], is_marked=False)
                return behind_space
        opener = self._form.opener
        at = text.find(opener) if opener else -1
        if at < 0:
            self._hold(text)
            return ""
        before = text[:at].rstrip(WHITE_SPACE)
        self._give(before)
        self._begin(text[len(before) : at] + opener, is_marked=True)
        return text[at + len(opener) :]

    def _read_call(self, scan: Scan, text: str) -> str:
        """Returns what is left behind the call, or from the character on that shows it isn't one."""
        start = 0  # of what isn't in `_raw` yet
        for at, char in enumerate(text):
            self._found.is_settled = False
            try:
                scan.send(char)
            except StopIteration:
                self._scan, self._after_call = None, True
                return text[at + 1 :]
            except Mismatch:
                self._scan, self._after_call = None, self._found.rest is not None
                self._hold("".join(self._raw) + text[start:at])
                return text[at:]
            if self._found.is_settled:
                self._raw.clear()
                start = at + 1
        self._raw.append(text[start:])
        return ""

    def _begin(self, opening: str, *, is_marked: bool) -> None:
        self._raw = [opening]
        self._found.open(is_marked)
        self._scan = self._form.calls(self._found)
        next(self._scan)

    def _hold(self, text: str) -> None:
        """Give text out, except for its end if that may yet belong to a call or be the end of the turn."""
        certain = len(text) - self._unfinished_mark(text)
        certain = len(text[:certain].rstrip(WHITE_SPACE))
        self._give(text[:certain])
        self._held = text[certain:]

    def _unfinished_mark(self, text: str) -> int:
        """The length of the longest end of the text that begins the opener or an end of turn, which may be whole."""
        return max((_overlap(text, beginning) for beginning in self._held_back), default=0)

    def _give(self, text: str) -> None:
        if text:
            self._after_call = False
            self._found.content(text)


def _overlap(text: str, mark: str) -> int:
    """The length of the longest beginning of the mark that the text ends with."""
    at = text.find(mark[0], max(0, len(text) - len(mark)))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len(text) - at if at >= 0 else 0


class _Found:
    """Takes what the parser and the grammars find, and makes deltas of it."""

    def __init__(self, streams_arguments: bool, tool_names: Collection[str], new_id: Callable[[], str]) -> None:
        self.num_begun = 0
        self.rest: str | None = None  # of the form, if no call is open
        self.is_settled = False  # whether nothing up to the last character can become content any more
        self._streams = streams_arguments
        self._tool_names = frozenset(tool_names)
        self._new_id = new_id
        self._is_marked = False
        self._name = ""
        self._arguments: list[str] = []  # those that aren't in a delta yet
        self._deltas: list[Delta] = []

    def open(self, is_marked: bool) -> None:
        self._is_marked = is_marked
        self.rest = None

    def content(self, text: str) -> None:
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, Content):
            self._deltas[-1] = Content(last.text + text)
        elif text:
            self._deltas.append(Content(text))

    def begin(self, name: str) -> None:
        if not TOOL_NAME.fullmatch(name) or not (self._is_marked or name in self._tool_names):
            raise Mismatch
        self._name = name
        self.rest = None
        self._arguments.clear()
        if self._streams:
            self._start()
            self.is_settled = True

    def add(self, text: str) -> None:
        self._arguments.append(text)
        self.is_settled = self._streams

    def end(self) -> None:
        if not self._streams:
            self._start()
        self._flush()
        self.may_end("")

    def may_end(self, rest: str) -> None:
        self.rest = rest
        self.is_settled = True

    def may_end_with(self, text: str) -> bool:
        """Whether an answer that ends with this text, behind what is settled, leaves no more than form out."""
        if self._streams and self.num_begun > 0:
            return True
        return self.rest is not None and self.rest.startswith(text)

    def take(self) -> list[Delta]:
        if self._streams:
            self._flush()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _start(self) -> None:
        self._deltas.append(CallStart(self.num_begun, self._new_id(), self._name))
        self.num_begun += 1

    def _flush(self) -> None:
        if self._arguments:
            self._deltas.append(CallArguments(self.num_begun - 1, "".join(self._arguments)))
            self._arguments.clear()
