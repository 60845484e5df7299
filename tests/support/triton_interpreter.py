"""Triton's interpreter, made fit for tests: `install()` changes it for the rest of the process.

- It multiplies the bits of bfloat16 numbers as if they were integers (`tl.dot`), and rounds float32 to bfloat16 towards
  zero (Triton 3.8). Here it does as a GPU does.
- Its sums depend on a row's place in a tile, as its BLAS splits matrices; a tensor core's don't. Here `tl.dot` sums in
  float64, so that tests can ask for the same bits of a row wherever it stands.
- Each call of a device function patches triton.language anew, most of the time that small kernels take. Here that is
  done once: some 5 times faster.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

__all__ = ["install"]


def install() -> None:
    if not _Patched.installed:
        _Patched.installed = True
        interpreter.InterpreterBuilder.create_dot = _dot
        interpreter.InterpreterBuilder.cast_impl = _cast
        interpreter._patch_lang(FunctionType(_dot.__code__, {"tl": tl, "core": tl.core}))  # by what its globals name
        interpreter._patch_lang = _Patched


class _Patched:
    """In place of what remembers a launch's patches, to undo them."""

    installed = False

    def __init__(self, function: Any) -> None: ...

    def restore(self) -> None: ...


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    product = np.matmul(_float64(a), _float64(b))
    return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def _cast(self: Any, source: Any, target: Any) -> Any:
    pair = (source.dtype.scalar, target.scalar)
    if pair == (tl.bfloat16, tl.float32):
        return interpreter.TensorHandle(_from_bfloat16(source.data), target.scalar)
    if pair == (tl.float32, tl.bfloat16):
        return interpreter.TensorHandle(_to_bfloat16(source.data), target.scalar)
    return interpreter.TensorHandle(source.data.astype(interpreter._get_np_dtype(target)), target.scalar)


def _from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """To the nearest, ties to even."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def _float64(handle: Any) -> NDArray[np.float64]:
    data: NDArray[Any] = handle.data
    if handle.dtype.scalar == tl.bfloat16:
        data = _from_bfloat16(data)
    elif handle.dtype.scalar.primitive_bitwidth == 8:
        data = interpreter._convert_float(data, handle.dtype.scalar, tl.float16, None).view(np.float16)
    return data.astype(np.float64)
