from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_files import WEIGHTS
from tiny import write_tiny
from tiny_adapters import base_shape, write_adapter
from torch import Tensor

from mlserve.adapters.dora import row_scales
from mlserve.adapters.host import HostAdapter, HostWeights, _PackedWeights, host_adapter, read_host_adapter
from mlserve.adapters.peft_format import read_adapter
from mlserve.adapters.spec import AdapterLimits, AdapterSpec, BaseShape, LoraWeights, Module, Site
from mlserve.errors import CorruptAdapterError

Q, DOWN, EMBED = Site(Module.Q_PROJ, 0), Site(Module.DOWN_PROJ, 1), Site(Module.EMBED_TOKENS)


class Weights:
    """A base model of ones, or of what is given, whose query projections have biases."""

    def __init__(self, shape: BaseShape, weight: Tensor | None = None) -> None:
        self.shape = shape
        self.given = weight
        self.reads: list[Site] = []

    def equals(self, module: Module, weight: Tensor) -> bool:
        return True

    def weight(self, site: Site) -> Tensor:
        self.reads.append(site)
        size = self.shape.size(site.module)
        assert size is not None
        return torch.ones(size) if self.given is None else self.given

    def bias(self, site: Site) -> Tensor | None:
        return torch.arange(64.0) if site.module is Module.Q_PROJ else None


def spec_of(weights: dict[Site, LoraWeights], tokens: tuple[int, ...] | None = None) -> AdapterSpec:
    return AdapterSpec(b"digest", weights, tokens)


def test_weights_are_laid_out(shape: BaseShape) -> None:
    q = LoraWeights(torch.randn(3, 64), torch.randn(64, 3), 0.5)
    down = LoraWeights(torch.randn(5, 128).bfloat16(), torch.randn(64, 5).bfloat16(), 2.0)
    base = Weights(shape)
    adapter = host_adapter(spec_of({Q: q, DOWN: down}, (1, 2)), base)
    assert (adapter.digest, adapter.invocation_tokens, adapter.rank) == (b"digest", (1, 2), 5)
    assert adapter.targets == {Module.Q_PROJ: (0,), Module.DOWN_PROJ: (1,)}
    assert list(adapter.weights) == [Q, DOWN]
    assert adapter.num_bytes == 4 * 3 * (64 + 64) + 2 * 5 * (128 + 64)
    assert base.reads == []
    for site, lora in ((Q, q), (DOWN, down)):
        host = adapter.weights[site]
        assert torch.equal(host.a, lora.a)
        assert torch.equal(host.b, lora.b.T)
        assert host.a.dtype == host.b.dtype == lora.a.dtype
        assert host.a.is_contiguous()
        assert host.b.is_contiguous()
        assert (host.scaling, host.rank, host.row_scales, host.bias) == (lora.scaling, lora.rank, None, None)


def test_dora(shape: BaseShape) -> None:
    q = LoraWeights(torch.randn(3, 64), torch.randn(64, 3), 0.5, 1 + torch.rand(64))
    down = LoraWeights(torch.randn(3, 128), torch.randn(64, 3), 0.5, 1 + torch.rand(64))
    base = Weights(shape)
    adapter = host_adapter(spec_of({Q: q, DOWN: down}), base)
    assert base.reads == [Q, DOWN]
    scales, bias = adapter.weights[Q].row_scales, adapter.weights[Q].bias
    assert scales is not None
    assert torch.equal(scales, row_scales(q, torch.ones(64, 64)))
    assert bias is not None
    assert torch.equal(bias, torch.arange(64.0))
    assert adapter.weights[DOWN].bias is None
    assert adapter.num_bytes == 4 * (3 * 128 + 64 + 64) + 4 * (3 * 192 + 64)


def test_dora_on_a_weight_with_a_row_of_zeros(shape: BaseShape) -> None:
    lora = LoraWeights(torch.zeros(3, 64), torch.zeros(64, 3), 0.5, torch.ones(64))
    with pytest.raises(CorruptAdapterError, match=r"layers\.0\.self_attn\.q_proj can't be adapted: a row .* norm 0"):
        host_adapter(spec_of({Q: lora}), Weights(shape, torch.zeros(64, 64)))


