"""The tables of docs/kernels.md, computed: `python tests/bench/kernels_page.py [--write]` prints the page with its
tables as they should be, or writes it. Each table stands between two comments that name it; all else is left alone.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from roofline import (
    A100,
    DEVICES,
    H100,
    H200,
    LLAMA_3_8B,
    Cost,
    Device,
    Part,
    decode_step,
    lora_step,
    prefill_step,
    step_seconds,
)

__all__ = ["PAGE", "TABLES", "updated"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "kernels.md"
RESOURCES = ROOT / "tests" / "kernels" / "triton" / "resources"
TARGETS = {"sm_80": "A100", "sm_90": "H100, H200", "sm_100": "B200"}

BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (1024, 8192, 32768)
PREFILLS = ((2048, 2048), (8192, 8192), (2048, 8192), (2048, 32768))  # tokens of the step, context with them
ADAPTERS = (1, 4, 16, 64)
SHAPE = LLAMA_3_8B
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def updated(page: str) -> str:
    """The page with all of its tables computed anew. Raises `KeyError` for a table that isn't known."""
    return MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", page)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _micros(seconds: float) -> str:
    return _number(seconds * 1e6)


def _millis(seconds: float) -> str:
    return _number(seconds * 1e3)


def devices() -> str:
    header = ("GPU", "data sheet", "memory, GB", "bandwidth, TB/s", "bfloat16, TFLOPS", "FLOPs per byte at the ridge")
    rows = [
        (d.name, d.sheet, f"{d.memory // 10**9}", f"{d.bandwidth / 1e12:.3g}", f"{d.peak / 1e12:.4g}", f"{d.ridge:.0f}")
        for d in DEVICES
    ]
    return _table(header, rows)


def _kernels_at(rows: int) -> list[tuple[str, Cost]]:
    """One call of each kernel of a layer that costs the same at any context, then what the step has once."""
    shape = SHAPE
    found = [(f"linear {name}", shape.linear(rows, size, sum(out))) for name, (size, out) in shape.linears.items()]
    found += [
        ("rms_norm", shape.rms_norm(rows)),
        ("add_rms_norm", shape.add_rms_norm(rows)),
        ("rope", shape.rope(rows)),
        ("kv_write", shape.kv_write(rows)),
        ("rope_kv_write", shape.rope_kv_write(rows)),
        ("gated_activation", shape.gated_activation(rows)),
    ]
    found += [(f"{part.name}, {rows} adapters", part.cost) for part in lora_step(shape, rows, rows)]
    found += [("lm_head", shape.linear(rows, shape.hidden, shape.vocabulary)), ("sampling", shape.sampling(rows))]
    return found


def decode_costs() -> str:
    """MB and MFLOP of each kernel, by batch."""
    columns = [_kernels_at(rows) for rows in BATCHES]
    names = [name.partition(",")[0] for name, _ in columns[0]]
    rows = [
        (name, *(f"{_number(column[i][1].bytes / 1e6)} / {_number(column[i][1].flops / 1e6)}" for column in columns))
        for i, name in enumerate(names)
    ]
    return _table(("MB / MFLOP", *map(str, BATCHES)), rows)


def _decode_floors(device: Device) -> str:
    columns = [_kernels_at(rows) for rows in BATCHES]
    names = [name.partition(",")[0] for name, _ in columns[0]]
    rows = [(name, *(_floor(column[i][1], device) for column in columns)) for i, name in enumerate(names)]
    return _table((f"µs on {device.name}", *map(str, BATCHES)), rows)


def _floor(cost: Cost, device: Device) -> str:
    """Microseconds; in bold where arithmetic is what bounds."""
    text = _micros(cost.seconds(device))
    return text if cost.is_memory_bound(device) else f"**{text}**"


def decode_attention() -> str:
    """By batch and context; what no pool of the GPU could hold beside the weights is left out."""
    rows = []
    for context in CONTEXTS:
        for device in DEVICES:
            cells = []
            for batch in BATCHES:
                cost = SHAPE.attention([1] * batch, [context] * batch)
                cells.append(_micros(cost.seconds(device)) if _fits(batch * context, device) else "–")
            rows.append((f"{context:,}", device.name, *cells))
    return _table(("context", "µs on", *map(str, BATCHES)), rows)


def _fits(tokens: int, device: Device) -> bool:
    return SHAPE.weight_bytes + tokens * SHAPE.layers * SHAPE.kv_bytes <= device.memory


