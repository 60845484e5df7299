"""Compiles the Triton kernels ahead of time, without a GPU, and reads what they take from the binaries.

    python -P tests/support/triton_aot.py                            # all, and rewrites tests/kernels/triton/resources/
    python -P tests/support/triton_aot.py --module lora_shrink       # one module's
    python -P tests/support/triton_aot.py --module lora_shrink --target 90 --print

It must be a process without TRITON_INTERPRET: tests call `compiled`, which starts one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

__all__ = ["RESOURCES", "TARGETS", "compiled", "modules"]

TARGETS = (80, 90, 100)  # A100, H100 and H200, B200
RESOURCES = Path(__file__).resolve().parents[1] / "kernels" / "triton" / "resources"

Usage = dict[str, int]  # registers per thread, spills: bytes per thread, shared: bytes per block


def compiled(module: str, target: int) -> dict[str, Usage]:
    """What each configuration of a module takes on sm_`target`, by the configuration's name."""
    command = [sys.executable, "-P", __file__, "--module", module, "--target", str(target), "--print", "--jobs", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    usages: dict[str, dict[str, Usage]] = json.loads(result.stdout)[module]
    return {name: usage[f"sm_{target}"] for name, usage in usages.items()}


def modules() -> list[str]:
    """The modules of `mlserve.kernels.triton` that have configurations."""
    import pkgutil

    from mlserve.kernels import triton as package

    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    return [name for name in names if hasattr(_module(name), "configs")]


def _module(name: str) -> Any:
    return importlib.import_module(f"mlserve.kernels.triton.{name}")


def _usage(module: str, index: int, target: int) -> Usage:
    """Compile one configuration."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    config = list(_module(module).configs())[index]
    attributes = {path: [["tt.divisibility", 16]] for path in config.aligned}
    source = ASTSource(config.kernel, dict(config.signature), dict(config.constants), attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return {**_read_cubin(kernel.asm["cubin"]), "shared": kernel.metadata.shared}


def _read_cubin(cubin: bytes) -> Usage:
    """Triton's kernels have no stack of their own: what is on it was spilt from registers."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "spills": found["STACK"] + found["LOCAL"]}


def compile_all(names: Sequence[str], targets: Sequence[int], jobs: int) -> dict[str, dict[str, dict[str, Usage]]]:
    """module -> configuration -> target -> usage"""
    tasks = []
    for module in names:
        configs = [config.name for config in _module(module).configs()]
        assert len(configs) == len(set(configs)), f"{module}: two configurations have one name"
        tasks += [(module, i, name, target) for i, name in enumerate(configs) for target in targets]
    usages: dict[str, dict[str, dict[str, Usage]]] = {module: {} for module in names}
    modules_, indices, _, targets_ = zip(*tasks, strict=True)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) if jobs > 1 else nullcontext() as pool:
        results = (pool.map if pool else map)(_usage, modules_, indices, targets_)
        for (module, _, name, target), usage in zip(tasks, results, strict=True):
            usages[module].setdefault(name, {})[f"sm_{target}"] = usage
    return usages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", action="append", help="of mlserve.kernels.triton; all if not given")
    parser.add_argument("--target", action="append", type=int, choices=TARGETS, help="needs --print")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--print", action="store_true", help="print, in place of writing the committed tables")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET is set, so that nothing is compiled: unset it")
    if options.target and not options.print:
        parser.error("a committed table has all targets: add --print")

    begin = time.perf_counter()
    usages = compile_all(options.module or modules(), options.target or TARGETS, options.jobs)
    if options.print:
        print(json.dumps(usages, indent=1))
        return
    import triton

    RESOURCES.mkdir(exist_ok=True)
    for module, configs in usages.items():
        table = {"triton": triton.__version__, "configs": configs}
        (RESOURCES / f"{module}.json").write_text(_to_text(table))
    print(f"compiled in {time.perf_counter() - begin:.0f} s with {options.jobs} processes")


def _to_text(table: dict[str, Any]) -> str:
    """JSON with a line for each target."""
    text = json.dumps(table, indent=1)
    return re.sub(r"\{\s*(\"registers\"[^}]*?)\s*\}", lambda m: "{" + " ".join(m[1].split()) + "}", text) + "\n"


if __name__ == "__main__":
    main()
