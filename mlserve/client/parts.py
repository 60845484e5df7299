"""Parts of a message: images and their embeddings, as they go over the wire."""

from __future__ import annotations

import io
from base64 import b64encode
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save as save_safetensors

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Part", "embeddings", "image"]

Part = dict[str, Any]
_SIGNATURES = {  # first bytes of a file -> its media type
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
    b"II*\x00": "image/tiff",
    b"MM\x00*": "image/tiff",
}


def image(source: str | PathLike[str] | bytes | Image) -> Part:
    """An image as a part of a message's content.

    source: a path, the bytes of an image file, a PIL image (sent as PNG, without loss), or a URL, of http(s) or data,
        which is sent as it is: the server fetches it, if it may.
    Raises `OSError` if there is no such file, `ValueError` if its format isn't known.
    """
    if isinstance(source, str) and source.startswith(("http://", "https://", "data:")):
        return _part(source)
    if isinstance(source, str | PathLike):
        data = Path(source).read_bytes()
    elif isinstance(source, bytes):
        data = source
    else:
        buffer = io.BytesIO()
        source.save(buffer, "PNG")
        data = buffer.getvalue()
    kind = next((kind for signature, kind in _SIGNATURES.items() if data.startswith(signature)), None)
    if kind is None:
        raise ValueError(f"the image begins with {data[:4]!r}, which is no known format: send {_kinds()}")
    return _part(f"data:{kind};base64,{b64encode(data).decode()}")


def embeddings(values: Any) -> Part:
    """Embeddings of an image, `[n, H]`, as a part of a message's content. values: an array, or what numpy makes one of.

    Raises `ValueError` for another shape.
    """
    array = np.ascontiguousarray(values, dtype=np.float32)
    if array.ndim != 2:
        raise ValueError(f"the embeddings have the shape {list(array.shape)}: give [n, H]")
    return {"type": "image_embeds", "image_embeds": b64encode(save_safetensors({"embeddings": array})).decode()}


def _part(url: str) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


def _kinds() -> str:
    return ", ".join(sorted({kind.removeprefix("image/").upper() for kind in _SIGNATURES.values()}))
