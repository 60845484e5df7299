"""Forms of attention that only Hopper and later GPUs run, compiled ahead of time: no register is spilt, and none takes
more than what is committed in hopper.json. `python -P tests/kernels/triton/test_attention_hopper.py` rewrites that."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import triton
from tree import run_python

SHARED_LIMIT = 227 * 1024  # bytes per block: CUDA's programming guide
SUPPORT = Path(__file__).resolve().parents[2] / "support"


TABLE = Path(__file__).parent / "hopper.json"
TARGETS = (90, 100)


def compiled(target: int) -> dict[str, dict[str, int]]:
    """What each of the forms takes on sm_`target`."""
    code = f"""
import json
import triton_aot
from mlserve.kernels.triton import attention

attention.configs = attention.hopper_configs
names = [config.name for config in attention.configs()]
print(json.dumps({{name: triton_aot._usage("attention", i, {target}) for i, name in enumerate(names)}}))
"""
    result = run_python(code, "-P")
    assert result.returncode == 0, result.stderr
    usages: dict[str, dict[str, int]] = json.loads(result.stdout)
    return usages


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_no_spills_and_no_more_registers(target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.fspath(SUPPORT))
    committed = json.loads(TABLE.read_text())
    usages = compiled(target)
    assert list(usages) == list(committed["configs"][f"sm_{target}"])
    assert "prefill-D128-fp8" in usages
    for name, usage in usages.items():
        assert usage["spills"] == 0, name
        assert usage["shared"] <= SHARED_LIMIT, name
        if triton.__version__ == committed["triton"]:  # another version's compiler allocates otherwise
            assert usage["registers"] <= committed["configs"][f"sm_{target}"][name]["registers"], name


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.fspath(SUPPORT)
    table = {"triton": triton.__version__, "configs": {f"sm_{target}": compiled(target) for target in TARGETS}}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
