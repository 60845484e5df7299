"""Weights saved by torch.save: tensors are read, and nothing is ever run (public bug report 2-13)."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import WEIGHTS, changed_copy, read_tensors
from tiny_adapters import write_adapter

from mlserve.adapters.peft_format import read_adapter
from mlserve.adapters.spec import AdapterLimits, BaseShape
from mlserve.errors import AdapterError, AdapterLimitError, CorruptAdapterError, UnsupportedAdapterError

TORCH_FILE = "adapter_model.bin"
Q0A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


class Marker:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def saved(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """AD(1) as PEFT saves it without safetensors."""
    return write_adapter(tmp_path / "saved", tiny_model_dir, 1, safe_serialization=False)


def with_content(plain: Path, folder: Path, content: object) -> Path:
    """An adapter whose weights are `content`, pickled by torch.save or given as the bytes of the file."""
    changed_copy(plain, folder)
    (folder / WEIGHTS).unlink()
    if isinstance(content, bytes):
        (folder / TORCH_FILE).write_bytes(content)
    else:
        torch.save(content, folder / TORCH_FILE)
    return folder


def test_2_13_nothing_is_run(plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    marker = tmp_path / "marker"
    tensors = read_tensors(plain)
    for number, content in enumerate(
        (tensors | {"x": Marker(marker)}, Marker(marker), [Marker(marker)], pickle.dumps(Marker(marker)))
    ):
        folder = with_content(plain, tmp_path / str(number), content)
        with pytest.raises(AdapterError, match=r"could run code|no archive"):
            read_adapter(folder, shape, limits)
        assert not marker.exists()
    pickle.loads(pickle.dumps(Marker(marker)))
    assert marker.exists()  # so the marker does what it is for


def test_2_13_safetensors_come_first(plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    folder = changed_copy(plain, tmp_path / "both")
    torch.save(Marker(tmp_path / "marker"), folder / TORCH_FILE)
    assert read_adapter(folder, shape, limits).digest == read_adapter(plain, shape, limits).digest
    (folder / WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(CorruptAdapterError, match="not a safetensors file"):
        read_adapter(folder, shape, limits)
    assert not (tmp_path / "marker").exists()


def test_tensors_are_read(saved: Path, plain: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    assert read_adapter(saved, shape, limits).digest == read_adapter(plain, shape, limits).digest


def test_parameters_and_views_are_read(plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    tensors = read_tensors(plain)
    odd = {key: torch.nn.Parameter(tensor.T.contiguous().T) for key, tensor in tensors.items()}
    folder = with_content(plain, tmp_path / "odd", OrderedDict(odd))
    spec = read_adapter(folder, shape, limits)
    assert spec.digest == read_adapter(plain, shape, limits).digest
    assert all(tensor.is_contiguous() for lora in spec.weights.values() for tensor in lora.tensors)


def no_tensors() -> dict[str, object]:
    ones = torch.ones(4, 64)
    return {
        "list": [ones],
        "number": 3,
        "nested": {"state_dict": {Q0A: ones}},
        "numbered": {0: ones},
        "text": {Q0A: "x"},
        "sparse": {Q0A: ones.to_sparse()},
        "meta": {Q0A: torch.ones(4, 64, device="meta")},
        "one-element-for-all": {Q0A: torch.ones(1).expand(2**40, 2**20)},
    }


@pytest.mark.filterwarnings("ignore")  # torch warns while it saves some of them
@pytest.mark.parametrize("kind", no_tensors())
def test_what_is_no_plain_tensor(
    plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, kind: str
) -> None:
    folder = with_content(plain, tmp_path / "x", no_tensors()[kind])
    with pytest.raises(AdapterError, match=r"holds a|which is no plain tensor|could run code|damaged"):
        read_adapter(folder, shape, limits)


def test_other_dtypes(plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    folder = with_content(plain, tmp_path / "x", read_tensors(plain) | {Q0A: torch.ones(4, 64).double()})
    with pytest.raises(UnsupportedAdapterError, match=r"stored as torch\.float64"):
        read_adapter(folder, shape, limits)


def test_compressed_archives(saved: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    """A small file could unfold to any size."""
    packed = shutil.copytree(saved, tmp_path / "packed")
    with (
        zipfile.ZipFile(saved / TORCH_FILE) as source,
        zipfile.ZipFile(packed / TORCH_FILE, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(CorruptAdapterError, match=r"compressed, which torch\.save never does"):
        read_adapter(packed, shape, limits)


def test_files_of_before_archives(plain: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    """torch's oldest format takes memory by what the file claims."""
    buffer = io.BytesIO()
    torch.save(read_tensors(plain), buffer, _use_new_zipfile_serialization=False)
    with pytest.raises(CorruptAdapterError, match=r"no archive of torch\.save"):
        read_adapter(with_content(plain, tmp_path / "x", buffer.getvalue()), shape, limits)


def test_damaged_archives(saved: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    good = (saved / TORCH_FILE).read_bytes()
    refused = 0
    cut = [good[:length] for length in range(0, len(good), len(good) // 20)]
    flipped = [good[:at] + bytes([good[at] ^ 255]) + good[at + 1 :] for at in range(0, 4000, 50)]
    for content in (*cut, *flipped):
        (saved / TORCH_FILE).write_bytes(content)
        try:
            read_adapter(saved, shape, limits)
        except AdapterError:
            refused += 1
    assert refused >= len(cut)


def test_limit_of_bytes(saved: Path, shape: BaseShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "load", None)
    size = (saved / TORCH_FILE).stat().st_size
    with pytest.raises(AdapterLimitError, match=rf"{TORCH_FILE} has {size} bytes"):
        read_adapter(saved, shape, AdapterLimits(max_bytes=size - 1))


def test_tensors_that_overlap_count_each(plain: Path, tmp_path: Path, shape: BaseShape) -> None:
    """Many views of one small storage must not become many large tensors."""
    storage = torch.ones(4, 4096)
    layers = {Q0A.replace("layers.0", f"layers.{n}"): storage for n in range(1000)}
    folder = with_content(plain, tmp_path / "x", layers)
    assert (folder / TORCH_FILE).stat().st_size < 2**20
    with pytest.raises(AdapterLimitError, match=f"has {1000 * storage.nbytes} bytes, limit {2**20}"):
        read_adapter(folder, shape, AdapterLimits(max_bytes=2**20))
