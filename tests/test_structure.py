"""How the tree is built: who imports whom, what is packaged, and what tests run under."""

from __future__ import annotations

import importlib
import os
import tomllib
from typing import Any

import pytest
import torch
from tree import PACKAGES, ROOT, imports, module_files, run_python, tree_files

# Which other parts each part may import. `errors`, `config`, `constraint` and `request` are plain data that every part
# above the kernels may use; an option of `config` may be an object of a part that it names for type checkers.
_BELOW_ENGINE = {"model", "cache", "adapters", "vision", "kernels"}
_TOP = {"llm", "cli", "terminal", "inspection", "server", "client"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "constraint": {"errors"},
    "request": {"constraint", "errors"},
    "config": {"errors", "cache", "engine", "vision"},
    "kernels": {"errors"},
    "adapters": {"kernels"},
    "vision": {"kernels"},
    "cache": set(),
    "model": {"adapters", "vision", "kernels"},
    "engine": _BELOW_ENGINE,
    **{part: _TOP | _BELOW_ENGINE | {"engine"} for part in _TOP},
}
PLAIN = {"errors", "config", "constraint", "request"}
FREE_OF_TORCH = ("mlserve", "mlserve.cache", "mlserve.engine.scheduler", "mlserve.engine.queues", "mlserve.model.plan")

MAX_LINES = 350
LONGER_FILES: set[str] = set()

MODULES = module_files()


def part_of(module: str) -> str:
    """`mlserve.cache.marks` -> `cache`; `mlserve` itself -> ``."""
    return (*module.split("."), "")[1]


@pytest.mark.parametrize("module", [name for name in MODULES if name != "mlserve"])
def test_imports_point_down(module: str) -> None:
    part = part_of(module)
    allowed = MAY_IMPORT[part] | (PLAIN if part not in PLAIN | {"kernels"} else set())
    used = {part_of(name) for name in imports(MODULES[module]) if name.split(".")[0] == "mlserve"}
    above = used - allowed - {part, "__version__"}
    assert not above, f"{module} must not import {sorted(above)}"


def test_parts_are_never_imported_by_their_folder_names() -> None:
    for path in tree_files():
        if path.suffix == ".py":
            tops = {name.split(".")[0] for name in imports(path)}
            assert not tops & ({*PACKAGES} - {"mlserve"}), path


@pytest.mark.parametrize("module", FREE_OF_TORCH)
def test_no_torch_is_imported(module: str) -> None:
    names = [name for name in MODULES if name == module or (module == "mlserve.cache" and name.startswith(module))]
    heavy = ("torch", "transformers")
    code = f"import sys, {', '.join(names)}; print([name for name in {heavy} if name in sys.modules])"
    result = run_python(code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.parametrize("folder", [folder for folder in PACKAGES if folder != "mlserve"])
def test_import_by_folder_name_fails_clearly(folder: str) -> None:
    result = run_python(f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {folder}")
    assert result.returncode == 1
    assert f"ImportError: '{folder}' is mlserve's own mlserve.{folder}" in result.stderr


def test_packages_are_the_folders_with_an_init() -> None:
    listed = _setuptools()["packages"]
    found = [name for name, path in MODULES.items() if path.name == "__init__.py"]
    assert sorted(listed) == sorted(found)


def test_every_module_is_in_a_package() -> None:
    """A folder without `__init__.py` would be left out of the wheel."""
    for path in MODULES.values():
        assert (path.parent / "__init__.py").exists(), path


def test_native_sources_are_packaged() -> None:
    patterns = _setuptools()["package-data"]
    packages = {path.parent: name for name, path in MODULES.items() if path.name == "__init__.py"}
    for folder in PACKAGES:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".cpp", ".h", ".cu", ".typed"}:
                globs = patterns[packages[path.parent]]
                assert any(path.match(glob) for glob in globs), path


@pytest.mark.parametrize("module", MODULES)
def test_all_names_what_exists(module: str) -> None:
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", [])
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(loaded, name)] == []


def test_files_are_short() -> None:
    long = set()
    for folder in PACKAGES:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".cpp", ".h", ".cu"} and len(path.read_text().splitlines()) > MAX_LINES:
                long.add(str(path.relative_to(ROOT)))
    assert long == LONGER_FILES


def test_stubs_for_type_checkers_point_at_the_parts() -> None:
    for folder in PACKAGES:
        if folder != "mlserve":
            link = ROOT / ".typings" / "mlserve" / folder
            assert link.is_symlink()
            assert link.resolve() == ROOT / folder
    assert not (ROOT / ".typings" / "mlserve" / "__init__.py").exists()


def test_scratch_memory_is_poisoned() -> None:
    source = torch.zeros(3)
    for scratch in (torch.empty(3), torch.empty_like(source), source.new_empty(3), torch.empty_strided((3,), (1,))):
        assert scratch.isnan().all()


def test_hubs_are_out_of_reach() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def _setuptools() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