def test_tensors_of_one_rank_and_odd_sizes(shape: BaseShape) -> None:
    """Dtypes of different sizes follow each other in one piece of memory."""
    q = LoraWeights(torch.randn(1, 3).half(), torch.randn(4, 1).half(), 1.0)
    down = LoraWeights(torch.randn(1, 7), torch.randn(3, 1), 1.0)
    adapter = host_adapter(spec_of({EMBED: q, Q: down, DOWN: q}), Weights(shape))
    for site, lora in ((EMBED, q), (Q, down), (DOWN, q)):
        assert torch.equal(adapter.weights[site].a, lora.a)
        assert torch.equal(adapter.weights[site].b, lora.b.T)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"targets": "all-linear", "dtype": torch.bfloat16, "r": 8},
        {"targets": "all-linear", "use_dora": True, "r": 8},
        {"targets": ["q_proj", "embed_tokens", "lm_head"], "r": 8},
    ],
    ids=["attention", "all-linear-bf16", "dora", "tables"],
)
def test_memory_is_that_of_the_file(tmp_path: Path, settings: dict) -> None:
    """Of qwen2, whose biases are kept with DoRA."""
    model_dir = write_tiny(tmp_path / "model", "qwen2")
    folder = write_adapter(tmp_path / "adapter", model_dir, 1, **settings)
    shape = base_shape(model_dir)
    adapter = read_host_adapter(folder, shape, AdapterLimits(), Weights(shape), None)
    assert memory(adapter) <= 1.1 * (folder / WEIGHTS).stat().st_size
    assert adapter.num_bytes <= memory(adapter) <= 1.01 * adapter.num_bytes


def memory(adapter: HostAdapter) -> int:
    """Of all storages, each counted once."""
    storages = [tensor.untyped_storage() for lora in adapter.weights.values() for tensor in lora.tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_nothing_of_the_spec_stays(plain: Path, shape: BaseShape) -> None:
    spec = read_adapter(plain, shape, AdapterLimits())
    adapter = host_adapter(spec, Weights(shape))
    first: HostWeights = adapter.weights[Q]
    want = first.a.clone()
    for lora in spec.weights.values():
        lora.a.zero_()
        lora.b.zero_()
    assert torch.equal(adapter.weights[Q].a, want)
    assert adapter.weights[Q].b.abs().sum() > 0
    assert adapter.weights[Q].a.data_ptr() == first.a.data_ptr()  # looks don't copy


def test_packed_weights_elsewhere(shape: BaseShape) -> None:
    """What is copied as one piece is taken apart as it was put together."""
    lora = LoraWeights(torch.randn(3, 64), torch.randn(64, 3).half(), 0.5)
    adapter = host_adapter(spec_of({Q: lora}), Weights(shape))
    assert adapter.weights_on(torch.device("cpu")) is adapter.weights
    assert isinstance(adapter.weights, _PackedWeights)
    moved = adapter.weights.to(torch.device("cpu"))
    assert torch.equal(moved[Q].a, lora.a)
    assert torch.equal(moved[Q].b, lora.b.T)
    assert moved[Q].b.dtype is torch.float16


@pytest.mark.gpu
def test_page_locked_weights_on_a_gpu(shape: BaseShape) -> None:
    lora = LoraWeights(torch.randn(3, 64), torch.randn(64, 3).half(), 0.5)
    adapter = host_adapter(spec_of({Q: lora}), Weights(shape), page_locked=True)
    assert adapter.weights[Q].a.is_pinned()
    assert adapter.num_bytes == 2048  # 768 + 384 bytes, in a power of 2
    moved = adapter.weights_on(torch.device("cuda"))
    assert (moved[Q].a.device.type, moved[Q].b.device.type) == ("cuda", "cuda")
    assert torch.equal(moved[Q].a.cpu(), lora.a)
    assert torch.equal(moved[Q].b.cpu(), lora.b.T)
