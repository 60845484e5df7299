"""The server under load, beside its engine alone under the same load.

Clients stream answers, one after the other, over the base model and four adapters. With --disturb some leave in the
middle, adapters are reloaded, and bad requests are mixed in. At the end no block may be referenced, and the pool must
be whole. Both parts run with one compute thread by default: the other core is for the clients, which on a real machine
are elsewhere.

    python tests/bench/bench_server.py [--clients 64] [--seconds 120] [--disturb] [--threads 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from http_server import served  # noqa: E402

from mlserve.config import EngineConfig  # noqa: E402
from mlserve.engine.async_engine import AsyncEngine  # noqa: E402
from mlserve.engine.build import build_engine  # noqa: E402
from mlserve.engine.engine import Engine  # noqa: E402
from mlserve.request import RequestOptions, SamplingParams  # noqa: E402
from mlserve.server.auth import Principal, create_key  # noqa: E402

ADAPTERS = (None, "butler", "json", "pirate", "rhyme")
BASE = "tiny"
USAGE = re.compile(rb'"completion_tokens":([0-9]+)')
LEAVE = 0.1  # share of streams that are left in the middle, with --disturb
BAD = 0.05  # and of requests that must be refused
BAD_BODIES: tuple[dict[str, Any], ...] = (
    {"model": "nobody"},
    {"temperature": -1},
    {"prompt": []},
    {"n": 1_000_000},
    {"unknown_field": 1},
    {"prompt": [10**9]},
)


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    max_tokens: int
    adapter: str | None
    leaves_after: int | None  # chunks


@dataclass
class Seen:
    """What the clients saw."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)


def jobs(client: int, disturb: bool) -> Any:
    """The endless list of one client: the same in every run."""
    rng = random.Random(client)
    while True:
        length = rng.choice((16, 32, 64, 128))
        prompt = [rng.randrange(1000, 40000) for _ in range(length)]
        leaves = rng.randrange(1, 8) if disturb and rng.random() < LEAVE else None
        yield Job(prompt, rng.choice((16, 32, 64)), rng.choice(ADAPTERS), leaves)


async def run_client(
    number: int, disturb: bool, end: float, seen: Seen, ask: Callable[[int, Job], AsyncIterator[int]]
) -> None:
    for job in jobs(number, disturb):
        if time.monotonic() >= end:
            return
        begin = last = time.monotonic()
        is_first = True
        async with aclosing(ask(number, job)) as chunks:
            count = 0
            async for tokens in chunks:
                now = time.monotonic()
                if now <= end:
                    seen.tokens += tokens
                if is_first:
                    seen.first.append(now - begin)
                else:
                    seen.between.append(now - last)
                is_first, last = False, now
                count += 1
                if count == job.leaves_after:
                    break
        seen.outcomes["left" if count == job.leaves_after else "answered"] += 1


async def in_process(engine: AsyncEngine, options: argparse.Namespace) -> Seen:
    seen, ids = Seen(), iter(range(10**9))

    async def ask(_: int, job: Job) -> AsyncIterator[int]:
        params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)
        stream = engine.stream(f"r{next(ids)}", job.prompt, params, RequestOptions(adapter=job.adapter))
        async with aclosing(stream):
            async for output in stream:
                yield len(output.token_ids)

    end = time.monotonic() + options.seconds
    await asyncio.gather(*(run_client(i, options.disturb, end, seen, ask) for i in range(options.clients)))
    return seen


