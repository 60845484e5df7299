"""Keys and their file."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from tree import run_python

from mlserve.cli import main
from mlserve.errors import ConfigError
from mlserve.server.auth import ANYONE, KeyRing, Principal, create_key

HASH = "0" * 64


def test_a_key_stands_for_its_principal(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    somebody, owner = Principal("a", requests_per_minute=3), Principal("b", is_admin=True, shares_cache=True)
    keys = [create_key(path, somebody), create_key(path, owner)]
    ring = KeyRing.read(path)
    assert not ring.is_open
    assert [ring.find(f"Bearer {key}") for key in keys] == [somebody, owner]
    assert ring.find(f"bearer   {keys[1]}  ") == owner
    for wrong in ("", "Bearer", "Bearer ", keys[0], f"Basic {keys[0]}", f"Bearer {keys[0]}x", f"Bearer {keys[0][:-1]}",
                  f"Bearer {HASH}", "Bearer \xff\udcff"):  # fmt: skip
        assert ring.find(wrong) is None


def test_the_file_holds_hashes_only_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = [create_key(path, Principal(name)) for name in "ab"]
    assert len(set(keys)) == 2
    assert all(len(key) > 40 for key in keys)
    text = path.read_text()
    assert not any(key in text or key.removeprefix("mls-") in text for key in keys)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["keys.json"]


def test_without_keys_everybody_is_somebody_but_no_administrator() -> None:
    ring = KeyRing(None)
    assert ring.is_open
    assert ring.find("") == ring.find("Bearer x") == ANYONE
    assert not ANYONE.is_admin


@pytest.mark.parametrize(
    "entry",
    [
        {"sha256": HASH},
        {"sha256": HASH, "tenant": None},
        {"sha256": HASH, "tenant": ""},
        {"sha256": HASH, "tenant": "x" * 129},
        {"sha256": HASH, "tenant": "a", "is_admin": "false"},
        {"sha256": HASH, "tenant": "a", "is_admin": 1},
        {"sha256": HASH, "tenant": "a", "shares_cache": None},
        {"sha256": HASH, "tenant": "a", "max_concurrent": 0},
        {"sha256": HASH, "tenant": "a", "max_concurrent": True},
        {"sha256": HASH, "tenant": "a", "requests_per_minute": 1.5},
        {"sha256": HASH, "tenant": "a", "admin": True},
        {"sha256": "é" * 64, "tenant": "a"},
        {"sha256": HASH.upper() + "A", "tenant": "a"},
        {"sha256": 5, "tenant": "a"},
        {"tenant": "a"},
        5,
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, entry: object) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"sha256": HASH, "tenant": "fine"}, entry]}))
    with pytest.raises(ConfigError):
        KeyRing.read(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keys": 5}', '{"keys": "ab"}', '{"keys": {"a": 1}}', "\xff"])
def test_what_is_no_file_of_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(text.encode("latin-1"))
    for use in (KeyRing.read, lambda path: create_key(path, Principal("a"))):
        with pytest.raises(ConfigError, match="is no file of API keys"):
            use(path)
    assert path.read_bytes() == text.encode("latin-1")
    with pytest.raises(ConfigError, match="is no file of API keys"):
        KeyRing.read(tmp_path / "missing")


def test_the_command_makes_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "keys.json")
    assert main(["keys", path, "--tenant", "a", "--admin", "--max-concurrent", "2"]) == 0
    key = capsys.readouterr().out.strip()
    assert KeyRing.read(path).find(f"Bearer {key}") == Principal("a", is_admin=True, max_concurrent=2)
    assert main(["keys", path, "--tenant", ""]) == 1
    assert "a tenant's name has 0 characters" in capsys.readouterr().err


def test_making_keys_needs_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from mlserve.cli import main
main(["keys", {str(tmp_path / "keys.json")!r}, "--tenant", "a"])
print("torch" in sys.modules)
"""
    assert run_python(code).stdout.splitlines()[-1] == "False"
