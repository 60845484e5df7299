"""Adapters behind many callers: read in the background, switched under load, their failures told to who asked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comparing import GREEDY, assert_eq, cold
from streaming import completed, live_state
from tiny_adapters import write_adapter

from mlserve import LLM, AdapterNotFoundError, RequestOptions, RequestOutput
from mlserve.engine.async_engine import AsyncEngine
from mlserve.engine.engine import Engine
from mlserve.request import FinishReason

PROMPT = list(range(1, 13))


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed in range(4):
        write_adapter(root / f"a{seed}", tiny_model_dir, seed)
    (root / "broken").mkdir()
    return root


@pytest.fixture
def engine(tiny_model_dir: Path, folder: Path) -> Iterator[Engine]:
    """Its state is looked at when its thread has ended."""
    inner = LLM(str(tiny_model_dir), adapter_dir=str(folder), max_loras=2, block_size=4, num_blocks=256).engine
    yield inner
    assert not any(live_state(inner).values()), live_state(inner)
    assert all(info.num_leases == 0 for info in inner.adapters.list())
    inner.cache.check()
    inner.scheduler.slots.check()


async def ask(engine: AsyncEngine, name: str, adapter: str | None, prompt: list[int] = PROMPT) -> RequestOutput:
    outputs = [o async for o in engine.stream(name, prompt, GREEDY, RequestOptions(adapter=adapter))]
    return completed(outputs)


def test_many_callers_with_adapters_that_are_read_meanwhile(engine: Engine, tiny_model_dir: Path, folder: Path) -> None:
    names = [None, "a0", "a1", "a2", "a3"]

    async def main() -> list[RequestOutput]:
        with AsyncEngine(engine) as running:
            return await asyncio.gather(*(ask(running, f"r{i}", names[i % 5]) for i in range(20)))

    for i, output in enumerate(asyncio.run(main())):
        name = names[i % 5]
        assert_eq(output, cold(tiny_model_dir, PROMPT, adapter=None if name is None else folder / name))


def test_failures_reach_who_asked(engine: Engine) -> None:
    async def main() -> tuple[RequestOutput, RequestOutput]:
        with AsyncEngine(engine) as running:
            with pytest.raises(AdapterNotFoundError, match="nobody"):
                await ask(running, "r", "nobody")
            return await asyncio.gather(ask(running, "broken", "broken"), ask(running, "fine", "a0"))

    broken, fine = asyncio.run(main())
    assert broken.outputs[0].finish_reason is FinishReason.ERROR
    assert broken.error is not None
    assert "broken" in broken.error
    assert fine.error is None


def test_reloading_and_unloading_under_load(engine: Engine, tiny_model_dir: Path, folder: Path) -> None:
    """Every answer is that of a content that its name had while the request was on its way."""
    contents = [folder / "a0", folder / "a1"]
    allowed = [cold(tiny_model_dir, PROMPT, adapter=content).outputs[0].token_ids for content in contents]
    engine.adapters.load("x", contents[0])
    rng = random.Random(0)

    async def churn() -> None:
        for turn in range(12):
            await asyncio.to_thread(engine.adapters.load, "x", contents[turn % 2])
            if rng.random() < 0.3:
                engine.adapters.unload("x")
                engine.adapters.register("x", contents[turn % 2])
            await asyncio.sleep(0.002)

    async def caller(running: AsyncEngine, number: int) -> list[Any]:
        found = []
        for turn in range(6):
            try:
                found.append((await ask(running, f"{number}.{turn}", "x")).outputs[0].token_ids)
            except AdapterNotFoundError:
                found.append(None)  # it asked between an unload and what came after
        return found

    async def main() -> list[list[Any]]:
        with AsyncEngine(engine) as running:
            *answers, _ = await asyncio.gather(*(caller(running, i) for i in range(5)), churn())
            return answers

    answers = [answer for found in asyncio.run(main()) for answer in found if answer is not None]
    assert len(answers) >= 25
    assert all(answer in allowed for answer in answers)


def test_leaving_while_the_adapter_is_read(engine: Engine) -> None:
    async def main() -> None:
        with AsyncEngine(engine) as running:
            stream = running.stream("r", PROMPT, GREEDY, RequestOptions(adapter="a3"))
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert (await ask(running, "next", "a3")).error is None

    asyncio.run(main())
