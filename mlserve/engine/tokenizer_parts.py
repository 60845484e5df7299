"""What a tokenizer is made of, wherever it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers

__all__ = ["TokenizerParts"]


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Read by `tokenizer_folder.py` or `tokenizer_gguf.py`; `Tokenizer` is built from it."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]  # role -> token, as chat templates name them: "bos_token" -> "<s>"
    eos_token_ids: tuple[int, ...]  # any of these ends a generation
    chat_template: str | None  # Jinja source
