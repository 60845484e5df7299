"""The OpenAPI document, and the server held against it by schemathesis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from http_server import Served, served
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS
from tenants import Keys

from mlserve import LLM
from mlserve.server.auth import Principal


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"), Principal("owner", is_admin=True))


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    engine = LLM(
        str(tiny_model_dir), block_size=4, num_blocks=512, adapter_dir=str(tmp_path_factory.mktemp("a"))
    ).engine
    with served(engine, api_keys=str(keys.path)) as server:
        yield server


def document(server: Served, keys: Keys) -> dict[str, Any]:
    found: dict[str, Any] = keys.http(server, "owner").get("/openapi.json").json()
    return found


def test_every_error_is_documented_as_it_is(server: Served, keys: Keys) -> None:
    paths = document(server, keys)["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/metrics"} <= set(paths)
    for path, operations in paths.items():
        for operation in operations.values():
            responses = operation["responses"]
            assert "422" not in responses, path  # what FastAPI would answer: here it is 400
            for status, response in responses.items():
                if status >= "400":
                    schema = response["content"]["application/json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (path, status)


@pytest.mark.slow
def test_no_request_makes_the_server_fail(server: Served, keys: Keys) -> None:
    """Twenty requests for each operation, valid and not. Some fields are left out, or nearly all would be refused."""
    schema = schemathesis.openapi.from_dict(document(server, keys))
    http = keys.http(server, "owner")
    num_calls, num_answers = 0, 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=20,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            nonlocal num_calls, num_answers
            if isinstance(case.body, dict):
                case.body.pop("model", None)
                for name in ("n", "min_tokens", "priority"):
                    if name in case.body:
                        del case.body[name]
                if "max_tokens" in case.body:
                    case.body["max_tokens"] = 4
            response = case.call(base_url=server.url, headers=keys.headers("owner"), timeout=30)
            num_calls += 1
            num_answers += response.status_code == 200
            chosen = ("not_a_server_error", "status_code_conformance", "content_type_conformance",
                      "response_schema_conformance")  # fmt: skip
            case.validate_response(response, checks=CHECKS.get_by_names(chosen))

        check()
        assert http.get("/health").status_code == 200
    assert num_calls > 200
    assert num_answers > 20
    server.wait_until_idle()
