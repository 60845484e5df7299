"""Kernels that treat each token by itself: norms, rotation, cache writes, activation, linears, and drawing tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from gpu.cases import EXACT, Case, Rig, Spec
from rows import row
from tolerances import TRITON
from torch import Tensor
from torch.nn import functional

from mlserve.kernels import Activation, kv_pool
from mlserve.kernels.reference import ReferenceLinear, ReferenceOps
from mlserve.kernels.triton.ops import TritonOps
from mlserve.kernels.triton.sampling import draw
from mlserve.model.sampler import Sampler
from mlserve.model.uniform import uniforms

__all__ = ["row_specs"]

REFERENCE, OURS = ReferenceOps(), TritonOps()
EPS = 1e-5
MOST_CHECKED_ROWS = 32  # of whole vocabularies, which the host draws from, too
RESTRICTIONS = {"temperature": {}, "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9}}


def row_specs(rig: Rig) -> Iterator[Spec]:
    """Every batch, and a prompt's rows but for tokens that are drawn."""
    shape, sizes = rig.scale.shape, (*rig.scale.batches, rig.scale.prefill_rows)
    for rows in sizes:
        label = f"{rows} rows"
        yield Spec("rms_norm", label, partial(_rms_norm, rig, rows))
        yield Spec("add_rms_norm", label, partial(_add_rms_norm, rig, rows))
        yield Spec("rope", label, partial(_rope, rig, rows))
        yield Spec("kv_write", label, partial(_kv_write, rig, rows))
        yield Spec("rope_kv_write", label, partial(_rope_kv_write, rig, rows))
        yield Spec("gated_activation", label, partial(_gated_activation, rig, rows))
    for rows in rig.scale.batches:
        for name, settings in RESTRICTIONS.items():
            build = partial(_sampling, rig, rows, settings)
            yield Spec("sampling", f"{rows} rows, {name}", build, is_checked=rows <= MOST_CHECKED_ROWS)
    linears = {name: (size, sum(out)) for name, (size, out) in shape.linears.items()}
    linears["lm_head"] = (shape.hidden, shape.vocabulary)
    for name, (size, out) in linears.items():
        for rows in sizes:
            build = partial(_linear, rig, rows, size, out)
            yield Spec("linear (cuBLAS)", f"{name}, {rows} rows", build, is_checked=rows == sizes[0])


def _rms_norm(rig: Rig, rows: int) -> Case:
    hidden = rig.scale.shape.hidden
    x, weight = rig.randn(rows, hidden), torch.rand(hidden, device=rig.device) + 0.5
    return Case(
        run=partial(OURS.rms_norm, x, weight, EPS),
        expected=partial(REFERENCE.rms_norm, x, weight, EPS),
        cost=rig.scale.shape.rms_norm(rows),
        tolerance=TRITON[rig.dtype],
        peers={"torch": partial(functional.rms_norm, x, (hidden,), weight.to(rig.dtype), EPS)},
    )


def _add_rms_norm(rig: Rig, rows: int) -> Case:
    hidden = rig.scale.shape.hidden
    x, start, weight = rig.randn(rows, hidden), rig.randn(rows, hidden), torch.rand(hidden, device=rig.device) + 0.5
    residual, narrow = start.clone(), weight.to(rig.dtype)

    def both(ops: ReferenceOps | TritonOps, into: Tensor) -> Tensor:
        return torch.stack([ops.add_rms_norm(x, into, weight, EPS), into])

    return Case(
        run=partial(OURS.add_rms_norm, x, residual, weight, EPS),
        view=lambda normed: torch.stack([normed, residual]),
        expected=lambda: both(REFERENCE, start.clone()),
        reset=lambda: residual.copy_(start),
        cost=rig.scale.shape.add_rms_norm(rows),
        tolerance=TRITON[rig.dtype],
        peers={"torch": lambda: functional.rms_norm(residual.add_(x), (hidden,), narrow, EPS)},
    )


