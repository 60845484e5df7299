"""One question to four adapters and the base model, in one batch.

python examples/many_adapters.py [QUESTION]
"""

import sys
import time
from pathlib import Path

from mlserve import LLM, SamplingParams

ADAPTERS = Path(__file__).parent / "adapters"
QUESTION = "What is the largest planet?"


def main(question: str = QUESTION) -> dict[str, str]:
    """Ask everybody; returns the answers by adapter."""
    llm = LLM(adapter_dir=str(ADAPTERS))  # each is read when it is first asked for
    names = [None, *sorted(path.parent.name for path in ADAPTERS.glob("*/adapter_config.json"))]
    messages = [{"role": "user", "content": question}]
    start = time.perf_counter()
    outputs = llm.chat([messages] * len(names), SamplingParams(max_tokens=48), adapter=names)
    seconds = time.perf_counter() - start
    print(question)
    answers = {}
    for name, output in zip(names, outputs, strict=True):
        answers[name or "base model"] = output.outputs[0].text.strip()
        print(f"\n[{name or 'base model'}]\n{output.outputs[0].text.strip()}")
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"\n{len(names)} answers, {count} tokens in one batch: {seconds:.1f} s")
    return answers


if __name__ == "__main__":
    main(*sys.argv[1:2])
