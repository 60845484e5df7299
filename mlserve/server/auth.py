"""API keys, and whom they stand for. A file holds their SHA-256 only.

Keys are random, 256 bits each, so that a plain hash is as good as a slow one: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mlserve.errors import ConfigError

__all__ = ["ANYONE", "KeyRing", "Principal", "create_key"]

PREFIX = "mls-"
SHA256 = re.compile("[0-9a-f]{64}")
MAX_TENANT_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Principal:
    """Whom a request comes from."""

    tenant: str | None = None  # None: nobody known, when the server needs no keys
    is_admin: bool = False
    shares_cache: bool = False  # with everybody else who does; otherwise cached KV is the tenant's own
    requests_per_minute: int | None = None
    max_concurrent: int | None = None  # requests at once

    def __post_init__(self) -> None:
        if self.tenant is not None and not 0 < len(self.tenant) <= MAX_TENANT_LENGTH:
            raise ConfigError(f"a tenant's name has {len(self.tenant)} characters: give 1 to {MAX_TENANT_LENGTH}")
        for name in ("requests_per_minute", "max_concurrent"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} of a key is {value!r}: give an integer from 1")
        for name in ("is_admin", "shares_cache"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} of a key is {getattr(self, name)!r}: give true or false")


ANYONE = Principal()


class KeyRing:
    """The keys of a server. Without a file no key is needed, and nobody is an administrator."""

    def __init__(self, holders: Sequence[tuple[str, Principal]] | None) -> None:
        """`holders`: SHA-256 of each key in hexadecimal, and whose it is. None: no key is needed."""
        self._holders = holders

    @classmethod
    def read(cls, path: str | Path) -> KeyRing:
        """The keys in a file that `create_key` wrote. Raises `ConfigError`."""
        return cls([(entry.pop("sha256"), _principal(path, entry)) for entry in _read_entries(path)])

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return self._holders is None

    def find(self, authorization: str) -> Principal | None:
        """Whose key stands in an Authorization header; None if nobody's. Its time doesn't depend on what is right."""
        if self._holders is None:
            return ANYONE
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
        found = None
        for known, principal in self._holders:
            if hmac.compare_digest(known, digest):
                found = principal
        return found if scheme.lower() == "bearer" else None


def create_key(path: str | Path, principal: Principal) -> str:
    """Make a key, add its hash to a file, which is made if need be, and return it: it can't be found out again.

    Raises `ConfigError` if the file is something else.
    """
    entries = _read_entries(path) if Path(path).exists() else []
    key = PREFIX + secrets.token_urlsafe(32)
    entries.append({"sha256": hashlib.sha256(key.encode()).hexdigest(), **asdict(principal)})
    replacement = Path(f"{path}.new")
    with open(os.open(replacement, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"keys": entries}, file, indent=2)
    replacement.replace(path)
    return key


def _read_entries(path: str | Path) -> list[dict[str, Any]]:
    try:
        entries = json.loads(Path(path).read_text())["keys"]
        if not all(SHA256.fullmatch(entry["sha256"]) for entry in entries):
            raise TypeError("sha256 is not 64 hexadecimal digits")
        return list(entries)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{str(path)!r} is no file of API keys ({error}): make one with `mlserve keys`") from None


def _principal(path: str | Path, entry: dict[str, Any]) -> Principal:
    unknown = set(entry) - {option.name for option in fields(Principal)}
    if unknown or not isinstance(entry.get("tenant"), str):
        what = f"the unknown field {min(unknown)!r}" if unknown else "no tenant"
        raise ConfigError(f"a key in {str(path)!r} has {what}: make keys with `mlserve keys`")
    return Principal(**entry)
