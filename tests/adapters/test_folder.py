"""Only an adapter's own files are opened, and only if they are files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from adapter_files import CONFIG, WEIGHTS, changed_copy

from mlserve.adapters.peft_format import read_adapter
from mlserve.adapters.spec import AdapterLimits, BaseShape
from mlserve.errors import AdapterError, AdapterFileNotFoundError, CorruptAdapterError


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    return changed_copy(plain, tmp_path / "root" / "adapter")


def test_links_without_a_root(folder: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    (folder / WEIGHTS).rename(tmp_path / "blob")
    (folder / WEIGHTS).symlink_to(tmp_path / "blob")
    read_adapter(folder, shape, limits)


def test_links_inside_the_root_are_followed(folder: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    """As in a hub's cache, whose snapshots are links to blobs."""
    root = folder.parent
    (folder / WEIGHTS).rename(root / "blob")
    (folder / WEIGHTS).symlink_to("../blob")
    (root / "link").symlink_to("adapter")
    read_adapter(root / "link", shape, limits, root=root)


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_links_out_of_the_root(
    folder: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits, file: str, no_reads: None
) -> None:
    (folder / file).rename(tmp_path / "outside")
    (folder / file).symlink_to(tmp_path / "outside")
    with pytest.raises(CorruptAdapterError, match=rf"{file} lies outside {folder.parent}: copy it"):
        read_adapter(folder, shape, limits, root=folder.parent)


def test_folders_outside_the_root(plain: Path, folder: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    root = folder.parent
    (root / "link").symlink_to(plain)
    for path in (plain, root / "link", root / ".." / "root" / ".." / "x", Path("/"), root / "adapter" / ".." / ".."):
        with pytest.raises(AdapterError, match=r"lies outside|no such folder|is missing"):
            read_adapter(path, shape, limits, root=root)


def test_names_that_only_begin_like_the_root(
    plain: Path, folder: Path, tmp_path: Path, shape: BaseShape, limits: AdapterLimits
) -> None:
    sibling = changed_copy(plain, tmp_path / "root-2")
    with pytest.raises(CorruptAdapterError, match="lies outside"):
        read_adapter(sibling, shape, limits, root=folder.parent)


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_what_is_no_regular_file(folder: Path, shape: BaseShape, limits: AdapterLimits, file: str) -> None:
    path = folder / file
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CorruptAdapterError, match=f"{file} is not a regular file"):
        read_adapter(folder, shape, limits)
    path.unlink()
    path.mkdir()
    with pytest.raises(CorruptAdapterError, match=f"{file} is not a regular file"):
        read_adapter(folder, shape, limits)
    path.rmdir()
    path.symlink_to(os.devnull)
    with pytest.raises(CorruptAdapterError, match=f"{file} is not a regular file"):
        read_adapter(folder, shape, limits)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(CorruptAdapterError, match=f"{file} can't be opened"):
        read_adapter(folder, shape, limits)
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(AdapterFileNotFoundError, match=f"{file} is missing"):
        read_adapter(folder, shape, limits)


def test_files_are_closed(folder: Path, shape: BaseShape, limits: AdapterLimits) -> None:
    before = os.listdir("/proc/self/fd")
    read_adapter(folder, shape, limits)
    (folder / WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(CorruptAdapterError):
        read_adapter(folder, shape, limits)
    assert os.listdir("/proc/self/fd") == before
