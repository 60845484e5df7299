"""Building the native operations: once, whoever asks, and with errors that say what to do."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from mlserve.errors import KernelBuildError
from mlserve.kernels.cpu import build
from mlserve.kernels.cpu.ops import CpuOps


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that has built nothing yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelBuildError, match="there is no 'no-such-compiler': install g"):
        CpuOps()


def test_a_failing_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(KernelBuildError, match="can't build"):
        CpuOps()


def test_a_processor_without_avx2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(KernelBuildError, match="AVX2"):
        CpuOps()


@pytest.mark.parametrize(("capability", "level"), [("AVX2", "x86-64-v3"), ("AVX512", "x86-64-v4")])
def test_each_kind_of_processor_has_a_library_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capability: str, level: str
) -> None:
    usual = build._build_key()
    here = torch.backends.cpu.get_cpu_capability()
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    assert f"-march={level}" in build.compiler_flags(capability)
    assert (build._build_key() == usual) == (capability == here)


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(KernelBuildError, match="set TORCH_EXTENSIONS_DIR"):
        CpuOps()


def test_a_build_after_one_that_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "source.cpp"
    monkeypatch.setattr(build, "_sources", lambda: [source])
    for name in ("broken", "whole"):
        (tmp_path / name).mkdir()
    source.write_text("not C++")
    with pytest.raises(KernelBuildError, match="can't build"):
        build._compile(tmp_path / "broken")
    source.write_text("int whole() { return 1; }")
    assert build._compile(tmp_path / "whole").is_file()


def test_the_second_load_is_the_same_module() -> None:
    assert build.load_extension() is build.load_extension()


def test_concurrent_builds_compile_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = []

    def compile_slowly(folder: Path) -> Path:
        compiled.append(folder)
        time.sleep(0.2)
        (folder / "new.so").write_bytes(b"library")
        return folder / "new.so"

    monkeypatch.setattr(build, "_compile", compile_slowly)
    library = tmp_path / "mlserve_cpu.so"
    threads = [threading.Thread(target=build._build_once, args=(library,)) for _ in range(4)]
    with caplog.at_level(logging.WARNING):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(compiled) == 1
    assert library.read_bytes() == b"library"
    assert [record.message.split(",")[0] for record in caplog.records] == ["building the native CPU kernels"]


def test_an_interrupted_build_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "mlserve_cpu.so"
    half_done = tmp_path / "mlserve_cpu.building"

    def die(folder: Path) -> Path:
        (folder / "new.so").write_bytes(b"half")
        raise KeyboardInterrupt

    def compile_all(folder: Path) -> Path:
        assert list(folder.iterdir()) == []
        (folder / "new.so").write_bytes(b"whole")
        return folder / "new.so"

    monkeypatch.setattr(build, "_compile", die)
    with pytest.raises(KeyboardInterrupt):
        build._build_once(library)
    assert half_done.exists()
    assert not library.exists()
    monkeypatch.setattr(build, "_compile", compile_all)
    build._build_once(library)
    assert library.read_bytes() == b"whole"
    assert not half_done.exists()


def test_sources_and_flags_name_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    key = build._build_key()
    monkeypatch.setattr(build, "compiler_flags", lambda capability: ["-O1"])
    assert build._build_key() != key


THREADS = """
import os, re, torch
from mlserve.kernels.cpu.ops import CpuOps
torch.ones(2000, 2000).sum()  # starts torch's pool
before = len(os.listdir("/proc/self/task"))
ops = CpuOps()
ops.linear(torch.ones(64, 512), ops.pack_linear(torch.ones(4096, 512)))
runtimes = set(re.findall(r"/\\S*lib[gi]?omp\\S*", open("/proc/self/maps").read()))
print(before, len(os.listdir("/proc/self/task")), len(runtimes))
"""


def test_the_native_operations_use_torchs_threads() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", THREADS], env=environment, capture_output=True, text=True, check=True)
    before, after, runtimes = map(int, done.stdout.split())
    assert before >= 2
    assert after == before
    assert runtimes == 1
