"""Logits of tiny models with adapters against PEFT, in float32: every kind of adapter that is served."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedRun, PagedSequence
from tiny import write_tiny
from tiny_adapters import ALL, load_peft, write_adapter
from torch import Tensor

from mlserve.adapters.host import HostAdapter, host_adapter
from mlserve.adapters.peft_format import read_adapter
from mlserve.adapters.slots import AdapterSlots
from mlserve.adapters.spec import AdapterLimits
from mlserve.config import ModelOptions
from mlserve.engine.admission import activation_start
from mlserve.model.base_weights import base_shape
from mlserve.model.loader import LoadedModel, load_model

ATOL = 1e-4
PROMPT = random.Random(0).choices(range(256), k=60)
INVOCATION = PROMPT[41:44]
EVERYTHING = (*ALL, "embed_tokens", "lm_head")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma3": ("gemma3", {}),
}
KINDS: dict[str, dict[str, Any]] = {
    "attention": {},
    "all-linear": {"targets": "all-linear", "r": 16},
    "one-module": {"targets": ["up_proj"]},
    "one-layer": {"layers_to_transform": 1},
    "rslora": {"r": 16, "lora_alpha": 32, "use_rslora": True, "std": 0.05},
    "patterns": {
        "targets": "all-linear",
        "rank_pattern": {"q_proj": 2, "up_proj": 8, "layers.1.self_attn.v_proj": 1},
        "alpha_pattern": {"o_proj": 3, "q_proj": 0.5},
    },
    "dora": {"targets": ALL, "use_dora": True},
    "dora-some": {"targets": ["v_proj", "down_proj"], "use_dora": True, "r": 5},
    "activated": {"targets": ALL, "alora_invocation_tokens": INVOCATION},
    "activated-nowhere": {"alora_invocation_tokens": [7, 300]},
    "embed": {"targets": ["embed_tokens", "q_proj"]},
    "lm-head": {"targets": ["lm_head", "q_proj"]},
    "everything": {"targets": EVERYTHING, "std": 0.1},
    "everything-dora": {"targets": EVERYTHING, "use_dora": True, "std": 0.1},
    "half": {"dtype": torch.float16},
}
# PEFT wraps a tied table's two uses apart, or refuses to: what it makes of both at once is not defined there.
UNDEFINED = {("llama-tied", kind) for kind in KINDS if kind.startswith("everything")}
UNDEFINED |= {("gemma3", kind) for kind in KINDS if kind.startswith("everything")}


@dataclass
class Served:
    """A model, an adapter of it in slot 1, and PEFT's logits of `PROMPT`."""

    model: LoadedModel
    slots: AdapterSlots
    adapter: HostAdapter
    expected: Tensor  # [60, V]

    @property
    def run(self) -> PagedRun:
        return PagedRun(self.model.decoder, adapters=self.slots)

    @property
    def place(self) -> dict[str, Any]:
        """Which slot, and from which token on."""
        start = activation_start(PROMPT, self.adapter.invocation_tokens)
        return {"adapter_slot": None} if start is None else {"adapter_slot": 1, "adapter_start": start}


Serve = Callable[[str, str], Served]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_tiny(tmp_path_factory.mktemp(name), family, **overrides)
        for name, (family, overrides) in MODELS.items()
    }


