"""Forms of attention that only Hopper and later GPUs run, compiled ahead of time: no register is spilt."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tree import run_python

SHARED_LIMIT = 227 * 1024  # bytes per block: CUDA's programming guide
SUPPORT = Path(__file__).resolve().parents[2] / "support"


@pytest.mark.slow
@pytest.mark.parametrize("target", [90, 100])
def test_no_spills(target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.fspath(SUPPORT))
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
    usages = json.loads(result.stdout)
    assert "prefill-D128-fp8" in usages
    for name, usage in usages.items():
        assert usage["spills"] == 0, name
        assert usage["shared"] <= SHARED_LIMIT, name
