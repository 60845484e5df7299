"""Small GGUF files that hold a vocabulary and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIALS = ("<unk>", "<s>", "</s>", "<start>")
WORDS = ("▁t", "he", "▁the", "in", "▁a", "ll", "hell", "hello", "▁hello", "st", "ar", "art", "start", "<start")


def write_gguf(path: Path, fields: Mapping[str, Any]) -> Path:
    """A GGUF file with the given metadata of `tokenizer.ggml.*` (a value of None leaves a key out)."""
    writer = GGUFWriter(path, "llama")
    for key, value in fields.items():
        key = key if "." in key else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def sentence_piece_fields(**changes: Any) -> dict[str, Any]:
    """SentencePiece BPE: specials, all bytes, a run of spaces, letters, and a few words; best first."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz<>|/_.,0123456789"]
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "  ", *WORDS, *letters]
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, *[NORMAL] * (len(WORDS) + len(letters))]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [-1000.0] * 261 + [float(-i) for i in range(len(WORDS) + len(letters))],
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }


def byte_level_fields(alphabet: list[str], **changes: Any) -> dict[str, Any]:
    """Byte-level BPE with three specials, bytes, and a few merges."""
    merged = ["Ġt", "he", "Ġthe", "ĠĠ", "12", "Ġ1", "ll", "He", "Hell", "Hello"]
    merges = ["Ġ t", "h e", "Ġt he", "Ġ Ġ", "1 2", "Ġ 1", "l l", "H e", "He ll", "Hell o"]
    tokens = ["<|end|>", "<|start|>", "<think>", *alphabet, *merged]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * (len(tokens) - 3)],
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 0,
        **changes,
    }
