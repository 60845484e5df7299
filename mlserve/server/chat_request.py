"""A chat's body as a job for the engine. All of it is work for a thread of its own: templates, tokens, pictures."""

from __future__ import annotations

import asyncio
import binascii
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from mlserve.constraint import Constraint
from mlserve.engine.media import GivenImage, no_images_error, take_images
from mlserve.engine.prompt import render_chat
from mlserve.errors import PromptError, SamplingParamsError
from mlserve.server.auth import Principal
from mlserve.server.chat_answer import OutputParser, PlainText
from mlserve.server.generation import Job
from mlserve.server.protocol.chat import ChatBody, ResponseFormat
from mlserve.server.serving import Serving
from mlserve.server.tools.choice import ToolChoice, ToolMode, call_schema, read_tool_choice
from mlserve.server.tools.definitions import read_tools
from mlserve.server.tools.first_call import FirstCallOnly
from mlserve.server.tools.formats import JSON_ANSWER, ToolFormat
from mlserve.server.tools.messages import prepare_prompt
from mlserve.server.tools.parser import CallParser

__all__ = ["Chat", "read_chat"]


@dataclass(frozen=True, slots=True, eq=False)
class Chat:
    """What the engine is asked, and how what it says is read."""

    job: Job
    make_parser: Callable[[], OutputParser]  # one for each choice


async def read_chat(serving: Serving, principal: Principal, request_id: str, body: ChatBody) -> Chat:
    """Check a chat, lay it out, identify its images, compile what its answer must follow. Raises a `RequestError`.

    In a thread; where there are images to fetch, in one of their own, so that slow hosts hold up nobody else.
    """
    threads = serving.fetchers if _has_addresses(body) else None
    return await asyncio.get_running_loop().run_in_executor(threads, _read, serving, principal, request_id, body)


def _has_addresses(body: ChatBody) -> bool:
    parts = [part for message in body.messages if isinstance(message.content, list) for part in message.content]
    urls = [part.get("image_url", part.get("image")) for part in parts]
    plain = [url.get("url") if isinstance(url, dict) else url for url in urls]
    return any(isinstance(url, str) and not url.startswith("data:") for url in plain)


def _read(serving: Serving, principal: Principal, request_id: str, body: ChatBody) -> Chat:
    options = serving.options(principal, body.model, body.cache_salt, body.priority)
    choice = read_tool_choice(body.tool_choice, read_tools(body.tools))
    if body.parallel_tool_calls is not None and not body.tools:
        raise SamplingParamsError("parallel_tool_calls is given without tools: give tools, or leave it out")
    form = _form(serving, choice)
    params = replace(body.sampling(serving.limits.max_model_len), constraint=_constraint(choice, body.response_format))
    if form is not None and any(serving.tokenizer.token_id(m) in serving.tokenizer.special_ids for m in form.markers):
        params = replace(params, skip_special_tokens=False)
    if params.constraint is not None:
        serving.constraints.compile(params.constraint)
    template = serving.tokenizer.chat_template
    messages: list[Mapping[str, Any]] = list(body.conversation())
    variables = dict(body.chat_template_kwargs or {})
    if template is not None:
        messages, tool_variables = prepare_prompt(messages, choice.tools, chat_template=template, form=form)
        variables |= tool_variables
    prompt_ids, images = _lay_out(serving, messages, options.cache_salt, body.image_identity, variables)
    job = Job(request_id, prompt_ids, params, options, images)
    return Chat(job, _parser_maker(serving, choice, form, body.parallel_tool_calls))


def _form(serving: Serving, choice: ToolChoice) -> ToolFormat | None:
    """How calls will be written. A model that must call is made to write JSON; otherwise it writes as it learnt to."""
    if choice.mode is ToolMode.REQUIRED:
        return JSON_ANSWER
    if choice.mode is ToolMode.AUTO and serving.tool_format is None:
        raise PromptError(
            "it isn't known how this model writes calls of tools: start the server with --tool-call-format, set "
            "tool_choice to 'required', or leave the tools out"
        )
    return serving.tool_format


def _constraint(choice: ToolChoice, wanted: ResponseFormat | None) -> Constraint | None:
    if wanted is not None and wanted.type != "text" and choice.mode is not ToolMode.NONE:
        raise SamplingParamsError(
            f"response_format is {wanted.type!r}, and there are tools to be called: leave one of them out, or set "
            "tool_choice to 'none'"
        )
    if choice.mode is ToolMode.REQUIRED:
        return Constraint.json_schema(call_schema(choice.tools))
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint.json_object()
    if wanted.json_schema is None or wanted.json_schema.json_schema is None:
        raise SamplingParamsError("response_format is 'json_schema' without a schema: give json_schema.schema")
    return Constraint.json_schema(wanted.json_schema.json_schema)


def _parser_maker(
    serving: Serving, choice: ToolChoice, form: ToolFormat | None, parallel: bool | None
) -> Callable[[], OutputParser]:
    if form is None or choice.mode is ToolMode.NONE:
        return PlainText
    tokenizer = serving.tokenizer
    ends = [tokenizer.token_bytes(token).decode(errors="replace") for token in serving.limits.eos_token_ids]
    names = [tool.name for tool in choice.tools]

    def make() -> OutputParser:
        parser = CallParser(form, tool_names=names, end_of_turn=ends)
        return parser if parallel is not False else FirstCallOnly(parser)

    return make


def _lay_out(
    serving: Serving,
    messages: list[Mapping[str, Any]],
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


def _with_embeddings(message: Mapping[str, Any]) -> Mapping[str, Any]:
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
        if not tensor.is_floating_point():
            raise ValueError(f"its numbers are of type {tensor.dtype}")
        return tensor.float()
    except (ValueError, KeyError, binascii.Error, SafetensorError) as error:
        raise PromptError(
            f"image_embeds can't be read ({error}): give a safetensors file of one tensor [n, H], in base64"
        ) from None
