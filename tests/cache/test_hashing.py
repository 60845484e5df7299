"""Block keys."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys

import pytest
from cache_world import what_acts
from hypothesis import given, settings
from hypothesis import strategies as st

from mlserve.cache.hashing import BLOCK_HASHES, BlockHasher, BlockKey, get_block_hash, pack_tokens
from mlserve.cache.marks import Mark, MarkKind, salt_mark
from mlserve.errors import ConfigError, PromptError

MODEL = b"m" * 32
ADAPTER = Mark(MarkKind.ADAPTER, b"a" * 32, 0, None)


def keys_of(token_ids: list[int], *marks: Mark, block_hash: str = "xxh3_128", block_size: int = 4) -> list[BlockKey]:
    keys: list[BlockKey] = []
    BlockHasher(block_hash, MODEL, "float32", block_size).extend(keys, [], token_ids, marks)
    return keys


def test_only_full_blocks_have_keys() -> None:
    assert [len(keys_of(list(range(length)))) for length in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_key_is_the_hash_of_parent_key_and_content() -> None:
    hasher = BlockHasher("sha256", MODEL, "float32", 2)
    keys: list[BlockKey] = []
    contents: list[bytes] = []
    hasher.extend(keys, contents, [1, 2, 3, 258], ())
    assert contents == [bytes([1, 0, 0, 0, 2, 0, 0, 0]), bytes([3, 0, 0, 0, 2, 1, 0, 0])]
    assert keys[0] == hashlib.sha256(hasher.root + contents[0]).digest()
    assert keys[1] == hashlib.sha256(keys[0] + contents[1]).digest()


def test_equal_tokens_under_other_parents_have_other_keys() -> None:
    keys = keys_of([5, 5, 5, 5] * 3)
    assert len(set(keys)) == 3
    assert keys_of([1, 2, 3, 4, 9, 9, 9, 9])[1] != keys_of([1, 2, 3, 5, 9, 9, 9, 9])[1]


def test_extending_step_by_step_gives_the_same_keys_as_at_once() -> None:
    token_ids = list(range(100, 141))
    marks = (Mark(MarkKind.ADAPTER, b"a" * 32, 6, None), Mark(MarkKind.IMAGE, b"i" * 32, 10, 31), salt_mark("s", 17))
    hasher = BlockHasher("xxh3_128", MODEL, "float32", 4)
    keys: list[BlockKey] = []
    contents: list[bytes] = []
    for length in (3, 4, 5, 13, 14, 15, 16, 41):
        hasher.extend(keys, contents, token_ids[:length], marks)
        assert len(keys) == len(contents) == length // 4
    assert keys == keys_of(token_ids, *marks)
    assert len(set(keys)) == 10


def test_all_that_the_root_covers_changes_every_key() -> None:
    roots = {
        BlockHasher(*arguments).root
        for arguments in (
            ("sha256", MODEL, "float32", 16),
            ("xxh3_128", MODEL, "float32", 16),
            ("sha256", b"n" * 32, "float32", 16),
            ("sha256", MODEL, "bfloat16", 16),
            ("sha256", MODEL, "float32", 32),
            ("sha256", MODEL + b"f", "loat32", 16),
        )
    }
    assert len(roots) == 6


def test_marks_change_the_keys_of_their_blocks_and_of_all_after() -> None:
    plain, marked = keys_of([7] * 16), keys_of([7] * 16, Mark(MarkKind.IMAGE, b"i" * 32, 5, 7))
    assert plain[0] == marked[0]
    assert not {*plain[1:]} & {*marked[1:]}


def test_private_rest_behind_a_shared_prefix() -> None:
    one, other = keys_of([7] * 16, salt_mark("one", 8)), keys_of([7] * 16, salt_mark("other", 8))
    assert one[:2] == other[:2] == keys_of([7] * 8)
    assert not {*one[2:]} & {*other[2:]}


def test_a_hash_may_be_any_object() -> None:
    class Blake2:
        name = "blake2b"

        def digest(self, data: bytes | memoryview, /) -> bytes:
            return hashlib.blake2b(data, digest_size=20).digest()

    hasher = BlockHasher(Blake2(), MODEL, "float32", 4)
    keys: list[BlockKey] = []
    hasher.extend(keys, [], [1, 2, 3, 4], ())
    assert keys == [hashlib.blake2b(hasher.root + pack_tokens([1, 2, 3, 4]), digest_size=20).digest()]


def test_a_hash_of_fewer_than_128_bits_is_refused() -> None:
    class Short:
        name = "short"

        def digest(self, data: bytes | memoryview, /) -> bytes:
            return bytes(8)

    with pytest.raises(ConfigError, match="'short' gives 64 bits"):
        BlockHasher(Short(), MODEL, "float32", 4)


def test_hashes_by_name() -> None:
    assert {name: len(get_block_hash(name).digest(b"x")) for name in BLOCK_HASHES} == {"xxh3_128": 16, "sha256": 32}
    assert all(block_hash.name == name for name, block_hash in BLOCK_HASHES.items())
    with pytest.raises(ConfigError, match="'md5': give one of xxh3_128, sha256"):
        get_block_hash("md5")


@pytest.mark.parametrize("token", [True, False, 1.0, "1", None])
def test_1_02_tokens_that_are_not_integers_are_refused(token: object) -> None:
    keys = keys_of([1, 2, 3, 4])
    contents = [b"kept"]
    with pytest.raises(PromptError, match=rf"token id {token!r} is of type {type(token).__name__}"):
        BlockHasher("sha256", MODEL, "float32", 4).extend(keys, contents, [1, 2, 3, 4, 5, token, 6, 7], ())  # type: ignore[list-item]
    assert (len(keys), contents) == (1, [b"kept"])


@pytest.mark.parametrize("token", [-1, -2, 2**32])
def test_1_02_tokens_out_of_range_are_refused(token: int) -> None:
    with pytest.raises(PromptError, match=f"token id {token} is out of range"):
        keys_of([1, 2, token, 4])
    assert keys_of([2**32 - 1] * 4) != keys_of([0] * 4)


@pytest.mark.parametrize("block_hash", BLOCK_HASHES)
def test_1_02_keys_are_the_same_in_every_process(block_hash: str) -> None:
    code = f"""
