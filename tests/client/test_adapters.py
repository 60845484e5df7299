"""Adapters and the cache through the client, over a real registry and a real model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from comparing import cold
from http_server import Served, served
from tiny_adapters import write_adapter

from mlserve import LLM
from mlserve.client import AdapterList, AsyncClient, BlockRun, CacheBlocks, CacheStats, Client
from mlserve.server.auth import Principal, create_key

NAMES = [
    "plain",
    "a/b",
    "/",
    "../up",
    ".",
    "..",
    "two words",
    "100%",
    "%2F",
    "?q=1#top",
    'it\'s "quoted"',
    "été-日本-🦜",
]


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed in range(2):
        write_adapter(root / f"a{seed}", tiny_model_dir, seed)
    return root


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    admin = create_key(path, Principal("ops", is_admin=True))
    return path, {"admin": admin, "user": create_key(path, Principal("someone"))}


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, folder: Path, keys: tuple[Path, Any]) -> Iterator[Served]:
    engine = LLM(str(tiny_model_dir), adapter_dir=str(folder), max_loras=2, block_size=4, num_blocks=256).engine
    with served(engine, str(folder), api_keys=str(keys[0])) as server:
        yield server


@pytest.fixture
def options(server: Served, keys: tuple[Path, dict[str, str]]) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": keys[1]["admin"], "max_retries": 0, "timeout": 30}


@pytest.fixture
def client(options: dict[str, Any]) -> Iterator[Client]:
    with Client(**options) as client:
        yield client


@pytest.fixture
def user(options: dict[str, Any], keys: tuple[Path, dict[str, str]]) -> Iterator[Client]:
    with Client(**options | {"api_key": keys[1]["user"]}) as client:
        yield client


def test_the_life_of_an_adapter(client: Client, folder: Path) -> None:
    loaded = client.adapters.load("mine", str(folder / "a0"), pinned=True)
    assert (loaded.name, loaded.rank, loaded.is_loaded, loaded.is_pinned, loaded.num_leases) == (
        "mine",
        4,
        True,
        True,
        0,
    )
    assert loaded.num_bytes is not None
    assert loaded.num_bytes > 0
    assert client.adapters.get("mine") == loaded
    again = client.adapters.load("mine")  # from its own folder
    assert (again.digest, again.is_pinned) == (loaded.digest, False)
    other = client.adapters.load("mine", str(folder / "a1"))
    assert other.digest != loaded.digest
    listed = client.adapters.list()
    assert isinstance(listed, AdapterList)
    assert other in listed.data
    assert listed.names == ["a0", "a1", "mine"]
    gone = client.adapters.unload("mine")
    assert (gone.name, gone.deleted) == ("mine", True)
    with pytest.raises(openai.NotFoundError, match="no adapter 'mine' was loaded"):
        client.adapters.get("mine")
    with pytest.raises(openai.NotFoundError, match="no adapter has the name 'mine'"):
        client.adapters.unload("mine")


@pytest.mark.parametrize("name", NAMES)
def test_adapters_of_any_name(client: Client, tiny_model_dir: Path, folder: Path, name: str) -> None:
    loaded = client.adapters.load(name, str(folder / "a0"))
    assert loaded.name == name
    assert client.adapters.get(name) == loaded
    assert name in client.adapters.list().names
    assert client.ask("hello", adapter=name, max_tokens=4).model == name
    assert client.adapters.unload(name).name == name
    assert name not in client.adapters.list().names


def test_an_adapter_without_a_name(client: Client, folder: Path) -> None:
    for act in (client.adapters.get, client.adapters.load, client.adapters.unload):
        with pytest.raises(ValueError, match="name is empty"):
            act("")


def test_the_adapter_answers(client: Client, server: Served, tiny_model_dir: Path, folder: Path) -> None:
    answers = {
        name: client.ask("hello", adapter=name, max_tokens=8, extra_body={"logprobs": True}) for name in ("a0", "a1")
    }
    base = client.ask("hello", max_tokens=8)
    assert len({base.text, *(answer.text for answer in answers.values())}) == 3
    ids = (
        server.http(headers={"Authorization": f"Bearer {client.api_key}"})
        .post("/tokenize", json={"messages": [{"role": "user", "content": "hello"}]})
        .json()["tokens"]
    )
    for name, answer in answers.items():
        wanted = cold(tiny_model_dir, ids, adapter=folder / name).outputs[0].text
        assert answer.text == wanted[: len(answer.text)] != ""


def test_what_only_administrators_may(user: Client, folder: Path) -> None:
    assert user.adapters.list().names == ["a0", "a1"]
    assert user.ask("hello", adapter="a0", max_tokens=1).model == "a0"
    assert user.adapters.get("a0").is_loaded
    for act in (
        lambda: user.adapters.load("mine", str(folder / "a0")),
        lambda: user.adapters.unload("a0"),
        user.cache.stats,
        user.cache.blocks,
        user.cache.reset,
    ):
        with pytest.raises(openai.PermissionDeniedError, match="administrator's API key"):
            act()


def test_folders_elsewhere(client: Client, tmp_path: Path) -> None:
    with pytest.raises(openai.PermissionDeniedError, match="outside the folders"):
        client.adapters.load("mine", str(tmp_path))


def test_the_cache(client: Client) -> None:
    assert client.cache.reset().status == "ok"
    empty = client.cache.stats()
    assert isinstance(empty, CacheStats)
    assert (empty.num_blocks, empty.num_free, empty.num_referenced, empty.num_cached) == (256, 256, 0, 0)
    answer = client.ask("hello", adapter="a1", max_tokens=1)
    assert client.cache.stats().num_cached == answer.prompt_tokens // 4
    assert client.ask("hello", adapter="a1", max_tokens=1).cached_tokens > 0
    assert 0 < client.cache.stats().hit_rate < 1
    blocks = client.cache.blocks()
    assert isinstance(blocks, CacheBlocks)
    assert all(isinstance(run, BlockRun) for run in blocks.block_runs)
    assert sum(run.num_blocks for run in blocks.block_runs) == 256
    adapted = [run for run in blocks.block_runs if run.state == "cached"]
    assert sum(run.num_blocks for run in adapted) == answer.prompt_tokens // 4
    assert {blocks.adapters[run.adapter]["name"] for run in adapted if run.adapter is not None} == {"a1"}
    assert blocks.images == []
    client.cache.reset()
    assert client.cache.stats().num_cached == 0


def test_async_adapters_and_cache(options: dict[str, Any], folder: Path) -> None:
    async def main() -> None:
        async with AsyncClient(**options) as client:
            loaded = await client.adapters.load("a/b c", str(folder / "a1"), pinned=True)
            assert loaded.is_pinned
            assert await client.adapters.get("a/b c") == loaded
            assert loaded in (await client.adapters.list()).data
            assert (await client.ask("hello", adapter="a/b c", max_tokens=2)).model == "a/b c"
            assert (await client.adapters.unload("a/b c")).deleted
            assert (await client.cache.stats()).num_cached > 0
            assert sum(run.num_blocks for run in (await client.cache.blocks()).block_runs) == 256
            assert (await client.cache.reset()).status == "ok"
            assert (await client.cache.stats()).num_cached == 0
            assert await client.base_model() == "tiny"

    asyncio.run(main())
