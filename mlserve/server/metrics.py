"""Figures for Prometheus: what requests saw, and how the engine stands."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlserve.engine.stats import EngineStats
from mlserve.request import RequestMetrics, RequestOutput, StreamOutput

__all__ = ["Metrics", "Recorder"]

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
BETWEEN_TOKENS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
WHOLE_REQUEST = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)
MAX_MODELS = 1000  # label values; what is beyond is counted together
OTHER_MODELS = "other"


class Metrics:
    """All series of one server, in a registry of its own. Belongs to one event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._models: set[str] = set()
        self._engine = _EngineCollector()
        self.registry.register(self._engine)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"mlserve_{name}", text, buckets=buckets, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mlserve_{name}", text, labels, registry=self.registry)

        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN)
        self.between_tokens = histogram("inter_token_seconds", "Between two outputs of a sequence.", BETWEEN_TOKENS)
        self.queue = histogram("queue_seconds", "From arrival to the first step.", FIRST_TOKEN)
        self.request = histogram("request_seconds", "From arrival to the end.", WHOLE_REQUEST)
        self.prompt_length = histogram("prompt_tokens_per_request", "Tokens of a prompt.", TOKENS)
        self.requests = counter("requests", "Requests that began, by model or adapter.", "model")
        self.finished = counter("sequences_finished", "Sequences that ended, by reason.", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.output_tokens = counter("output_tokens", "Tokens that were generated.")
        self.cached_tokens = counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache.", "kind")
        self.preemptions = counter("preemptions", "Times that a sequence gave its blocks back.")

    def begin(self, model: str) -> Recorder:
        """A request of a model that there is."""
        if model not in self._models and len(self._models) >= MAX_MODELS:
            model = OTHER_MODELS
        self._models.add(model)
        self.requests.labels(model).inc()
        return Recorder(self)

    def forget_model(self, model: str) -> None:
        """Drop the series of an adapter that is served no longer."""
        if model in self._models:
            self._models.remove(model)
            self.requests.remove(model)

    def exposition(self, stats: EngineStats) -> bytes:
        """Everything, in Prometheus' text format."""
        self._engine.stats = stats
        return generate_latest(self.registry)


class Recorder:
    """Watches the outputs of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last: dict[int, float] = {}  # when a sequence's last output came

    def saw(self, output: StreamOutput) -> None:
        """Take note of an output."""
        metrics, now = self._metrics, time.monotonic()
        if output.token_ids:
            metrics.output_tokens.inc(len(output.token_ids))
            last = self._last.get(output.index)
            if last is not None:
                metrics.between_tokens.observe(now - last)
            self._last[output.index] = now
        if output.finish_reason is not None:
            metrics.finished.labels(output.finish_reason.value).inc()
        if output.completed is not None:
            self._completed(output.completed)

    def _completed(self, output: RequestOutput) -> None:
        metrics, seen = self._metrics, output.metrics
        metrics.prompt_tokens.inc(seen.prompt_tokens)
        metrics.prompt_length.observe(seen.prompt_tokens)
        metrics.preemptions.inc(seen.preemptions)
        for kind, count in _cached_by_kind(seen).items():
            metrics.cached_tokens.labels(kind).inc(count)
        for histogram, end in (
            (metrics.queue, seen.scheduled),
            (metrics.first_token, seen.first_token),
            (metrics.request, seen.finished),
        ):
            if end is not None:
                histogram.observe(end - seen.arrival)


def _cached_by_kind(seen: RequestMetrics) -> dict[str, int]:
    image, adapter = seen.cached_image_tokens, seen.cached_adapter_tokens
    return {"text": seen.cached_tokens - image - adapter, "image": image, "adapter": adapter}


class _EngineCollector(Collector):
    """Figures of the engine as they were last given."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        """One value each."""
        if self.stats is None:
            return
        stats, cache = self.stats, self.stats.cache
        gauges = {
            "sequences_running": ("Sequences in the batch.", stats.num_running),
            "sequences_waiting": ("Sequences that wait for a place in the batch.", stats.num_waiting),
            "requests_loading": ("Requests that wait for their adapter to be read.", stats.num_loading),
            "kv_blocks": ("Blocks of the pool.", cache.num_blocks),
            "kv_blocks_in_use": ("Blocks in use by running sequences.", cache.num_referenced),
            "kv_blocks_cached": ("Blocks that can be hit, in use or not.", cache.num_cached),
        }
        counters = {
            "kv_blocks_evicted": ("Cached blocks that were given up for new content.", cache.num_evicted),
            "adapter_swaps": ("Adapters that were written into a slot of the device.", stats.adapter_swaps),
        }
        if stats.embeddings is not None:
            held = stats.embeddings
            gauges["embedding_cache_bytes"] = ("Bytes of images' embeddings.", held.num_bytes)
            counters["embedding_cache_hits"] = ("Images whose embeddings were there.", held.hits)
            counters["embedding_cache_misses"] = ("Images that had to be encoded.", held.misses)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"mlserve_{name}", text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"mlserve_{name}", text, value=value)
