"""What is launched, and what is compiled: one description of both.

A launcher computes a `Launch` from shapes alone, never from the tensors' contents, and runs it:

    def lora_shrink(x, lora, segments):
        ...
        Launch(_shrink_kernel, grid, args={"x": x, ...}, constants={"BLOCK_R": 16}, num_warps=4, num_stages=2).run()

A module of kernels lists the forms that it uses, made from the same launches with `meta` tensors of real shapes:

    def configs() -> Iterator[KernelConfig]:
        yield _shrink_launch(meta_x, meta_lora, ...).config("lora_shrink-R16-bf16")

The tests compile all of these ahead of time for several GPUs and hold registers and spills to a committed table. There
is no search for the best configuration at run time: it would break graph capture, and bits would differ between runs.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Argument", "KernelConfig", "Launch", "all_configs"]

Scalar = int | float | bool | None
Argument = Tensor | Scalar | tuple[int, ...]
Path = tuple[int, ...]  # of an argument: its place, and for a member of a tuple the place in that

_ALIGNMENT = 16  # Triton compiles a form of its own for numbers and addresses that are multiples of 16
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One form of a kernel: all that the compiler is given. `tests/support/triton_aot.py` compiles it."""

    name: str  # unique; says kernel, shape class and dtype
    kernel: Any  # a function under @triton.jit
    signature: Mapping[str, Any]  # Triton's type of each parameter, in order: "*bf16", "i32", "constexpr", or a tuple
    constants: Mapping[Path, Any]
    aligned: tuple[Path, ...]  # arguments that are multiples of 16
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a kernel. Tensors on the `meta` device will do for `config`."""

    kernel: Any  # a function under @triton.jit
    grid: tuple[int, ...]
    args: Mapping[str, Argument]  # by parameter
    constants: Mapping[str, Any]  # the tl.constexpr parameters
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        if 0 not in self.grid:
            self.kernel[self.grid](**self.args, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages)

    def config(self, name: str) -> KernelConfig:
        """The form that Triton compiles for this call, if addresses are aligned."""
        signature: dict[str, Any] = {}
        constants: dict[Path, Any] = {}
        aligned: list[Path] = []
        for i, parameter in enumerate(self.kernel.params):
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
                constants[i,] = self.constants.get(parameter.name, parameter.default)
            else:
                specialize = not parameter.do_not_specialize
                signature[parameter.name] = _type_of(self.args[parameter.name], (i,), specialize, constants, aligned)
        return KernelConfig(name, self.kernel, signature, constants, tuple(aligned), self.num_warps, self.num_stages)


def _type_of(
    value: Argument, path: Path, specialize: bool, constants: dict[Path, Any], aligned: list[Path]
) -> str | tuple[Any, ...]:
    """Triton's type of an argument. What is compiled into the form goes to `constants` and `aligned`."""
    match value:
        case Tensor():
            aligned.append(path)
            return _POINTERS[value.dtype]
        case tuple():
            members = enumerate(value)  # specialized whatever do_not_specialize says (Triton 3.8)
            return tuple(_type_of(member, (*path, i), True, constants, aligned) for i, member in members)
        case bool():
            return "u1"
        case float():
            return "fp32"
        case None:
            constants[path] = None
            return "constexpr"
    if specialize and value == 1:
        constants[path] = 1
        return "constexpr"
    if specialize and value % _ALIGNMENT == 0:
        aligned.append(path)
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def all_configs() -> Iterator[KernelConfig]:
    """The forms that all modules of this package use: what their `configs()` give."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        yield from getattr(module, "configs", tuple)()
