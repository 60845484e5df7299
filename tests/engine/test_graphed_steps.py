"""The whole engine with its decode steps as graphs, against the same without. On a CPU graphs are reruns."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tiny_adapters import ALL, write_adapter
from twins import Rerun

from mlserve import LLM, SamplingParams
from mlserve.engine import build
from mlserve.model.graphs import GraphOptions
from mlserve.request import RequestOutput

NAMES = [None, "r4", "all", "ends", "dora", None]
KINDS = [
    SamplingParams(max_tokens=20, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(max_tokens=14, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=12, n=2, temperature=1.0, seed=5, repetition_penalty=1.2),
]


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    write_adapter(root / "r4", tiny_model_dir, 1)
    write_adapter(root / "all", tiny_model_dir, 2, r=8, targets=ALL)
    write_adapter(root / "ends", tiny_model_dir, 4, targets=("embed_tokens", "lm_head"))
    write_adapter(root / "dora", tiny_model_dir, 5, use_dora=True)
    return root


def outputs_of(llm: LLM) -> list[RequestOutput]:
    """30 requests that share prefixes, differ in kind and adapter, and find too few blocks and slots."""
    rng = random.Random(1)
    shared = [rng.randrange(256) for _ in range(17)]
    prompts = [
        shared[: rng.randrange(18)] + [rng.randrange(256) for _ in range(rng.randrange(1, 20))] for _ in range(30)
    ]
    return llm.generate(
        prompts,
        [KINDS[i % len(KINDS)] for i in range(len(prompts))],
        adapter=[NAMES[i % len(NAMES)] for i in range(len(prompts))],
    )


def test_the_same_answers(monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path, folder: Path) -> None:
    recorder = Rerun()
    options: dict[str, Any] = {
        "kernels": "reference",
        "device": "cpu",
        "adapter_dir": str(folder),
        "block_size": 4,
        "num_blocks": 60,
        "max_loras": 2,
        "max_num_seqs": 10,
        "max_num_batched_tokens": 40,
    }
    expected = outputs_of(LLM(str(tiny_model_dir), **options))
    with monkeypatch.context() as patched:
        graphs = GraphOptions(recorder, max_num_seqs=10, max_model_len=64)
        patched.setattr(build, "_graph_options", lambda *_: graphs)
        found = outputs_of(LLM(str(tiny_model_dir), **options))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.error is theirs.error is None
        assert [choice.token_ids for choice in ours.outputs] == [choice.token_ids for choice in theirs.outputs]
        assert [choice.finish_reason for choice in ours.outputs] == [choice.finish_reason for choice in theirs.outputs]
    assert recorder.num_replays >= 10


def test_there_are_none_on_a_cpu(tiny_model_dir: Path) -> None:
    for wanted in (True, False):
        llm = LLM(str(tiny_model_dir), device="cpu", num_blocks=8, cuda_graphs=wanted)
        assert llm.engine.runner._graphs is None  # type: ignore[attr-defined]
