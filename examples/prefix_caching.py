"""Two questions about one long document: the second is answered sooner, because the document's KV is in the cache.

The embedded model is small: it reads these two rows rightly, and about half of the others.

python examples/prefix_caching.py
"""

from mlserve import LLM, SamplingParams

NAMES = (
    "Mary Stone, Ivan Petrov, Lena Fischer, Omar Haddad, John Doe, Ruth Cohen, Paul Martin, Anna Kowalska, Nora Lind, "
    "Hugo Silva, Emma Clarke, Noah Baker, Olga Ivanova, Liam Murphy, Sara Rossi, Adam Novak, Clara Schmidt, "
    "Peter Jansen, Maya Patel, Kenji Sato, Zack Blue, Alice Moreau, Felix Wagner, Irene Costa"
).split(", ")
JOBS = ["baker", "pilot", "nurse", "farmer", "tailor", "singer", "lawyer"]
CITIES = ["Oslo", "Lima", "Cairo", "Rome", "Delhi", "Paris", "Quito", "Tokyo", "Berlin", "Madrid", "Dublin"]
HOBBIES = [
    "plays chess on Sundays and keeps two cats",
    "grows tomatoes and reads crime novels",
    "runs marathons and paints landscapes",
    "collects stamps and old maps of the sea",
    "sings in a choir and cooks for friends",
]
AGES = {name: 21 + i * 17 % 58 for i, name in enumerate(NAMES)}


def table_of_people() -> str:
    """A Markdown table, the same in every run."""
    rows = ["| Name | Age | Job | City | About |", "|---|---|---|---|---|"]
    for i, name in enumerate(NAMES):
        about = f"{HOBBIES[i % 5]} and in summer {HOBBIES[(i * 3 + 1) % 5]}"
        rows.append(f"| {name} | {AGES[name]} | {JOBS[i % 7]} | {CITIES[i % 11]} | {about} |")
    return "\n".join(rows)


def ask(llm: LLM, name: str) -> tuple[float, str]:
    """Ask for a person's age, after two questions that show how. Seconds to the first token, and the answer."""
    shown = [f"What is the age of {who}?\nThe age of {who} is {AGES[who]}." for who in ("Nora Lind", "Paul Martin")]
    prompt = "\n\n".join([table_of_people(), *shown, f"What is the age of {name}?\n"])
    output = llm.generate(prompt, SamplingParams(max_tokens=16, stop="\n"))[0]
    metrics, answer = output.metrics, output.outputs[0].text
    print(f"{answer}\n  first token after {metrics.time_to_first_token:.3f} s; ", end="")
    print(f"{metrics.cached_tokens} of {metrics.prompt_tokens} prompt tokens came from the cache")
    return metrics.time_to_first_token, answer


def main() -> tuple[float, list[str]]:
    """Run it; returns how many times sooner the second answer began, and both answers."""
    llm = LLM(enable_prefix_caching=True)
    (first, john), (second, zack) = ask(llm, "John Doe"), ask(llm, "Zack Blue")
    print(f"The second answer began {first / second:.1f} times sooner.")
    return first / second, [john, zack]


if __name__ == "__main__":
    main()
