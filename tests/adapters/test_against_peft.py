"""What is read from an adapter's folder makes the weights that PEFT makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import write_tiny
from tiny_adapters import base_shape, peft_deltas, peft_weights, quiet, randomise, write_adapter
from torch import Tensor
from transformers import AutoModelForCausalLM

from mlserve.adapters.dora import row_scales
from mlserve.adapters.peft_format import read_adapter
from mlserve.adapters.spec import AdapterLimits, AdapterSpec, Module, Site

ATOL = 1e-6
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
QV_PATTERN = r".*layers\.(0|1)\.self_attn\.(q|v)_proj"

# Settings by name. Those on the output layer and the embedding are in tests of their own.
LORA: dict[str, dict[str, Any]] = {
    "attention": {},
    "all-linear": {"targets": "all-linear"},
    "pattern": {"targets": QV_PATTERN},
    "full-names": {"targets": ["model.layers.0.mlp.down_proj", "layers.1.self_attn.k_proj"]},
    "some-targets-absent": {"targets": ["q_proj", "no_such_proj"]},
    "excluded": {"targets": "all-linear", "exclude_modules": ["layers.0.mlp.up_proj", "k_proj"]},
    "excluded-by-pattern": {"targets": ["q_proj", "up_proj"], "exclude_modules": r".*\.0\.mlp\..*"},
    "one-layer": {"layers_to_transform": 1},
    "listed-layers": {"layers_to_transform": [0], "layers_pattern": "layers"},
    "rslora": {"r": 16, "lora_alpha": 32, "use_rslora": True},
    "patterns": {
        "targets": "all-linear",
        "rank_pattern": {"q_proj": 2, r"model\.layers\.\d+\.mlp\.(up|gate)_proj": 8, "layers.1.self_attn.v_proj": 1},
        "alpha_pattern": {"^model.layers.0.self_attn.o_proj": 3, r".*\.up_proj": 5, "q_proj": 0.5},
    },
    "patterns-first-counts": {"rank_pattern": {r".*1.*proj": 3, "q_proj": 2}, "alpha_pattern": {"proj": 99}},
    "patterns-rslora": {"rank_pattern": {"q_proj": 9}, "alpha_pattern": {"k_proj": 1}, "use_rslora": True},
    "fan-in-fan-out": {"fan_in_fan_out": True},
    "dropout": {"lora_dropout": 0.5},
    "bias-all-of-none": {"bias": "all"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "eva": {"init_lora_weights": "eva"},
    "activated": {"alora_invocation_tokens": [5, 6, 7]},
    "torch-file": {"safe_serialization": False},
    "torch-file-pattern": {"safe_serialization": False, "targets": QV_PATTERN},
    "torch-file-all-linear": {"safe_serialization": False, "targets": "all-linear"},
}
DORA: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "dora-rslora-patterns": {"use_dora": True, "use_rslora": True, "rank_pattern": {"v_proj": 7}},
    "dora-torch-file": {"use_dora": True, "safe_serialization": False},
}

Read = Callable[..., tuple[Path, Path, AdapterSpec]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_tiny(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture
def read(models: dict[str, Path], tmp_path: Path) -> Read:
    """Write an adapter and read it: model folder, adapter folder, what was read."""

    def run(family: str = "llama", base_weights: Any = None, **settings: Any) -> tuple[Path, Path, AdapterSpec]:
        model_dir = models[family]
        folder = write_adapter(tmp_path / "adapter", model_dir, 1, **settings)
        spec = read_adapter(folder, base_shape(model_dir), AdapterLimits(), base_weights=base_weights)
        return model_dir, folder, spec

    return run


class Tables:
    """The base model's tables, compared without tolerance."""

    def __init__(self, model_dir: Path) -> None:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(model_dir)
        self._tables = {Module.EMBED_TOKENS: model.model.embed_tokens.weight, Module.LM_HEAD: model.lm_head.weight}

    def equals(self, module: Module, weight: Tensor) -> bool:
        return torch.equal(self._tables[module], weight)


def in_model(site: Site) -> str:
    """A site's path in a transformers model."""
    return site.path if site.module is Module.LM_HEAD else f"model.{site.path}"


def check_deltas(spec: AdapterSpec, folder: Path, model_dir: Path) -> None:
    want = peft_deltas(folder, model_dir)
    assert {in_model(site) for site in spec.weights} == want.keys()
    for site, lora in spec.weights.items():
        delta = lora.delta().T if site.module is Module.EMBED_TOKENS else lora.delta()
        assert delta.abs().max() > 0.02
        torch.testing.assert_close(delta, want[in_model(site)], atol=ATOL, rtol=1e-6)


