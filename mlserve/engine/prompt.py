"""From what a caller sends to token ids: conversations through the model's chat template, and checks of given ids.

What a user types never steers the model. `<|im_start|>` written by the template becomes that special token; the same
characters in a message are encoded as the text they are. To tell them apart after rendering, literals of special
tokens are taken out of the messages, replaced by numbered marks, and put back as plain text when the rendered
conversation is encoded. A conversation without such literals is encoded as a whole, exactly as transformers does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlserve.engine.tokenizer import Tokenizer
from mlserve.errors import PromptError

__all__ = ["ImageText", "render_chat", "validate_prompt_ids"]

Message = Mapping[str, Any]
MAX_DEPTH = 32  # of lists and objects within a message


@dataclass(frozen=True, slots=True)
class ImageText:
    """How an image is written in a prompt's text: the special token that a template writes, and what is put around."""

    token: str
    before: str = ""
    after: str = ""


def validate_prompt_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise `PromptError` unless there is at least one id, all are ints (not bool) and in [0, vocab_size)."""
    if len(ids) == 0:
        raise PromptError("the prompt is empty: give at least one token")
    if set(map(type, ids)) != {int}:
        at, wrong = next((i, token) for i, token in enumerate(ids) if type(token) is not int)
        raise PromptError(f"prompt token {at} is {wrong!r}, a {type(wrong).__name__}: give token ids as ints")
    if min(ids) < 0 or max(ids) >= vocab_size:
        at, wrong = next((i, token) for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise PromptError(
            f"prompt token {at} is {wrong}, the vocabulary has {vocab_size}: give ids from 0 to {vocab_size - 1}"
        )


def render_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    images: ImageText | None = None,
    **variables: Any,
) -> list[int]:
    """Lay a conversation out by a chat template, and encode it.

    messages: each with a `role` and a `content`: a string, or a list of `{"type": "text", "text": ...}` parts, which
        are joined. An assistant's content may be missing. Other keys (`name`, `tool_calls`, ...) go to the template.
        For a model with images there may be `{"type": "image"}` parts; then the template gets the list.
    chat_template: Jinja source; default: the tokenizer's own.
    add_generation_prompt: end with what opens the assistant's answer.
    images: how the model writes an image; None if it takes none.
    variables: what else the template reads, such as `tools`.
    Raises `PromptError` if there is no template, if it refuses the messages, or if they are malformed.
    """
    source = chat_template or tokenizer.chat_template
    if source is None:
        raise PromptError("the model has no chat template: give one, or give the prompt as text")
    literals = _Literals(tokenizer)
    given = {"tools": None, "documents": None, **variables, "messages": _checked(messages, images is not None)}
    text = _render(
        source,
        {
            **tokenizer.special_tokens,
            **{name: literals.take_out(value) for name, value in given.items()},
            "add_generation_prompt": add_generation_prompt,
        },
    )
    if images is not None:
        text = text.replace(images.token, images.before + images.token + images.after)
    if literals.found:
        pieces = tokenizer.split_special(text)
        ids = tokenizer.encode_pieces(literals.put_back(piece) if i is None else i for piece, i in pieces)
    else:
        ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise PromptError("the chat template made an empty prompt of the messages: give some content")
    return ids


def _checked(messages: Sequence[Message], takes_images: bool) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise PromptError(f"messages are {_short(messages)}: give a list of at least one message")
    return [_checked_message(message, f"message {i}", takes_images) for i, message in enumerate(messages)]


def _checked_message(message: Message, name: str, takes_images: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(f"{name} is {_short(message)}: give an object with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise PromptError(f"{name} has the role {_short(role)}: give a string such as 'user'")
    content = message.get("content")
    if content is None and role == "assistant":  # as when it only calls tools; templates would print 'None'
        content = ""
    # Templates take a key that is there for one that has a value.
    rest = {key: value for key, value in message.items() if value is not None}
    return {**rest, "content": _checked_content(content, name, takes_images)}


def _checked_content(content: object, name: str, takes_images: bool) -> str | list[dict[str, str]]:
    """Text as one string; the list of parts if there are images among them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise PromptError(f"{name} has the content {_short(content)}: give a string or a list of text parts")
    parts: list[dict[str, str]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else None
        if isinstance(text, str):
            parts.append({"type": "text", "text": text})
        elif kind == "image" and takes_images:
            parts.append({"type": "image"})
        elif kind in ("image", "image_url", "image_embeds"):
            raise PromptError(f"{name} has an image, and the model takes none: use a vision-language model")
        else:
            raise PromptError(f"{name} has the content part {_short(part)}: give {{'type': 'text', 'text': '...'}}")
    has_images = any(part["type"] == "image" for part in parts)
    return parts if has_images else "".join(part["text"] for part in parts)


class _Literals:
    """Literals of special tokens, taken out of what users typed."""

    # A capitulum, which hardly anybody writes; if someone does, it is treated as a literal too. It is printable: else
    # templates that write values with Python's repr would escape it.
    MARK = "\u2e3f"
    MARKED = re.compile(f"{MARK}([0-9]+){MARK}")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.found: list[str] = []

    def take_out(self, value: Any, depth: int = 0) -> Any:
        """A copy of a value, of plain JSON types only (templates must not get at anything else), with marks."""
        if isinstance(value, str):
            return self._marked(value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if depth == MAX_DEPTH:
            raise PromptError(f"messages are nested more than {MAX_DEPTH} deep: send flatter ones")
        if isinstance(value, Mapping):
            return {self.take_out(key, depth + 1): self.take_out(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.take_out(item, depth + 1) for item in value]
        raise PromptError(f"a message holds {_short(value)}, a {type(value).__name__}: send plain JSON values")

    def put_back(self, text: str) -> str:
        """The text as it was typed."""
        return self.MARKED.sub(lambda match: self.found[int(match[1])], text)

    def _marked(self, text: str) -> str:
        pieces = []
        for piece, special_id in self._tokenizer.split_special(text):
            if special_id is not None:
                pieces.append(self._mark(piece))
            else:
                pieces.append(self._mark(self.MARK).join(piece.split(self.MARK)) if self.MARK in piece else piece)
        return "".join(pieces)

    def _mark(self, literal: str) -> str:
        self.found.append(literal)
        return f"{self.MARK}{len(self.found) - 1}{self.MARK}"


def _render(source: str, variables: Mapping[str, Any]) -> str:
    try:
        return _compile(source).render(variables)
    except jinja2.TemplateSyntaxError as error:
        raise PromptError(
            f"the chat template has an error in line {error.lineno} ({error.message}): correct the template"
        ) from error
    except jinja2.TemplateError as error:  # it called raise_exception, or used what isn't there
        raise PromptError(f"the chat template refuses the messages: {error.message}") from error
    except Exception as error:  # a template is a program, and may fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise PromptError(
            f"the chat template can't lay out these messages ({reason}): check their roles and keys"
        ) from error


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    """The environment is that of transformers, so that every published template renders as it does there."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(source)


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` tells training what an assistant wrote. Here it is its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own attribute)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own `tojson` escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
