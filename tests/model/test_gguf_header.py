"""GGUF headers: every kind of value, and damage at any place."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from vocabularies import write_gguf

from mlserve.config import EMBEDDED_MODEL
from mlserve.errors import CorruptWeightsError, ModelError, ModelNotFoundError, UnsupportedModelError
from mlserve.model.gguf_header import read_header
from mlserve.model.sources import find_model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """One of each kind of value, and two tensors."""
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 😀")
    writer.add_array("texts", ["", "▁a", "b"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.25])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_tensor("a.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b.weight", np.ones(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values(path: Path) -> None:
    header = read_header(path)
    assert header.architecture == "llama"
    assert {key: value for key, value in header.metadata.items() if not key.startswith("general.")} == {
        "u8": 200, "i8": -100, "u16": 60000, "i16": -30000, "u32": 4_000_000_000, "i32": -2_000_000_000,
        "u64": 2**63, "i64": -(2**62), "f32": 0.5, "f64": 0.1, "yes": True, "text": "naïve 😀",
        "texts": ["", "▁a", "b"], "numbers": [1, -2, 3], "floats": [0.5, -1.25], "nested": [[1, 2], [3]],
    }  # fmt: skip
    assert header.metadata["yes"] is True


def test_tensors_stand_where_they_are_said_to(path: Path) -> None:
    a, b = read_header(path).tensors
    data = path.read_bytes()
    assert (a.name, a.shape, b.name, b.shape) == ("a.weight", (2, 3), "b.weight", (5,))
    assert np.frombuffer(data, np.float32, 6, a.offset).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.frombuffer(data, np.float16, 5, b.offset).tolist() == [1] * 5


@pytest.mark.slow
def test_same_as_the_gguf_package() -> None:
    path = find_model(EMBEDDED_MODEL)
    header, reader = read_header(path), GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == theirs
    tensors = [(t.name, tuple(t.shape.tolist()[::-1]), int(t.tensor_type), t.data_offset) for t in reader.tensors]
    assert [(t.name, t.shape, t.ggml_type, t.offset) for t in header.tensors] == tensors


def test_a_file_that_is_cut_off_anywhere_is_corrupt(path: Path) -> None:
    data = path.read_bytes()
    end = read_header(path).tensors[0].offset - 32  # data is aligned to 32 bytes: some of these are padding
    for length in range(end):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptWeightsError):
            read_header(path)


def test_damaged_bytes_raise_nothing_else(path: Path) -> None:
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(500):
        damaged = bytearray(data)
        for at in rng.integers(4, read_header_end(data), 3):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            read_header(path)
        except ModelError:
            continue


def read_header_end(data: bytes) -> int:
    return data.index(b"b.weight") + 8 + 4 + 8 + 4 + 8


@pytest.mark.parametrize("alignment", [0, "32"])
def test_a_wrong_alignment(tmp_path: Path, alignment: object) -> None:
    path = write_gguf(tmp_path / "model.gguf", {"general.alignment": alignment})
    with pytest.raises(CorruptWeightsError, match=r"general\.alignment is"):
        read_header(path)


def test_huge_counts_are_refused_without_allocating(path: Path) -> None:
    data = path.read_bytes()
    for at in (8, 16):  # tensors, values
        path.write_bytes(data[:at] + struct.pack("<Q", 2**60) + data[at + 8 :])
        with pytest.raises(CorruptWeightsError, match="is damaged"):
            read_header(path)
    at = data.index(b"texts") + 5 + 4 + 4
    path.write_bytes(data[:at] + struct.pack("<Q", 2**60) + data[at + 8 :])
    with pytest.raises(CorruptWeightsError, match="runs over the end"):
        read_header(path)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        read_header(path)
    path.write_bytes(b"")
    with pytest.raises(CorruptWeightsError, match="has 0 bytes"):
        read_header(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptWeightsError, match="it is not a GGUF file"):
        read_header(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(100))
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        read_header(path)
