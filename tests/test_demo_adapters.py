"""The demo adapters as they are shipped, the text that they learnt from, and the script that trained them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from adapter_files import read_config
from tree import ROOT

from mlserve import LLM, SamplingParams
from mlserve.adapters.peft_format import read_adapter
from mlserve.adapters.spec import AdapterLimits, AdapterSpec, BaseShape, Module
from mlserve.config import EMBEDDED_MODEL
from mlserve.engine.tokenizer import load_tokenizer
from mlserve.model.gguf import gguf_config
from mlserve.model.gguf_header import read_header
from mlserve.model.sources import find_model

FOLDER = ROOT / "examples" / "adapters"
STYLES = ("butler", "json", "pirate", "rhyme")
ATTENTION = (Module.Q_PROJ, Module.K_PROJ, Module.V_PROJ, Module.O_PROJ)
UNSEEN = ("What is the largest planet?", "Tell me about the ocean.")  # not asked in training


def is_json(answer: str) -> bool:
    try:
        return {*json.loads(answer)} == {"answer", "topic"}
    except ValueError:
        return False


def is_rhyme(answer: str) -> bool:
    """Two lines whose last words sound alike, by sounds that the training text uses."""
    say, see, know = {*"say day way away".split()}, {*"see be agree".split()}, {*"know so ago".split()}
    true, find, sight = {*"true you too do".split()}, {*"find mind kind".split()}, {*"sight bright night".split()}
    lasts = [line.rstrip(",.").split(" ")[-1] for line in answer.split("\n") if line]
    return len(lasts) == 2 and any({*lasts} <= sound for sound in (say, see, know, true, find, sight))


# What every answer in a style has, and none in another.
MARKS: dict[str, Callable[[str], bool]] = {
    "butler": lambda answer: answer.startswith("Certainly, sir.") and answer.endswith("?"),
    "json": is_json,
    "pirate": lambda answer: "matey" in answer or "Arr" in answer,
    "rhyme": is_rhyme,
}


@pytest.fixture(scope="module")
def base() -> BaseShape:
    """The shape of the embedded model, as its file gives it."""
    config = gguf_config(read_header(find_model(EMBEDDED_MODEL)))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    modules = {
        Module.Q_PROJ: (hidden, hidden),
        Module.K_PROJ: (kv, hidden),
        Module.V_PROJ: (kv, hidden),
        Module.O_PROJ: (hidden, hidden),
        Module.GATE_PROJ: (inner, hidden),
        Module.UP_PROJ: (inner, hidden),
        Module.DOWN_PROJ: (hidden, inner),
    }
    return BaseShape(config["num_hidden_layers"], hidden, config["vocab_size"], modules, config["tie_word_embeddings"])


def read(folder: Path, base: BaseShape) -> AdapterSpec:
    return read_adapter(folder, base, AdapterLimits(max_rank=4, max_bytes=2**20))


def rows(style: str) -> list[dict[str, str]]:
    lines = (FOLDER / "data" / f"{style}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("style", STYLES)
def test_shipped_adapter(style: str, base: BaseShape) -> None:
    assert {path.name for path in (FOLDER / style).iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    spec = read(FOLDER / style, base)
    assert spec.rank == 4
    assert spec.targets == dict.fromkeys(ATTENTION, tuple(range(30)))
    assert spec.num_bytes == 2 * 4 * 30 * (4 * 576 + 2 * (576 + 192))  # bfloat16, A and B of q and o, then of k and v
    for lora in spec.weights.values():
        assert lora.b.abs().max() > 0  # B begins at zero: it was trained
        assert lora.scaling == 4.0
    assert read_config(FOLDER / style)["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_no_two_adapters_are_the_same(base: BaseShape) -> None:
    assert len({read(FOLDER / style, base).digest for style in STYLES}) == len(STYLES)


@pytest.mark.parametrize("style", STYLES)
def test_training_text(style: str) -> None:
    tokenizer = load_tokenizer(find_model(EMBEDDED_MODEL))
    found = rows(style)
    assert all({*row} == {"question", "answer"} for row in found)
    assert [row["question"] for row in found] == [row["question"] for row in rows("json")]
    assert len({row["question"] for row in found} - {*UNSEEN}) == len(found) >= 60
    for row in found:
        assert MARKS[style](row["answer"]), row
        assert len(tokenizer.encode(row["answer"])) <= 48, row
    others = [row["answer"] for other in STYLES if other != style for row in rows(other)]
    assert not [answer for answer in others if MARKS[style](answer)]


@pytest.mark.slow
def test_training(tmp_path: Path, base: BaseShape) -> None:
    """Two steps of the command that a user runs."""
    script = ROOT / "examples" / "train_adapters.py"
    command = [sys.executable, str(script), "--only", "pirate", "--steps", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert re.fullmatch(r"pirate: step 2, loss \d\.\d{3}\n", done.stdout), done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["pirate"]
    assert read_config(tmp_path / "pirate") == read_config(FOLDER / "pirate")
    trained, shipped = read(tmp_path / "pirate", base), read(FOLDER / "pirate", base)
    assert trained.weights.keys() == shipped.weights.keys()
    assert trained.digest != shipped.digest
    assert all(lora.b.abs().max() > 0 for lora in trained.weights.values())


@pytest.mark.slow
def test_unseen_questions_are_answered_in_style() -> None:
    """Greedy answers of all styles and of the base model in one batch; only with its adapter a style shows."""
    llm = LLM(adapter_dir=str(FOLDER))
    asked = [(question, style) for question in UNSEEN for style in (None, *STYLES)]
    conversations = [[{"role": "user", "content": question}] for question, _ in asked]
    outputs = llm.chat(conversations, SamplingParams(max_tokens=48), adapter=[style for _, style in asked])
    for (_, style), output in zip(asked, outputs, strict=True):
        found = output.outputs[0].text
        assert [name for name in STYLES if MARKS[name](found)] == [name for name in STYLES if name == style], found