def check_merged(spec: AdapterSpec, folder: Path, model_dir: Path) -> None:
    """With DoRA: row_scales * (W + delta) is PEFT's merged weight, and all other weights stay."""
    base, merged = peft_weights(folder, model_dir)
    for site, lora in spec.weights.items():
        name = f"{in_model(site)}.weight"
        is_embedding = site.module is Module.EMBED_TOKENS
        weight = base.pop(name).T if is_embedding else base.pop(name)
        effective = row_scales(lora, weight)[:, None] * (weight + lora.delta())
        torch.testing.assert_close(effective.T if is_embedding else effective, merged.pop(name), atol=ATOL, rtol=1e-6)
    for name, weight in base.items():
        assert torch.equal(weight, merged[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_of_each_family(read: Read, family: str) -> None:
    model_dir, folder, spec = read(family, targets="all-linear")
    assert len(spec.weights) == 2 * 7
    check_deltas(spec, folder, model_dir)


@pytest.mark.parametrize("kind", LORA)
def test_lora(read: Read, kind: str) -> None:
    model_dir, folder, spec = read(**LORA[kind])
    check_deltas(spec, folder, model_dir)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_keep_the_dtype_of_the_file(read: Read, dtype: torch.dtype) -> None:
    model_dir, folder, spec = read(dtype=dtype)
    assert {tensor.dtype for lora in spec.weights.values() for tensor in lora.tensors} == {dtype}
    check_deltas(spec, folder, model_dir)  # PEFT makes float32 of them, which changes no value


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "targets", [["embed_tokens"], ["lm_head"], ["q_proj", "embed_tokens", "lm_head"]], ids="+".join
)
def test_lora_on_tables(read: Read, models: dict[str, Path], family: str, targets: list[str]) -> None:
    """PEFT saves the base model's own tables with it."""
    tables = Tables(models[family])
    model_dir, folder, spec = read(family, base_weights=tables, targets=targets, use_rslora=True)
    assert {site.module for site in spec.weights} == {Module(name) for name in targets}
    check_deltas(spec, folder, model_dir)


def test_tied_tables_with_an_adapter_on_both(read: Read, models: dict[str, Path]) -> None:
    """With ensure_weight_tying the output layer gets the embedding's adapter, though target_modules doesn't name it."""
    tables = Tables(models["gemma3"])
    model_dir, folder, spec = read(
        "gemma3", base_weights=tables, targets=["q_proj", "embed_tokens"], ensure_weight_tying=True
    )
    assert Site(Module.LM_HEAD) in spec.weights
    check_deltas(spec, folder, model_dir)


@pytest.mark.parametrize("family", FAMILIES)
def test_dora_of_each_family(read: Read, family: str) -> None:
    model_dir, folder, spec = read(family, targets="all-linear", use_dora=True)
    assert spec.uses_dora
    check_merged(spec, folder, model_dir)


@pytest.mark.parametrize("kind", DORA)
def test_dora(read: Read, kind: str) -> None:
    model_dir, folder, spec = read(**DORA[kind])
    check_merged(spec, folder, model_dir)


def test_dora_on_tables(read: Read, models: dict[str, Path]) -> None:
    tables = Tables(models["llama"])
    model_dir, folder, spec = read(
        base_weights=tables, targets=["q_proj", "embed_tokens", "lm_head"], use_dora=True, use_rslora=True
    )
    check_merged(spec, folder, model_dir)


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_adapters_whose_start_changed_the_base_model_are_served_once_converted(
    models: dict[str, Path], tmp_path: Path, init: str, use_rslora: bool
) -> None:
    """PEFT writes the difference to the start as a plain LoRA of twice the rank."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(models["llama"])
        config = LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=init, use_rslora=use_rslora
        )
        peft_model = get_peft_model(model, config)
        config.init_lora_weights = True
        peft_model.save_pretrained(tmp_path / "start")
        config.init_lora_weights = init
        randomise(peft_model, seed=1)
        peft_model.save_pretrained(tmp_path / "a", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    spec = read_adapter(tmp_path / "a", base_shape(models["llama"]), AdapterLimits())
    assert spec.rank == 8
    check_deltas(spec, tmp_path / "a", models["llama"])
