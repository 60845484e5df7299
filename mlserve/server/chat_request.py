"""A chat's body as a job for the engine. All of it is work for a thread of its own: templates, tokens, pictures."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from mlserve.engine.media import GivenImage, no_images_error, take_images
from mlserve.engine.prompt import render_chat
from mlserve.errors import PromptError
from mlserve.request import SamplingParams
from mlserve.server.auth import Principal
from mlserve.server.generation import Job
from mlserve.server.protocol.chat import ChatBody
from mlserve.server.serving import Serving

__all__ = ["chat_job", "lay_out"]


def chat_job(
    serving: Serving, principal: Principal, request_id: str, body: ChatBody, params: SamplingParams, **variables: Any
) -> Job:
    """Check a chat, lay it out, and identify its images.

    variables: what the template reads besides the messages, such as tools. Raises a `RequestError`.
    """
    options = serving.options(principal, body.model, body.cache_salt, body.priority)
    messages = variables.pop("messages", None) or body.conversation()
    prompt_ids, images = lay_out(
        serving, messages, options.cache_salt, body.image_identity, {**(body.chat_template_kwargs or {}), **variables}
    )
    return Job(request_id, prompt_ids, params, options, images)


def lay_out(
    serving: Serving,
    messages: list[dict[str, Any]],
    cache_salt: str | None,
    image_identity: str | None,
    variables: Mapping[str, Any],
) -> tuple[list[int], list[GivenImage]]:
    """A conversation's tokens, with a placeholder for each image, and its images. Raises a `RequestError`."""
    reserved = {"messages", "images", "tokenizer", "chat_template"} & set(variables)
    if reserved:
        raise PromptError(f"chat_template_kwargs has {min(reserved)!r}: leave it out, it isn't for the template")
    plain, sources = take_images([_with_embeddings(message) for message in messages])
    desk = serving.images
    if desk is None and sources:
        raise no_images_error(len(sources))
    if desk is None:
        return render_chat(plain, serving.tokenizer, **variables), []
    images = desk.identify(sources, cache_salt, image_identity, allow_paths=False)
    return render_chat(plain, serving.tokenizer, images=desk.text, **variables), images


def _with_embeddings(message: dict[str, Any]) -> dict[str, Any]:
    """Image parts as the SDK knows them: embeddings come over the wire as safetensors in base64."""
    content = message.get("content")
    if not isinstance(content, list) or not any(part.get("type") == "image_embeds" for part in content):
        return message
    parts = [
        {**part, "image_embeds": _embeddings(part.get("image_embeds"))} if part.get("type") == "image_embeds" else part
        for part in content
    ]
    return {**message, "content": parts}


def _embeddings(encoded: object) -> Any:
    try:
        if not isinstance(encoded, str):
            raise ValueError(f"it is of type {type(encoded).__name__}")
        tensors = load_safetensors(b64decode(encoded, validate=True))
        (tensor,) = tensors.values()
        return tensor.float()
    except (ValueError, binascii.Error, SafetensorError) as error:
        raise PromptError(
            f"image_embeds can't be read ({error}): give a safetensors file of one tensor [n, H], in base64"
        ) from None
