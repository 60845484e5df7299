"""The same picture again, on a model of SmolVLM-256M's shape with random weights: time to the first token.

python tests/bench/bench_vision.py [--runs 3]

A picture of 512 x 512 is 64 tokens. First it is new; then the same pixels come in another file, with the same question
and with another one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mlserve import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from tiny_vision import write_tiny_vlm

TEXT = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
PROCESSOR = {"size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 512}}
ONE = SamplingParams(max_tokens=1)


def as_png(picture: Image.Image, level: int) -> bytes:
    file = BytesIO()
    picture.save(file, "PNG", compress_level=level)
    return file.getvalue()


def ttft(llm: LLM, image: bytes, question: str) -> tuple[float, int, int]:
    """Seconds to the first token, cached and all prompt tokens."""
    content: list[dict[str, Any]] = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    metrics = llm.chat([{"role": "user", "content": content}], ONE)[0].metrics
    assert metrics.time_to_first_token is not None
    return metrics.time_to_first_token, metrics.cached_tokens, metrics.prompt_tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny_vlm(
            Path(scratch), "idefics3", text_config=TEXT, vision_config=TOWER, scale_factor=4, image_processor=PROCESSOR
        )
        llm = LLM(str(folder))
        rng = np.random.default_rng(0)
        figures: dict[str, list[float]] = {"new": [], "again": [], "again, another question": []}
        for run in range(options.runs + 1):
            picture = Image.fromarray(rng.integers(0, 256, (512, 512, 3), dtype=np.uint8))
            seconds = {
                "new": ttft(llm, as_png(picture, 1), "What is it?"),
                "again": ttft(llm, as_png(picture, 9), "What is it?"),
                "again, another question": ttft(llm, as_png(picture, 9), "Where was it taken?"),
            }
            if run:
                for name, (second, _, _) in seconds.items():
                    figures[name].append(second)
    for name, values in figures.items():
        ratio = statistics.median(a / b for a, b in zip(figures["new"], values, strict=True))
        _, cached, total = seconds[name]
        median = statistics.median(values)
        print(f"  {name:24s} {median:.3f} s, {ratio:5.1f} times sooner; {cached} of {total} tokens cached")


if __name__ == "__main__":
    main()
