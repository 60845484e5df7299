"""The repository as files: which modules there are and what they import."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]

# Folder at the top -> the package that it is installed as.
PACKAGES = {
    "mlserve": "mlserve",
    "adapters": "mlserve.adapters",
    "vision": "mlserve.vision",
    "kernels": "mlserve.kernels",
}
_NOT_OURS = {"build", "dist", "__pycache__"}


def module_files() -> dict[str, Path]:
    """Every module of the installed package, by its dotted name."""
    found = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            inner = inner[:-1] if inner[-1] == "__init__" else inner
            found[".".join((package, *inner))] = path
    return found


def tree_files() -> Iterator[Path]:
    """Every file that belongs to the repository: no hidden or built folders, but for `.ci`."""
    for entry in sorted(ROOT.iterdir()):
        if entry.is_file():
            yield entry
        elif entry.name == ".ci" or not (entry.name.startswith(".") or entry.suffix == ".egg-info"):
            yield from (path for path in entry.rglob("*") if path.is_file() and not _NOT_OURS & {*path.parts})


def imports(path: Path) -> set[str]:
    """Dotted names of all that a file imports, anywhere in it. `from a import b` gives `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def run_python(code: str, *options: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, *options, "-c", code], cwd=cwd, capture_output=True, text=True, check=False, timeout=120
    )


def load_example(name: str) -> ModuleType:
    """A script of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
