"""Two questions about one long document: the second is answered sooner, because the document's KV is in the cache.

python examples/prefix_caching.py
"""

import time

from mlserve import LLM, SamplingParams

FIRST = ["John", "Mary", "Zack", "Lena", "Omar", "Ruth", "Ivan", "Anna", "Paul", "Nora"]
LAST = ["Doe", "Blue", "Stone", "Rivers", "Field", "Woods"]
JOBS = ["baker", "pilot", "nurse", "farmer", "tailor", "singer", "lawyer"]


def table_of_people() -> str:
    """A Markdown table of sixty people. Ages and jobs follow a fixed rule: every run asks about the same document."""
    rows = ["| Name | Age | Job |", "|---|---|---|"]
    for i in range(len(FIRST) * len(LAST)):
        name = f"{FIRST[i % len(FIRST)]} {LAST[i // len(FIRST)]}"
        rows.append(f"| {name} | {20 + i * 7 % 60} | {JOBS[i % len(JOBS)]} |")
    return "\n".join(rows)


def ask(llm: LLM, name: str) -> float:
    """Ask for a person's age; print the answer; return the seconds to its first token."""
    conversation = [
        {"role": "system", "content": f"Answer from this table.\n\n{table_of_people()}"},
        {"role": "user", "content": f"How old is {name}? Answer in one short sentence."},
    ]
    start = time.perf_counter()
    output = llm.chat(conversation, SamplingParams(max_tokens=24))[0]
    total = time.perf_counter() - start
    metrics = output.metrics
    print(f"{name}: {output.outputs[0].text.strip()}")
    print(
        f"  first token after {metrics.time_to_first_token:.3f} s, whole answer {total:.3f} s; "
        f"{metrics.cached_tokens} of {metrics.prompt_tokens} prompt tokens came from the cache"
    )
    return metrics.time_to_first_token


def main() -> float:
    """Run it; returns how many times sooner the second answer began."""
    llm = LLM(enable_prefix_caching=True)
    first = ask(llm, "John Doe")
    second = ask(llm, "Zack Blue")
    print(f"The second answer began {first / second:.1f} times sooner.")
    return first / second


if __name__ == "__main__":
    main()
