"""Which operations serve which device."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest
import torch
import triton

from mlserve.errors import ConfigError, KernelBuildError
from mlserve.kernels.dispatch import select

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "kernels", "name"),
    [
        (CPU, "auto", "cpu"),
        (CPU, "cpu", "cpu"),
        (CPU, "reference", "reference"),
        (CUDA, "auto", "triton"),
        (CUDA, "triton", "triton"),
        (CUDA, "reference", "reference"),
    ],
)
def test_select(device: torch.device, kernels: str, name: str) -> None:
    assert select(device, kernels).name == name


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="kernels is 'fast': use one of auto, cpu, triton, reference"):
        select(CPU, "fast")


def test_cpu_kernels_need_a_cpu() -> None:
    with pytest.raises(ConfigError, match="kernels is 'cpu' and the device cuda"):
        select(CUDA, "cpu")


def test_triton_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ConfigError, match="kernels is 'triton' and the device cpu"):
        select(CPU, "triton")


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_a_gpu_needs_triton(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="need the package triton: install it, or use kernels='reference'"):
        select(CUDA, kernels)


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.mark.usefixtures("_no_compiler")
def test_auto_falls_back_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert select(CPU, "auto").name == "reference"
    (record,) = caplog.records
    assert "there is no 'no-such-compiler': install g++" in record.getMessage()
    assert "times slower" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.usefixtures("_no_compiler")
def test_cpu_kernels_or_an_error() -> None:
    with pytest.raises(KernelBuildError, match="need a C\\+\\+ compiler"):
        select(CPU, "cpu")
