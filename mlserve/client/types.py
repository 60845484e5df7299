"""What the server answers, typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from openai import BaseModel
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_usage import CompletionUsage

from mlserve.client.parts import Part

__all__ = [
    "Adapter",
    "AdapterList",
    "Answer",
    "BlockRun",
    "CacheBlocks",
    "CacheStats",
    "Deleted",
    "ImageMatch",
    "Status",
    "StreamedAnswer",
    "answer_of",
    "question",
    "shown_images",
]


class Adapter(BaseModel):
    """An adapter that was loaded or asked for. What only its files say is None before they were read."""

    name: str
    digest: str | None = None  # of its content, hexadecimal
    rank: int | None = None
    targets: str | None = None
    num_bytes: int | None = None  # in host memory
    is_loaded: bool
    is_pinned: bool
    num_leases: int  # requests that use it or wait for it


class AdapterList(BaseModel):
    """Adapters that were loaded or asked for, and the names of all that can be."""

    data: list[Adapter]
    names: list[str]


class CacheStats(BaseModel):
    """Figures of the pool of KV blocks and of the prefix cache."""

    num_blocks: int
    num_free: int
    num_referenced: int
    num_cached: int
    num_evicted: int
    query_tokens: int
    hit_tokens: int
    hit_rate: float  # 0 to 1


class BlockRun(NamedTuple):
    """Equal blocks in a row."""

    num_blocks: int
    state: str  # free, cached or in_use
    references: int
    adapter: int | None  # place in `CacheBlocks.adapters`
    image: int | None  # place in `CacheBlocks.images`


class CacheBlocks(BaseModel):
    """A map of the pool."""

    runs: list[list[Any]]  # as they came over the wire: see `block_runs`
    adapters: list[dict[str, str | None]]  # digest and name
    images: list[str]  # digests

    @property
    def block_runs(self) -> list[BlockRun]:
        """All blocks in order."""
        return [BlockRun(*run) for run in self.runs]


class Deleted(BaseModel):
    """A name that is served no longer."""

    name: str
    deleted: bool


class Status(BaseModel):
    """That it was done."""

    status: str


class ImageMatch(BaseModel):
    """Which image an answer was about: another than was sent if that looked the same to the server."""

    digest: str
    canonical: str
    hash: str | None = None
    distance: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a question."""

    text: str
    finish_reason: str
    model: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt's, those that were found in the prefix cache
    images: Sequence[ImageMatch | None] = ()  # of the prompt, in order; None: embeddings
    time_to_first_token: float | None = None  # seconds, if it was streamed


def question(
    prompt: str, images: Sequence[Part], system: str | None, history: Sequence[Mapping[str, Any]]
) -> list[Any]:
    """A conversation's messages, ending with the question."""
    content: Any = [*images, {"type": "text", "text": prompt}] if images else prompt
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, *history, {"role": "user", "content": content}]


def answer_of(completion: ChatCompletion) -> Answer:
    """The first choice of a whole answer."""
    choice, usage = completion.choices[0], completion.usage
    return Answer(
        choice.message.content or "",
        choice.finish_reason,
        completion.model,
        *_counts(usage),
        images=shown_images(completion),
    )


def _counts(usage: CompletionUsage | None) -> tuple[int, int, int]:
    if usage is None:
        return 0, 0, 0
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details is not None else None
    return usage.prompt_tokens, usage.completion_tokens, cached or 0


def shown_images(body: ChatCompletion | ChatCompletionChunk) -> list[ImageMatch | None]:
    """The images that an answer speaks of; none for a text."""
    given = (body.model_extra or {}).get("images") or []
    return [None if image is None else ImageMatch.model_validate(image) for image in given]


class StreamedAnswer:
    """Puts an answer together from its chunks."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._text: list[str] = []
        self._finish_reason = ""
        self._last: ChatCompletionChunk | None = None
        self._first_at: float | None = None
        self._images: list[ImageMatch | None] = []
        self._usage: CompletionUsage | None = None

    def add(self, chunk: ChatCompletionChunk, now: float) -> str:
        """Take a chunk; returns its text."""
        self._last = chunk
        self._usage = chunk.usage or self._usage
        self._images = self._images or shown_images(chunk)
        text = ""
        for choice in chunk.choices:
            text = choice.delta.content or ""
            self._finish_reason = choice.finish_reason or self._finish_reason
        if text:
            self._text.append(text)
            if self._first_at is None:
                self._first_at = now
        return text

    def answer(self) -> Answer:
        """The whole. Raises `ValueError` if there were no chunks."""
        if self._last is None:
            raise ValueError("the stream was not read: iterate over it first")
        return Answer(
            "".join(self._text),
            self._finish_reason,
            self._last.model,
            *_counts(self._usage),
            images=self._images,
            time_to_first_token=None if self._first_at is None else self._first_at - self._started,
        )
