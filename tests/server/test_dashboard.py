"""The dashboard asks for series that there are."""

from __future__ import annotations

import json
import re

from prometheus_client.parser import text_string_to_metric_families
from tree import ROOT

from mlserve.cache.manager import CacheStats
from mlserve.engine.stats import EngineStats
from mlserve.server.metrics import Metrics
from mlserve.vision.embedding_cache import EmbeddingStats


def test_every_panel_shows_series_of_the_server() -> None:
    stats = EngineStats(CacheStats(8, 8, 0, 0, 0, 0, 0), 0, 0, 0, 0, EmbeddingStats(0, 0, 0, 0))
    exposed = Metrics().exposition(stats).decode()
    known = {family.name for family in text_string_to_metric_families(exposed)}
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    for panel in panels:
        for target in panel["targets"]:
            for name in re.findall(r"mlserve_\w+", target["expr"]):
                assert re.sub(r"_(bucket|total)$", "", name) in known, f"{panel['title']}: {name}"
    assert len(panels) == 12
