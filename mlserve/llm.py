"""The offline SDK: a model in this process."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict, TypeGuard, TypeVar, Unpack, cast

from torch import Tensor
from tqdm import tqdm

from mlserve.adapters.registry import AdapterInfo
from mlserve.cache.hashing import BlockHash
from mlserve.cache.manager import CacheStats
from mlserve.config import EngineConfig
from mlserve.engine.build import build_engine
from mlserve.engine.media import GivenImage, no_images_error, take_images
from mlserve.engine.prompt import render_chat
from mlserve.engine.queues import WaitingQueue
from mlserve.engine.sequence import EngineRequest
from mlserve.errors import ConfigError, RequestError
from mlserve.request import RequestOptions, RequestOutput, SamplingParams, StreamOutput
from mlserve.vision.identity import ImageIdentity
from mlserve.vision.source import ImageSource

__all__ = ["LLM", "AdapterName", "Image", "Message", "Options", "Prompt"]

Prompt = str | Sequence[int]
AdapterName = str | None  # None: the base model
Image = ImageSource | Tensor  # a tensor holds embeddings, [n, H]
T = TypeVar("T")
Message = Mapping[str, Any]
PROGRESS_FROM = 8  # prompts in one call from which a progress bar is worth a line


class Options(TypedDict, total=False):
    """Options of `LLM`. Meanings and defaults stand in `mlserve.config`; `mlserve generate --help` prints them."""

    dtype: str
    device: str
    max_model_len: int | None
    kernels: str
    cuda_graphs: bool
    block_size: int
    enable_prefix_caching: bool
    block_hash: str | BlockHash
    num_blocks: int | None
    kv_memory: float | None
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str | Callable[[], WaitingQueue]
    max_skips: int
    max_loras: int
    max_lora_rank: int
    lora_dtype: str | None
    max_adapter_memory: float
    max_adapter_bytes: int
    adapter_dir: str | None
    image_identity: str | ImageIdentity
    image_radius: int | None
    image_clip: str | None
    default_image_identity: str | None
    max_images: int
    max_image_bytes: int
    max_image_pixels: int
    embedding_cache_memory: float
    image_hosts: str | None


class LLM:
    """A model, its KV pool and its scheduler. Not thread-safe: `mlserve.engine.async_engine` serves many callers.

    >>> llm = LLM()
    >>> llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Load a model: the embedded one (default), a Hugging Face folder or hub id, or a GGUF file.

        adapters: LoRA adapters to load, folders as PEFT saves them, by the names that requests use. With the option
        `adapter_dir` adapters are found by the names of their folders, and read when they are first asked for.
        Raises `ModelError` if the model can't be loaded, `AdapterError` if one of the adapters can't, `ConfigError` for
        wrong options.
        """
        named: dict[str, Any] = dict(options)
        if model is not None:
            named["model"] = model
        self.config = EngineConfig.from_options(**named)
        self.engine = build_engine(self.config)
        self._ids = itertools.count()
        self._mailboxes: dict[str, deque[StreamOutput]] = {}
        for name, path in (adapters or {}).items():
            self.load_adapter(name, path)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterName | Sequence[AdapterName] = None,
        images: Sequence[Sequence[Image]] | None = None,
        image_identity: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many (texts, or lists of token ids) as one batch. Outputs stand in the prompts' order.

        sampling_params, adapter: one for all, or one for each prompt.
        images: for each prompt those that its image placeholders stand for: PIL images, paths, bytes, data URLs, or
            embeddings `[n, H]` as a tensor.
        image_identity: "exact" or, if the engine's option of that name allows it, "perceptual"; by default what
            `default_image_identity` says.
        priority: lower goes first; needs the option policy='priority'.
        cache_salt: cached KV is shared only between requests of the same salt.
        progress: show a progress bar; by default for long batches on a terminal.
        Raises `RequestError` before anything runs if any prompt can't be served. A request that fails while it runs
        doesn't disturb the others: its `finish_reason` is `error`, and `error` says why.
        """
        batch: list[Prompt] = [prompts] if _is_prompt(prompts) else list(cast(Sequence[Prompt], prompts))
        all_params = _one_each("sampling_params", sampling_params or SamplingParams(), SamplingParams, len(batch))
        names = _one_each("adapter", adapter, str | None, len(batch))
        all_images = [()] * len(batch) if images is None else images
        if len(all_images) != len(batch):
            raise ConfigError(f"images of {len(all_images)} prompts for {len(batch)}: give a list for each")
        requests = []
        for number, (prompt, params, name, own) in enumerate(zip(batch, all_params, names, all_images, strict=True)):
            with _naming(number, len(batch)):
                given = self._identified(own, cache_salt, image_identity)
                requests.append(self._prepare(prompt, params, RequestOptions(name, priority, cache_salt), given))
        return self._complete(requests, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterName | Sequence[AdapterName] = None,
        image_identity: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, laid out by the model's chat template. Otherwise like `generate`.

        A message's content may have image parts: `{"type": "image", "image": ...}`, or `{"type": "image_url", ...}` as
        in OpenAI's API.
        """
        conversations = messages if _are_conversations(messages) else [cast(Sequence[Message], messages)]
        prompts, images = [], []
        for number, conversation in enumerate(conversations):
            with _naming(number, len(conversations)):
                prompt, own = self._laid_out(conversation)
                prompts.append(prompt)
                images.append(own)
        return self.generate(
            prompts,
            sampling_params,
            adapter=adapter,
            images=images,
            image_identity=image_identity,
            priority=priority,
            cache_salt=cache_salt,
            progress=progress,
        )

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        adapter: AdapterName = None,
        image_identity: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Iterator[StreamOutput]:
        """Outputs of one prompt or conversation as they come; `text` is what is new. Leaving the loop early aborts it.

        Several streams may be read in turn: each step of the engine serves all that have begun. A stream begins when
        its first output is asked for. Raises a `RequestError` at once if the prompt can't be served.
        """
        given, images = self._laid_out(prompt) if _is_conversation(prompt) else (cast(Prompt, prompt), [])
        options = RequestOptions(adapter, priority, cache_salt)
        identified = self._identified(images, cache_salt, image_identity)
        return self._read(self._prepare(given, sampling_params or SamplingParams(), options, identified))

    def load_adapter(self, name: str, path: str | Path | None = None, *, pinned: bool = False) -> AdapterInfo:
        """Read an adapter, a folder as PEFT saves it, and serve it under a name from now on.

        A name that exists gets the new content: requests that run finish on the old one, and no KV of it is used
        again. Without a path the name's own folder is read again. A pinned adapter is never put out of host memory.
        Raises an `AdapterError` if it can't be served; nothing has changed then.
        """
        return self.engine.adapters.load(name, path, pinned=pinned)

    def unload_adapter(self, name: str) -> None:
        """Serve a name no longer. Requests that run finish on it. Raises `AdapterNotFoundError`."""
        self.engine.adapters.unload(name)

    def list_adapters(self) -> list[AdapterInfo]:
        """The adapters that are served, by name."""
        return self.engine.adapters.list()

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV."""
        self.engine.reset_prefix_cache()

    def cache_stats(self) -> CacheStats:
        """Figures of the KV pool and of the prefix cache."""
        return self.engine.cache.stats()

    def _laid_out(self, conversation: Sequence[Message]) -> tuple[list[int], list[Image]]:
        """A conversation's prompt, and its images in the order of their placeholders."""
        desk = self.engine.images
        if desk is None:
            return render_chat(conversation, self.engine.tokenizer), []
        messages, images = take_images(conversation)
        return render_chat(messages, self.engine.tokenizer, images=desk.text), images

    def _identified(self, images: Sequence[Image], cache_salt: str | None, identity: str | None) -> list[GivenImage]:
        desk = self.engine.images
        if desk is not None:
            return desk.identify(images, cache_salt, identity, allow_paths=True)
        if images:
            raise no_images_error(len(images))
        return []

    def _prepare(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions, images: Sequence[GivenImage]
    ) -> EngineRequest:
        return self.engine.prepare(f"llm-{next(self._ids)}", prompt, params, options, images)

    def _pump(self) -> list[StreamOutput]:
        outputs = self.engine.step()
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                mailbox.append(output)
        return outputs

    def _read(self, request: EngineRequest) -> Iterator[StreamOutput]:
        mailbox = self._mailboxes[request.request_id] = deque()
        try:
            self.engine.submit(request)
            while True:
                while not mailbox:
                    self._pump()
                output = mailbox.popleft()
                yield output
                if output.completed is not None:
                    return
        finally:
            del self._mailboxes[request.request_id]
            self.engine.abort(request.request_id)

    def _complete(self, requests: list[EngineRequest], progress: bool | None) -> list[RequestOutput]:
        show = len(requests) >= PROGRESS_FROM and sys.stderr.isatty() if progress is None else progress
        completed: dict[str, RequestOutput | None] = {request.request_id: None for request in requests}
        missing = len(requests)
        try:
            for request in requests:
                self.engine.submit(request)
            with tqdm(total=len(requests), desc="requests", unit="req", disable=not show) as bar:
                while missing:
                    for output in self._pump():
                        if output.completed is not None and output.request_id in completed:
                            completed[output.request_id] = output.completed
                            missing -= 1
                            bar.update()
        finally:  # after an interrupt nothing may stay behind in the engine
            for request in requests:
                self.engine.abort(request.request_id)
        return [output for output in completed.values() if output is not None]


@contextmanager
def _naming(number: int, count: int) -> Iterator[None]:
    """An error about one prompt of several says which one it is."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise type(error)(f"prompt {number}: {error}") from None


def _is_prompt(value: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    """What is neither a prompt nor a list of prompts is taken for a wrong prompt."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return not is_list or not any(isinstance(part, str | Sequence) for part in value)


def _is_conversation(value: object) -> TypeGuard[Sequence[Message]]:
    return _is_filled_list(value) and isinstance(value[0], Mapping)


def _are_conversations(value: object) -> TypeGuard[Sequence[Sequence[Message]]]:
    return _is_filled_list(value) and _is_filled_list(value[0])


def _is_filled_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _one_each(name: str, given: T | Sequence[T], kind: type[T] | UnionType, count: int) -> list[T]:
    if isinstance(given, kind):
        return [given] * count
    each = cast(Sequence[T], given)
    if len(each) != count:
        raise ConfigError(f"{len(each)} {name} for {count} prompts: give one, or one for each prompt")
    return list(each)
