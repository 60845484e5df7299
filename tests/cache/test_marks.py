"""Marks and their encoding."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from cache_world import what_acts
from hypothesis import given, settings
from hypothesis import strategies as st

from mlserve.cache.marks import Mark, MarkKind, encode_marks, encode_runs, salt_mark

A, B = b"a" * 16, b"b" * 16


def adapter(start: int = 0, end: int | None = None, digest: bytes = A) -> Mark:
    return Mark(MarkKind.ADAPTER, digest, start, end)


def image(start: int, end: int, digest: bytes = A) -> Mark:
    return Mark(MarkKind.IMAGE, digest, start, end)


@st.composite
def marks(draw: st.DrawFn) -> Mark:
    kind = draw(st.sampled_from(MarkKind))
    start = draw(st.integers(0, 20))
    end = draw(st.none() | st.integers(start + 1, 24))
    return Mark(kind, draw(st.sampled_from((A, B, A + A))), start, end)


MARK_LISTS = st.lists(marks(), max_size=4)


@pytest.mark.parametrize(
    ("start", "end", "digest", "message"),
    [
        (-1, None, A, "starts at -1"),
        (3, 3, A, r"covers no token, \[3, 3\)"),
        (3, 2, A, r"covers no token, \[3, 2\)"),
        (0, None, b"x" * 15, "15 bytes: give 16 to 64"),
        (0, None, b"x" * 65, "65 bytes: give 16 to 64"),
    ],
)
def test_mark_is_validated(start: int, end: int | None, digest: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mark(MarkKind.ADAPTER, digest, start, end)


def test_mark_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        adapter().start = 1  # type: ignore[misc]


def test_tags_are_stable() -> None:
    assert {kind.name: kind.value for kind in MarkKind} == {"ADAPTER": 1, "IMAGE": 2, "SALT": 3, "EMBEDS": 4}


def test_the_encoding_is_stable() -> None:
    """Keys may be kept on disk or shared between machines: whoever changes this must raise the hash version."""
    encoding = encode_marks([image(2, 9)], 1, 4)
    assert encoding.hex() == "02 10 00000000 04000000 0700000000000000".replace(" ", "") + A.hex() + "0200000000000000"


def test_no_marks_encode_to_nothing() -> None:
    assert encode_marks([], 0, 4) == b""
    assert list(encode_runs([], 0, 100, 4)) == []


def test_a_mark_that_touches_the_edge_is_not_in_the_block() -> None:
    assert encode_marks([image(4, 8)], 0, 4) == b""
    assert encode_marks([image(4, 8)], 1, 4) != b""
    assert encode_marks([image(4, 8)], 2, 4) == b""


def test_order_and_repetition_do_not_matter() -> None:
    pair = [adapter(), salt_mark("x")]
    assert encode_marks(pair, 0, 4) == encode_marks(pair[::-1], 0, 4) == encode_marks(pair + pair, 0, 4)


def test_equal_digests_of_two_kinds_never_meet() -> None:
    encodings = {encode_marks([Mark(kind, A, 0, 4)], 0, 4) for kind in MarkKind}
    assert len(encodings) == len(MarkKind)


def test_two_digests_are_not_one_long_digest() -> None:
    assert encode_marks([adapter(digest=A), adapter(digest=B)], 0, 4) != encode_marks([adapter(digest=A + B)], 0, 4)


def test_where_a_mark_starts_and_ends_in_the_block_matters() -> None:
    ranges = [(0, None), (1, None), (0, 3), (1, 3)]
    assert len({encode_marks([adapter(start, end)], 0, 4) for start, end in ranges}) == 4


def test_what_comes_after_the_block_does_not_prevent_sharing() -> None:
    assert encode_marks([adapter(0, 4)], 0, 4) == encode_marks([adapter(0, 9)], 0, 4) == encode_marks([adapter()], 0, 4)


def test_how_long_an_adapter_was_on_does_not_prevent_sharing() -> None:
    assert encode_marks([adapter(0)], 5, 4) == encode_marks([adapter(18)], 5, 4)
    assert encode_marks([salt_mark("x")], 5, 4) == encode_marks([salt_mark("x", 20)], 5, 4)


def test_parts_of_one_image_differ() -> None:
    encodings = [encode_marks([image(4, 20)], block, 4) for block in (1, 2, 3, 4)]
    assert len(set(encodings)) == 4


def test_one_image_is_not_two_halves() -> None:
    whole, halves = [image(0, 8)], [image(0, 4), image(4, 8)]
    assert encode_marks(whole, 1, 4) != encode_marks(halves, 1, 4)


def test_an_image_is_found_at_another_place_with_the_same_alignment() -> None:
    assert encode_marks([image(2, 9)], 1, 4) == encode_marks([image(10, 17)], 3, 4)


def test_salts_are_digests_of_their_text() -> None:
    assert salt_mark("a") == salt_mark("a")
    assert len({salt_mark(salt).digest for salt in ("", "a", "b", "A", "a\0", "\ud800", "\ud801")}) == 7
    assert salt_mark("a", 7) == Mark(MarkKind.SALT, salt_mark("a").digest, 7, None)


@settings(max_examples=300, deadline=None)
@given(MARK_LISTS, st.integers(0, 3), st.integers(1, 7), st.integers(1, 5))
def test_runs_are_the_encodings_of_their_blocks(found: list[Mark], first: int, count: int, block_size: int) -> None:
    last = first + count
    expected = {block: encode_marks(found, block, block_size) for block in range(first, last)}
    runs = list(encode_runs(found, first, last, block_size))
    in_runs = {begin + at: each for begin, _, encodings in runs for at, each in enumerate(encodings)}
    assert in_runs == {block: encoding for block, encoding in expected.items() if encoding}
    assert [len(encodings) for _, _, encodings in runs] == [end - begin for begin, end, _ in runs]


@settings(max_examples=500, deadline=None)
@given(MARK_LISTS, MARK_LISTS, st.integers(0, 4), st.integers(1, 5))
def test_equal_encodings_mean_equal_effects(one: list[Mark], other: list[Mark], block: int, block_size: int) -> None:
    positions = range(block * block_size, (block + 1) * block_size)
    if encode_marks(one, block, block_size) == encode_marks(other, block, block_size):
        assert [what_acts(one, at) for at in positions] == [what_acts(other, at) for at in positions]


@settings(max_examples=300, deadline=None)
@given(marks(), marks(), st.integers(0, 4), st.integers(1, 5))
def test_equal_effects_of_one_mark_have_equal_encodings(one: Mark, other: Mark, block: int, block_size: int) -> None:
    positions = range(block * block_size, (block + 1) * block_size)
    if [what_acts([one], at) for at in positions] == [what_acts([other], at) for at in positions]:
        assert encode_marks([one], block, block_size) == encode_marks([other], block, block_size)
