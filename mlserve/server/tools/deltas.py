"""What an answer is made of: text for the reader, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Call", "CallArguments", "CallStart", "Content", "Delta", "join"]


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; it is the `index`-th of the answer, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = Content | CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call."""

    id: str
    name: str
    arguments: str  # the JSON text of an object


def join(deltas: Iterable[Delta]) -> tuple[str, tuple[Call, ...]]:
    """The content and the calls of a whole answer."""
    content: list[str] = []
    starts: list[CallStart] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        match delta:
            case Content(text):
                content.append(text)
            case CallStart():
                starts.append(delta)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    calls = [Call(start.id, start.name, "".join(texts)) for start, texts in zip(starts, arguments, strict=True)]
    return "".join(content), tuple(calls)