class _Heads:
    """One step's q, k and v as views of a fused matrix, with what rotates and stores them."""

    def __init__(self, rig: Rig, rows: int) -> None:
        shape, block_size = rig.scale.shape, rig.scale.block_size
        self._sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
        self.start = rig.randn(rows, sum(self._sizes), shape.head_dim)
        self.qkv = self.start.clone()
        angles = torch.rand(rows, shape.head_dim // 2, device=rig.device) * 6.28
        self.cos, self.sin = angles.cos(), angles.sin()
        num_blocks = -(-rows // block_size) + 1
        self.kv = kv_pool(num_blocks, 1, block_size, shape.kv_heads, shape.head_dim, rig.dtype, rig.device)[:, 0]
        self.slots = torch.randperm((num_blocks - 1) * block_size, device=rig.device)[:rows] + block_size

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.split_with_sizes(self._sizes, 1)
        return q, k, v

    def reset(self) -> None:
        self.qkv.copy_(self.start)
        self.kv.zero_()

    def rope(self, ops: ReferenceOps | TritonOps, qkv: Tensor) -> Tensor:
        q, k, _ = self.split(qkv)
        ops.rope_(q, k, self.cos, self.sin)
        return qkv

    def write(self, ops: ReferenceOps | TritonOps, kv: Tensor) -> Tensor:
        _, k, v = self.split(self.start)
        ops.kv_write(k, v, kv, self.slots)
        return kv

    def both(self, ops: ReferenceOps | TritonOps, qkv: Tensor, kv: Tensor) -> Tensor:
        """What is left of k in the step's matrix is nobody's business."""
        q, k, v = self.split(qkv)
        ops.rope_kv_write(q, k, v, self.cos, self.sin, kv, self.slots)
        return qkv

    def seen(self, qkv: Tensor, kv: Tensor) -> Tensor:
        return torch.cat([self.split(qkv)[0].flatten(), kv.flatten()])


def _rope(rig: Rig, rows: int) -> Case:
    heads = _Heads(rig, rows)
    return Case(
        run=lambda: heads.rope(OURS, heads.qkv),
        expected=lambda: heads.rope(REFERENCE, heads.start.clone()),
        reset=heads.reset,
        cost=rig.scale.shape.rope(rows),
        tolerance=TRITON[rig.dtype],
        peers={"torch": lambda: heads.rope(REFERENCE, heads.qkv)},
    )


def _kv_write(rig: Rig, rows: int) -> Case:
    heads = _Heads(rig, rows)
    return Case(
        run=lambda: heads.write(OURS, heads.kv),
        expected=lambda: heads.write(REFERENCE, torch.zeros_like(heads.kv)),
        reset=heads.reset,
        cost=rig.scale.shape.kv_write(rows),
        tolerance=EXACT,
        peers={"torch": lambda: heads.write(REFERENCE, heads.kv)},
    )


def _rope_kv_write(rig: Rig, rows: int) -> Case:
    heads = _Heads(rig, rows)

    def expected() -> Tensor:
        kv = torch.zeros_like(heads.kv)
        return heads.seen(heads.both(REFERENCE, heads.start.clone(), kv), kv)

    return Case(
        run=lambda: heads.both(OURS, heads.qkv, heads.kv),
        view=lambda qkv: heads.seen(qkv, heads.kv),
        expected=expected,
        reset=heads.reset,
        cost=rig.scale.shape.rope_kv_write(rows),
        tolerance=TRITON[rig.dtype],
        peers={"torch": lambda: heads.both(REFERENCE, heads.qkv, heads.kv)},
    )


def _gated_activation(rig: Rig, rows: int) -> Case:
    gate_up = rig.randn(rows, 2 * rig.scale.shape.inner)
    return Case(
        run=partial(OURS.gated_activation, gate_up, Activation.SILU),
        expected=lambda: REFERENCE.gated_activation(gate_up.float(), Activation.SILU),
        cost=rig.scale.shape.gated_activation(rows),
        tolerance=TRITON[rig.dtype],
        peers={"torch": partial(REFERENCE.gated_activation, gate_up, Activation.SILU)},
    )


def _sampling(rig: Rig, rows: int, settings: dict[str, float]) -> Case:
    """Against the sampler on a CPU, which draws the same tokens."""
    device, width = rig.device, rig.scale.shape.vocabulary
    start = rig.randn(rows, width, std=3.0).float()
    logits, best, one = start.clone(), start.amax(-1), torch.ones(rows, device=device)
    asked = [row(row_seed=seed, temperature=1.0, **settings) for seed in range(rows)]
    arguments = (
        (one * settings.get("top_k", width)).int(),
        one.double() * settings.get("top_p", 1.0),
        one * 0,
        torch.from_numpy(uniforms([each.seed for each in asked], [0] * rows)).to(device),
    )
    return Case(
        run=lambda: draw(logits, best, one, *arguments),
        expected=lambda: torch.tensor(Sampler().sample(start.cpu(), asked).token_ids, device=device),
        reset=lambda: logits.copy_(start),
        cost=rig.scale.shape.sampling(rows),
        tolerance=EXACT,
        peers={"torch": partial(_torch_draw, logits, **settings)},
    )


def _torch_draw(logits: Tensor, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """By a sort, if anything is restricted."""
    if top_k is None:
        return logits.softmax(-1).multinomial(1)
    ordered, tokens = logits.sort(-1, descending=True)
    weights = ordered[:, :top_k].softmax(-1)
    weights = weights.masked_fill(weights.cumsum(-1) - weights >= top_p, 0.0)
    return tokens.gather(1, weights.multinomial(1))


def _linear(rig: Rig, rows: int, size: int, out: int) -> Case:
    x, weight = rig.randn(rows, size), rig.randn(out, size, std=size**-0.5)
    packed = ReferenceLinear(weight, None)
    return Case(
        run=partial(OURS.linear, x, packed),
        expected=lambda: functional.linear(x.float(), weight.float()),
        cost=rig.scale.shape.linear(rows, size, out),
        tolerance=TRITON[rig.dtype],
    )
