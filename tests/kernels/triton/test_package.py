"""The package as a whole."""

from __future__ import annotations

from tree import run_python


def test_a_cpu_needs_no_triton() -> None:
    code = """
import sys, torch, mlserve, mlserve.llm
from mlserve.kernels.dispatch import select
select(torch.device("cpu"), "reference")
print([name for name in sys.modules if name.startswith(("triton", "mlserve.kernels.triton"))])
"""
    result = run_python(code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
