"""Every configuration that is used, compiled ahead of time for three GPUs: no register is spilt, and none takes more
than what is committed. `python -P tests/support/triton_aot.py` rewrites the tables."""

from __future__ import annotations

import json
from typing import Any

import pytest
import triton
from triton_aot import RESOURCES, TARGETS, compiled, modules

SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes per block: CUDA's programming guide


def table(module: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESOURCES / f"{module}.json").read_text())
    return loaded


def test_each_module_has_a_table() -> None:
    assert sorted(path.stem for path in RESOURCES.glob("*.json")) == modules()


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("module", modules())
def test_no_spills_and_no_more_registers(module: str, target: int) -> None:
    committed = table(module)
    usages = compiled(module, target)
    assert list(usages) == list(committed["configs"])
    for name, usage in usages.items():
        assert usage["spills"] == 0, name
        assert usage["shared"] <= SHARED_LIMITS[target], name
        if triton.__version__ == committed["triton"]:  # another version's compiler allocates otherwise
            assert usage["registers"] <= committed["configs"][name][f"sm_{target}"]["registers"], name
