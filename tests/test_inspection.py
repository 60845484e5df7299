"""What `mlserve inspect` says of models whose figures are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny

from mlserve import LLM, ConfigError, CorruptWeightsError, EngineConfig
from mlserve.inspection import describe

# Embedding and output layer, then per layer q, k, v, o, three of the MLP, and two norms; the last norm.
TINY_NORMS = 2 * (2 * 64) + 64
TINY_PARAMETERS = 2 * 320 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + TINY_NORMS


def facts(model: Path | str, **options: Any) -> dict[str, str]:
    title, *lines = describe(EngineConfig.from_options(model=str(model), **options)).splitlines()
    assert title == str(model)
    pairs = (line.strip().split("  ", 1) for line in lines)
    return {name: fact.strip() for name, fact in pairs}


def test_the_tiny_model(tiny_model_dir: Path) -> None:
    told = facts(tiny_model_dir, kernels="reference", device="cpu")
    assert told == {
        "architecture": "LlamaForCausalLM",
        "layers": "2",
        "hidden size": "64, in the MLP 128",
        "heads": "4 query, 2 key and value, of 16",
        "vocabulary": "320, output layer of its own",
        "max length": "512 tokens, prompt and output",
        "parameters": f"{TINY_PARAMETERS:,}",
        "weights": "449.25 KiB in float32 (225.25 KiB in bfloat16, 225.25 KiB in float16)",
        "KV per token": "512 bytes in float32",
        "KV per block": "8.00 KiB for 16 tokens",
        "KV pool": "131,072 blocks in 1.00 GiB (default: 1 GiB)",
        "KV capacity": "2,097,152 tokens, 4096.0 times the max length",
        "device": "cpu",
        "kernels": "reference",
    }


def test_options_count(tiny_model_dir: Path) -> None:
    told = facts(tiny_model_dir, dtype="bfloat16", block_size=4, num_blocks=31, max_model_len=100)
    assert told["max length"].startswith("100 tokens")
    assert told["weights"].startswith("225.25 KiB in bfloat16 (449.25 KiB in float32, ")
    assert told["KV per block"] == "2.00 KiB for 4 tokens"
    assert told["KV pool"] == "31 blocks in 64.00 KiB (num_blocks)"
    assert told["KV capacity"] == "124 tokens, 1.2 times the max length"
    assert facts(tiny_model_dir, kv_memory=0.5)["KV pool"] == "65,536 blocks in 512.01 MiB (kv_memory)"


def test_tied_embeddings_count_once_and_windows_are_told(tmp_path: Path) -> None:
    told = facts(write_tiny(tmp_path, "gemma3"))
    assert told["vocabulary"] == "320, output layer tied"
    assert told["layers"] == "2, 1 of them with a window of 8 tokens"
    # One table; four norms of 64 and two of 16 per layer.
    per_layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 4 * 64 + 2 * 16
    assert told["parameters"] == f"{320 * 64 + 2 * per_layer + 64:,}"


def test_what_is_told_is_what_is_built(tiny_model_dir: Path) -> None:
    options = {"kv_memory": 0.001, "block_size": 8}
    told = facts(tiny_model_dir, **options)
    llm = LLM(str(tiny_model_dir), **options)
    assert told["KV pool"].startswith(f"{llm.cache_stats().num_blocks} blocks in ")
    kv = llm.engine.runner.kv  # type: ignore[attr-defined]
    assert told["KV pool"].split(" in ")[1].startswith(f"{kv.nbytes / 2**20:.2f} MiB")
    assert told["max length"].startswith(f"{llm.engine.limits.max_model_len} tokens")


def test_the_embedded_model() -> None:
    told = facts("smollm2-135m-instruct", kernels="reference", device="cpu")
    assert told["parameters"] == "134,515,008"
    assert told["layers"] == "30"
    assert told["heads"] == "9 query, 3 key and value, of 64"
    assert told["vocabulary"] == "49,152, output layer tied"
    assert told["KV per token"] == "46,080 bytes in float32"


def test_weights_are_checked_but_not_read(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-8] + b"\xff" * 8)  # values of a tensor, which are nobody's business here
    assert facts(folder)["parameters"] == "115,008"
    weights.write_bytes(content[:-8])
    with pytest.raises(CorruptWeightsError):
        facts(folder)


def test_wrong_options_are_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 513"):
        facts(tiny_model_dir, max_model_len=513)
    with pytest.raises(ConfigError, match="raise kv_memory or lower block_size"):
        facts(tiny_model_dir, kv_memory=1e-9)
