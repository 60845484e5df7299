"""A chat of several turns: each turn's prompt holds the whole history, and only what is new in it is computed.

python examples/multi_turn_chat.py
"""

import time

from mlserve import LLM, SamplingParams

TURNS = [
    "I am planning a week in Norway in June. What should I pack?",
    "I also want to hike for two days. What do I add?",
    "And which of all these could I leave at home if my bag is small?",
]


def converse(llm: LLM) -> list[tuple[float, int, int]]:
    """Hold the conversation. Returns, for each turn, seconds to the first token, cached and all prompt tokens."""
    history, figures = [], []
    for turn in TURNS:
        history.append({"role": "user", "content": turn})
        output = llm.chat(history, SamplingParams(max_tokens=96))[0]
        history.append({"role": "assistant", "content": output.outputs[0].text})
        metrics = output.metrics
        figures.append((metrics.time_to_first_token, metrics.cached_tokens, metrics.prompt_tokens))
    return figures


def main() -> float:
    """Run it with the cache and without; returns how many times sooner the last turn began with it."""
    last = {}
    for caching in (False, True):
        start = time.perf_counter()
        figures = converse(LLM(enable_prefix_caching=caching))
        print(f"prefix caching {'on' if caching else 'off'} ({time.perf_counter() - start:.1f} s in all)")
        for number, (seconds, cached, total) in enumerate(figures, 1):
            print(f"  turn {number}: first token after {seconds:.3f} s, {cached} of {total} prompt tokens cached")
        last[caching] = figures[-1][0]
    print(f"The last turn began {last[False] / last[True]:.1f} times sooner with the cache.")
    return last[False] / last[True]


if __name__ == "__main__":
    main()
