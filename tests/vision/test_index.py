"""The index against a plain search, while entries come and go."""

from __future__ import annotations

import random

import pytest

from mlserve.vision.index import HammingIndex


def plain_search(
    rows: dict[str, tuple[int, ...]], words: tuple[int, ...], radii: tuple[int, ...]
) -> set[tuple[int, str]]:
    found = set()
    for key, row in rows.items():
        distances = [(mine ^ theirs).bit_count() for mine, theirs in zip(words, row, strict=True)]
        if all(distance <= radius for distance, radius in zip(distances, radii, strict=True)):
            found.add((sum(distances), key))
    return found


@pytest.mark.parametrize("num_words", [1, 2, 3])
def test_near_is_what_a_plain_search_finds(num_words: int) -> None:
    choices = random.Random(num_words)
    index: HammingIndex[str] = HammingIndex(num_words)
    rows: dict[str, tuple[int, ...]] = {}
    for step in range(400):
        if rows and choices.random() < 0.4:
            gone = choices.choice(list(rows))
            index.remove(gone)
            del rows[gone]
        else:
            near_zero = [
                choices.getrandbits(64) & choices.getrandbits(64) & choices.getrandbits(64) for _ in range(num_words)
            ]
            rows[f"key {step}"] = tuple(near_zero)
            index.add(f"key {step}", near_zero)
        words = tuple(choices.getrandbits(64) & choices.getrandbits(64) for _ in range(num_words))
        radii = tuple(choices.randrange(12, 24) for _ in range(num_words))
        found = index.near(words, radii)
        assert set(found) == plain_search(rows, words, radii)
        assert [distance for distance, _ in found] == sorted(distance for distance, _ in found)
        assert len(index) == len(rows)


def test_all_64_bits_count() -> None:
    index: HammingIndex[int] = HammingIndex(1)
    for bit in range(64):
        index.add(bit, [1 << bit])
    assert index.near([1 << 63], [0]) == [(0, 63)]
    assert index.near([2**64 - 1], [62]) == []
    assert len(index.near([2**64 - 1], [63])) == 64
    assert index.near([0], [1])[:2] == [(1, 0), (1, 1)]


def test_unknown_keys() -> None:
    index: HammingIndex[str] = HammingIndex(1)
    with pytest.raises(KeyError):
        index.remove("never added")
    assert index.near([0], [64]) == []
