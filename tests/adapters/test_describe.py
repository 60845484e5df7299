"""What inspection says of adapters, good and bad."""

from __future__ import annotations

from pathlib import Path

import torch
from adapter_files import CONFIG, Q0, WEIGHTS, changed_copy, with_tensors
from tiny_adapters import write_adapter

from mlserve.adapters.describe import AdapterDescription, describe_adapter
from mlserve.adapters.peft_format import read_adapter
from mlserve.adapters.spec import AdapterLimits, BaseShape


def test_a_good_adapter(plain: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    spec = read_adapter(plain, shape, limits)
    described = describe_adapter(plain, shape)
    per_layer = 4 * (64 + 64) + 4 * (64 + 32) + 4 * (64 + 32) + 4 * (64 + 64)
    assert described == AdapterDescription(
        path=plain,
        kind="LoRA",
        ranks=(4,),
        scalings=(2.0,),
        targets="q_proj, k_proj, v_proj, o_proj (layers 0-1)",
        num_parameters=2 * per_layer,
        num_bytes=spec.num_bytes,
        digest=spec.digest,
    )
    assert described.text.splitlines() == [
        f"adapter      {plain}",
        "kind         LoRA",
        "rank         4",
        "scaling      2",
        "targets      q_proj, k_proj, v_proj, o_proj (layers 0-1)",
        "parameters   3,584",
        "host memory  0.01 MiB",
        "on a device  0.01 MiB in 16 bits, 0.01 MiB in float32",
        f"digest       {spec.digest.hex()}",
        "served       yes",
    ]


def test_without_a_base_model(plain: Path, shape: BaseShape) -> None:
    assert describe_adapter(plain) == describe_adapter(plain, shape)


def test_kinds_and_ranges(tiny_model_dir: Path, tmp_path: Path, shape: BaseShape) -> None:
    dora = write_adapter(
        tmp_path / "dora", tiny_model_dir, 1, use_dora=True, rank_pattern={"layers.0.self_attn.v_proj": 16}
    )
    described = describe_adapter(dora, shape)
    assert (described.kind, described.ranks, described.scalings) == ("DoRA", (4, 16), (0.5, 2.0))
    assert "rank         4 to 16\nscaling      0.5 to 2\n" in described.text
    settings = {"targets": ["q_proj", "up_proj"], "exclude_modules": r".*\.1\.mlp.*", "alora_invocation_tokens": [5, 6]}
    activated = describe_adapter(write_adapter(tmp_path / "alora", tiny_model_dir, 1, **settings), shape)
    assert (activated.kind, activated.invocation_tokens) == ("activated LoRA", (5, 6))
    assert activated.targets == "q_proj (layers 0-1), up_proj (layer 0)"
    assert "invoked by   tokens 5 6\n" in activated.text


def test_all_reasons_are_told(plain: Path, tmp_path: Path, shape: BaseShape) -> None:
    wrong = {f"{Q0}lora_A.weight": torch.zeros(4, 63), f"{Q0}lora_B.bias": torch.zeros(64)}
    folder = changed_copy(plain, tmp_path, change=with_tensors(wrong), lora_bias=True, task_type="SEQ_CLS")
    described = describe_adapter(folder, shape, AdapterLimits(max_rank=3))
    reasons = ("lora_bias is set", "task_type is 'SEQ_CLS'", "1 tensor would not be applied", "[4, 63]", "limit 3")
    assert len(described.problems) == len(reasons)
    for reason in reasons:
        assert sum(reason in problem for problem in described.problems) == 1, reason
    assert (described.digest, described.scalings, described.ranks) == (None, None, (4,))
    assert described.text.endswith("served       no\n" + "\n".join(f"  - {p}" for p in described.problems))


def test_values_can_be_the_reason(plain: Path, tmp_path: Path, shape: BaseShape) -> None:
    folder = changed_copy(plain, tmp_path, change=with_tensors({f"{Q0}lora_A.weight": torch.full((4, 64), torch.nan)}))
    described = describe_adapter(folder, shape)
    assert [problem for problem in described.problems if "not finite" in problem] == [*described.problems]
    assert described.digest is None


def test_folders_with_little_in_them(plain: Path, tmp_path: Path) -> None:
    nothing = describe_adapter(tmp_path / "nothing")
    assert (nothing.kind, nothing.ranks, len(nothing.problems)) == (None, None, 1)
    assert nothing.text.startswith(f"adapter      {tmp_path / 'nothing'}\nserved       no\n  - there is no such folder")
    no_weights = changed_copy(plain, tmp_path / "no-weights")
    (no_weights / WEIGHTS).unlink()
    assert (describe_adapter(no_weights).kind, describe_adapter(no_weights).ranks) == ("LoRA", None)
    no_config = changed_copy(plain, tmp_path / "no-config")
    (no_config / CONFIG).unlink()
    assert (describe_adapter(no_config).kind, describe_adapter(no_config).ranks) == (None, (4,))
