"""Whole steps of a model: decoding with graphs and without, by number of adapters; and prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

from gpu.cases import Rig
from gpu.kernel_phases import reason
from gpu.random_model import Twins
from gpu.report import Entry, Outcome, Report
from gpu.timing import Deadline, median_seconds
from planned import Planned
from roofline import Device, Part, decode_step, lora_step, prefill_step, step_seconds

from mlserve.model.plan import StepPlan
from mlserve.model.runner import ModelRunner
from mlserve.request import SamplingParams

__all__ = ["DECODE", "PREFILL", "decode", "prefill"]

DECODE, PREFILL = "decoding, whole steps", "prompts, whole steps"
GREEDY = SamplingParams(temperature=0.0)
WITH_LOGPROBS = SamplingParams(temperature=0.0, logprobs=5)
# Between a graph and the same kernels one by one. The shapes are the same, and so should the bits be; should cuBLAS
# choose otherwise in a graph, what is left is bfloat16's rounding: 1/16 for logits from 8 on, in some places.
LOGPROB_TOLERANCE = 0.25


def decode(rig: Rig, twins: Twins, gpu: Device | None, report: Report, deadline: Deadline) -> None:
    """Every batch without adapters and over each number of them, by both runners."""
    scale = rig.scale
    for rows in scale.batches:
        for count in (0, *(count for count in scale.adapters if count <= rows)):
            case = f"batch {rows}, {count} adapter{'s' * (count != 1)}"
            if deadline.is_over or rows * _blocks_of(rig) >= twins.num_blocks:
                report.add(_skipped(DECODE, "decode", case, deadline))
                continue
            try:
                report.add(_decode(rig, twins, gpu, rows, count, case))
            except Exception as error:
                report.add(Entry(DECODE, "decode", case, Outcome.FAILED, note=reason(error)))


def _skipped(phase: str, name: str, case: str, deadline: Deadline) -> Entry:
    note = "no time left" if deadline.is_over else "too little memory"
    return Entry(phase, name, case, Outcome.SKIPPED, note=note)


def _blocks_of(rig: Rig) -> int:
    """Of one decoding sequence, whose new token is the first beyond its context."""
    return rig.scale.step_context // rig.scale.block_size + 1


def _decode(rig: Rig, twins: Twins, gpu: Device | None, rows: int, count: int, case: str) -> Entry:
    """The same step again and again: it writes the same KV each time."""
    plan = _decode_plan(rig, rows, count, GREEDY)
    figures = {}
    for name, runner in (("graph", twins.graphed), ("eager", twins.eager)):
        seconds = median_seconds(partial(runner.run, plan), rig.scale.steps)
        figures |= {f"{name}, ms": seconds * 1e3, f"{name}, tokens/s": rows / seconds}
    if gpu is not None:
        parts = [*decode_step(rig.scale.shape, rows, rig.scale.step_context + 1), *_lora_parts(rig, rows, count)]
        floor = step_seconds(parts, gpu)
        figures |= {"floor, ms": floor * 1e3, "floor / graph": floor * 1e3 / figures["graph, ms"]}
    note = _difference(twins, _decode_plan(rig, rows, count, WITH_LOGPROBS))
    return Entry(DECODE, "decode", case, Outcome.FAILED if note else Outcome.PASSED, figures, note)


def _decode_plan(rig: Rig, rows: int, count: int, params: SamplingParams) -> StepPlan[Planned]:
    context, size = rig.scale.step_context, _blocks_of(rig)
    sequences = [
        Planned(
            token_ids=[(31 * row + 7 * i) % rig.scale.shape.vocabulary for i in range(context + 1)],
            params=params,
            adapter_slot=row % count if count else None,
            num_computed=context,
            block_table=array("i", range(1 + row * size, 1 + (row + 1) * size)),
        )
        for row in range(rows)
    ]
    return StepPlan(sequences, [1] * rows, list(range(rows)))


def _lora_parts(rig: Rig, rows: int, count: int) -> list[Part]:
    return lora_step(rig.scale.shape, rows, count, rig.scale.rank) if count else []


def _difference(twins: Twins, plan: StepPlan[Planned]) -> str:
    """What a step by a graph has otherwise than one without; empty if nothing."""
    graphed, eager = twins.graphed.run(plan), twins.eager.run(plan)
    errors = graphed.errors | eager.errors
    if errors:
        return f"row {min(errors)}: {errors[min(errors)]}"
    for row, expected in eager.logprobs.items():
        found = dict(graphed.logprobs[row].top).get(expected.token_id)
        if found is None or not abs(found - expected.logprob) <= LOGPROB_TOLERANCE:
            by_graph = "not among the likeliest" if found is None else f"{found:.4f}"
            return f"row {row}: token {expected.token_id} has logprob {expected.logprob:.4f}, by the graph {by_graph}"
    return ""


def prefill(rig: Rig, twins: Twins, gpu: Device | None, report: Report, deadline: Deadline) -> None:
    """Each chunk by itself, for the base model and with an adapter."""
    for tokens, context in rig.scale.chunks:
        for count in (0, 1):
            case = f"{tokens} of {context}, {count} adapters"
            if deadline.is_over or -(-context // rig.scale.block_size) >= twins.num_blocks:
                report.add(_skipped(PREFILL, "prefill", case, deadline))
                continue
            try:
                report.add(_prefill(rig, twins.eager, gpu, tokens, context, count, case))
            except Exception as error:
                report.add(Entry(PREFILL, "prefill", case, Outcome.FAILED, note=reason(error)))


def _prefill(
    rig: Rig, runner: ModelRunner, gpu: Device | None, tokens: int, context: int, count: int, case: str
) -> Entry:
    num_blocks = -(-context // rig.scale.block_size)
    sequence = Planned(
        token_ids=[7 * i % rig.scale.shape.vocabulary for i in range(context)],
        params=GREEDY,
        adapter_slot=0 if count else None,
        num_computed=context - tokens,
        block_table=array("i", range(1, 1 + num_blocks)),
    )
    plan = StepPlan([sequence], [tokens], [0])
    seconds = median_seconds(partial(runner.run, plan), max(3, rig.scale.steps // 4))
    figures = {"ms": seconds * 1e3, "tokens/s": tokens / seconds}
    if gpu is not None:
        parts: Sequence[Part] = [*prefill_step(rig.scale.shape, tokens, context), *_lora_parts(rig, tokens, count)]
        floor = step_seconds(parts, gpu)
        figures |= {"floor, ms": floor * 1e3, "floor / time": floor / seconds}
    return Entry(PREFILL, "prefill", case, Outcome.MEASURED, figures)
