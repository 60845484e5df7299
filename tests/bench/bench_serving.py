"""The embedded model end to end: one stream, prefill, sixteen at once, a shared prefix, and what caching costs.

python tests/bench/bench_serving.py [--dtype bfloat16] [--runs 5] [--peer]

Greedy, fixed lengths, random token ids. With `--peer` transformers' `generate` does the same work in the same process,
in turn with ours (on the weights as our GGUF reader decodes them).
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from lockstep import Batch, engines_over, lockstep

from mlserve import LLM, SamplingParams
from mlserve.model.gguf import GGUFTensors, gguf_config
from mlserve.model.gguf_header import read_header
from mlserve.model.sources import find_model

Work = Callable[[], float]


def prompt(rng: random.Random, length: int) -> list[int]:
    """Random token ids, none of them special."""
    return [rng.randrange(1000, 40000) for _ in range(length)]


def fixed(count: int) -> SamplingParams:
    """Exactly `count` greedy tokens."""
    return SamplingParams(max_tokens=count, ignore_eos=True)


def single_stream(llm: LLM, rng: random.Random) -> float:
    """Decode tokens/s of one request, prompt 64, 128 new."""
    metrics = llm.generate(prompt(rng, 64), fixed(128))[0].metrics
    assert metrics.finished is not None
    assert metrics.first_token is not None
    return 127 / (metrics.finished - metrics.first_token)


def prefill(llm: LLM, rng: random.Random) -> float:
    """Prompt tokens/s at 1,024 tokens."""
    seconds = llm.generate(prompt(rng, 1024), fixed(1))[0].metrics.time_to_first_token
    assert seconds is not None
    return 1024 / seconds


def sixteen(llm: LLM, rng: random.Random) -> float:
    """Output tokens/s of 16 requests at once, prompt 128, 64 new, prefill included."""
    prompts = [prompt(rng, 128) for _ in range(16)]
    start = time.perf_counter()
    llm.generate(prompts, fixed(64))
    return 16 * 64 / (time.perf_counter() - start)


def sixteen_decoding(llm: LLM, rng: random.Random) -> float:
    """The same from the last first token on: the decode steps alone."""
    outputs = llm.generate([prompt(rng, 128) for _ in range(16)], fixed(64))
    first = max(o.metrics.first_token or 0.0 for o in outputs)
    return 16 * 63 / (max(o.metrics.finished or 0.0 for o in outputs) - first)


def shared_prefix(llm: LLM, rng: random.Random) -> tuple[float, float]:
    """TTFT in seconds of two requests that share 1,024 tokens and differ in 16."""
    prefix = prompt(rng, 1024)
    first, second = (llm.generate([*prefix, *prompt(rng, 16)], fixed(1))[0].metrics for _ in range(2))
    assert second.cached_tokens == 1024
    assert first.time_to_first_token is not None
    assert second.time_to_first_token is not None
    return first.time_to_first_token, second.time_to_first_token


def transformers_twin(llm: LLM) -> Any:
    """transformers' model of the same weights, as our GGUF reader decodes them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    header = read_header(find_model(llm.config.model.model))
    config = gguf_config(header)
    tensors = GGUFTensors(header, config)
    config.pop("partial_rotary_factor")
    state = {name: tensors.read(name) for name in tensors.shapes}
    return LlamaForCausalLM.from_pretrained(None, config=LlamaConfig(**config), state_dict=state).eval()


def peer(llm: LLM) -> dict[str, Work]:
    """transformers' `generate` on the same weights: the same three workloads."""
    import torch

    model = transformers_twin(llm)

    def run(batch: int, length: int, new: int) -> float:
        rng = random.Random(7)
        ids = torch.tensor([prompt(rng, length) for _ in range(batch)])
        start = time.perf_counter()
        how: dict[str, Any] = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
        model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        return time.perf_counter() - start

    return {
        "one stream, decode tokens/s": lambda: 127 / (run(1, 64, 128) - run(1, 64, 1)),
        "prefill of 1,024, tokens/s": lambda: 1024 / run(1, 1024, 1),
        "16 at once, output tokens/s": lambda: 16 * 64 / run(16, 128, 64),
    }


def caching_cost(llm: LLM, rounds: int) -> list[float]:
    """Throughput with caching on over off, when nothing is shared: 16 requests, prompt 64, 32 new, in lockstep."""
    engines = engines_over(llm, {"on": True, "off": False})
    ratios = []
    for i in range(rounds + 1):
        rng = random.Random(1000 + i)
        batch = Batch([prompt(rng, 64) for _ in range(16)], fixed(32), [None] * 16)
        seconds = lockstep(engines, {caching: [batch] for caching in engines}, i)
        ratios.append(sum(seconds["off"][0]) / sum(seconds["on"][0]))
    return ratios[1:]  # the first round is the warm-up


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):8.1f}   ({min(values):.1f} to {max(values):.1f})"


def quartiles(ratios: Iterable[float]) -> str:
    """The median and, for figures of many rounds, where the middle half of them lies."""
    ranked = sorted(ratios)
    low, high = (ranked[len(ranked) * quarter // 4] for quarter in (1, 3))
    return f"{statistics.median(ranked):.3f}, {low:.3f} to {high:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    llm, rng = LLM(dtype=options.dtype), random.Random(0)
    workloads: dict[str, Callable[[LLM, random.Random], float]] = {
        "one stream, decode tokens/s": single_stream,
        "prefill of 1,024, tokens/s": prefill,
        "16 at once, output tokens/s": sixteen,
        "16 at once, decode steps only, tokens/s": sixteen_decoding,
    }
    peers = peer(llm) if options.peer else {}
    print(f"weights {options.dtype}, median of {options.runs} (least to most)")
    for name, work in workloads.items():
        work(llm, rng)
        ours, theirs = [], []
        for _ in range(options.runs):
            ours.append(work(llm, rng))
            if name in peers:
                theirs.append(peers[name]())
        print(f"  {name:40s} {spread(ours)}")
        if theirs:
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            print(f"  {'  transformers generate':40s} {spread(theirs)}   ours / theirs {ratio:.1f}")
    pairs = [shared_prefix(llm, rng) for _ in range(options.runs)]
    first, second = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"  shared prefix of 1,024: first token after {first:.3f} s, then {second:.3f} s: {ratio:.1f} times sooner")
    cost = quartiles(caching_cost(llm, 5 * options.runs))
    print(f"  caching on / off, nothing shared: throughput ratio (quartiles) {cost}")
    print(f"  peak RSS {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB, a KV pool of 1 GiB in it")


if __name__ == "__main__":
    main()
