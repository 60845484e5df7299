"""Builds the native CPU operations once per machine and loads them.

The library is kept in torch's extension folder (`TORCH_EXTENSIONS_DIR`, by default in the user's cache) under a name
that holds a hash of all that it was built from: sources, compiler flags, torch and Python.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock

from mlserve.errors import KernelBuildError

__all__ = ["compiler_flags", "load_extension"]

logger = logging.getLogger(__name__)

MODULE_NAME = "mlserve_cpu"


def load_extension() -> ModuleType:
    """The native operations, built first if this machine hasn't built them yet: with AVX-512 where torch uses it.

    Raises KernelBuildError if the processor lacks AVX2, or there is no compiler, or it fails.
    """
    _check_machine()
    library = _build_root() / f"{MODULE_NAME}-{_build_key()}.so"
    loaded = sys.modules.get(MODULE_NAME)
    if loaded is not None and loaded.__file__ == str(library):
        return loaded
    if not library.exists():
        try:
            _build_once(library)
        except OSError as error:
            raise KernelBuildError(
                f"the native CPU kernels can't be kept in {library.parent} ({error}): set TORCH_EXTENSIONS_DIR to a "
                "folder that you may write to, or use kernels='reference'"
            ) from error
    return _import(library)


def compiler_flags(capability: str) -> list[str]:
    """For a processor of this capability, as torch names it: "AVX512", else AVX2 with FMA and F16C.

    Not -march=native, as a home folder may be shared by different machines.
    """
    level = "x86-64-v4" if capability.startswith("AVX512") else "x86-64-v3"
    return ["-O3", "-std=c++20", f"-march={level}", "-fopenmp", "-fvisibility=hidden"]


def _flags() -> list[str]:
    return compiler_flags(torch.backends.cpu.get_cpu_capability())


def _check_machine() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    if sys.platform != "linux" or not capability.startswith("AVX"):
        raise KernelBuildError(
            f"the native CPU kernels need Linux on x86-64 with AVX2, this is {sys.platform} with {capability}: "
            "use kernels='reference'"
        )


def _sources() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*.cpp"))


def _build_root() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions").expanduser()


def _build_key() -> str:
    digest = hashlib.sha256()
    for path in [*_sources(), *sorted(Path(__file__).parent.glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((_flags(), torch.__version__, torch.version.cuda, sys.version)).encode())
    return digest.hexdigest()[:16]


def _build_once(library: Path) -> None:
    """Build under a lock that the system releases if its holder dies, and move the finished library into place.

    So a second process waits and finds the library, and what an interrupted build leaves behind is never loaded.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{library}.lock"):
        if library.exists():
            return
        folder = library.with_suffix(".building")
        _check_compiler()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        logger.warning("building the native CPU kernels, once, in about half a minute: %s", library)
        os.replace(_compile(folder), library)
        shutil.rmtree(folder)


def _check_compiler() -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise KernelBuildError(
            f"the native CPU kernels need a C++ compiler, and there is no {compiler!r}: install g++ or clang "
            "(Debian: apt install g++), or name one in CXX, or use kernels='reference'"
        )


def _compile(folder: Path) -> Path:
    with _errors_only("torch.utils.cpp_extension"):  # it warns of a CUDA that isn't needed here
        from torch.utils.cpp_extension import JIT_EXTENSION_VERSIONER, load  # late, as it takes seconds
    # A second build in one process, after one that failed, would get another name than it is imported by.
    JIT_EXTENSION_VERSIONER.entries.pop(MODULE_NAME, None)
    try:
        with _ninja_on_path():
            load(
                name=MODULE_NAME,
                sources=[str(path) for path in _sources()],
                extra_cflags=_flags(),
                extra_ldflags=_openmp_flags(),
                build_directory=str(folder),
                is_python_module=False,
            )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise KernelBuildError(
            f"the compiler can't build the native CPU kernels: read its message, or use kernels='reference'\n{error}"
        ) from error
    return folder / f"{MODULE_NAME}.so"


def _openmp_flags() -> list[str]:
    """Link the OpenMP runtime that torch brings along: a second one would start a second pool of threads."""
    torch_folder = Path(torch.__file__).parent
    for folder in (torch_folder / "lib", torch_folder.parent / "torch.libs"):
        for runtime in sorted(folder.glob("libgomp*.so*")):
            return [str(runtime)]
    return ["-fopenmp"]  # a torch built against the system's runtime


@contextlib.contextmanager
def _errors_only(logger_name: str) -> Iterator[None]:
    noisy = logging.getLogger(logger_name)
    before = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        yield
    finally:
        noisy.setLevel(before)


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Torch looks for ninja on the PATH, where that of a virtual environment which isn't activated is missing."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([before, str(Path(sys.executable).parent)])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _import(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[MODULE_NAME] = module
    return module
