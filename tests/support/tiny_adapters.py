"""Adapters of the tiny models, made and saved by PEFT itself, and PEFT's own view of them.

`write_adapter(folder, model_dir, seed)` writes the adapter that the tests call AD(seed): r=4, lora_alpha=8, on the four
attention projections, with all matrices normal(0, 0.2), so that its effect shows. Any LoraConfig setting goes by
keyword. Importing this module takes seconds, since PEFT and transformers do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from mlserve.adapters.spec import BaseShape, Module

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")

logging.disable_progress_bar()


@contextmanager
def quiet() -> Iterator[None]:
    """PEFT and transformers warn about each other's changes, and about settings that these tests are about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write_adapter(
    folder: Path,
    model_dir: Path,
    seed: int,
    *,
    r: int = 4,
    lora_alpha: float = 8,
    targets: Sequence[str] | str = ATTENTION,
    std: float = 0.2,
    dtype: torch.dtype = torch.float32,
    safe_serialization: bool = True,
    **settings: Any,
) -> Path:
    """Write an adapter of the model in `model_dir` into `folder`; returns `folder`.

    DoRA's magnitudes are those of the base model's rows times something between 0.5 and 1.5. `settings` are
    LoraConfig's.
    """
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(model_dir)
        target_modules = targets if isinstance(targets, str) else list(targets)
        config = LoraConfig(
            task_type="CAUSAL_LM", r=r, lora_alpha=lora_alpha, target_modules=target_modules, **settings
        )
        peft_model = get_peft_model(model, config)
        randomise(peft_model, seed, std)
        if dtype is not torch.float32:
            for name, parameter in peft_model.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.to(dtype)
        peft_model.save_pretrained(folder, safe_serialization=safe_serialization)
    return folder


def randomise(model: PeftModel, seed: int, std: float = 0.2) -> None:
    """Give LoRA's matrices values of normal(0, std)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_magnitude_vector" in name:
            parameter.data *= 0.5 + torch.rand(parameter.shape, generator=generator)
        elif "lora_" in name:
            parameter.data.copy_(std * torch.randn(parameter.shape, generator=generator))  # in place: it may be tied


def load_peft(folder: Path, model_dir: Path) -> PeftModel:
    """The model with the adapter, as PEFT loads it."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        peft_model: PeftModel = PeftModel.from_pretrained(model, folder).eval()
    return peft_model


def peft_deltas(folder: Path, model_dir: Path) -> dict[str, Tensor]:
    """What PEFT adds to each adapted weight, by the module's path in the model. DoRA's rescaling is not in it."""
    model = load_peft(folder, model_dir).base_model.model
    return {
        name: module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def peft_weights(folder: Path, model_dir: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The base model's weights by name, and those that PEFT makes of them by merging the adapter."""
    with quiet():
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict()
        merged = load_peft(folder, model_dir).merge_and_unload().state_dict()
    return dict(base), dict(merged)


def base_shape(model_dir: Path) -> BaseShape:
    """The shape of a tiny model, from its transformers twin."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(model_dir)
    layers = model.model.layers
    modules = {
        Module(name): tuple(module.weight.shape)
        for part in (layers[0].self_attn, layers[0].mlp)
        for name, module in part.named_children()
        if name in ALL
    }
    vocab_size, hidden_size = model.model.embed_tokens.weight.shape
    tied = model.config.tie_word_embeddings
    return BaseShape(len(layers), hidden_size, vocab_size, modules, tied)
