"""What the native CPU operations cost: `python -m tests.bench.bench_kernels [--quick]`.

Shapes are SmolLM2-135M's, weights of all 30 layers, so that they come from memory as in a real step. What is compared
runs alternately in one process; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mlserve.kernels import Activation, Linear, PagedBatch
from mlserve.kernels.cpu.ops import CpuOps
from mlserve.kernels.reference import ReferenceOps
from tests.support.ragged import Lengths, ragged_batch

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 30, 576, 9, 3, 64
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # qkv, o, gate_up, down: [out, in]
LM_HEAD_SHAPE = (49152, 576)
MAX_LM_HEAD_ROWS = 64  # a step computes logits for its last rows only


def alternate(candidates: Sequence[Callable[[], object]], seconds: float = 1.0, least: int = 3) -> list[float]:
    """Median seconds of each, run in turn for about `seconds` each, after one run that isn't counted."""
    for run in candidates:
        run()
    times: list[list[float]] = [[] for _ in candidates]
    while sum(map(sum, times)) < seconds * len(candidates) or len(times[0]) < least:
        for run, taken in zip(candidates, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def model_weights() -> list[Tensor]:
    return [torch.full(shape, 0.02) for shape in [*LAYER_SHAPES * LAYERS, LM_HEAD_SHAPE]]


def bench_linear(ops: CpuOps, rows: Sequence[int]) -> None:
    print("\nall matrices of the model, ms (lm_head left out above 64 rows)")
    print("   rows | native fp32  GFLOP/s   GB/s | native bf16  GFLOP/s   GB/s | torch fp32  GFLOP/s | torch / native")
    plain = model_weights()
    packed = [ops.pack_linear(w) for w in plain]
    packed_bf16 = [ops.pack_linear(w.bfloat16()) for w in plain]
    for m in rows:
        inputs = {size: torch.randn(m, size) for size in (576, 1536)}
        used = len(plain) if m <= MAX_LM_HEAD_ROWS else len(plain) - 1
        numbers = sum(w.numel() for w in plain[:used])

        def native(weights: Sequence[Linear], inputs: dict[int, Tensor] = inputs, used: int = used) -> None:
            for w in weights[:used]:
                ops.linear(inputs[w.in_features], w)

        def by_torch(inputs: dict[int, Tensor] = inputs, used: int = used) -> None:
            for w in plain[:used]:
                functional.linear(inputs[w.shape[1]], w)

        fp32, bf16, other = alternate([lambda: native(packed), lambda: native(packed_bf16), by_torch])
        flop = 2e-9 * m * numbers
        print(
            f"{m:7} | {fp32 * 1e3:11.1f} {flop / fp32:8.0f} {4e-9 * numbers / fp32:6.1f} "
            f"| {bf16 * 1e3:11.1f} {flop / bf16:8.0f} {2e-9 * numbers / bf16:6.1f} "
            f"| {other * 1e3:10.1f} {flop / other:8.0f} | {other / fp32:6.2f}"
        )


def bench_attention(ops: CpuOps) -> None:
    print("\nattention over 30 layers, ms (GB/s: KV read once; GFLOP/s: the causal half)")
    cases: dict[str, Lengths] = {
        "decode, 1 x 1024": [(1, 1024)],
        "decode, 16 x 1024": [(1, 1024)] * 16,
        "decode, 64 x 256": [(1, 256)] * 64,
        "prefill, 1 x 1024": [(1024, 1024)],
        "prefill, 16 x 128": [(128, 128)] * 16,
        "16 after 1024 cached": [(16, 1040)],
        "256 prefill + 15 decode at 512": [(256, 256)] + [(1, 512)] * 15,
    }
    for dtype in (torch.float32, torch.bfloat16):
        for name, lengths in cases.items():
            batch, num_blocks = ragged_batch(lengths, block_size=16)
            pool = torch.full((num_blocks, LAYERS, 2, 16, KV_HEADS, HEAD_DIM), 0.5, dtype=dtype)
            qkv = torch.randn(int(batch.query_starts[-1]), HEADS + 2 * KV_HEADS, HEAD_DIM)

            def run(pool: Tensor = pool, batch: PagedBatch = batch, q: Tensor = qkv[:, :HEADS]) -> None:
                for layer in range(LAYERS):
                    ops.paged_attention(q, pool[:, layer], batch, scale=HEAD_DIM**-0.5)

            (seconds,) = alternate([run], seconds=0.5)
            size = LAYERS * sum(context for _, context in lengths) * 2 * KV_HEADS * HEAD_DIM * dtype.itemsize
            pairs = sum(queries * (2 * context - queries + 1) / 2 for queries, context in lengths)
            flop = LAYERS * pairs * HEADS * HEAD_DIM * 4
            print(
                f"  {name:32} {str(dtype)[6:]:9} {seconds * 1e3:8.2f} ms  {size / seconds * 1e-9:6.1f} GB/s "
                f"{flop / seconds * 1e-9:6.0f} GFLOP/s"
            )


def bench_calls(ops: CpuOps, tokens: int) -> None:
    """The small operations, native against plain torch."""
    reference = ReferenceOps()
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos, sin = torch.rand(tokens, HEAD_DIM // 2), torch.rand(tokens, HEAD_DIM // 2)
    pool = torch.zeros(tokens // 16 + 2, LAYERS, 2, 16, KV_HEADS, HEAD_DIM)
    slots = torch.arange(tokens) + 16
    x, residual, weight = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN), torch.randn(HIDDEN)
    gate_up = torch.randn(tokens, 3072)
    table = torch.randn(4096, HIDDEN)
    ids = torch.randint(0, 4096, (tokens,))
    packed, kept = ops.pack_linear(table), reference.pack_linear(table)
    cases: tuple[tuple[str, Callable[[CpuOps | ReferenceOps], object]], ...] = (
        ("rms_norm", lambda o: o.rms_norm(x, weight, 1e-5)),
        ("add_rms_norm", lambda o: o.add_rms_norm(x, residual, weight, 1e-5)),
        ("rope_", lambda o: o.rope_(q, k, cos, sin)),
        ("kv_write", lambda o: o.kv_write(k, v, pool[:, 3], slots)),
        ("gated_activation", lambda o: o.gated_activation(gate_up, Activation.SILU)),
        ("embedding", lambda o: o.embedding(ids, packed if o is ops else kept)),
    )
    print(f"\nsmall operations at {tokens} tokens, us a call (native | plain torch)")
    for name, call in cases:
        native, plain = alternate([lambda c=call: c(ops), lambda c=call: c(reference)], seconds=0.2)  # type: ignore[misc]
        print(f"  {name:18} {native * 1e6:8.1f} | {plain * 1e6:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer row counts")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    ops = CpuOps()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    bench_linear(ops, (1, 16, 1024) if quick else (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024))
    bench_attention(ops)
    for tokens in (1, 16, 1024):
        bench_calls(ops, tokens)


if __name__ == "__main__":
    main()
