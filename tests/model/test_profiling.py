from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mlserve.adapters.slots import AdapterSlots
from mlserve.config import ModelOptions
from mlserve.model.base_weights import base_shape
from mlserve.model.loader import load_model
from mlserve.model.profiling import largest_step, peak_bytes
from mlserve.model.runner import ModelRunner


@pytest.mark.parametrize(
    ("tokens", "seqs", "longest", "expected"),
    [
        (10, 3, 100, [8, 1, 1]),
        (10, 3, 5, [5, 4, 1]),
        (3, 3, 100, [1, 1, 1]),
        (100, 3, 5, [5, 5, 5]),  # there can't be more
    ],
)
def test_the_largest_step(tokens: int, seqs: int, longest: int, expected: list[int]) -> None:
    plan = largest_step(tokens, seqs, longest, 4)
    assert plan.query_lens == expected
    assert [len(sequence.token_ids) for sequence in plan.sequences] == expected
    assert [len(sequence.block_table) for sequence in plan.sequences] == [-(-n // 4) for n in expected]
    assert plan.sampled == list(range(seqs))


def test_it_runs_on_a_pool_of_block_0_alone(tiny_model_dir: Path) -> None:
    decoder = load_model(ModelOptions(str(tiny_model_dir), device="cpu")).decoder
    slots = AdapterSlots(base_shape(decoder.config), 2, 4, torch.float32, decoder.device)
    runner = ModelRunner(decoder, 1, 4, torch.float32, slots)
    result = runner.run(largest_step(64, 5, 40, 4))
    assert sorted(result.token_ids) == [0, 1, 2, 3, 4]
    assert not result.errors


@pytest.mark.gpu
def test_peak_of_a_known_size() -> None:
    device = torch.device("cuda")

    kept = []

    def work() -> None:
        for _ in range(2):
            torch.empty(2**24, dtype=torch.uint8, device=device)
        if not kept:
            kept.append(torch.empty(2**23, dtype=torch.uint8, device=device))

    assert peak_bytes(work, device) == 2**24 + 2**23