async def over_http(url: str, options: argparse.Namespace, key: str) -> Seen:
    seen = Seen()
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600, headers=headers) as http:

        async def ask(_: int, job: Job) -> AsyncIterator[int]:
            body = {"model": job.adapter or BASE, "prompt": job.prompt, "max_tokens": job.max_tokens}
            body |= {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
            counted = 0
            async with aclosing(_post(url, "/v1/completions", body, key)) as pieces:
                async for data in pieces:
                    assert b'"error"' not in data, data
                    # An event is a token, unless a token has no text of its own; the last one says how many there were.
                    total = USAGE.search(data)
                    events = data.count(b"data: {") if total is None else int(total[1]) - counted
                    counted += events
                    if events:
                        yield events

        end = time.monotonic() + options.seconds
        tasks: list[Awaitable[None]] = [run_client(i, options.disturb, end, seen, ask) for i in range(options.clients)]
        if options.disturb:
            tasks += [_reload(http, end, seen), _send_bad(http, end, seen)]
        await asyncio.gather(*tasks)
    return seen


async def _post(url: str, path: str, body: dict[str, Any], key: str) -> AsyncIterator[bytes]:
    """What a server sends, as it comes. An HTTP library would take several times as long for each event as the server
    does, on cores that the server needs."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        status = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in status.split(b"\r\n")[0], status + await reader.read()
        while piece := await reader.read(65536):
            yield piece
    finally:
        writer.close()


async def _reload(http: httpx.AsyncClient, end: float, seen: Seen) -> None:
    """Reload, or unload and load again, an adapter every other second."""
    rng = random.Random(1)
    while time.monotonic() < end:
        name = rng.choice(ADAPTERS[1:])
        response = await http.put(f"/v1/adapters/{name}", json={})
        assert response.status_code == 200, response.text
        seen.outcomes["reloaded"] += 1
        await asyncio.sleep(2)


async def _send_bad(http: httpx.AsyncClient, end: float, seen: Seen) -> None:
    rng = random.Random(2)
    while time.monotonic() < end:
        body = {"model": BASE, "prompt": [1, 2, 3], "max_tokens": 4, **rng.choice(BAD_BODIES)}
        response = await http.post("/v1/completions", json=body)
        assert 400 <= response.status_code < 500, response.text
        seen.outcomes["refused"] += 1
        await asyncio.sleep(0.2)


def _client_process(url: str, options: argparse.Namespace, key: str, results: Any) -> None:
    seen = asyncio.run(over_http(url, options, key))
    results.put((seen.first, seen.between, seen.tokens, dict(seen.outcomes)))


def memory_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel doesn't say how much memory is in use")


def report(name: str, seen: Seen, seconds: float) -> None:
    def at(values: list[float], share: float) -> float:
        return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else float("nan")

    print(
        f"{name}: {seen.tokens / seconds:.1f} tok/s; first token p50 {at(seen.first, 0.5):.2f} s, p99 "
        f"{at(seen.first, 0.99):.2f} s; between tokens p50 {1e3 * at(seen.between, 0.5):.0f} ms, p99 "
        f"{1e3 * at(seen.between, 0.99):.0f} ms; {dict(seen.outcomes)}",
        flush=True,
    )


def with_server(engine: Engine, options: argparse.Namespace) -> Seen:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        key = create_key(keys, Principal("bench", is_admin=True, shares_cache=True))
        adapter_dir = str(ROOT / "examples" / "adapters")
        with served(engine, adapter_dir, api_keys=str(keys)) as server:
            process = context.Process(target=_client_process, args=(server.url, options, key, results))
            process.start()
            time.sleep(min(20.0, options.seconds / 3))
            before = memory_mib()
            first, between, tokens, outcomes = results.get(timeout=options.seconds + 300)
            process.join()
            server.wait_until_idle(30)
            print(f"memory {before:.0f} MiB after the beginning, {memory_mib():.0f} MiB at the end", flush=True)
    engine.cache.check()
    return Seen(first, between, tokens, Counter(outcomes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--disturb", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=1, help="runs of both kinds, in turn")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = build_engine(EngineConfig.from_options(adapter_dir=str(ROOT / "examples" / "adapters")))
    ratios = []
    for _ in range(options.pairs):
        engine.reset_prefix_cache()
        with AsyncEngine(engine) as running:
            alone = asyncio.run(in_process(running, options))
        report("engine alone", alone, options.seconds)
        engine.reset_prefix_cache()
        over = with_server(engine, options)
        report("over HTTP   ", over, options.seconds)
        ratios.append(over.tokens / alone.tokens)
    print(json.dumps({"http_over_engine": round(statistics.median(ratios), 3), "runs": [round(r, 3) for r in ratios]}))


if __name__ == "__main__":
    main()
