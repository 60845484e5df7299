from __future__ import annotations

import random
from collections import OrderedDict

import torch
from torch import Tensor

from mlserve.vision.embedding_cache import EmbeddingCache, EmbeddingStats


def of(count: int, value: float = 0.0) -> Tensor:
    """`count` embeddings of 4 bytes."""
    return torch.full((count, 1), value)


def test_least_recently_used_goes_first() -> None:
    cache = EmbeddingCache(max_bytes=12)
    for key in (b"a", b"b", b"c"):
        cache.put(key, of(1))
    assert cache.get(b"a") is not None
    cache.put(b"d", of(1))
    assert cache.get(b"b") is None
    assert all(cache.get(key) is not None for key in (b"a", b"c", b"d"))
    assert cache.stats() == EmbeddingStats(num_images=3, num_bytes=12, hits=4, misses=1)


def test_what_does_not_fit_is_not_kept() -> None:
    cache = EmbeddingCache(max_bytes=8)
    cache.put(b"small", of(1))
    cache.put(b"large", of(3))
    assert cache.get(b"large") is None
    assert cache.get(b"small") is not None


def test_one_large_one_takes_the_place_of_several() -> None:
    cache = EmbeddingCache(max_bytes=16)
    for key in (b"a", b"b", b"c"):
        cache.put(key, of(1))
    cache.put(b"d", of(3, 7.0))
    assert [cache.get(key) is None for key in (b"a", b"b", b"c")] == [True, True, False]
    found = cache.get(b"d")
    assert found is not None
    assert torch.equal(found, of(3, 7.0))


def test_the_first_of_equal_keys_stays() -> None:
    cache = EmbeddingCache(max_bytes=16)
    cache.put(b"a", of(1, 1.0))
    cache.put(b"a", of(1, 2.0))
    assert cache.stats().num_bytes == 4
    assert torch.equal(cache.get(b"a"), of(1, 1.0))  # type: ignore[arg-type]


def test_random_use_against_an_oracle() -> None:
    rng = random.Random(0)
    cache, oracle = EmbeddingCache(max_bytes=40), OrderedDict[bytes, int]()
    for _ in range(3000):
        key = bytes([rng.randrange(12)])
        if rng.random() < 0.5:
            assert (cache.get(key) is not None) == (key in oracle)
            if key in oracle:
                oracle.move_to_end(key)
        else:
            size = rng.randint(1, 12)
            cache.put(key, of(size))
            if key not in oracle and 4 * size <= 40:
                oracle[key] = size
                while 4 * sum(oracle.values()) > 40:
                    oracle.popitem(last=False)
        assert cache.stats().num_bytes == 4 * sum(oracle.values()) <= 40
    cache.clear()
    assert cache.stats().num_images == cache.stats().num_bytes == 0
