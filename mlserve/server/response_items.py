"""The output items of a response as they grow, and the events that tell of it, in the order that clients rely on.

output_item.added
    content_part.added, output_text.delta ..., output_text.done, content_part.done    a message
    function_call_arguments.delta ..., function_call_arguments.done                   a call
output_item.done
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mlserve.server.tools.deltas import CallArguments, CallStart, Content, Delta

__all__ = ["Event", "OutputItems", "Status"]

Event = dict[str, Any]  # without its place in the stream


class Status(StrEnum):
    """Of a response, and of each of its items."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"  # of a response


@dataclass(slots=True)
class _Message:
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": "".join(self.texts),
            "annotations": [],
            "logprobs": list(self.logprobs),
        }

    def shown(self, status: Status, *, is_new: bool = False) -> dict[str, Any]:
        content = [] if is_new else [self.part]
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}


@dataclass(slots=True)
class _Call:
    id: str
    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def shown(self, status: Status, *, is_new: bool = False) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self.id,
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": "".join(self.arguments),
        }


class OutputItems:
    """One after the other: an item begins when the one before it has ended."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._done: list[dict[str, Any]] = []
        self._open: _Message | _Call | None = None

    def shown(self) -> list[dict[str, Any]]:
        """All so far. The one that isn't done is incomplete."""
        return [*self._done, *([] if self._open is None else [self._open.shown(Status.INCOMPLETE)])]

    def add(self, delta: Delta, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """A piece of the answer, in the order of the answer. logprobs: of the tokens of a text."""
        match delta:
            case Content(text):
                return self._add_text(text, logprobs)
            case CallStart(_, call_id, name):
                call = _Call(self._new_id("fc"), call_id, name)
                return [*self._end(Status.COMPLETED), *self._begin(call)]
            case CallArguments(_, text):
                assert isinstance(self._open, _Call), "arguments follow the beginning of their call"
                self._open.arguments.append(text)
                return [self._of_item("response.function_call_arguments.delta", delta=text)]

    def finish(self, status: Status) -> list[Event]:
        """The answer has ended, and its last item with this status. One without anything has an empty message."""
        events = [] if self._done or self._open else self._begin(_Message(self._new_id("msg")))
        return [*events, *self._end(status)]

    def _add_text(self, text: str, logprobs: Sequence[dict[str, Any]]) -> list[Event]:
        events: list[Event] = []
        message = self._open
        if not isinstance(message, _Message):
            message = _Message(self._new_id("msg"))
            events = [*self._end(Status.COMPLETED), *self._begin(message)]
        message.texts.append(text)
        message.logprobs.extend(logprobs)
        return [*events, self._of_part("response.output_text.delta", delta=text, logprobs=list(logprobs))]

    def _begin(self, item: _Message | _Call) -> list[Event]:
        self._open = item
        events = [self._event("response.output_item.added", item=item.shown(Status.IN_PROGRESS, is_new=True))]
        if isinstance(item, _Message):
            events.append(self._of_part("response.content_part.added", part=item.part))
        return events

    def _end(self, status: Status) -> list[Event]:
        item = self._open
        if item is None:
            return []
        shown = item.shown(status)
        if isinstance(item, _Message):
            part = item.part
            events = [
                self._of_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
                self._of_part("response.content_part.done", part=part),
            ]
        else:
            done = {"name": item.name, "arguments": shown["arguments"]}
            events = [self._of_item("response.function_call_arguments.done", **done)]
        events.append(self._event("response.output_item.done", item=shown))
        self._open = None
        self._done.append(shown)
        return events

    def _new_id(self, prefix: str) -> str:
        num_items = len(self._done) + (self._open is not None)
        return f"{prefix}_{self._request_id}_{num_items}"

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "output_index": len(self._done), **more}

    def _of_item(self, kind: str, **more: Any) -> Event:
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, **more)

    def _of_part(self, kind: str, **more: Any) -> Event:
        return self._of_item(kind, content_index=0, **more)
