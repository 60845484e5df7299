"""Text to token ids and back."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, models

from mlserve.engine.token_bytes import token_decoder
from mlserve.engine.tokenizer_folder import read_folder
from mlserve.engine.tokenizer_gguf import read_gguf
from mlserve.engine.tokenizer_parts import TokenizerParts
from mlserve.errors import ModelNotFoundError, PromptError

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(source: str | Path, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder or of a GGUF file, with that template in place of its own.

    Raises `ModelError` if that fails.
    """
    path = Path(source)
    if path.is_dir():
        parts = read_folder(path)
    elif path.is_file():
        parts = read_gguf(path)
    else:
        raise ModelNotFoundError(f"there is no model at {str(path)!r}: give a folder or a .gguf file")
    return Tokenizer(parts if chat_template is None else replace(parts, chat_template=chat_template))


class Tokenizer:
    """A vocabulary, and the chat template that goes with it. Safe to share between threads.

    *Special* tokens are those that steer a model (`<|im_start|>`, `<eos>`); their literals in a text are encoded to
    them unless `parse_special` is false. Added tokens that aren't special, such as `<think>`, are always matched.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        backend = parts.backend
        added = dict(sorted(backend.get_added_tokens_decoder().items()))
        self.special_tokens = parts.special_tokens  # role -> token: "bos_token" -> "<s>"
        self.eos_token_ids = parts.eos_token_ids
        self.chat_template = parts.chat_template
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._backend = backend
        self._plain, self._guard = _plain_twin(backend, list(added.values()))
        self._finder = _SpecialFinder({i: token for i, token in added.items() if token.special})
        self._decoder = token_decoder(backend)
        self._bytes: dict[int, bytes] = {}  # filled as tokens are asked for
        if self._decoder.added_are_plain:
            self._bytes |= {i: token.content.encode() for i, token in added.items()}

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the vocabulary has one."""
        token = self.special_tokens.get("bos_token")
        return None if token is None else self.token_id(token)

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its spelling in the vocabulary."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special_tokens: put before (and after) it what the model expects there, such as `<bos>`.
        parse_special: whether literals of special tokens in the text become these tokens.
        Raises `PromptError` for text that isn't valid Unicode.
        """
        backend = self._backend if parse_special else self._plain
        ids: list[int] = _encode(backend, text, add_special_tokens).ids
        return ids

    def encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        """Token ids of one text given in pieces: token ids stand as they are, strings are encoded as plain text.

        Other than by encoding the strings one by one, no string but the first is taken for the beginning of a text.
        """
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            elif not ids:
                ids += self.encode(piece, add_special_tokens=False, parse_special=False)
            else:
                ids += self.encode(self._guard + piece, add_special_tokens=False, parse_special=False)[1:]
        return ids

    def split_special(self, text: str) -> list[tuple[str, int | None]]:
        """Cut a text at the literals of special tokens: (piece, None) for plain text, (literal, id) for a special one.

        The pieces joined are the text. A literal comes with the white space that its token swallows.
        """
        return self._finder.split(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none for ids that the vocabulary lacks."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._look_up(token_id)
        return found

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that aren't UTF-8 become U+FFFD, one for each maximal part of a character."""
        skipped = self.special_ids if skip_special_tokens else ()
        text = b"".join([self.token_bytes(i) for i in ids if i not in skipped]).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._decoder.strips_first_space else text

    def _look_up(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._decoder.to_bytes(token)


class _SpecialFinder:
    """Finds special tokens' literals just as encoding would, but a few times sooner, and says where they are."""

    def __init__(self, special: dict[int, AddedToken]) -> None:
        # A vocabulary of one word, which every plain stretch of text becomes; special tokens count up from 1.
        self._backend = tokenizers.Tokenizer(models.WordPiece({"?": 0}, unk_token="?", max_input_chars_per_word=0))
        self._backend.add_tokens(list(special.values()))
        self._ids = [None, *special]

    def split(self, text: str) -> list[tuple[str, int | None]]:
        found = _encode(self._backend, text, add_special_tokens=False)
        return [(text[start:end], self._ids[i]) for (start, end), i in zip(found.offsets, found.ids, strict=True)]


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except (UnicodeEncodeError, TypeError) as error:
        shown = repr(text) if len(repr(text)) <= 40 else f"{repr(text)[:37]}..."
        raise PromptError(f"the text {shown} can't be encoded ({error}): give a string of valid Unicode") from error


def _plain_twin(backend: tokenizers.Tokenizer, added: list[AddedToken]) -> tuple[tokenizers.Tokenizer, str]:
    """A tokenizer that shares the vocabulary but takes special tokens' literals for text; and its guard.

    The guard is one more added token, which no text contains. A text behind it is encoded as one that goes on, without
    what some tokenizers put before the beginning of a text.
    """
    twin = tokenizers.Tokenizer(backend.model)  # shared, not copied
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(backend, part) is not None:
            setattr(twin, part, getattr(backend, part))
    guard = f"<guard {secrets.token_hex(16)}>"
    twin.add_tokens([*added, AddedToken(guard, special=False, normalized=False)])  # in order of their ids
    twin.encode_special_tokens = True
    return twin, guard
