from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlserve.adapters.segments import AdapterRows, SlotRange


def rows_of(*ranges: tuple[int, int, int]) -> AdapterRows:
    return AdapterRows.of_ranges([SlotRange(*piece) for piece in ranges])


def by_row(rows: AdapterRows) -> dict[int, int]:
    return dict(zip(rows.rows.tolist(), rows.slots.tolist(), strict=True))


def test_ranges_become_rows() -> None:
    rows = rows_of((3, 0, 2), (1, 5, 8))
    assert by_row(rows) == {0: 3, 1: 3, 5: 1, 6: 1, 7: 1}


def test_decoding_has_one_row_each() -> None:
    rows = rows_of((1, 0, 1), (0, 2, 3), (1, 4, 5))
    assert by_row(rows) == {0: 1, 2: 0, 4: 1}
    assert (rows.rows.dtype, rows.slots.dtype) == (np.int64, np.int32)


def test_segments_group_rows_by_slot() -> None:
    segments = rows_of((1, 0, 2), (0, 3, 4), (1, 6, 7)).grouped()
    assert segments.slots.tolist() == [0, 1]
    assert segments.starts.tolist() == [0, 1, 4]
    assert segments.order.tolist() == [3, 0, 1, 6]
    assert (segments.order.dtype, segments.starts.dtype, segments.slots.dtype) == (
        np.int64,
        np.int32,
        np.int32,
    )


@pytest.mark.parametrize("chosen", [[1], [0, 1, 6], [2, 5], [9], []])
def test_a_selection_is_renumbered(chosen: list[int]) -> None:
    rows = rows_of((1, 0, 2), (0, 6, 8))
    expected = {i: by_row(rows)[row] for i, row in enumerate(chosen) if row in by_row(rows)}
    assert by_row(rows.select(chosen)) == expected


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=1, max_size=40).filter(
        lambda s: any(x is not None for x in s)
    )
)
def test_every_row_is_in_its_slots_segment(slots: list[int | None]) -> None:
    rows = rows_of(*((slot, i, i + 1) for i, slot in enumerate(slots) if slot is not None))
    segments = rows.grouped()
    found = {}
    starts = segments.starts.tolist()
    for g, slot in enumerate(segments.slots.tolist()):
        members = segments.order[starts[g] : starts[g + 1]].tolist()
        assert members == sorted(members)
        found.update(dict.fromkeys(members, slot))
    assert found == {i: slot for i, slot in enumerate(slots) if slot is not None}
    assert len(set(segments.slots.tolist())) == len(segments.slots)


def test_padding_adds_neither_rows_nor_slots() -> None:
    grouped = rows_of((1, 0, 2), (3, 3, 4)).grouped().padded(6, 4)
    assert grouped.order.tolist() == [0, 1, 3, 0, 0, 0]
    assert grouped.starts.tolist() == [0, 2, 3, 3, 3]  # the rows at the end are in no segment, two segments are empty
    assert grouped.slots.tolist() == [1, 3, 0, 0]
    assert grouped.row_slots.tolist() == [1, 1, 3, 0, 0, 0]
    assert (grouped.starts.dtype, grouped.slots.dtype) == (np.int32, np.int32)
