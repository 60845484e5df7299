"""Adapters over HTTP, real ones of the tiny model: who may change them, from where, and what that does to requests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from adapter_files import changed_copy
from http_answers import PROMPT, error_of, joined
from http_server import MODEL, Served, served
from tenants import Keys
from tiny_adapters import write_adapter

from mlserve import LLM
from mlserve.server.auth import Principal

GREEDY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def made(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders one and two with adapters, which tests copy."""
    folder = tmp_path_factory.mktemp("made")
    for seed, name in enumerate(("one", "two"), start=1):
        write_adapter(folder / name, tiny_model_dir, seed)
    return folder


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """Where adapters may be loaded from."""
    shutil.copytree(made, tmp_path / "root")
    return tmp_path / "root"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path, Principal("owner", is_admin=True), Principal("a"))


@pytest.fixture
def server(tiny_model_dir: Path, root: Path, keys: Keys) -> Iterator[Served]:
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=256, max_loras=2)
    roots = f"{root}, {root.parent / 'missing'}"
    with served(llm.engine, api_keys=str(keys.path), adapter_roots=roots) as server:
        yield server
    assert all(info.num_leases == 0 for info in llm.engine.adapters.list())


@pytest.fixture
def admin(server: Served, keys: Keys) -> httpx.Client:
    return keys.http(server, "owner")


def text_of(admin: httpx.Client, model: str) -> str:
    response = admin.post("/v1/completions", json={**GREEDY, "model": model})
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def names(admin: httpx.Client) -> list[str]:
    return [model["id"] for model in admin.get("/v1/models").json()["data"]]


def test_load_reload_and_unload(server: Served, admin: httpx.Client, root: Path) -> None:
    base = text_of(admin, MODEL)
    response = admin.put("/v1/adapters/fr", json={"path": str(root / "one")})
    assert response.status_code == 200
    shown = response.json()
    assert (shown["name"], shown["rank"], shown["is_loaded"], shown["is_pinned"]) == ("fr", 4, True, False)
    assert "path" not in shown
    assert str(root) not in response.text
    assert names(admin) == [MODEL, "fr"]
    one = text_of(admin, "fr")
    assert one != base
    assert text_of(admin, MODEL) == base
    cached = admin.post("/v1/completions", json={**GREEDY, "model": "fr"}).json()["usage"]["prompt_tokens_details"]
    assert cached == {"cached_tokens": 12}

    shutil.rmtree(root / "one")
    shutil.copytree(root / "two", root / "one")
    again = admin.put("/v1/adapters/fr", json={"pinned": True}).json()  # from where it was
    assert (again["is_pinned"], again["digest"] != shown["digest"]) == (True, True)
    after = admin.post("/v1/completions", json={**GREEDY, "model": "fr"}).json()
    assert after["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert after["choices"][0]["text"] not in (one, base)

    assert admin.get("/v1/adapters/fr").json()["digest"] == again["digest"]
    assert [each["name"] for each in admin.get("/v1/adapters").json()["data"]] == ["fr"]
    assert admin.delete("/v1/adapters/fr").json() == {"name": "fr", "deleted": True}
    assert names(admin) == [MODEL]
    for response in (
        admin.delete("/v1/adapters/fr"),
        admin.get("/v1/adapters/fr"),
        admin.put("/v1/adapters/fr", json={}),
        admin.post("/v1/unload_lora_adapter", json={"lora_name": "fr"}),
        admin.post("/v1/completions", json={**GREEDY, "model": "fr"}),
    ):
        assert error_of(response, 404)["code"] == "model_not_found"
    assert text_of(admin, MODEL) == base


def test_the_forms_that_clients_of_vllm_use(admin: httpx.Client, root: Path) -> None:
    response = admin.post("/v1/load_lora_adapter", json={"lora_name": "org/fr", "lora_path": str(root / "one")})
    assert (response.status_code, response.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert names(admin) == [MODEL, "org/fr"]
    assert text_of(admin, "org/fr") != text_of(admin, MODEL)
    assert admin.get("/v1/models/org/fr").json()["parent"] == MODEL
    assert admin.get("/v1/adapters/org/fr").json()["name"] == "org/fr"
    assert admin.post("/v1/unload_lora_adapter", json={"lora_name": "org/fr"}).status_code == 200
    assert names(admin) == [MODEL]


def outside(root: Path) -> dict[str, str]:
    """Paths that lead out of a folder."""
    elsewhere = root.parent / "elsewhere"
    shutil.copytree(root / "one", elsewhere)
    (root / "link").symlink_to(elsewhere)
    (root / "up").symlink_to("..")
    shutil.copytree(root / "one", root / "inner")
    weights = root / "inner" / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(elsewhere / weights.name)
    return {
        "elsewhere": str(elsewhere),
        "dots": f"{root}/../elsewhere",
        "link": str(root / "link"),
        "up": str(root / "up" / "elsewhere"),
        "beside": f"{root}x",
        "relative": "elsewhere",
        "root": "/",
        "null": f"{root}/one\x00",
        "home": "~/one",
        "empty": "",
        "missing": str(root.parent / "not there"),
        "hub": "org/name",
    }


def test_nothing_outside_is_read(admin: httpx.Client, root: Path) -> None:
    answers = set()
    for path in outside(root).values():
        answers.add(error_of(admin.put("/v1/adapters/x", json={"path": path}), 403)["message"])
        error_of(admin.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path}), 403)
    assert len(answers) == 1  # whether there is something or not
    assert "lies outside" in error_of(admin.put("/v1/adapters/x", json={"path": str(root / "inner")}), 400)["message"]
    error_of(admin.put("/v1/adapters/x", json={"path": f"{root}/{'x' * 4000}"}), 400)
    assert names(admin) == [MODEL]


