"""What was found: entries that are printed as tables and written as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

__all__ = ["Entry", "Outcome", "Report"]


class Outcome(StrEnum):
    """What became of an entry."""

    PASSED = "passed"
    FAILED = "FAILED"
    MEASURED = "measured"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a phase's table."""

    phase: str
    name: str
    case: str
    outcome: Outcome
    figures: Mapping[str, float] = field(default_factory=dict)  # by column, with the unit in its name
    note: str = ""


class Report:
    """All entries of a run, in order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)

    @property
    def num_failed(self) -> int:
        return sum(entry.outcome is Outcome.FAILED for entry in self.entries)

    def text(self) -> str:
        """A table for each phase, and a last line with what became of all entries."""
        phases = dict.fromkeys(entry.phase for entry in self.entries)
        counts = {outcome: sum(entry.outcome is outcome for entry in self.entries) for outcome in Outcome}
        last = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        return "\n\n".join([*("\n".join(self._table(phase)) for phase in phases), last])

    def write(self, path: Path) -> None:
        path.write_text(json.dumps([asdict(entry) for entry in self.entries], indent=1) + "\n")

    def _table(self, phase: str) -> Iterator[str]:
        entries = [entry for entry in self.entries if entry.phase == phase]
        columns = list(dict.fromkeys(name for entry in entries for name in entry.figures))
        rows = [["", "", *columns, ""]]
        for entry in entries:
            figures = [_text(entry.figures[column]) if column in entry.figures else "" for column in columns]
            rows.append([entry.name, entry.case, *figures, f"{entry.outcome} {entry.note}".rstrip()])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        yield f"== {phase}"
        for name, case, *cells in rows:
            right = (cell.rjust(width) for cell, width in zip(cells[:-1], widths[2:-1], strict=True))
            yield "  ".join([name.ljust(widths[0]), case.ljust(widths[1]), *right, cells[-1]]).rstrip()


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
