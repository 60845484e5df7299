"""The whole engine on a GPU against the same on a CPU: one tiny model, greedy, the same ids."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_adapters import ALL, write_adapter

from mlserve import LLM, SamplingParams
from mlserve.model.runner import ModelRunner

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"block_size": 4, "max_loras": 2, "max_num_seqs": 24, "max_num_batched_tokens": 64}
NAMES = [None, "r4", "r8", "mlp", "ends", "dora"]


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    write_adapter(root / "r4", tiny_model_dir, 1)
    write_adapter(root / "r8", tiny_model_dir, 2, r=8, targets=ALL)
    write_adapter(root / "mlp", tiny_model_dir, 3, targets=("gate_proj", "up_proj", "down_proj"))
    write_adapter(root / "ends", tiny_model_dir, 4, targets=("embed_tokens", "lm_head"))
    write_adapter(root / "dora", tiny_model_dir, 5, use_dora=True)
    return root


def ids_on(device: str, model: Path, folder: Path, params: SamplingParams, **options: Any) -> list[list[int]]:
    """40 requests, of lengths and adapters that differ, of which 2 adapters fit at once: loads go on all the time."""
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 60))] for _ in range(40)]
    adapters = [NAMES[i % len(NAMES)] for i in range(len(prompts))]
    llm = LLM(str(model), device=device, adapter_dir=str(folder), num_blocks=800, **OPTIONS, **options)
    outputs = llm.generate(prompts, params, adapter=adapters)
    assert all(output.error is None for output in outputs)
    llm.engine.cache.check()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_greedy_ids(tiny_model_dir: Path, folder: Path, cuda_graphs: bool) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    expected = ids_on("cpu", tiny_model_dir, folder, params)
    assert ids_on("cuda", tiny_model_dir, folder, params, cuda_graphs=cuda_graphs) == expected


def test_drawn_ids(tiny_model_dir: Path, folder: Path) -> None:
    """Seeds decide, on any device."""
    params = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, top_k=40, seed=3, ignore_eos=True)
    expected = ids_on("cpu", tiny_model_dir, folder, params)
    assert ids_on("cuda", tiny_model_dir, folder, params) == expected


def test_graphs_are_there_and_can_be_left_out(tiny_model_dir: Path) -> None:
    for wanted, kernels, there in ((True, "auto", True), (False, "auto", False), (True, "reference", False)):
        llm = LLM(str(tiny_model_dir), device="cuda", num_blocks=64, kernels=kernels, cuda_graphs=wanted, **OPTIONS)
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        assert (runner._graphs is not None) == there


def test_the_pool_leaves_room_for_the_largest_step(tiny_model_dir: Path) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    # Blocks of 2 MiB, as a real model's of 16 tokens are: of this one's the pool would have millions.
    llm = LLM(str(tiny_model_dir), device="cuda", max_num_batched_tokens=2048, block_size=4096)
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    assert 0.5 * free < runner.kv.nbytes < 0.93 * free
    params = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, ignore_eos=True)
    outputs = llm.generate([[i % 256] * 100 for i in range(256)], params)
    assert all(output.error is None for output in outputs)
    assert torch.cuda.mem_get_info()[0] > 0.02 * free
