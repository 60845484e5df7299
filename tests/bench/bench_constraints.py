"""What constraints cost: the library's view of the vocabulary, compiling, the masks of a step, and whole decode steps.

python tests/bench/bench_constraints.py [--runs 3]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import numpy as np
import torch

from mlserve import LLM, Constraint, RequestOutput, SamplingParams
from mlserve.engine.constraints import CompiledConstraint, ConstraintCompiler
from mlserve.model.token_masks import mask_tokens

ROWS = 16
# Strings of at least 400 characters: all rows are busy for 64 tokens.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["news", "story", "letter"]},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "text": {"type": "string", "minLength": 400, "maxLength": 4000},
    },
    "required": ["kind", "year", "text"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "JSON object": Constraint.json_object(),
    "schema of 3 properties": Constraint.json_schema(SCHEMA),
    "schema of 300 properties": Constraint.json_schema(
        {"type": "object", "properties": {f"property{i}": {"type": "string"} for i in range(300)}}
    ),
    "1,000 choices": Constraint.choice([f"{random.Random(i).getrandbits(128):040}" for i in range(1000)]),
    "regular expression": Constraint.regex(r"(\w+ ){5,50}\w+"),
}


class Row:
    """A row of which masks ask nothing else."""

    def __init__(self, compiled: CompiledConstraint) -> None:
        self.matcher = compiled.matcher()


def masks(llm: LLM, compiled: CompiledConstraint, steps: int = 40) -> tuple[list[float], list[float]]:
    """Milliseconds of each step to mask 16 rows, and to advance them, on answers that a hot model would give."""
    vocab_size = llm.engine.limits.vocab_size
    rows: Any = [Row(compiled) for _ in range(ROWS)]
    rng = torch.Generator().manual_seed(0)
    masking, advancing = [], []
    for _ in range(steps):
        logits = torch.randn(ROWS, vocab_size, generator=rng)
        start = time.perf_counter()
        failures = mask_tokens(logits, rows)
        masking.append(1e3 * (time.perf_counter() - start))
        assert not failures
        tokens = logits.argmax(-1).tolist()
        start = time.perf_counter()
        for row, token in zip(rows, tokens, strict=True):
            row.matcher.advance(token)
        advancing.append(1e3 * (time.perf_counter() - start))
        rows = [Row(compiled) if row.matcher.is_complete or row.matcher.error else row for row in rows]
    return masking, advancing


def decode(llm: LLM, rng: random.Random, constraint: Constraint | None) -> float:
    """Milliseconds of a decode step of 16 rows, prompt 64, 64 new."""
    prompts = [[rng.randrange(1000, 40000) for _ in range(64)] for _ in range(ROWS)]
    params = SamplingParams(max_tokens=64, temperature=0.8, seed=1, ignore_eos=True, constraint=constraint)
    outputs: list[RequestOutput] = llm.generate(prompts, params)
    assert all(output.error is None and len(output.outputs[0].token_ids) == 64 for output in outputs)
    first = max(output.metrics.first_token or 0.0 for output in outputs)
    return 1e3 * (max(output.metrics.finished or 0.0 for output in outputs) - first) / 63


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    llm = LLM()
    engine = llm.engine
    start = time.perf_counter()
    compiler = ConstraintCompiler(engine.tokenizer, engine.limits.vocab_size, engine.limits.eos_token_ids)
    compiler.compile(Constraint.regex("a"))
    print(f"the library's view of {engine.limits.vocab_size} tokens: {1e3 * (time.perf_counter() - start):.0f} ms")
    print(f"{'16 rows, ms':28}{'compile':>10}{'mask':>16}{'advance':>10}   (median, largest)")
    for name, constraint in CONSTRAINTS.items():
        start = time.perf_counter()
        compiled = compiler.compile(constraint)
        compile_ms = 1e3 * (time.perf_counter() - start)
        masking, advancing = masks(llm, compiled)
        print(
            f"{name:28}{compile_ms:10.1f}{np.median(masking):8.2f}{max(masking):8.2f}{np.median(advancing):10.2f}",
            flush=True,
        )
    rng = random.Random(0)
    constraint = Constraint.json_schema(json.dumps(SCHEMA))
    decode(llm, rng, constraint)
    pairs = [(decode(llm, rng, None), decode(llm, rng, constraint)) for _ in range(runs)]
    for which, found in zip(("free", "constrained"), zip(*pairs, strict=True), strict=True):
        print(
            f"decode step, 16 rows, {which}: {statistics.median(found):.1f} ms ({min(found):.1f} to {max(found):.1f})"
        )
    ratios = sorted(with_ / free for free, with_ in pairs)
    print(f"constrained over free: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
