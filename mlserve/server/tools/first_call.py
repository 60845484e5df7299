"""For clients that take one call at a time."""

from __future__ import annotations

from mlserve.server.tools.deltas import CallArguments, CallStart, Delta
from mlserve.server.tools.parser import CallParser

__all__ = ["FirstCallOnly"]


class FirstCallOnly:
    """Leaves out all calls but the first of an answer."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Delta]:
        """As the parser does."""
        return _without_later(self._parser.feed(text))

    def finish(self) -> list[Delta]:
        """As the parser does."""
        return _without_later(self._parser.finish())


def _without_later(deltas: list[Delta]) -> list[Delta]:
    return [delta for delta in deltas if not isinstance(delta, CallStart | CallArguments) or delta.index == 0]
