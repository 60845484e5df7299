"""The whole engine: time to the first token with a prompt in the cache and without, and decoding from plan to text."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engines import make_engine
from gpu.cases import Rig
from gpu.kernel_phases import reason
from gpu.random_model import Twins
from gpu.report import Entry, Outcome, Report
from gpu.timing import Deadline
from tiny import write_tokenizer

from mlserve.engine.engine import Engine
from mlserve.engine.tokenizer import load_tokenizer
from mlserve.request import RequestMetrics, RequestOptions, SamplingParams

__all__ = ["ENGINE", "measure_engine"]

ENGINE = "the engine"
STEP_TOKENS = 2048
WARM_STEPS = 3  # of decoding, that aren't measured


def measure_engine(rig: Rig, twins: Twins, report: Report, deadline: Deadline) -> None:
    for name, phase in (("time to first token", _first_tokens), ("decode", _decoding)):
        if deadline.is_over:
            report.add(Entry(ENGINE, name, "", Outcome.SKIPPED, note="no time left"))
            continue
        try:
            with _engine(rig, twins) as engine:
                report.add(phase(rig, engine))
        except Exception as error:
            report.add(Entry(ENGINE, name, "", Outcome.FAILED, note=reason(error)))


@contextmanager
def _engine(rig: Rig, twins: Twins) -> Iterator[Engine]:
    """With graphs, and a vocabulary of bytes and tokens that no text has."""
    scale = rig.scale
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), scale.shape.vocabulary)
        yield make_engine(
            twins.graphed,
            load_tokenizer(folder),
            num_blocks=twins.num_blocks - 1,
            block_size=scale.block_size,
            max_model_len=2 * max(scale.prompt, scale.step_context),
            vocab_size=scale.shape.vocabulary,
            max_num_seqs=max(scale.batches),
            max_num_batched_tokens=max(STEP_TOKENS, max(scale.batches)),
        )


def _first_tokens(rig: Rig, engine: Engine) -> Entry:
    """Prompts that share all but their last block: the first is computed whole, the others from the cache on."""
    scale = rig.scale
    own = scale.block_size
    for prompt in (_tokens(scale.prompt, seed=0), _tokens(scale.prompt, seed=0)):  # compiles; then what a hit needs
        _complete(engine, prompt)
    shared = _tokens(scale.prompt - own, seed=1)
    cold = _complete(engine, shared + _tokens(own, seed=2))
    hits = [_complete(engine, shared + _tokens(own, seed=3 + i)) for i in range(5)]
    if not all(hit.cached_tokens == len(shared) for hit in hits) or cold.cached_tokens:
        note = f"{[hit.cached_tokens for hit in hits]} tokens from the cache, not {len(shared)} each"
        return Entry(ENGINE, "time to first token", f"{scale.prompt} tokens", Outcome.FAILED, note=note)
    first, hit = (cold.time_to_first_token or 0.0), statistics.median(h.time_to_first_token or 0.0 for h in hits)
    figures = {"cold, ms": first * 1e3, "hit, ms": hit * 1e3, "cold / hit": first / hit}
    return Entry(ENGINE, "time to first token", f"{scale.prompt} tokens", Outcome.PASSED, figures)


def _complete(engine: Engine, prompt: list[int]) -> RequestMetrics:
    """A request for one token, alone."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.submit(engine.prepare("only", prompt, params, RequestOptions()))
    metrics = None
    while engine.has_work():
        for output in engine.step():
            if output.completed is not None:
                metrics = output.completed.metrics
    assert metrics is not None
    return metrics


def _decoding(rig: Rig, engine: Engine) -> Entry:
    """Steps in which every sequence gets a token, from planning to text."""
    scale = rig.scale
    rows = sorted(scale.batches)[len(scale.batches) // 2]
    prompt = min(128, scale.prompt // 2)
    params = SamplingParams(max_tokens=scale.steps + 2 * WARM_STEPS, ignore_eos=True)
    for i in range(rows):
        engine.submit(engine.prepare(f"decode-{i}", _tokens(prompt, seed=100 + i), params, RequestOptions()))
    taken = []
    while engine.has_work():
        begin = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == rows:
            taken.append(time.perf_counter() - begin)
    seconds = statistics.median(taken[WARM_STEPS:])
    figures = {"ms a step": seconds * 1e3, "tokens/s": rows / seconds}
    return Entry(ENGINE, "decode", f"batch {rows}, contexts from {prompt}", Outcome.MEASURED, figures)


def _tokens(count: int, seed: int) -> list[int]:
    """Of bytes, which any vocabulary has."""
    return random.Random(seed).choices(range(256), k=count)
