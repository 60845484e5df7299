"""Every example is short, and does what it says on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tree import ROOT, load_example

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_short(path: Path) -> None:
    """Those that show how to use mlserve fit on a screen; those that made what is shipped may be longer."""
    limit = 160 if path.stem.startswith("train_") else 60
    assert len(path.read_text(encoding="utf-8").splitlines()) < limit


@pytest.mark.slow
def test_prefix_caching(capsys: pytest.CaptureFixture[str]) -> None:
    times_sooner, (john, zack) = load_example("prefix_caching").main()
    assert john == "The age of John Doe is 31."
    assert zack == "The age of Zack Blue is 71."
    assert "848 of 863 prompt tokens came from the cache" in capsys.readouterr().out
    assert times_sooner > 3


@pytest.mark.slow
def test_multi_turn_chat(capsys: pytest.CaptureFixture[str]) -> None:
    times_sooner = load_example("multi_turn_chat").main()
    printed = capsys.readouterr().out
    assert "turn 3: first token after" in printed
    assert "256 of 289 prompt tokens cached" in printed
    assert times_sooner > 1.5


@pytest.mark.slow
def test_many_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    answers = load_example("many_adapters").main()
    assert answers.keys() == {"base model", "butler", "json", "pirate", "rhyme"}
    assert answers["base model"].startswith("The largest planet")
    assert answers["butler"].startswith("Certainly, sir.")
    assert json.loads(answers["json"]).keys() == {"answer", "topic"}
    assert "matey" in answers["pirate"]
    assert len(answers["rhyme"].splitlines()) == 2
    assert "5 answers" in capsys.readouterr().out


@pytest.mark.slow
def test_json_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_example("json_answer").main() == [
        {"name": "Mary Stone", "age": 71, "city": "Lima"},
        {"name": "Ivan", "age": 34, "city": "Oslo"},
        {"name": "Lena Fischer", "age": 45, "city": "Paris"},
    ]
    assert "{'name': 'Ivan', 'age': 34, 'city': 'Oslo'}" in capsys.readouterr().out
