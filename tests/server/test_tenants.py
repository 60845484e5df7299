"""Tenants and the cache: nobody hits what another asked."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import make_engine
from fakes import ContextRunner
from http_answers import PROMPT
from http_server import MODEL, Served, served
from tenants import Keys

from mlserve.engine.tokenizer import Tokenizer
from mlserve.server.auth import ANYONE, Principal
from mlserve.server.tenants import tenant_salt

TEXT = "a question that fills more than a block or two"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    names = ("a", "b", "shares1", "shares2")
    holders = [Principal(name, shares_cache=name.startswith("shares")) for name in names]
    return Keys(tmp_path_factory.mktemp("keys"), *holders)


@pytest.fixture(scope="module")
def running(tokenizer: Tokenizer, keys: Keys) -> Iterator[Served]:
    engine = make_engine(ContextRunner(128, 4), tokenizer, num_blocks=2048, vocab_size=tokenizer.vocab_size)
    with served(engine, api_keys=str(keys.path)) as server:
        yield server


@pytest.fixture
def server(running: Served) -> Served:
    """With nothing cached."""
    running.engine.reset_prefix_cache()
    return running


def cached(server: Served, keys: Keys, tenant: str, salt: str | None = None, *, chat: bool = False) -> int:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "cache_salt": salt}
    body |= {"messages": [{"role": "user", "content": TEXT}]} if chat else {"prompt": TEXT}
    response = keys.http(server, tenant).post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    tokens: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


@pytest.mark.parametrize("chat", [False, True])
def test_a_tenant_hits_what_it_asked_and_nobody_else_does(server: Served, keys: Keys, chat: bool) -> None:
    assert cached(server, keys, "a", chat=chat) == 0
    assert cached(server, keys, "b", chat=chat) == 0
    assert cached(server, keys, "shares1", chat=chat) == 0
    assert cached(server, keys, "a", chat=chat) >= len(TEXT) - 4
    assert cached(server, keys, "b", chat=chat) >= len(TEXT) - 4
    assert cached(server, keys, "shares2", chat=chat) >= len(TEXT) - 4  # shares1 asked it


def test_salts_of_tenants_cannot_be_guessed_into(server: Served, keys: Keys) -> None:
    assert cached(server, keys, "a") == 0
    assert cached(server, keys, "a", "x") == 0
    guesses = [
        "a", "x", "ax", "[a, null]", json.dumps(["a", None]), json.dumps(["a", "x"]), '"a", null', '", "x',
        '", null], ["a', "null", "", "a\x00x",
    ]  # fmt: skip
    for tenant in ("b", "shares1"):
        for guess in guesses:
            assert cached(server, keys, tenant, guess) == 0, (tenant, guess)
    assert cached(server, keys, "a", "x") >= len(TEXT) - 4


def test_a_salt_parts_a_tenants_own_requests(server: Served, keys: Keys) -> None:
    assert [cached(server, keys, "a", salt) > 0 for salt in (None, "x", "", None, "x", "")] == [False] * 3 + [True] * 3


def test_no_two_pairs_of_tenant_and_salt_have_the_same() -> None:
    tenants = ["a", "b", "null", "", 'a", "x', "a\\", "[", "é"]
    salts = [None, "", "null", "a", "x", 'x"]', '", "', "\\", "é"]
    principals = [ANYONE, *(Principal(name) for name in tenants if name)]
    made = [tenant_salt(*pair) for pair in itertools.product(principals, salts)]
    assert len(set(made)) == len(made)
    assert tenant_salt(ANYONE, None) is None
    assert tenant_salt(Principal("a", shares_cache=True), None) is None
    assert tenant_salt(Principal("a", shares_cache=True), "x") == tenant_salt(ANYONE, "x")


def test_without_keys_everybody_shares(tokenizer: Tokenizer) -> None:
    engine = make_engine(ContextRunner(128, 4), tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)
    with served(engine) as server:
        body = {"prompt": PROMPT, "max_tokens": 1}
        usages = [server.http().post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
        assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 12]


def test_figures_over_all_tenants_are_for_administrators(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = Keys(tmp_path, Principal("a"), Principal("owner", is_admin=True))
    engine = make_engine(ContextRunner(128, 4), tokenizer, num_blocks=64, vocab_size=tokenizer.vocab_size)
    with served(engine, api_keys=str(keys.path)) as server:
        for path in ("/metrics", "/v1/cache", "/v1/cache/blocks"):
            assert keys.http(server, "a").get(path).status_code == 403
            assert keys.http(server, "owner").get(path).status_code == 200