def prefill() -> str:
    """One layer's kernels over a prompt, or over its last chunk."""
    rows = []
    for tokens, context in PREFILLS:
        parts = [*prefill_step(SHAPE, tokens, context), *lora_step(SHAPE, tokens, 1)]
        for name, cost in _merged(parts):
            rows.append(
                (
                    f"{tokens:,} of {context:,}",
                    name,
                    _number(cost.bytes / 1e6),
                    _number(cost.flops / 1e9),
                    *(_floor(cost, device) for device in DEVICES),
                )
            )
    header = ("tokens of context", "one layer", "MB", "GFLOP", *(f"{device.name}, µs" for device in DEVICES))
    return _table(header, rows)


def _merged(parts: Sequence[Part]) -> list[tuple[str, Cost]]:
    """A layer's parts, those of one kind as one."""
    kinds = {
        "linears": {*SHAPE.linears},
        "paged_attention": {"paged_attention"},
        "norms, rope, activation": {"add_rms_norm", "rope_kv_write", "gated_activation"},
        "LoRA, one adapter": {part.name for part in parts if part.name.startswith("lora")},
    }
    found = []
    for kind, names in kinds.items():
        chosen = [(part.cost, -(-part.count // SHAPE.layers)) for part in parts if part.name in names]
        found.append((kind, Cost(sum(c.bytes * n for c, n in chosen), sum(c.flops * n for c, n in chosen))))
    return found


def decode_step_table() -> str:
    """A whole step, and its shares, at a context of 1,024."""
    rows = []
    for device in DEVICES:
        for batch in BATCHES:
            parts = decode_step(SHAPE, batch, CONTEXTS[0])
            total = step_seconds(parts, device)
            linears = sum(part.seconds(device) for part in parts if part.name in {*SHAPE.linears, "lm_head"})
            attention = sum(part.seconds(device) for part in parts if part.name == "paged_attention")
            shares = (linears, attention, total - linears - attention)
            rows.append(
                (
                    device.name,
                    str(batch),
                    _millis(total),
                    *(f"{share / total:.1%}" for share in shares),
                    f"{batch / total:,.0f}",
                )
            )
    return _table(("GPU", "batch", "ms a step", "linears", "attention", "the rest", "tokens/s at most"), rows)


def lora_share() -> str:
    """What LoRA adds to a step of the base model, in floors, at a context of 1,024."""
    rows = []
    for device in DEVICES:
        for count in ADAPTERS:
            cells = []
            for batch in BATCHES:
                base = step_seconds(decode_step(SHAPE, batch, CONTEXTS[0]), device)
                lora = step_seconds(lora_step(SHAPE, batch, count), device)
                cells.append(f"{lora / base:.1%}" if count <= batch else "–")
            rows.append((device.name, str(count), *cells))
    return _table(("GPU", "adapters", *(f"batch {batch}" for batch in BATCHES)), rows)


def resources() -> str:
    """Registers per thread, shared memory per block and spills, as compiled ahead of time."""
    rows = []
    for path in sorted(RESOURCES.glob("*.json")):
        for name, targets in json.loads(path.read_text())["configs"].items():
            cells = [targets[target] for target in TARGETS]
            texts = [f"{cell['registers']} / {cell['shared'] / 1024:.3g} / {cell['spills']}" for cell in cells]
            rows.append((path.stem, name, *texts))
    return _table(("module", "form", *(f"{target} ({gpu})" for target, gpu in TARGETS.items())), rows)


def resources_summary() -> str:
    """The most that any form of a module takes."""
    rows = []
    for path in sorted(RESOURCES.glob("*.json")):
        configs = json.loads(path.read_text())["configs"].values()
        cells = []
        for target in TARGETS:
            most = {key: max(config[target][key] for config in configs) for key in ("registers", "shared", "spills")}
            cells.append(f"{most['registers']} / {most['shared'] / 1024:.3g} / {most['spills']}")
        rows.append((path.stem, str(len(configs)), *cells))
    return _table(("module", "forms", *(f"{target} ({gpu})" for target, gpu in TARGETS.items())), rows)


TABLES: dict[str, Callable[[], str]] = {
    "devices": devices,
    "decode_costs": decode_costs,
    "decode_a100": lambda: _decode_floors(A100),
    "decode_h100": lambda: _decode_floors(H100),
    "decode_h200": lambda: _decode_floors(H200),
    "decode_attention": decode_attention,
    "prefill": prefill,
    "decode_step": decode_step_table,
    "lora_share": lora_share,
    "resources_summary": resources_summary,
    "resources": resources,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the page in place of printing it")
    page = updated(PAGE.read_text())
    if parser.parse_args().write:
        PAGE.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
