"""Gets the bytes of an image file from what a request names: the bytes themselves, a data URL, a path, a URL.

Messages quote no string but a path, since any other may be an image.
"""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from typing import Protocol, TypeAlias

from PIL.Image import Image

from mlserve.errors import ImageLimitError, ImageSourceError

__all__ = ["ImageFetcher", "ImageSource", "check_num_bytes", "read_source"]

# A string is a data URL, an http(s) URL, or else a path.
ImageSource: TypeAlias = Image | bytes | bytearray | memoryview | str | os.PathLike[str]


class ImageFetcher(Protocol):
    """Gets what a URL points to: `HttpFetcher`, or what stands for it in a test."""

    def fetch(self, url: str, max_bytes: int) -> bytes:
        """Raises `ImageFetchError`, and `ImageLimitError` for more than `max_bytes`."""
        ...


def read_source(
    source: ImageSource, max_bytes: int, allow_paths: bool = False, fetcher: ImageFetcher | None = None
) -> bytes:
    """The bytes of an image file, at most `max_bytes`. Bytes decide what the image is, not a name or a media type.

    Raises `ImageSourceError`, `ImageFetchError` or `ImageLimitError`.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        check_num_bytes(memoryview(source).nbytes, max_bytes)
        return bytes(source)
    if isinstance(source, str):
        scheme = source[:8].partition(":")[0].lower()
        if scheme == "data":
            return _read_data_url(source, max_bytes)
        if scheme in ("http", "https"):
            if fetcher is None:
                raise ImageSourceError("the image is a URL, and none are fetched here: send its bytes as a data URL")
            return fetcher.fetch(source, max_bytes)
    elif not isinstance(source, os.PathLike):
        raise ImageSourceError(
            f"a {type(source).__name__} is no image: give a PIL image, bytes, a data URL, a path or a URL"
        )
    if not allow_paths:
        raise ImageSourceError(
            "the image is neither bytes nor a data URL nor an http(s) URL, and paths aren't read here: "
            "send its bytes as a data URL"
        )
    return _read_path(Path(source), max_bytes)


def check_num_bytes(num_bytes: int, max_bytes: int) -> None:
    """Raises `ImageLimitError` for an image file that is too large."""
    if num_bytes > max_bytes:
        raise ImageLimitError(f"the image has {num_bytes} bytes, limit {max_bytes}: shrink it or raise max_bytes")


def _read_data_url(url: str, max_bytes: int) -> bytes:
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ImageSourceError("the data URL isn't in base64: write it as data:image/png;base64,...")
    check_num_bytes(len(payload) // 4 * 3 - payload[-2:].count("="), max_bytes)
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        raise ImageSourceError("the data URL's base64 is damaged or cut short: encode the file again") from None


def _read_path(path: Path, max_bytes: int) -> bytes:
    shown = repr(str(path)) if len(str(path)) <= 256 else f"a path of {len(str(path))} characters"
    try:
        if not path.is_file():  # not a device, which would never end, nor a pipe, which may never begin
            raise ImageSourceError(f"there is no image file at {shown}: check the path")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
            check_num_bytes(os.fstat(file.fileno()).st_size, max_bytes)
    except (OSError, ValueError) as error:
        raise ImageSourceError(f"{shown} can't be read ({type(error).__name__}): check the path") from None
    check_num_bytes(len(data), max_bytes)
    return data
