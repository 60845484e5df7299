"""Figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engines import make_engine
from fake_adapters import FakeRegistry, fake_adapter
from http_answers import PROMPT
from http_server import MODEL, Served, served
from prometheus_client.parser import text_string_to_metric_families
from streaming import SlowRunner

from mlserve.engine.tokenizer import Tokenizer
from mlserve.server import metrics
from mlserve.server.metrics import Metrics


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    registry = FakeRegistry(a=fake_adapter("a"))
    engine = make_engine(
        SlowRunner(128, 4), tokenizer, num_blocks=64, vocab_size=tokenizer.vocab_size, adapters=registry
    )
    with served(engine) as server:
        yield server


def figures(server: Served) -> dict[str, float]:
    """Samples by name and labels, such as `mlserve_requests_total{model=tiny}`."""
    response = server.http().get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return {name.removeprefix("mlserve_"): value for name, value in found.items()}


def ask(server: Served, **more: Any) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "temperature": 0, **more}
    assert server.http().post("/v1/completions", json=body).status_code == 200


def test_figures_of_requests(server: Served) -> None:
    ask(server)
    ask(server)  # hits 12 of 16
    ask(server, model="a")
    ask(server, model="a", stream=True)  # hits 12, on which the adapter acts
    ask(server, n=3, temperature=1)  # hits 12
    ask(server, prompt=["one", "two"])
    found = figures(server)
    num_requests, num_sequences = 7, 9
    assert found["requests_total{model=tiny}"] == 5
    assert found["requests_total{model=a}"] == 2
    for histogram in ("time_to_first_token_seconds", "queue_seconds", "request_seconds", "prompt_tokens_per_request"):
        assert found[f"{histogram}_count"] == num_requests
        assert found[f"{histogram}_bucket{{le=+Inf}}"] == num_requests
    assert found["prompt_tokens_per_request_sum"] == found["prompt_tokens_total"] == 5 * 16 + 3 + 3
    assert found["prompt_tokens_per_request_bucket{le=16.0}"] == num_requests
    assert found["inter_token_seconds_count"] == num_sequences * 4
    assert found["output_tokens_total"] == num_sequences * 5
    assert found["sequences_finished_total{reason=length}"] == num_sequences
    assert found["cached_prompt_tokens_total{kind=text}"] == 24
    assert found["cached_prompt_tokens_total{kind=adapter}"] == 12
    assert found["cached_prompt_tokens_total{kind=image}"] == 0
    assert 0 < found["time_to_first_token_seconds_sum"] < found["request_seconds_sum"]
    assert found["queue_seconds_sum"] < found["time_to_first_token_seconds_sum"]


def test_figures_of_the_engine(server: Served) -> None:
    ask(server, model="a")
    before = figures(server)
    assert (before["sequences_running"], before["sequences_waiting"], before["requests_loading"]) == (0, 0, 0)
    assert before["adapter_swaps_total"] == 1
    assert (before["kv_blocks"], before["kv_blocks_in_use"]) == (64, 0)
    assert before["kv_blocks_cached"] == 5  # of 16 + 4 tokens whose KV was written
    assert before["kv_blocks_evicted_total"] == 0
    for number in range(20):
        ask(server, prompt=f"{number:02} {PROMPT}")
    after = figures(server)
    assert after["kv_blocks_cached"] <= 64
    assert after["kv_blocks_evicted_total"] > 0
    assert "embedding_cache_hits_total" not in after  # it takes no images


def test_what_is_refused_or_leaves_is_no_answer(server: Served) -> None:
    server.http().post("/v1/completions", json={"prompt": "x" * 600})
    server.http().post("/v1/completions", json={"prompt": "x", "model": "nobody"})
    with server.http().stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 400, "stream": True}):
        pass
    server.wait_until_idle()
    found = figures(server)
    assert found["request_seconds_count"] == 0
    assert not any("nobody" in name for name in found)


def test_models_beyond_a_limit_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_MODELS", 2)
    mine = Metrics()
    for model in ("a", "b", "c", "d", "a"):
        mine.begin(model)

    def counts() -> dict[str, float]:
        (family,) = mine.requests.collect()
        return {s.labels["model"]: s.value for s in family.samples if s.name.endswith("_total")}

    assert counts() == {"a": 2, "b": 1, "other": 2}
    mine.forget_model("a")
    mine.forget_model("a")
    mine.forget_model("nobody")
    assert counts() == {"b": 1, "other": 2}
