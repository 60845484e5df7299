"""Settings of adapter_config.json: which are read, which don't matter, which are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from peft import (
    BdLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftConfig,
    PromptTuningConfig,
)

from mlserve.adapters.peft_config import LoraSettings, parse_config
from mlserve.errors import CorruptAdapterError, UnsupportedAdapterError


def as_saved(config: PeftConfig) -> dict[str, Any]:
    """What save_pretrained writes."""
    saved: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=list))
    return saved


def reasons(**config: Any) -> list[str]:
    _, problems = parse_config({"peft_type": "LORA"} | config)
    assert {type(problem) for problem in problems} <= {UnsupportedAdapterError, CorruptAdapterError}
    return [str(problem) for problem in problems]


def test_what_peft_writes_by_default_is_served() -> None:
    settings, problems = parse_config(as_saved(LoraConfig(r=16, lora_alpha=2.5, target_modules=["q_proj"])))
    assert problems == []
    assert settings == LoraSettings(
        rank=16,
        alpha=2.5,
        rank_pattern={},
        alpha_pattern={},
        use_rslora=False,
        use_dora=False,
        invocation_tokens=None,
        target_modules=("q_proj",),
        exclude_modules=(),
        layers_to_transform=None,
        layers_pattern=(),
        ensure_weight_tying=False,
    )


def test_defaults_are_those_of_peft() -> None:
    settings, problems = parse_config({"peft_type": "LORA"})
    assert problems == []
    assert settings is not None
    assert (settings.rank, settings.alpha) == (LoraConfig().r, LoraConfig().lora_alpha)
    assert settings.scaling(16, 32.0) == 2.0


def test_every_setting_of_peft_has_been_looked_at() -> None:
    """A setting that PEFT adds must be put among those that are read, harmless or refused."""
    for key in as_saved(LoraConfig()):
        assert not any(reason.startswith("the setting") for reason in reasons(**{key: "x"})), key
    assert reasons(quite_new="x") == [
        "the setting quite_new ('x') is not known: set it to null if the adapter computes the same without it"
    ]


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_unknown_settings_that_are_off(value: object) -> None:
    assert reasons(enable_lora=value, merge_weights=value) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]),
        ("trainable_token_indices", {"embed_tokens": [1]}),
        ("lora_bias", True),
        ("layer_replication", [[0, 2]]),
        ("target_parameters", ["mlp.experts.down_proj"]),
        ("megatron_config", {"x": 1}),
        ("use_qalora", True),
        ("use_bdlora", as_saved(LoraConfig(use_bdlora=BdLoraConfig()))["use_bdlora"]),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"num_samples": 8}),
        ("velora_config", {"num_groups": 64}),
    ],
)
def test_settings_that_are_not_served_are_named(key: str, value: object) -> None:
    (reason,) = reasons(**{key: value})
    assert reason.startswith(f"{key} is set ({value!r}): ")


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "corda", "olora", "loftq", "lora_ga"])
def test_inits_that_change_the_base_model(init: str) -> None:
    (reason,) = reasons(init_lora_weights=init)
    assert f"init_lora_weights is {init!r}" in reason
    assert "path_initial_model_for_weight_conversion" in reason


def test_other_inits() -> None:
    for init in (True, False, None, "gaussian", "eva", "orthogonal", "mica"):
        assert reasons(init_lora_weights=init) == []
    for init in ("new", 3, ["pissa"]):
        assert len(reasons(init_lora_weights=init)) == 1


@pytest.mark.parametrize("config", [IA3Config(), LoHaConfig(), PromptTuningConfig(num_virtual_tokens=3)])
def test_other_kinds_of_adapters_are_named(config: PeftConfig) -> None:
    settings, problems = parse_config(as_saved(config))
    assert settings is None
    assert [str(problem) for problem in problems] == [
        f"adapters of type {config.peft_type.value!r} are not served: use LoRA (peft_type 'LORA')"
    ]


@pytest.mark.parametrize("peft_type", [None, 3, [], "lora"])
def test_no_kind_at_all(peft_type: object) -> None:
    assert parse_config({"peft_type": peft_type})[0] is None
    assert parse_config({})[0] is None


def test_tasks() -> None:
    assert reasons(task_type=None) == reasons(task_type="CAUSAL_LM") == []
    assert reasons(task_type="SEQ_CLS") == ["task_type is 'SEQ_CLS': only adapters for CAUSAL_LM are served"]


def test_activated_dora_is_refused_as_in_peft() -> None:
    (reason,) = reasons(use_dora=True, alora_invocation_tokens=[1])
    assert "alora_invocation_tokens and use_dora are both set" in reason


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("r", value) for value in (0, -1, 1.5, "4", True, None, [4])),
        *(("lora_alpha", value) for value in (float("nan"), float("inf"), 10**400, "8", None, True, {})),
        ("rank_pattern", [1]),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": 2.0}),
        ("rank_pattern", dict.fromkeys(map(str, range(10_001)), 1)),
        ("alpha_pattern", {"q_proj": "x"}),
        ("alpha_pattern", {"q_proj": float("-inf")}),
        *(("use_rslora", value) for value in (1, "true", [True])),
        *(("use_dora", value) for value in (1, "false")),
        *(("target_modules", value) for value in (3, [3], {"q_proj": 1}, [["q_proj"]])),
        ("exclude_modules", [None]),
        *(("alora_invocation_tokens", value) for value in ("5", [-1], [1.0], [True], [2**40], {})),
        ("layers_to_transform", ["0"]),
        ("layers_pattern", 3),
        ("ensure_weight_tying", "no"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_values_that_make_no_sense_are_named(key: str, value: object) -> None:
    settings, problems = parse_config({"peft_type": "LORA", key: value})
    assert settings is None
    (problem,) = problems
    assert isinstance(problem, CorruptAdapterError)
    assert str(problem).startswith(f"{key} is ")
    assert len(str(problem)) < 250


def test_all_wrong_settings_are_told() -> None:
    found = reasons(r=0, use_dora=1, modules_to_save=["x"], new=3, task_type="x", init_lora_weights="pissa")
    assert len(found) == 6
