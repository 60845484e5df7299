"""Parts of a message: images and their embeddings, as they go over the wire."""

from __future__ import annotations

import io
import re
from base64 import b64encode
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from safetensors.numpy import save as save_safetensors

__all__ = ["Part", "embeddings", "image"]

Part = dict[str, Any]
_SIGNATURES = (  # how files of the formats that servers read begin, and their media types
    (re.compile(rb"\x89PNG"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
    (re.compile(rb"BM"), "image/bmp"),
)
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")  # PIL's modes that PNG holds as they are
_PNG_ALPHA = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}  # others with transparency


def image(source: str | PathLike[str] | bytes | Image.Image) -> Part:
    """An image as a part of a message's content.

    source: a path, the bytes of an image file, a PIL image (sent as PNG, turned as its EXIF says), or a URL, of http(s)
        or data, which is sent as it is: the server fetches it, if it may.
    Raises `OSError` if there is no such file, `ValueError` for a format or pixels that servers don't read, `TypeError`
    for what is no image.
    """
    if isinstance(source, str) and source.startswith(("http://", "https://", "data:")):
        return _part(source)
    if isinstance(source, str | PathLike):
        data = Path(source).read_bytes()
    elif isinstance(source, bytes):
        data = source
    elif isinstance(source, Image.Image):
        data = _png(source)
    else:
        raise TypeError(f"the image is a {type(source).__name__}: give a path, a URL, bytes or a PIL image")
    kind = next((kind for signature, kind in _SIGNATURES if signature.match(data)), None)
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


def _png(picture: Image.Image) -> bytes:
    if picture.mode == "F" or (picture.mode.startswith("I") and picture.mode != "I;16"):
        raise ValueError(f"the image has PIL mode {picture.mode!r}, whose range isn't defined: convert it to L or RGB")
    upright = ImageOps.exif_transpose(picture)
    if upright.mode not in _PNG_MODES:
        upright = upright.convert(_PNG_ALPHA.get(upright.mode, "RGB"))
    buffer = io.BytesIO()
    upright.save(buffer, "PNG")
    return buffer.getvalue()


def _part(url: str) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


def _kinds() -> str:
    return ", ".join(sorted(kind.removeprefix("image/").upper() for _, kind in _SIGNATURES))