from mlserve.cache.hashing import BlockHasher
from mlserve.cache.marks import Mark, MarkKind, salt_mark
keys = []
marks = [Mark(MarkKind.ADAPTER, b"a" * 32, 0, None), Mark(MarkKind.IMAGE, b"i" * 16, 3, 9), salt_mark("s", 2)]
BlockHasher({block_hash!r}, b"m" * 32, "float32", 4).extend(keys, [], list(range(20)), marks)
print(b"".join(keys).hex())
"""
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "4242")
    }
    marks = (ADAPTER, Mark(MarkKind.IMAGE, b"i" * 16, 3, 9), salt_mark("s", 2))
    assert found == {b"".join(keys_of(list(range(20)), *marks, block_hash=block_hash)).hex() + "\n"}


@pytest.mark.parametrize(
    ("block_hash", "key"),
    [
        ("xxh3_128", "ce4e74f569f0f3be315aab395b520ad8"),
        ("sha256", "cfd13cfae04d8b8626154ad197f6c593008e04df1d0724012dd3a0610ae87324"),
    ],
)
def test_keys_do_not_change_from_release_to_release(block_hash: str, key: str) -> None:
    """Whoever has to change these raises the hash version too."""
    assert keys_of([1, 2, 3, 4], ADAPTER, block_hash=block_hash)[0].hex() == key


def test_1_06_an_adapter_and_a_salt_of_the_same_bytes_never_meet() -> None:
    salt = salt_mark("X")
    adapter = Mark(MarkKind.ADAPTER, salt.digest, 0, None)
    assert not {*keys_of([7] * 12, salt)} & {*keys_of([7] * 12, adapter)}


def test_3_02_every_bit_of_an_image_digest_reaches_the_key() -> None:
    choices = random.Random(0)
    digests = [choices.randbytes(32) for _ in range(70_000)]
    tails = [b"\1" * 30 + b"\xbe\xef", b"\2" * 30 + b"\xbe\xef"]
    flipped = [bytes(32), *((1 << bit).to_bytes(32, "big") for bit in range(256))]
    keys = {keys_of([9] * 4, Mark(MarkKind.IMAGE, digest, 0, 4))[0] for digest in digests + tails + flipped}
    assert len(keys) == 70_000 + 2 + 257


def test_3_07_a_block_that_only_touches_an_image_is_free_of_it() -> None:
    token_ids = [1, 2, 3, 4, 9, 9, 9, 9, 5, 6, 7, 8]
    hasher = BlockHasher("xxh3_128", MODEL, "float32", 4)
    for digest in (b"i" * 32, b"j" * 32):
        contents: list[bytes] = []
        hasher.extend([], contents, token_ids, [Mark(MarkKind.IMAGE, digest, 4, 8)])
        extra = [content[16:] for content in contents]
        assert (extra[0], extra[2]) == (b"", b"")
        assert digest in extra[1]
    one, other = (keys_of(token_ids, Mark(MarkKind.IMAGE, digest, 4, 8)) for digest in (b"i" * 32, b"j" * 32))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False]


TOKENS = st.lists(st.integers(0, 1), min_size=8, max_size=12)
RANGES = st.tuples(st.sampled_from(MarkKind), st.integers(0, 8), st.none() | st.integers(1, 6))


@settings(max_examples=500, deadline=None)
@given(TOKENS, st.lists(RANGES, max_size=3), TOKENS, st.lists(RANGES, max_size=3))
def test_equal_keys_mean_equal_prefixes(
    one: list[int],
    on_one: list[tuple[MarkKind, int, int | None]],
    other: list[int],
    on_other: list[tuple[MarkKind, int, int | None]],
) -> None:
    prefixes = []
    for token_ids, ranges in ((one, on_one), (other, on_other)):
        marks = [Mark(kind, b"d" * 16, start, length and start + length) for kind, start, length in ranges]
        acting = [(token, what_acts(marks, at)) for at, token in enumerate(token_ids)]
        prefixes.append({key: acting[: 2 * at + 2] for at, key in enumerate(keys_of(token_ids, *marks, block_size=2))})
    for key in {*prefixes[0]} & {*prefixes[1]}:
        assert prefixes[0][key] == prefixes[1][key]
