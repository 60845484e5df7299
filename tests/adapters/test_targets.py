"""Which modules a config means: PEFT's own functions are asked the same questions."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from mlserve.adapters import targets
from mlserve.adapters.peft_config import LoraSettings, parse_config
from mlserve.adapters.targets import pattern_values, targeted
from mlserve.errors import CorruptAdapterError

BLOCKS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
PATHS = [
    f"model.{tower}layers.{layer}.{block}.{name}"
    for tower in ("", "language_model.")
    for layer in (0, 1, 2, 10, 11)
    for block, names in BLOCKS.items()
    for name in names
] + ["lm_head", "model.embed_tokens"]


def settings(**config: Any) -> LoraSettings:
    parsed, problems = parse_config({"peft_type": "LORA"} | config)
    assert not problems
    assert parsed is not None
    return parsed


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["proj", "lm_head", "attn.q_proj"]},
        {"target_modules": ["self_attn.q_proj", "embed_tokens", "model.layers.1.mlp.up_proj", "layers.11.mlp.up_proj"]},
        {"target_modules": r".*layers\.(0|1)\.self_attn\.(q|v)_proj"},
        {"target_modules": r"model.layers.1.self_attn.q_proj"},
        {"target_modules": r"q_proj"},
        {"target_modules": r".*q_proj|lm_head"},
        {"target_modules": r"(?i).*Q_PROJ"},
        {"target_modules": r"^.*\.(?:q|k)_proj$"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1, 10]},
        {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": 11},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["blocks", "h"]},
        {"target_modules": ["q_proj"], "layers_to_transform": []},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["layers.1.self_attn.q_proj", "k_proj"]},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*\.1\..*q_proj"},
        {"target_modules": r".*_proj", "exclude_modules": [r"language_model.layers.0.self_attn.q_proj"]},
        {"target_modules": []},
    ],
    ids=repr,
)
def test_targeted_is_what_peft_says(config: dict[str, Any]) -> None:
    peft_config = LoraConfig(**config)
    want = [bool(check_target_module_exists(peft_config, path)) for path in PATHS]
    assert targeted(settings(**config), PATHS) == want
    assert any(want) or config["target_modules"] in ([], "q_proj") or "layers_pattern" in config


def test_all_linear_leaves_the_tables_out() -> None:
    wanted = targeted(settings(target_modules="all-linear"), PATHS)
    assert wanted == [not path.endswith(("lm_head", "embed_tokens")) for path in PATHS]


@pytest.mark.parametrize(
    "patterns",
    [
        {"q_proj": 1},
        {"proj": 1, "k_proj": 2},
        {"model.layers.1.self_attn.q_proj": 1, "layers.1.self_attn.k_proj": 2},
        {"^model.layers.1.self_attn.q_proj": 1, "^layers.1.self_attn.k_proj": 2},
        {"layers.1.self_attn.q_proj$": 1},
        {r".*\.1\.self_attn\..*": 1, "q_proj": 2, "v_proj": 3},
        {"q_proj": 2, r".*\.1\.self_attn\..*": 1},
        {"(q|k)_proj": 1, "q_proj|lm_head": 2, "(.*)": 3},
        {r"layers\.\d\.mlp.[ud]\w+": 1},
        {"": 1, "lm_head": 2},
        {"self_attn": 1, "layers": 2},
    ],
    ids=repr,
)
def test_pattern_values_are_those_of_peft(patterns: dict[str, int]) -> None:
    want = [patterns.get(get_pattern_key(list(patterns), path), 8) for path in PATHS]
    assert pattern_values(patterns, PATHS, 8) == want


def test_patterns_that_are_none() -> None:
    for wrong in ("(", "*", "a)b", r"\9", "(?P<x>a)(?P<x>b)"):
        with pytest.raises(CorruptAdapterError, match="patterns of module names are wrong"):
            pattern_values({wrong: 1}, PATHS, 8)
        with pytest.raises(CorruptAdapterError, match="patterns of module names are wrong"):
            targeted(settings(target_modules=wrong), PATHS)


def test_patterns_that_take_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "MATCH_SECONDS", 0.5)
    start = time.monotonic()
    for slow in (r"([a-z_.0-9]+)+X", r"([a-z_.0-9]|[a-z_.0-9]{2}|[a-z_.0-9]{3})*X"):
        with pytest.raises(CorruptAdapterError, match=r"take more than 0\.5 s: list the modules"):
            pattern_values({slow: 1}, PATHS, 8)
        with pytest.raises(CorruptAdapterError, match=r"take more than 0\.5 s: list the modules"):
            targeted(replace(settings(), target_modules=slow), PATHS)
    assert time.monotonic() - start < 10


def test_plain_patterns_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object, **options: object) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(targets.subprocess, "run", run)
    many = {f"model.layers.{layer}.self_attn.q_proj": layer for layer in range(100)} | {r"mlp\.up_proj": 9}
    assert pattern_values(many, PATHS[:7], 8) == [0, 8, 8, 8, 8, 9, 8]
    with pytest.raises(AssertionError, match="a process is started"):
        pattern_values({"(q)_proj": 1}, PATHS, 8)
