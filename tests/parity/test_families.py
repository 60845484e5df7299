"""Logits of tiny random models against transformers, in float32, for every family and every setting that it uses."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedRun, PagedSequence
from tiny import write_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from mlserve.config import ModelOptions
from mlserve.model.decoder import Decoder
from mlserve.model.loader import load_model

ATOL = 1e-4
PROMPT = random.Random(0).choices(range(256), k=100)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8],
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "linear-old-spelling": {"type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-attention-factor": YARN | {"attention_factor": 1.3},
    "yarn-mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 0.3},
    "yarn-untruncated": YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-no-trained-length": {"rope_type": "yarn", "factor": 2.0},
    "longrope": LONGROPE,
    "longrope-attention-factor": LONGROPE | {"factor": 4.0, "attention_factor": 0.9},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-gqa3-derived-head": ("llama", {"hidden_size": 96, "num_attention_heads": 6, "head_dim": ...}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 16}),
    "mistral-mqa-wide-heads": ("mistral", {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": 7}),
    "qwen2": ("qwen2", {"head_dim": ...}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-window-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-wide-heads": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3-biases-mha": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma3": ("gemma3", {}),
    "gemma3-mqa": ("gemma3", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}),
    "gemma3-untied-biases": ("gemma3", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3-pattern": (
        "gemma3",
        {"num_hidden_layers": 7, "layer_types": ..., "sliding_window": 33, "sliding_window_pattern": 3},
    ),
    "gemma3-logit-cap": ("gemma3", {"final_logit_softcapping": 2.0}),
    "gemma3-rope-scaling": ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma3-rope-parameters": (
        "gemma3",
        {
            "rope_theta": ...,
            "rope_local_base_freq": ...,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 500000.0} | YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    **{f"llama-{name}": ("llama", {"rope_scaling": scaling}) for name, scaling in ROPES.items()},
    **{
        f"{family}-{name}-new-spelling": (
            family,
            {"rope_theta": ..., "rope_parameters": ROPES[name] | {"rope_theta": 5000.0}},
        )
        for family in ("llama", "mistral", "qwen2", "qwen3")
        for name in ("yarn", "llama3", "linear")
    },
}

Made = tuple[Path, Tensor]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Folder of a case, and transformers' logits of `PROMPT`, `[100, V]`."""
    made: dict[str, Made] = {}

    def make_case(case: str) -> Made:
        if case not in made:
            family, overrides = CASES[case]
            folder = write_tiny(tmp_path_factory.mktemp(case), family, **overrides)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            with torch.inference_mode():
                made[case] = folder, model(torch.tensor([PROMPT])).logits[0]
        return made[case]

    return make_case


def load(folder: Path, kernels: str) -> Decoder:
    return load_model(ModelOptions(model=str(folder), device="cpu", kernels=kernels)).decoder


@pytest.mark.parametrize("case", CASES)
def test_prefill_logits(case: str, kernels: str, make: Callable[[str], Made]) -> None:
    folder, expected = make(case)
    _, logits = PagedRun(load(folder, kernels)).prefill(PROMPT)
    assert float(expected.std()) > 0.3  # a flat model would agree with anything
    torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_chunks_and_decode_logits(case: str, kernels: str, make: Callable[[str], Made]) -> None:
    """The prompt in chunks that end anywhere in a block, then token by token, beside other sequences."""
    folder, expected = make(case)
    run = PagedRun(load(folder, kernels))
    sequence, other = PagedSequence(PROMPT), PagedSequence(PROMPT[::-1])
    logits = []
    for count in (7, 1, 24, 33, 16, *[1] * 19):
        both = run.step([(other, 2), (sequence, count)])
        logits.append(both[2:])
    torch.testing.assert_close(torch.cat(logits), expected, atol=ATOL, rtol=0)
