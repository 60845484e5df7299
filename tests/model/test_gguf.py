from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_files import write_gguf
from paged import PagedRun
from tiny import random_weights, write_tiny
from torch import Tensor

from mlserve.config import ModelOptions
from mlserve.errors import CorruptWeightsError, ModelError, UnsupportedModelError
from mlserve.model.gguf import GGUFTensors, gguf_config
from mlserve.model.gguf_header import read_header
from mlserve.model.loader import LoadedModel, load_model

PROMPT = list(range(40, 60))
Kind = GGMLQuantizationType


def load(path: Path) -> LoadedModel:
    return load_model(ModelOptions(model=str(path), device="cpu", kernels="reference"))


def logits(path: Path) -> Tensor:
    return PagedRun(load(path).decoder).prefill(PROMPT)[1]


def tiny_config(folder: Path, family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """Write the same model as a folder; its config."""
    write_tiny(folder, family, **overrides)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    return write_gguf(folder / "tiny.gguf", tiny_config(folder / "tiny"), kind=Kind.Q8_0)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"num_key_value_heads": 4}),
        ("gemma3", {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": ..., "sliding_window": 5}),
    ],
)
def test_model_is_that_of_the_folder(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "folder", family, **overrides)
    path = write_gguf(tmp_path / "model.gguf", config)
    torch.testing.assert_close(logits(path), logits(tmp_path / "folder"), atol=1e-6, rtol=0)


def test_what_is_known_of_a_loaded_file(good: Path) -> None:
    model = load(good)
    assert model.tokenizer_source == good
    assert model.eos_token_ids == (257,)
    assert model.digest == load(good).digest


def test_llama3_frequencies(tmp_path: Path) -> None:
    """llama.cpp stores Llama 3's scaling as divisors of the frequencies."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = tiny_config(tmp_path / "scaled", rope_scaling={"rope_type": "llama3"} | scaling)
    scaled = load(tmp_path / "scaled").config.ropes[0].frequencies
    plain = load(write_tiny(tmp_path / "plain")).config.ropes[0].frequencies
    divisors = torch.tensor(plain) / torch.tensor(scaled)
    path = write_gguf(tmp_path / "model.gguf", config, extra={"rope_freqs.weight": divisors})
    torch.testing.assert_close(logits(path), logits(tmp_path / "scaled"), atol=1e-4, rtol=0)
    assert (logits(path) - logits(tmp_path / "plain")).abs().max() > 0.1


@pytest.mark.parametrize(
    ("scaling", "stored"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {"type": "yarn", "factor": 4.0, "original_context_length": 64},
        ),
    ],
    ids=["linear", "yarn"],
)
def test_rope_scalings(scaling: dict[str, Any], stored: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "folder", "qwen2", rope_scaling=scaling)
    metadata = {f"qwen2.rope.scaling.{key}": value for key, value in stored.items()}
    path = write_gguf(tmp_path / "model.gguf", config, metadata=metadata)
    assert load(path).config.ropes == load(tmp_path / "folder").config.ropes


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=str)
def test_quantised_matrices(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    # 5 x 2**17 weights in the embedding: more than one chunk
    config = tiny_config(tmp_path / "folder", vocab_size=10_240 + 3)
    header = read_header(write_gguf(tmp_path / "model.gguf", config, kind=kind))
    tensors = GGUFTensors(header, gguf_config(header))
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        weight = random_weights(config, 0)[name].numpy()
        expected = dequantize(quantize(weight, kind), kind)
        assert np.array_equal(tensors.read(name).numpy(), expected)
        assert np.abs(expected - weight).max() < 0.1


def test_every_truncation_is_refused(good: Path, tmp_path: Path) -> None:
    data, path = good.read_bytes(), tmp_path / "cut.gguf"
    lengths = {0, 3, 4, 8, 20, 24, len(data) - 1, *random.Random(0).sample(range(len(data)), 60)}
    for length in sorted(lengths):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptWeightsError, match=r"cut.gguf|tensor "):
            load(path)


def test_damaged_headers_never_crash(good: Path, tmp_path: Path) -> None:
    data, path, rng = good.read_bytes(), tmp_path / "damaged.gguf", random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 1, 8])):
            damaged[rng.randrange(2500)] = rng.choice([0, 1, 127, 255, rng.randrange(256)])
        path.write_bytes(damaged)
        try:
            load(path)
        except ModelError:
            refused += 1
    assert refused > 150


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.attention.head_count": 0}, "num_attention_heads as 0"),
        ({"llama.attention.head_count_kv": 3}, "4 query heads can't share 3"),
        ({"llama.expert_count": 8}, "num_experts"),
        ({"llama.attention.sliding_window": 16}, "sliding window"),
        ({"llama.rope.dimension_count": 8}, "partial_rotary_factor 0.5"),
        ({"llama.rope.scaling.type": "longrope"}, "short_factor"),
        ({"llama.rope.scaling.type": "mystery"}, "'mystery'"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 1.5}, "attn_factor 1.5"),
    ],
)
def test_metadata_that_is_not_served_is_named(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_config(tmp_path / "folder"), metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=named):
        load(path)


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "folder") | {"model_type": "starcoder"}
    with pytest.raises(UnsupportedModelError, match="'starcoder'"):
        load(write_gguf(tmp_path / "model.gguf", config))


@pytest.mark.parametrize("name", ["blk.0.ffn_mystery.weight", "v.patch_embd.weight", "rope_factors_long.weight"])
def test_unknown_tensors_are_named(name: str, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "folder")
    path = write_gguf(tmp_path / "model.gguf", config, extra={name: torch.ones(8)})
    with pytest.raises(CorruptWeightsError, match=name):
        load(path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "folder") | {"num_hidden_layers": 1}
    path = write_gguf(tmp_path / "model.gguf", config, metadata={"llama.block_count": 2})
    with pytest.raises(CorruptWeightsError, match=r"model.layers.1.*missing"):
        load(path)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "folder") | {"num_hidden_layers": 1}
    extra = {"blk.1.attn_norm.weight": torch.ones(64, dtype=torch.int32)}
    header = read_header(write_gguf(tmp_path / "model.gguf", config, extra=extra))
    tensors = GGUFTensors(header, gguf_config(header))
    with pytest.raises(UnsupportedModelError, match=r"blk.1.attn_norm.weight has the quantisation I32"):
        tensors.read("model.layers.1.input_layernorm.weight")