def test_what_cannot_be_loaded_changes_nothing(admin: httpx.Client, root: Path) -> None:
    admin.put("/v1/adapters/fr", json={"path": str(root / "one")})
    before = text_of(admin, "fr")
    (root / "empty").mkdir()
    changed_copy(root / "one", root / "rank", r=64)
    changed_copy(root / "one", root / "dora", use_dora=True)
    for folder, status in (("missing", 404), ("empty", 404), ("rank", 400), ("dora", 400)):
        error_of(admin.put("/v1/adapters/fr", json={"path": str(root / folder)}), status)
        error_of(admin.put("/v1/adapters/new", json={"path": str(root / folder)}), status)
    for name in ("a\nb", "x" * 257, ""):
        body = {"lora_name": name, "lora_path": str(root / "one")}
        error_of(admin.post("/v1/load_lora_adapter", json=body), 400)
    assert error_of(admin.put(f"/v1/adapters/{MODEL}", json={"path": str(root / "one")}), 409)["code"] == "name_taken"
    assert names(admin) == [MODEL, "fr"]
    assert text_of(admin, "fr") == before


def test_requests_that_run_keep_what_they_have(server: Served, keys: Keys, admin: httpx.Client, root: Path) -> None:
    client = server.client(key=keys.by_tenant["a"])
    wanted = {**GREEDY, "max_tokens": 150}
    texts = {}
    for name in ("one", "two"):
        assert admin.put("/v1/adapters/x", json={"path": str(root / name)}).status_code == 200
        texts[name] = client.completions.create(model="x", **wanted).choices[0].text
    assert texts["one"] != texts["two"]
    for change in ("reload", "unload", "reset"):
        assert admin.put("/v1/adapters/x", json={"path": str(root / "one")}).status_code == 200
        stream = client.completions.create(model="x", stream=True, **wanted)
        first = next(stream)
        if change == "reload":
            assert admin.put("/v1/adapters/x", json={"path": str(root / "two")}).status_code == 200
            assert client.completions.create(model="x", **wanted).choices[0].text == texts["two"]
        elif change == "unload":
            assert admin.delete("/v1/adapters/x").status_code == 200
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="x", **wanted)
        else:
            assert admin.post("/v1/cache/reset").json() == {"status": "ok"}
        assert joined([first, *stream])[0].text == texts["one"]
    server.wait_until_idle()


def test_a_directory_of_adapters(tiny_model_dir: Path, root: Path, keys: Keys) -> None:
    """Its names are models before they are asked for, and it is where adapters may be loaded from."""
    (root / "broken").mkdir()
    (root / "broken" / "adapter_config.json").write_text("{")
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=256, adapter_dir=str(root))
    with served(llm.engine, str(root), api_keys=str(keys.path)) as server:
        admin = keys.http(server, "owner")
        assert names(admin) == [MODEL, "broken", "one", "two"]
        assert admin.get("/v1/adapters").json() == {"object": "list", "data": [], "names": ["broken", "one", "two"]}
        assert text_of(admin, "one") != text_of(admin, "two")
        for stream in (False, True):
            response = admin.post("/v1/completions", json={**GREEDY, "model": "broken", "stream": stream})
            assert "can't be" in error_of(response, 500)["message"] or "not a config" in response.text
        assert admin.put("/v1/adapters/mine", json={"path": str(root / "one")}).status_code == 200
        error_of(admin.put("/v1/adapters/mine", json={"path": str(root.parent)}), 403)
        server.wait_until_idle()


def test_the_map_of_the_pool(server: Served, admin: httpx.Client, root: Path) -> None:
    admin.put("/v1/adapters/fr", json={"path": str(root / "one")})
    text_of(admin, "fr")
    text_of(admin, MODEL)
    found = admin.get("/v1/cache/blocks").json()
    assert sum(run[0] for run in found["runs"]) == 256
    assert [adapter["name"] for adapter in found["adapters"]] == ["fr"]
    assert sum(run[0] for run in found["runs"] if run[3] == 0) == 5
    stats = admin.get("/v1/cache").json()
    assert (stats["num_blocks"], stats["num_referenced"], stats["num_cached"]) == (256, 0, 10)
    assert admin.post("/v1/cache/reset").status_code == 200
    assert admin.get("/v1/cache").json()["num_cached"] == 0
    assert [run[:2] for run in admin.get("/v1/cache/blocks").json()["runs"]] == [[256, "free"]]
