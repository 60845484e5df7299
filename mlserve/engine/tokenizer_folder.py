"""Reads the tokenizer of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from mlserve.engine.tokenizer_parts import TokenizerParts
from mlserve.errors import ModelError, ModelNotFoundError

__all__ = ["read_folder"]

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LEGACY_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


def read_folder(folder: Path) -> TokenizerParts:
    """Read tokenizer.json and what stands beside it; older formats are converted by transformers.

    Raises `ModelNotFoundError` if there is no tokenizer, `ModelError` if a file of it is damaged.
    """
    config = _read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        backend = _read_backend(folder / "tokenizer.json")
        _add_missing(backend, config)
        special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
    elif any((folder / name).is_file() for name in LEGACY_FILES):
        backend, special_tokens = _convert_legacy(folder)
    else:
        raise ModelNotFoundError(f"{str(folder)!r} has no tokenizer.json: save the model's tokenizer there")
    backend.no_truncation()  # some tokenizer.json keep what they were trained with
    backend.no_padding()
    return TokenizerParts(
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=_eos_token_ids(folder, backend, special_tokens),
        chat_template=_chat_template(folder, config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{str(path)!r} is not JSON ({error}): fetch the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{str(path)!r} holds a {type(content).__name__}, not an object: fetch the model again")
    return content


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain `Exception`
        raise ModelError(f"{str(path)!r} can't be read as a tokenizer ({error}): fetch the model again") from error


def _add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that were added after tokenizer.json was written stand in tokenizer_config.json only."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    entries = config.get("added_tokens_decoder", {})
    for _, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        if entry["content"] not in known:
            flags = {key: value for key, value in entry.items() if key not in ("content", "__type")}
            backend.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for role in ROLES:
        token = config.get(role)
        if isinstance(token, Mapping):
            token = token.get("content")
        if token is not None:
            found[role] = str(token)
    return found


def _convert_legacy(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    from transformers import AutoTokenizer  # takes seconds to import, and few models need it

    try:
        converted = AutoTokenizer.from_pretrained(str(folder))
        return converted.backend_tokenizer, _special_tokens(converted.special_tokens_map)
    except Exception as error:  # whatever its many converters raise
        raise ModelError(
            f"transformers can't convert the tokenizer in {str(folder)!r} ({error}): save it as tokenizer.json"
        ) from error


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> tuple[int, ...]:
    ids = []
    for name in ("generation_config.json", "config.json"):
        given = _read_json(folder / name).get("eos_token_id")
        if given is not None:
            ids += given if isinstance(given, list) else [given]
            break
    if "eos_token" in special_tokens:
        token_id = backend.token_to_id(special_tokens["eos_token"])
        ids += [] if token_id is None else [token_id]
    return tuple(dict.fromkeys(ids))


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
