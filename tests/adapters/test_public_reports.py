"""Public bug reports on adapters, by their number in the list of cases; those that reading can answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from adapter_files import CONFIG, PREFIX, Q0, WEIGHTS, changed_copy, read_tensors, with_tensors, without
from tiny_adapters import write_adapter
from torch import Tensor

from mlserve.adapters.peft_format import read_adapter
from mlserve.adapters.spec import AdapterLimits, BaseShape, Module
from mlserve.errors import (
    AdapterFileNotFoundError,
    AdapterLimitError,
    CorruptAdapterError,
    UnsupportedAdapterError,
)


def test_2_07_rslora_scaling(tiny_model_dir: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    folder = write_adapter(tmp_path, tiny_model_dir, 1, r=16, lora_alpha=32, use_rslora=True)
    assert {lora.scaling for lora in read_adapter(folder, shape, limits).weights.values()} == {8.0}


def test_2_08_dora_is_never_loaded_as_plain_lora(
    dora: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, no_reads: None
) -> None:
    magnitudes = [key for key in read_tensors(dora) if "magnitude" in key]
    assert len(magnitudes) == 8
    missing = changed_copy(dora, tmp_path / "missing", change=without(*magnitudes))
    one_missing = changed_copy(dora, tmp_path / "one", change=without(magnitudes[0]))
    unset = changed_copy(dora, tmp_path / "unset", use_dora=False)
    for folder in (missing, one_missing):
        with pytest.raises(CorruptAdapterError, match=r"use_dora is set, but layers\.0\.\S+.* no DoRA magnitudes"):
            read_adapter(folder, shape, limits)
    with pytest.raises(CorruptAdapterError, match="have DoRA magnitudes, but use_dora is not set"):
        read_adapter(unset, shape, limits)


@pytest.mark.parametrize("rows", [320, 324])
def test_2_09_modules_to_save(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, no_reads: None, rows: int
) -> None:
    tables = {
        f"{PREFIX}embed_tokens.weight": torch.zeros(rows, 64),
        "base_model.model.lm_head.weight": torch.zeros(rows, 64),
    }
    folder = changed_copy(plain, tmp_path, change=with_tensors(tables), modules_to_save=["lm_head", "embed_tokens"])
    with pytest.raises(UnsupportedAdapterError, match=r"modules_to_save is set \(\['lm_head', 'embed_tokens'\]\)") as e:
        read_adapter(folder, shape, limits)
    assert (f"embed_tokens by one of the shape [{rows}, 64]" in str(e.value)) == (rows != 320)


@pytest.mark.parametrize("spelling", ["weight", "base_layer.weight", "modules_to_save.default.weight"])
def test_2_09_tables_without_a_setting(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, spelling: str
) -> None:
    table = torch.ones(320, 64)
    folder = changed_copy(plain, tmp_path, change=with_tensors({f"base_model.model.lm_head.{spelling}": table}))

    class Tables:
        def __init__(self, own: Tensor) -> None:
            self.own = own

        def equals(self, module: Module, weight: Tensor) -> bool:
            assert module is Module.LM_HEAD
            return torch.equal(self.own, weight)

    read_adapter(folder, shape, limits, base_weights=Tables(table))
    with pytest.raises(UnsupportedAdapterError, match=r"replaces the whole of lm_head.*differs from the base model's"):
        read_adapter(folder, shape, limits, base_weights=Tables(table * 2))
    with pytest.raises(UnsupportedAdapterError, match=r"lm_head.*can't be compared"):
        read_adapter(folder, shape, limits)


def test_2_10_a_load_that_applies_nothing_is_an_error(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, no_reads: None
) -> None:
    nothing = changed_copy(
        plain, tmp_path, rename=lambda key: re.sub(r"\w_proj", lambda m: f"no_such_{m[0]}", key), target_modules=["x"]
    )
    with pytest.raises(UnsupportedAdapterError, match=r"16 tensors would not be applied.*no LoRA tensors"):
        read_adapter(nothing, shape, limits)


UNAPPLIED = {
    f"{PREFIX}layers.0.self_attn.qkv_proj.lora_A.weight": "the base model has no such module",
    f"{PREFIX}layers.0.mlp.q_proj.lora_A.weight": "the base model has no such module",
    f"{PREFIX}layers.00.self_attn.q_proj.lora_A.weight": "the base model has no such module",
    f"{PREFIX}layers.0.self_attn.q_proj.lora_embedding_A": "the base model has no such module",
    f"{PREFIX}embed_tokens.lora_A.weight": "the base model has no such module",
    "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight": "only the language model's",
    f"{PREFIX}layers.0.self_attn.q_proj.lora_B.bias": "biases of LoRA's own",
    f"{PREFIX}layers.0.self_attn.q_proj.base_layer.bias": "trained biases",
    f"{PREFIX}layers.0.self_attn.q_proj.base_layer.weight": "the base model has no such module",
    f"{PREFIX}embed_tokens.token_adapter.trainable_tokens_delta": "trained tokens",
    f"{PREFIX}layers.0.self_attn.q_proj.lora_E": "AdaLoRA",
    f"{PREFIX}layers.0.self_attn.q_proj.lora_diag": "KaSA",
    f"{PREFIX}layers.0.input_layernorm.weight": "trained norms",
    "": "the base model has no such module",
}


@pytest.mark.parametrize("key", UNAPPLIED)
def test_2_10_a_load_that_applies_some_tensors_is_an_error(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, no_reads: None, key: str
) -> None:
    folder = changed_copy(plain, tmp_path, change=with_tensors({key: torch.zeros(4)}))
    want = rf"1 tensor would not be applied, {re.escape(key)}: {UNAPPLIED[key]}"
    with pytest.raises(UnsupportedAdapterError, match=want):
        read_adapter(folder, shape, limits)


def test_2_10_missing_tensors_are_noticed(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, no_reads: None
) -> None:
    half = changed_copy(plain, tmp_path / "half", change=without(f"{Q0}lora_B.weight"))
    with pytest.raises(CorruptAdapterError, match=r"A and B is missing for layers\.0\.self_attn\.q_proj"):
        read_adapter(half, shape, limits)
    none = changed_copy(plain, tmp_path / "none", change=without(f"{Q0}lora_A.weight", f"{Q0}lora_B.weight"))
    with pytest.raises(CorruptAdapterError, match=r"target_modules names layers\.0\.self_attn\.q_proj, which the file"):
        read_adapter(none, shape, limits)
    more = changed_copy(plain, tmp_path / "more", target_modules=["q_proj", "k_proj", "v_proj"])
    with pytest.raises(CorruptAdapterError, match=r"changes layers\.0\.\S*o_proj, layers\.1\.\S*o_proj, which target"):
        read_adapter(more, shape, limits)


def test_2_12_bad_adapters(tiny_model_dir: Path, plain: Path, tmp_path: Path, shape: BaseShape, no_reads: None) -> None:
    limits = AdapterLimits(max_rank=16)
    large = write_adapter(tmp_path / "large", tiny_model_dir, 1, r=64)
    with pytest.raises(AdapterLimitError, match=r"rank 64 \(in layers.*, limit 16: raise max_lora_rank"):
        read_adapter(large, shape, limits)
    no_weights = changed_copy(plain, tmp_path / "no-weights")
    (no_weights / WEIGHTS).unlink()
    with pytest.raises(AdapterFileNotFoundError, match=r"neither adapter_model\.safetensors nor adapter_model\.bin"):
        read_adapter(no_weights, shape, limits)
    wrong = changed_copy(plain, tmp_path / "wrong", change=with_tensors({f"{Q0}lora_A.weight": torch.zeros(4, 63)}))
    with pytest.raises(
        CorruptAdapterError, match=r"q_proj.lora_A.weight has the shape \[4, 63\], and must have \[4, 64\]"
    ):
        read_adapter(wrong, shape, limits)
    for path in (tmp_path / "no-such-path", plain / CONFIG, tmp_path / "a\0b"):
        with pytest.raises(AdapterFileNotFoundError, match=r"there is no such folder: give one that [^;]*$"):
            read_adapter(path, shape, limits)


def test_2_12_rank_equal_to_the_limit(tiny_model_dir: Path, tmp_path: Path, shape: BaseShape) -> None:
    folder = write_adapter(tmp_path, tiny_model_dir, 1, rank_pattern={"v_proj": 16})
    assert read_adapter(folder, shape, AdapterLimits(max_rank=16)).rank == 16
    with pytest.raises(AdapterLimitError, match=r"rank 16 \(in layers\.\d\.self_attn\.v_proj\), limit 15"):
        read_adapter(folder, shape, AdapterLimits(max_rank=15))
