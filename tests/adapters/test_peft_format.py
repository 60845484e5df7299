"""Reading adapters: what is accepted, what is refused and why."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import (
    CONFIG,
    PREFIX,
    Q0,
    WEIGHTS,
    changed_copy,
    read_config,
    read_tensors,
    with_tensors,
    write_files,
)
from torch import Tensor

from mlserve.adapters.peft_format import read_adapter
from mlserve.adapters.spec import AdapterLimits, BaseShape, Module, Site
from mlserve.errors import (
    AdapterError,
    AdapterFileNotFoundError,
    AdapterLimitError,
    CorruptAdapterError,
    UnsupportedAdapterError,
)


def test_what_is_read(plain: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    spec = read_adapter(plain, shape, limits)
    tensors = read_tensors(plain)
    attention = (Module.Q_PROJ, Module.K_PROJ, Module.V_PROJ, Module.O_PROJ)
    assert list(spec.weights) == [Site(module, layer) for layer in (0, 1) for module in attention]
    lora = spec.weights[Site(Module.K_PROJ, 1)]
    assert torch.equal(lora.a, tensors[f"{PREFIX}layers.1.self_attn.k_proj.lora_A.weight"])
    assert torch.equal(lora.b, tensors[f"{PREFIX}layers.1.self_attn.k_proj.lora_B.weight"])
    assert (lora.a.shape, lora.b.shape) == ((4, 64), (32, 4))
    assert (lora.scaling, lora.magnitude, lora.rank) == (2.0, None, 4)
    assert (spec.rank, spec.uses_dora, spec.invocation_tokens) == (4, False, None)
    assert spec.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert spec.targets == dict.fromkeys(attention, (0, 1))


def test_later_writes_to_the_file_do_not_reach_the_adapter(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits
) -> None:
    folder = changed_copy(plain, tmp_path)
    spec = read_adapter(folder, shape, limits)
    before = spec.weights[Site(Module.Q_PROJ, 0)].a.clone()
    size = (folder / WEIGHTS).stat().st_size
    with (folder / WEIGHTS).open("r+b") as file:
        file.write(bytes(size))
    assert torch.equal(spec.weights[Site(Module.Q_PROJ, 0)].a, before)


RENAMED: dict[str, Callable[[str], str]] = {
    "without-prefix": lambda key: key.removeprefix("base_model.model."),
    "model-without-head": lambda key: key.replace("base_model.model.model.", "base_model.model."),
    "bare-layers": lambda key: key.removeprefix(PREFIX),
    "short-prefix": lambda key: key.replace("base_model.model.", "base_model.", 1),
    "2-10-language-model": lambda key: key.replace("model.layers", "model.language_model.layers"),
    "2-10-language-model-first": lambda key: key.replace("model.model.layers", "model.language_model.model.layers"),
    "text-model": lambda key: key.replace("model.layers", "model.text_model.layers"),
    "default-name": lambda key: key.replace(".weight", ".default.weight"),
    "some-name": lambda key: key.replace(".weight", ".my-adapter_2.weight"),
    "compiled": lambda key: key.replace("base_model.model.", "base_model.model._orig_mod."),
    "fsdp": lambda key: key.replace(".self_attn.", "._fsdp_wrapped_module.self_attn._checkpoint_wrapped_module."),
    "ddp": lambda key: f"module.{key}",
}
RENAMED_DORA: dict[str, Callable[[str], str]] = {
    "weight": lambda key: re.sub(r"vector$", "vector.weight", key),
    "named": lambda key: re.sub(r"vector$", "vector.default", key),
    "named-weight": lambda key: re.sub(r"vector$", "vector.default.weight", key),
    "weight-beside-names": lambda key: re.sub(r"vector$", "vector.weight", re.sub(r"_([AB])\.", r"_\1.default.", key)),
}


@pytest.mark.parametrize("rename", RENAMED.values(), ids=RENAMED.keys())
def test_spellings_of_keys(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, rename: Callable[[str], str]
) -> None:
    renamed = changed_copy(plain, tmp_path, rename=rename)
    assert read_tensors(renamed).keys().isdisjoint(read_tensors(plain))
    assert read_adapter(renamed, shape, limits).digest == read_adapter(plain, shape, limits).digest


@pytest.mark.parametrize("rename", RENAMED_DORA.values(), ids=RENAMED_DORA.keys())
def test_spellings_of_magnitudes(
    dora: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, rename: Callable[[str], str]
) -> None:
    renamed = changed_copy(dora, tmp_path, rename=rename)
    assert read_tensors(renamed).keys() != read_tensors(dora).keys()
    assert read_adapter(renamed, shape, limits).digest == read_adapter(dora, shape, limits).digest


WRONG_SHAPES = {
    "a-1d": {f"{Q0}lora_A.weight": (64,)},
    "a-3d": {f"{Q0}lora_A.weight": (4, 64, 1)},
    "a-scalar": {f"{Q0}lora_A.weight": ()},
    "a-empty": {f"{Q0}lora_A.weight": (0, 64)},
    "both-empty": {f"{Q0}lora_A.weight": (0, 64), f"{Q0}lora_B.weight": (64, 0)},
    "b-transposed": {f"{Q0}lora_B.weight": (4, 64)},
    "ranks-differ": {f"{Q0}lora_B.weight": (64, 5)},
    "out-of-another-model": {f"{Q0}lora_B.weight": (65, 4)},
}


@pytest.mark.parametrize("shapes", WRONG_SHAPES.values(), ids=WRONG_SHAPES.keys())
def test_wrong_shapes(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, no_reads: None, shapes: dict[str, Any]
) -> None:
    folder = changed_copy(
        plain, tmp_path, change=with_tensors({key: torch.zeros(wrong) for key, wrong in shapes.items()})
    )
    with pytest.raises(CorruptAdapterError, match=r"layers\.0\.self_attn\.q_proj\.lora_. has the shape|has the shape"):
        read_adapter(folder, shape, limits)


def test_wrong_shape_of_magnitudes(
    dora: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, no_reads: None
) -> None:
    folder = changed_copy(dora, tmp_path, change=with_tensors({f"{Q0}lora_magnitude_vector": torch.ones(63)}))
    with pytest.raises(CorruptAdapterError, match=r"magnitude_vector has the shape \[63\], and must have \[64\]"):
        read_adapter(folder, shape, limits)


def test_ranks_must_be_those_of_the_config(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, no_reads: None
) -> None:
    for number, settings in enumerate(({"r": 8}, {"r": ...}, {"rank_pattern": {"k_proj": 2}})):
        folder = changed_copy(plain, tmp_path / str(number), **settings)
        with pytest.raises(CorruptAdapterError, match=r"disagree on the rank of layers\.0\.\S+.*: [28] and 4"):
            read_adapter(folder, shape, limits)


def test_layers_that_the_base_model_has_not(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, no_reads: None
) -> None:
    folder = changed_copy(plain, tmp_path, rename=lambda key: key.replace("layers.1.", "layers.2."))
    with pytest.raises(UnsupportedAdapterError, match=r"layers\.2\.self_attn\.q_proj.* can't be applied: .* 2 layers"):
        read_adapter(folder, shape, limits)


def test_other_dtypes(plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, no_reads: None) -> None:
    for number, dtype in enumerate((torch.float64, torch.int8, torch.float8_e4m3fn)):
        wrong = {f"{Q0}lora_A.weight": torch.zeros(4, 64, dtype=dtype)}
        folder = changed_copy(plain, tmp_path / str(number), change=with_tensors(wrong))
        with pytest.raises(UnsupportedAdapterError, match=r"stored as (F64|I8|F8_E4M3), .*: use float32, float16"):
            read_adapter(folder, shape, limits)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, value: float
) -> None:
    a = torch.zeros(4, 64)
    a[3, 63] = value
    folder = changed_copy(plain, tmp_path, change=with_tensors({f"{Q0}lora_A.weight": a}))
    with pytest.raises(CorruptAdapterError, match=r"q_proj\.lora_A\.weight has values that are not finite"):
        read_adapter(folder, shape, limits)


def test_one_tensor_twice(plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, no_reads: None) -> None:
    again = {f"{Q0}lora_A.default.weight": torch.zeros(4, 64)}
    folder = changed_copy(plain, tmp_path, change=with_tensors(again))
    with pytest.raises(CorruptAdapterError, match=r"lora_A\.default\.weight and \S+lora_A\.weight are the same tensor"):
        read_adapter(folder, shape, limits)


def test_several_adapters_in_one_file(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, no_reads: None
) -> None:
    def named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            key.replace(".weight", f".{name}.weight"): t + i
            for key, t in tensors.items()
            for i, name in enumerate("xy")
        }

    folder = changed_copy(plain, tmp_path, change=named)
    with pytest.raises(UnsupportedAdapterError, match=r"holds several adapters, x, y: save each alone$"):
        read_adapter(folder, shape, limits)


def test_tied_tables_must_have_one_adapter(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits
) -> None:
    a, b = torch.randn(4, 320), torch.randn(64, 4)

    def both(head_a: Tensor) -> dict[str, Tensor]:
        embedding = f"{PREFIX}embed_tokens.lora_embedding_"
        head = "base_model.model.lm_head.lora_"
        return {f"{embedding}A": a, f"{embedding}B": b, f"{head}A.weight": head_a, f"{head}B.weight": a.T.contiguous()}

    settings = {"ensure_weight_tying": True, "target_modules": [*read_config(plain)["target_modules"], "embed_tokens"]}
    equal = changed_copy(plain, tmp_path / "1", change=with_tensors(both(b.T.contiguous())), **settings)
    other = changed_copy(plain, tmp_path / "2", change=with_tensors(both(b.T.contiguous() + 1)), **settings)
    tied = BaseShape(2, 64, 320, shape.layer_modules, tied_embeddings=True)
    assert Site(Module.LM_HEAD) in read_adapter(equal, tied, limits).weights
    with pytest.raises(CorruptAdapterError, match="embed_tokens and lm_head differ"):
        read_adapter(other, tied, limits)
    with pytest.raises(CorruptAdapterError, match="the file changes lm_head, which target_modules doesn't name"):
        read_adapter(equal, shape, limits)


def test_invocation_tokens(plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    folder = changed_copy(plain, tmp_path / "1", alora_invocation_tokens=[5, 319])
    assert read_adapter(folder, shape, limits).invocation_tokens == (5, 319)
    assert (
        read_adapter(changed_copy(plain, tmp_path / "2", alora_invocation_tokens=[]), shape, limits).invocation_tokens
        is None
    )
    with pytest.raises(CorruptAdapterError, match="alora_invocation_tokens has 320, the base model has 320 tokens"):
        read_adapter(changed_copy(plain, tmp_path / "3", alora_invocation_tokens=[5, 320]), shape, limits)


def test_all_reasons_are_told(plain: Path, tmp_path: Path, shape: BaseShape, no_reads: None) -> None:
    wrong = {f"{Q0}lora_A.weight": torch.zeros(4, 63), f"{PREFIX}norm.weight": torch.zeros(64)}
    folder = changed_copy(plain, tmp_path, change=with_tensors(wrong), lora_bias=True, new_setting="x")
    with pytest.raises(UnsupportedAdapterError) as caught:
        read_adapter(folder, shape, AdapterLimits(max_rank=2))
    message = str(caught.value)
    assert message.startswith(f"the adapter in {str(folder)!r} can't be loaded: ")
    for reason in ("lora_bias is set", "new_setting ('x') is not known", "trained norms", "[4, 63]", "limit 2"):
        assert message.count(reason) == 1, reason


def test_limit_of_bytes(plain: Path, shape: BaseShape, no_reads: None) -> None:
    size = (plain / WEIGHTS).stat().st_size
    with pytest.raises(AdapterLimitError, match=rf"has {size} bytes, limit {size - 1}"):
        read_adapter(plain, shape, AdapterLimits(max_bytes=size - 1))


def test_limit_of_bytes_can_be_reached(plain: Path, shape: BaseShape) -> None:
    read_adapter(plain, shape, AdapterLimits(max_bytes=(plain / WEIGHTS).stat().st_size))


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_damaged_files_are_refused_or_harmless(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, file: str
) -> None:
    """Flipped, lost and inserted bytes, mostly in the header: nothing but our errors comes out."""
    good = (plain / file).read_bytes()
    folder = write_files(tmp_path, read_config(plain), read_tensors(plain))
    chance = random.Random(0)
    refused = 0
    for _ in range(200):
        content = bytearray(good)
        for _ in range(chance.choice((1, 1, 3))):
            position = chance.randrange(min(len(content), 4000))
            match chance.randrange(4):
                case 0:
                    content[position] ^= 1 << chance.randrange(8)
                case 1:
                    del content[position : position + chance.choice((1, 100))]
                case 2:
                    content[position:position] = chance.choice((b"0", b"9" * 30, b'"', b"[" * 1000, b"null", b"\xff"))
                case 3:
                    del content[chance.randrange(len(content)) :]
        (folder / file).write_bytes(content)
        try:
            read_adapter(folder, shape, limits)
        except AdapterError:
            refused += 1
    assert refused > 150


def test_config_that_is_none(plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    folder = changed_copy(plain, tmp_path)
    for text in (
        "",
        "[]",
        "null",
        "{",
        "[" * 100_000,
        '"' + "x" * 5_000_000 + '"',
        "\ud800".encode("utf-8", "replace").decode() + "{",
    ):
        (folder / CONFIG).write_text(text)
        with pytest.raises(CorruptAdapterError, match=CONFIG):
            read_adapter(folder, shape, limits)
    (folder / CONFIG).write_bytes(json.dumps(read_config(plain)).encode("utf-16"))
    with pytest.raises(CorruptAdapterError, match=CONFIG):
        read_adapter(folder, shape, limits)
    (folder / CONFIG).unlink()
    with pytest.raises(AdapterFileNotFoundError, match=f"{CONFIG} is missing"):
        read_adapter(folder, shape, limits)
