"""Tenants don't meet in the cache: from how soon an answer begins nobody learns what another tenant asked."""

from __future__ import annotations

import json

from mlserve.server.auth import Principal

__all__ = ["tenant_salt"]


def tenant_salt(principal: Principal, salt: str | None) -> str | None:
    """The salt of a principal's request that brings `salt` along. No two pairs of tenant and salt have the same."""
    tenant = None if principal.shares_cache else principal.tenant
    return None if tenant is None and salt is None else json.dumps([tenant, salt])
