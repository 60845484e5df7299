"""Servers with keys, and who holds them."""

from __future__ import annotations

from pathlib import Path

import httpx
from http_server import Served

from mlserve.server.auth import Principal, create_key


class Keys:
    """A file of keys, and the keys by the name of their holder."""

    def __init__(self, folder: Path, *holders: Principal) -> None:
        self.path = folder / "keys.json"
        self.by_tenant = {holder.tenant: create_key(self.path, holder) for holder in holders}

    def headers(self, tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.by_tenant[tenant]}"}

    def http(self, server: Served, tenant: str) -> httpx.Client:
        return server.http(headers=self.headers(tenant))
