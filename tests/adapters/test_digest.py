"""Equal content has one digest, whatever it is called; each thing that changes the result changes it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import Q0, changed_copy, read_config, read_tensors, with_tensors, write_files
from tiny_adapters import write_adapter
from torch import Tensor

from mlserve.adapters.digest import adapter_digest
from mlserve.adapters.peft_format import read_adapter
from mlserve.adapters.spec import AdapterLimits, BaseShape, LoraWeights, Module, Site


@pytest.fixture
def digest_of(shape: BaseShape, limits: AdapterLimits) -> Any:
    return lambda folder: read_adapter(folder, shape, limits).digest


def lora(a: Tensor | None = None, b: Tensor | None = None, scaling: float = 2.0, **more: Any) -> LoraWeights:
    return LoraWeights(torch.ones(2, 8) if a is None else a, torch.ones(6, 2) if b is None else b, scaling, **more)


def test_digest_is_fixed() -> None:
    """Digests are kept across versions, in the names of KV blocks: a change of the encoding needs a new domain."""
    weights = {Site(Module.Q_PROJ, 0): lora(torch.arange(16.0).view(2, 8)), Site(Module.LM_HEAD): lora()}
    assert adapter_digest(weights, (1, 2)).hex() == "7984836a93f1d03fe4241d37ec707cb7587373d73c90f5a5f397fd94de587501"


def test_copies_under_other_names_are_equal(plain: Path, tmp_path: Path, digest_of: Any) -> None:
    shutil.copytree(plain, tmp_path / "another-name")
    assert digest_of(tmp_path / "another-name") == digest_of(plain)
    assert len(digest_of(plain)) == 32


def test_order_and_spelling_of_keys_do_not_matter(plain: Path, tmp_path: Path, digest_of: Any) -> None:
    tensors = dict(reversed(read_tensors(plain).items()))
    renamed = {key.replace("base_model.model.", ""): tensor for key, tensor in tensors.items()}
    assert digest_of(write_files(tmp_path, read_config(plain), renamed)) == digest_of(plain)


def test_kind_of_file_does_not_matter(plain: Path, tiny_model_dir: Path, tmp_path: Path, digest_of: Any) -> None:
    assert digest_of(write_adapter(tmp_path, tiny_model_dir, 1, safe_serialization=False)) == digest_of(plain)


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_dropout": 0.9, "base_model_name_or_path": "x", "inference_mode": False, "peft_version": "9"},
        {"lora_alpha": 4, "use_rslora": True},
        {"lora_alpha": 1, "alpha_pattern": {".*": 8}},
        {"target_modules": "all-linear", "exclude_modules": ["gate_proj", "up_proj", "down_proj"]},
    ],
    ids=["training", "rslora", "alpha-pattern", "targets"],
)
def test_settings_that_compute_the_same(plain: Path, tmp_path: Path, digest_of: Any, settings: dict[str, Any]) -> None:
    assert digest_of(changed_copy(plain, tmp_path, **settings)) == digest_of(plain)


@pytest.mark.parametrize(
    "settings",
    [{"lora_alpha": 8.001}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 9}}, {"alora_invocation_tokens": [1]}],
    ids=["alpha", "rslora", "alpha-pattern", "invocation"],
)
def test_settings_that_change_the_result(plain: Path, tmp_path: Path, digest_of: Any, settings: dict[str, Any]) -> None:
    assert digest_of(changed_copy(plain, tmp_path, **settings)) != digest_of(plain)


def test_one_element_changes_it(plain: Path, tmp_path: Path, digest_of: Any) -> None:
    for part in ("A", "B"):
        key = f"{Q0}lora_{part}.weight"
        tensor = read_tensors(plain)[key]
        tensor[1, 1] = torch.nextafter(tensor[1, 1], torch.tensor(9.0))
        assert digest_of(changed_copy(plain, tmp_path, change=with_tensors({key: tensor}))) != digest_of(plain)


def test_a_file_that_was_replaced_has_another(
    plain: Path, tiny_model_dir: Path, tmp_path: Path, digest_of: Any
) -> None:
    folder = changed_copy(plain, tmp_path)
    assert digest_of(folder) == digest_of(plain)
    write_adapter(folder, tiny_model_dir, 2)
    assert digest_of(folder) != digest_of(plain)


def test_every_part_is_in_it() -> None:
    q, k, other_layer = Site(Module.Q_PROJ, 0), Site(Module.K_PROJ, 0), Site(Module.Q_PROJ, 1)
    one, two = torch.ones(2, 8), torch.full((2, 8), 2.0)
    variants: list[tuple[dict[Site, LoraWeights], tuple[int, ...] | None]] = [
        ({q: lora()}, None),
        ({q: lora()}, ()),
        ({q: lora()}, (1,)),
        ({q: lora()}, (2,)),
        ({q: lora()}, (1, 2)),
        ({k: lora()}, None),
        ({other_layer: lora()}, None),
        ({q: lora(), k: lora()}, None),
        ({q: lora(one), k: lora(two)}, None),
        ({q: lora(two), k: lora(one)}, None),
        ({q: lora(one.bfloat16())}, None),
        ({q: lora(one.half())}, None),
        ({q: lora(one.view(4, 4), torch.ones(3, 4))}, None),
        ({q: lora(torch.ones(1, 8), torch.ones(20, 1))}, None),
        ({q: lora(scaling=-2.0)}, None),
        ({q: lora(magnitude=torch.ones(6))}, None),
        ({q: lora(magnitude=torch.zeros(6))}, None),
    ]
    digests = [adapter_digest(weights, tokens) for weights, tokens in variants]
    assert digests[0] != digests[1]
    assert len({*digests}) == len(variants)


def test_order_of_sites_is_not_in_it() -> None:
    q, k = Site(Module.Q_PROJ, 0), Site(Module.K_PROJ, 0)
    one, two = lora(), lora(scaling=1.0)
    assert adapter_digest({q: one, k: two}, None) == adapter_digest({k: two, q: one}, None)
