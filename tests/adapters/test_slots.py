from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

from mlserve.adapters.host import HostAdapter, HostWeights
from mlserve.adapters.slots import AdapterSlots, Projection
from mlserve.adapters.spec import BaseShape, Module, Site
from mlserve.errors import AdapterLimitError

BASE = BaseShape(
    num_layers=2,
    hidden_size=6,
    vocab_size=10,
    layer_modules={
        Module.Q_PROJ: (8, 6),
        Module.K_PROJ: (4, 6),
        Module.V_PROJ: (4, 6),
        Module.O_PROJ: (6, 8),
        Module.GATE_PROJ: (12, 6),
        Module.UP_PROJ: (12, 6),
        Module.DOWN_PROJ: (6, 12),
    },
)


def weights(site: Site, rank: int, *, scaling: float = 1.0, dora: bool = False, bias: bool = False) -> HostWeights:
    size = BASE.size(site.module)
    assert size is not None
    out, width = size
    return HostWeights(
        torch.randn(rank, width),
        torch.randn(rank, out),
        scaling,
        torch.rand(out) + 0.5 if dora else None,
        torch.randn(out) if bias else None,
    )


def adapter(**sites: HostWeights) -> HostAdapter:
    """Sites by `q_proj_0`, `lm_head`."""
    named = {}
    for name, lora in sites.items():
        module, _, layer = name.rpartition("_") if name[-1].isdigit() else (name, "", "")
        named[Site(Module(module), int(layer) if layer else None)] = lora
    return HostAdapter(bytes(32), None, MappingProxyType(named))


def site(name: str) -> Site:
    return next(iter(adapter(**{name: weights(Site(Module.Q_PROJ, 0), 1)}).weights))


@pytest.fixture
def slots() -> AdapterSlots:
    return AdapterSlots(BASE, 3, 4, torch.float32, torch.device("cpu"))


def test_nothing_is_allocated_before_it_is_needed(slots: AdapterSlots) -> None:
    assert slots.num_bytes == 0
    slots.write(0, adapter(o_proj_1=weights(site("o_proj_1"), 2)))
    assert slots.num_bytes == 3 * 2 * 4 * (8 + 6) * 4
    assert slots.projections({0}) == {Projection.OUT}
    assert slots.projections({0, 1}) == {Projection.OUT}
    assert slots.projections({1}) == set()


def test_slices_of_a_fused_linear(slots: AdapterSlots) -> None:
    q, v = weights(site("q_proj_1"), 2, scaling=0.5), weights(site("v_proj_1"), 4)
    slots.write(2, adapter(q_proj_1=q, v_proj_1=v))
    lora = slots.lora(Projection.QKV, 1)
    assert lora.out_starts == (0, 8, 12, 16)
    assert lora.ranks.tolist() == [[0, 0, 0], [0, 0, 0], [2, 0, 4]]
    assert slots.lora(Projection.QKV, 0).ranks.tolist() == [[0, 0, 0]] * 3
    assert torch.equal(lora.a[2, 0, :2], q.a)
    assert torch.equal(lora.a[2, 2], v.a)
    assert torch.equal(lora.b[2, :2, :8], 0.5 * q.b)
    assert torch.equal(lora.b[2, :, 12:], v.b)


def test_what_a_low_rank_uses_of_its_slot_is_one_piece(slots: AdapterSlots) -> None:
    """As large pages would else be taken for ranks that no adapter has."""
    slots.write(1, adapter(q_proj_0=weights(site("q_proj_0"), 2)))
    layers = [slots.lora(Projection.QKV, layer) for layer in range(BASE.num_layers)]
    for used in ([lora.a[1, :, :2] for lora in layers], [lora.b[1, :2] for lora in layers]):
        begin = min(tensor.data_ptr() for tensor in used)
        end = max(tensor[(-1,) * tensor.dim()].data_ptr() + tensor.itemsize for tensor in used)
        assert end - begin == sum(tensor.nbytes for tensor in used)


def test_a_slot_is_overwritten_whole(slots: AdapterSlots) -> None:
    first = adapter(q_proj_0=weights(site("q_proj_0"), 4, dora=True), down_proj_1=weights(site("down_proj_1"), 3))
    slots.write(1, first)
    assert slots.dora_slots(Projection.QKV) == {1}
    k = weights(site("k_proj_1"), 1)
    slots.write(1, adapter(k_proj_1=k))
    assert slots.lora(Projection.QKV, 0).ranks.sum() == 0
    assert slots.lora(Projection.QKV, 1).ranks.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert slots.lora(Projection.DOWN, 1).ranks.sum() == 0
    assert slots.projections({1}) == {Projection.QKV}
    assert slots.dora_slots(Projection.QKV) == set()


def test_other_slots_are_left_alone(slots: AdapterSlots) -> None:
    kept = weights(site("o_proj_0"), 3)
    slots.write(0, adapter(o_proj_0=kept))
    slots.write(1, adapter(o_proj_0=weights(site("o_proj_0"), 4, dora=True)))
    lora = slots.lora(Projection.OUT, 0)
    assert torch.equal(lora.a[0, 0, :3], kept.a)
    assert torch.equal(lora.b[0, :3], kept.b)
    assert slots.dora_slots(Projection.OUT) == {1}


def test_dora_scales_and_keeps_the_bias(slots: AdapterSlots) -> None:
    v = weights(site("v_proj_0"), 2, scaling=2.0, dora=True, bias=True)
    slots.write(0, adapter(q_proj_0=weights(site("q_proj_0"), 2), v_proj_0=v))
    scales = slots.row_scales(Projection.QKV, 0)
    assert v.row_scales is not None
    assert v.bias is not None
    assert scales is not None
    assert torch.equal(scales.scale[0, :12], torch.ones(12))  # q has no DoRA, k no adapter
    assert torch.equal(scales.scale[0, 12:], v.row_scales)
    assert torch.equal(scales.shift[0, :12], torch.zeros(12))
    torch.testing.assert_close(scales.shift[0, 12:], v.bias * (1 - v.row_scales))
    torch.testing.assert_close(slots.lora(Projection.QKV, 0).b[0, :2, 12:], 2.0 * v.b * v.row_scales)
    assert slots.row_scales(Projection.QKV, 1) is not None


def test_scales_of_an_earlier_adapter_are_gone(slots: AdapterSlots) -> None:
    q = site("q_proj_0")
    slots.write(0, adapter(q_proj_0=weights(q, 2, dora=True), q_proj_1=weights(site("q_proj_1"), 2, dora=True)))
    slots.write(0, adapter(q_proj_0=weights(q, 2, dora=True)))
    scales = slots.row_scales(Projection.QKV, 1)
    assert scales is not None
    assert torch.equal(scales.scale[0], torch.ones(16))


def test_dtype_of_the_slots(slots: AdapterSlots) -> None:
    half = HostWeights(torch.randn(2, 8).half(), torch.randn(2, 6).half(), 0.7)
    slots.write(0, adapter(o_proj_0=half))
    lora = slots.lora(Projection.OUT, 0)
    assert lora.a.dtype is torch.float32
    assert torch.equal(lora.b[0, :2], half.b.float() * 0.7)  # scaled in the slots' dtype, not the file's


def test_no_memory(monkeypatch: pytest.MonkeyPatch, slots: AdapterSlots) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(AdapterLimitError, match="3 slots of rank 4 on down: lower max_loras or max_lora_rank"):
        slots.write(0, adapter(down_proj_0=weights(site("down_proj_0"), 2)))
