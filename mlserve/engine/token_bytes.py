"""The bytes that each token of a vocabulary stands for.

With them decoding is a lookup and a join, a stream of tokens is a stream of bytes, and where a character ends is known
exactly. Two kinds of vocabulary are read; both are recognised by the decoder of their tokenizer:

- byte-level (GPT-2, Llama 3, Qwen, SmolLM): a token is spelled in an alphabet of 256 characters, one for each byte;
- SentencePiece (Llama 2, Mistral, Gemma): plain text with U+2581 for a space, and tokens `<0xAB>` for single bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers

from mlserve.errors import UnsupportedModelError

__all__ = ["TokenDecoder", "token_decoder"]

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """How a token's spelling becomes bytes."""

    to_bytes: Callable[[str], bytes]
    added_are_plain: bool  # added tokens are spelled as plain text, not in the vocabulary's own way
    strips_first_space: bool  # the space that encoding puts before a text goes again when a whole text is decoded


def token_decoder(backend: tokenizers.Tokenizer) -> TokenDecoder:
    """The decoder of a tokenizer. Raises `UnsupportedModelError` for kinds other than the two above."""
    steps = _steps(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": None})
    kinds = [step["type"] for step in steps if step["type"] != "Fuse"]
    if kinds == ["ByteLevel"]:
        return TokenDecoder(_byte_level, added_are_plain=True, strips_first_space=False)
    if kinds[:2] == ["Replace", "ByteFallback"] and kinds[2:] in ([], ["Strip"]):
        replace, strip = steps[0], [step for step in steps if step["type"] == "Strip"]
        old, new = replace["pattern"].get("String"), replace["content"]
        if old is not None and (not strip or (strip[0]["content"], strip[0]["start"], strip[0]["stop"]) == (" ", 1, 0)):
            return TokenDecoder(
                lambda token: _sentence_piece(token, old, new), added_are_plain=False, strips_first_space=bool(strip)
            )
    raise UnsupportedModelError(
        f"the tokenizer decodes with {kinds}: byte-level and SentencePiece vocabularies (with byte fallback) are served"
    )


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:  # a token that is spelled as plain text, though it isn't listed as added
        return token.encode()


def _sentence_piece(token: str, old: str, new: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(old, new).encode()
