from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from safetensors.torch import load_file
from tiny import write_tiny
from torch import Tensor

from mlserve.adapters.spec import LAYER_MODULES, Module, Site
from mlserve.config import DType, ModelOptions
from mlserve.model.base_weights import FileBaseWeights, base_shape
from mlserve.model.loader import OpenModel, open_model

Q, EMBED, HEAD = Site(Module.Q_PROJ, 1), Site(Module.EMBED_TOKENS), Site(Module.LM_HEAD)


def opened(folder: Path, dtype: DType = DType.FLOAT32) -> OpenModel:
    return open_model(ModelOptions(model=str(folder), device="cpu", kernels="reference", dtype=dtype))


def weights_of(model: OpenModel) -> FileBaseWeights:
    return FileBaseWeights(model.files.tensors, model.config, model.dtype)


@pytest.fixture
def stored(tiny_model_dir: Path) -> dict[str, Tensor]:
    return load_file(tiny_model_dir / "model.safetensors")


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_shapes_are_those_of_the_weights(tmp_path: Path, family: str) -> None:
    model = opened(write_tiny(tmp_path, family))
    shape, weights = base_shape(model.config), weights_of(model)
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (2, 64, 320)
    assert shape.tied_embeddings == (family == "gemma3")
    assert set(shape.layer_modules) == set(LAYER_MODULES)
    for site in (EMBED, HEAD, *shape.layer_sites()):
        assert tuple(weights.weight(site).shape) == shape.size(site.module), site.path


def test_weights_are_read(tiny_model_dir: Path, stored: dict[str, Tensor]) -> None:
    weights = weights_of(opened(tiny_model_dir))
    assert torch.equal(weights.weight(Q), stored["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(weights.weight(HEAD), stored["lm_head.weight"])
    assert torch.equal(weights.weight(EMBED), stored["model.embed_tokens.weight"].T)
    assert weights.bias(Q) is None
    assert weights.bias(EMBED) is None


def test_nothing_is_kept(tiny_model_dir: Path) -> None:
    weights = weights_of(opened(tiny_model_dir))
    first = weights.weight(Q)
    want = first.clone()
    first.zero_()
    assert torch.equal(weights.weight(Q), want)


def test_weights_have_the_dtype_that_the_model_has(tiny_model_dir: Path, stored: dict[str, Tensor]) -> None:
    weights = weights_of(opened(tiny_model_dir, DType.BFLOAT16))
    assert torch.equal(weights.weight(Q), stored["model.layers.1.self_attn.q_proj.weight"].bfloat16())


def test_biases(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "qwen2")
    want = load_file(folder / "model.safetensors")["model.layers.1.self_attn.q_proj.bias"]
    bias = weights_of(opened(folder, DType.BFLOAT16)).bias(Q)
    assert bias is not None
    assert bias.dtype == torch.float32
    assert torch.equal(bias, want.bfloat16().float())
    assert weights_of(opened(folder)).bias(Site(Module.O_PROJ, 1)) is None


@pytest.mark.parametrize("module", [Module.EMBED_TOKENS, Module.LM_HEAD])
def test_copies_of_tables_are_told_from_others(tiny_model_dir: Path, stored: dict[str, Tensor], module: Module) -> None:
    table = stored["model.embed_tokens.weight" if module is Module.EMBED_TOKENS else "lm_head.weight"]
    weights = weights_of(opened(tiny_model_dir))
    assert weights.equals(module, table)
    assert weights.equals(module, table.double())
    changed = table.clone()
    changed[7, 3] += 1e-3
    assert not weights.equals(module, changed)
    assert not weights.equals(module, table[:-1])
    assert not weights.equals(module, table.bfloat16())  # would be another table


def test_copies_of_tables_may_be_finer_than_what_the_model_holds(
    tiny_model_dir: Path, stored: dict[str, Tensor]
) -> None:
    weights = weights_of(opened(tiny_model_dir, DType.BFLOAT16))
    table = stored["lm_head.weight"]
    assert weights.equals(Module.LM_HEAD, table)
    assert weights.equals(Module.LM_HEAD, table.bfloat16())
    assert not weights.equals(Module.LM_HEAD, table * 1.01)


def test_the_output_layer_of_tied_embeddings_is_the_table(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "gemma3")
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    weights = weights_of(opened(folder))
    assert torch.equal(weights.weight(HEAD), table)
    assert torch.equal(weights.weight(EMBED), table.T)
    assert weights.equals(Module.LM_HEAD, table)


def write_quantised(folder: Path) -> Path:
    config = json.loads((write_tiny(folder / "tiny") / "config.json").read_text())
    return write_gguf(folder / "tiny.gguf", config, kind=GGMLQuantizationType.Q8_0)


@pytest.mark.parametrize(
    "write",
    [write_tiny, lambda folder: write_tiny(folder, shards=3), write_quantised],
    ids=["one-file", "shards", "gguf"],
)
def test_threads_may_read_at_once(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    model = opened(write(tmp_path))
    weights, sites = weights_of(model), [EMBED, HEAD, *base_shape(model.config).layer_sites()]
    want = {site: weights.weight(site) for site in sites}
    wrong: list[str] = []

    def read(offset: int) -> None:
        for i in range(20 * len(sites)):
            site = sites[(i + offset) % len(sites)]
            if not torch.equal(weights.weight(site), want[site]):
                wrong.append(site.path)

    threads = [threading.Thread(target=read, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
