"""The matrix kernel's AVX-512 form: emulated on AVX2 it gives the AVX2 form's bits; compiled, it stays in registers.

No machine with AVX-512 is needed: `avx512_emulation.h` replaces the handful of operations that the form consists of.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mlserve.kernels.cpu import build

SUPPORT = Path(__file__).parent.parent / "support"
SOURCES = Path(build.__file__).parent
DTYPES = [torch.float32, torch.bfloat16, torch.float16]  # in the order of mlserve::DType
COMPILER = os.environ.get("CXX", "c++")

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler")


def compile_cpp(target: Path, flags: Sequence[str], *sources: Path) -> Path:
    command = [COMPILER, *flags, f"-I{SOURCES}", "-o", str(target), *map(str, sources)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


class NativeLinear:
    """The native linear in a library of its own."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.tile_rows: int = self._library.tile_rows()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.full((len(x), len(weight)), torch.nan)
        self._library.linear(
            DTYPES.index(weight.dtype),
            ctypes.c_void_p(weight.data_ptr()),
            ctypes.c_void_p(None if bias is None else bias.data_ptr()),
            *map(ctypes.c_int64, weight.shape),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_int64(len(x)),
            ctypes.c_int64(x.stride(0)),
            ctypes.c_void_p(y.data_ptr()),
        )
        return y

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        y = torch.full((len(ids), weight.shape[1]), torch.nan)
        self._library.embedding(
            DTYPES.index(weight.dtype),
            ctypes.c_void_p(weight.data_ptr()),
            *map(ctypes.c_int64, weight.shape),
            ctypes.c_void_p(ids.data_ptr()),
            ctypes.c_int64(len(ids)),
            ctypes.c_void_p(y.data_ptr()),
        )
        return y


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> tuple[NativeLinear, NativeLinear]:
    """The AVX2 form, and the AVX-512 form as AVX2 emulates it."""
    folder = tmp_path_factory.mktemp("forms")
    parts = ["linear", "weights", "lora", "elementwise"]
    sources = [SUPPORT / "native_linear.cpp", *(SOURCES / f"{part}.cpp" for part in parts)]
    flags = [*build.compiler_flags("AVX2"), "-shared", "-fPIC", "-fvisibility=default"]
    emulation = ["-include", str(SUPPORT / "avx512_emulation.h")]
    plain = compile_cpp(folder / "avx2.so", flags, *sources)
    emulated = compile_cpp(folder / "avx512.so", [*flags, *emulation], *sources)
    return NativeLinear(plain), NativeLinear(emulated)


def test_the_two_forms_differ_in_their_tiles(forms: tuple[NativeLinear, NativeLinear]) -> None:
    assert [form.tile_rows for form in forms] == [6, 12]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 11, 12, 13, 16, 24, 25, 36, 37, 100, 288, 289, 330])
@pytest.mark.parametrize(("out", "width"), [(48, 40), (35, 37), (1, 3)])
def test_both_forms_give_the_same_bits(
    forms: tuple[NativeLinear, NativeLinear], dtype: torch.dtype, rows: int, out: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width + 5, generator=generator)[:, :width]  # rows that don't lie next to each other
    weight = torch.randn(out, width, generator=generator).to(dtype)
    bias = torch.randn(out, generator=generator) if rows % 2 else None
    avx2, avx512 = (form.linear(x, weight, bias) for form in forms)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(avx512.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(avx512, avx2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_an_embedding_are_the_table_s(forms: tuple[NativeLinear, NativeLinear], dtype: torch.dtype) -> None:
    table, ids = torch.randn(37, 24).to(dtype), torch.tensor([0, 36, 8, 15, 16, 7, 7])
    for form in forms:
        assert torch.equal(form.embedding(ids, table), table[ids].float())


def test_the_avx512_form_keeps_its_sums_in_registers(tmp_path: Path) -> None:
    flags = [*build.compiler_flags("AVX512"), "-S"]
    text = compile_cpp(tmp_path / "linear.s", flags, SOURCES / "linear.cpp").read_text()
    wide = [line for line in text.splitlines() if "%zmm" in line]
    assert sum("vfmadd" in line for line in wide) > 100
    assert not [line for line in wide if re.search(r"%r[sb]p", line)]
