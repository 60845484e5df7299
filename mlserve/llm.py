"""The offline SDK: a model in this process."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeGuard, Unpack, cast

from tqdm import tqdm

from mlserve.cache.hashing import BlockHash
from mlserve.cache.manager import CacheStats
from mlserve.config import EngineConfig
from mlserve.engine.build import build_engine
from mlserve.engine.prompt import render_chat
from mlserve.engine.sequence import EngineRequest
from mlserve.errors import ConfigError, RequestError
from mlserve.request import RequestOutput, SamplingParams, StreamOutput

__all__ = ["LLM", "Message", "Options", "Prompt"]

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
PROGRESS_FROM = 8  # prompts in one call from which a progress bar is worth a line


class Options(TypedDict, total=False):
    """Options of `LLM`. Meanings and defaults stand in `mlserve.config`; `mlserve generate --help` prints them."""

    dtype: str
    device: str
    max_model_len: int | None
    kernels: str
    block_size: int
    enable_prefix_caching: bool
    block_hash: str | BlockHash
    num_blocks: int | None
    kv_memory: float | None
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    max_skips: int


class LLM:
    """A model, its KV pool and its scheduler. Not thread-safe: `mlserve.engine.async_engine` serves many callers.

    >>> llm = LLM()
    >>> llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(self, model: str | None = None, **options: Unpack[Options]) -> None:
        """Load a model: the embedded one (default), a Hugging Face folder or hub id, or a GGUF file.

        Raises `ModelError` if it can't be loaded, `ConfigError` for wrong options.
        """
        named: dict[str, Any] = dict(options)
        if model is not None:
            named["model"] = model
        self.config = EngineConfig.from_options(**named)
        self.engine = build_engine(self.config)
        self._ids = itertools.count()
        self._mailboxes: dict[str, deque[StreamOutput]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many (texts, or lists of token ids) as one batch. Outputs stand in the prompts' order.

        sampling_params: one for all, or one for each prompt.
        progress: show a progress bar; by default for long batches on a terminal.
        Raises `RequestError` before anything runs if any prompt can't be served. A request that fails while it runs
        doesn't disturb the others: its `finish_reason` is `error`, and `error` says why.
        """
        batch: list[Prompt] = [prompts] if _is_prompt(prompts) else list(cast(Sequence[Prompt], prompts))
        requests = []
        for i, (prompt, params) in enumerate(zip(batch, _one_each(sampling_params, len(batch)), strict=True)):
            try:
                requests.append(self._prepare(prompt, params, priority, cache_salt))
            except RequestError as error:
                raise error if len(batch) == 1 else type(error)(f"prompt {i}: {error}") from None
        return self._complete(requests, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, laid out by the model's chat template. Otherwise like `generate`."""
        conversations = [messages] if _is_conversation(messages) else list(messages)
        prompts = [render_chat(conversation, self.engine.tokenizer) for conversation in conversations]
        return self.generate(prompts, sampling_params, priority=priority, cache_salt=cache_salt, progress=progress)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Iterator[StreamOutput]:
        """Outputs of one prompt or conversation as they come; `text` is what is new. Leaving the loop early aborts it.

        Several streams may be read in turn: each step of the engine serves all of them.
        """
        given = render_chat(prompt, self.engine.tokenizer) if _is_conversation(prompt) else cast(Prompt, prompt)
        request = self._prepare(given, sampling_params or SamplingParams(), priority, cache_salt)
        self._submit(request)
        return self._read(request.request_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV."""
        self.engine.reset_prefix_cache()

    def cache_stats(self) -> CacheStats:
        """Figures of the KV pool and of the prefix cache."""
        return self.engine.stats()

    def _prepare(self, prompt: Prompt, params: SamplingParams, priority: int, cache_salt: str | None) -> EngineRequest:
        return self.engine.prepare(f"llm-{next(self._ids)}", prompt, params, priority=priority, cache_salt=cache_salt)

    def _submit(self, request: EngineRequest) -> None:
        self._mailboxes[request.request_id] = deque()
        self.engine.submit(request)

    def _pump(self) -> None:
        for output in self.engine.step():
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                mailbox.append(output)

    def _read(self, request_id: str) -> Iterator[StreamOutput]:
        mailbox = self._mailboxes[request_id]
        try:
            while True:
                while not mailbox:
                    self._pump()
                output = mailbox.popleft()
                yield output
                if output.completed is not None:
                    return
        finally:
            del self._mailboxes[request_id]
            self.engine.abort(request_id)

    def _complete(self, requests: list[EngineRequest], progress: bool | None) -> list[RequestOutput]:
        show = len(requests) >= PROGRESS_FROM and sys.stderr.isatty() if progress is None else progress
        completed: dict[str, RequestOutput] = {}
        try:
            for request in requests:
                self._submit(request)
            with tqdm(total=len(requests), desc="requests", unit="req", disable=not show) as bar:
                while len(completed) < len(requests):
                    self._pump()
                    bar.update(self._collect(requests, completed))
        finally:  # after an interrupt nothing may stay behind in the engine
            for request in requests:
                self._mailboxes.pop(request.request_id, None)
                self.engine.abort(request.request_id)
        return [completed[request.request_id] for request in requests]

    def _collect(self, requests: list[EngineRequest], completed: dict[str, RequestOutput]) -> int:
        before = len(completed)
        for request in requests:
            mailbox = self._mailboxes[request.request_id]
            if mailbox and mailbox[-1].completed is not None:
                completed[request.request_id] = mailbox[-1].completed
            mailbox.clear()
        return len(completed) - before


def _is_prompt(value: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    return isinstance(value, str) or not any(isinstance(part, str | Sequence) for part in value)


def _is_conversation(value: object) -> TypeGuard[Sequence[Message]]:
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{len(params)} sampling_params for {count} prompts: give one, or one for each prompt")
    return list(params)