@pytest.fixture(scope="module")
def peft_logits(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    made: dict[tuple[str, str], tuple[Path, Tensor]] = {}

    def logits(model: str, kind: str) -> tuple[Path, Tensor]:
        if (model, kind) not in made:
            folder = write_adapter(tmp_path_factory.mktemp("adapter"), folders[model], 1, **KINDS[kind])
            with torch.inference_mode():
                found = load_peft(folder, folders[model])(input_ids=torch.tensor([PROMPT])).logits[0]
            made[model, kind] = folder, found
        return made[model, kind]

    return logits


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Callable[[str, str], LoadedModel]:
    loaded: dict[tuple[str, str], LoadedModel] = {}

    def once(model: str, kernels: str) -> LoadedModel:
        if (model, kernels) not in loaded:
            loaded[model, kernels] = load_model(ModelOptions(model=str(folders[model]), device="cpu", kernels=kernels))
        return loaded[model, kernels]

    return once


@pytest.fixture
def serve(load: Callable[[str, str], LoadedModel], peft_logits: Callable[[str, str], Any], kernels: str) -> Serve:
    def make(model_name: str, kind: str) -> Served:
        folder, expected = peft_logits(model_name, kind)
        model = load(model_name, kernels)
        shape = base_shape(model.config)
        slots = AdapterSlots(shape, 2, 16, torch.float32, torch.device("cpu"))
        spec = read_adapter(folder, shape, AdapterLimits(), base_weights=model.base_weights)
        adapter = host_adapter(spec, model.base_weights)
        slots.write(1, adapter)
        return Served(model, slots, adapter, expected)

    return make


def cases() -> list[tuple[str, str]]:
    return [(model, kind) for model in MODELS for kind in KINDS if (model, kind) not in UNDEFINED]


@pytest.mark.parametrize(("model", "kind"), cases())
def test_logits(model: str, kind: str, serve: Serve) -> None:
    served = serve(model, kind)
    _, logits = served.run.prefill(PROMPT, **served.place)
    torch.testing.assert_close(logits, served.expected, atol=ATOL, rtol=0)
    _, base = served.run.prefill(PROMPT)
    if kind != "activated-nowhere":
        assert float((base - served.expected).abs().max()) > 0.05  # an adapter that changes nothing would prove nothing


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "activated-nowhere"])
def test_slots_in_fewer_bits(kind: str, serve: Serve) -> None:
    """bfloat16 keeps 8 bits of each number: it shows, and is small beside what the adapter does."""
    served = serve("llama", kind)
    slots = AdapterSlots(served.slots.base, 2, 16, torch.bfloat16, torch.device("cpu"))
    slots.write(1, served.adapter)
    _, base = served.run.prefill(PROMPT)
    _, logits = PagedRun(served.model.decoder, adapters=slots).prefill(PROMPT, **served.place)
    effect = float((served.expected - base).norm())
    assert float((logits - served.expected).norm()) <= 0.01 * effect


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_beside_the_base_model(kind: str, serve: Serve) -> None:
    served = serve("llama", kind)
    run = served.run
    _, base = served.run.prefill(PROMPT)
    adapted, other = PagedSequence(list(PROMPT), **served.place), PagedSequence(list(PROMPT))
    logits, beside = [], []
    for count in (7, 1, 24, 9, *[1] * 19):
        both = run.step([(other, count), (adapted, count)])
        beside.append(both[:count])
        logits.append(both[count:])
    torch.testing.assert_close(torch.cat(logits), served.expected, atol=ATOL, rtol=0)
    torch.testing.assert_close(torch.cat(beside), base, atol=ATOL, rtol=0)


def test_an_activated_adapter_leaves_what_was_before_alone(serve: Serve) -> None:
    served = serve("llama", "activated")
    _, logits = served.run.prefill(PROMPT, **served.place)
    _, base = served.run.prefill(PROMPT)
    assert torch.equal(logits[:41], base[:41])
    assert not torch.isclose(logits[41], base[41], atol=1e-3).all()


def test_only_some_rows_want_logits(serve: Serve) -> None:
    """The last layer computes wanted rows only; adapters must follow."""
    served = serve("llama", "everything-dora")
    sequence, other = PagedSequence(list(PROMPT), **served.place), PagedSequence(list(PROMPT))
    logits = served.run.step([(other, 60), (sequence, 60)], rows=[3, 62, 119])
    torch.testing.assert_close(logits[1:], served.expected[[2, 59]], atol=ATOL, rtol=0)
