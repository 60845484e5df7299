"""Images in an engine beyond the public reports: near-duplicates, embeddings as input, what is encoded, wrong input."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparing import GREEDY, assert_eq
from PIL import Image
from tiny import IMAGE
from tiny_adapters import quiet
from tiny_vision import write_tiny_vlm

from mlserve import LLM, CapacityError, ConfigError, CorruptImageError, ImageLimitError, PromptError, RequestError
from mlserve.engine.media import take_images
from mlserve.engine.prompt import render_chat
from mlserve.vision.image import DecodedImage

OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 256}


def photograph(seed: int = 0, size: int = 256) -> Image.Image:
    """Soft shapes, as a perceptual hash likes them."""
    small = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            with quiet():
                made[family] = write_tiny_vlm(tmp_path_factory.mktemp(family), family)
        return made[family]

    return folder


@pytest.fixture
def load(folders: Callable[[str], Path]) -> Callable[..., LLM]:
    return lambda family="llava", **options: LLM(str(folders(family)), **{**OPTIONS, **options})


def ask(llm: LLM, image: Any, **how: Any) -> Any:
    part = {"type": "image_embeds", "image_embeds": image} if isinstance(image, torch.Tensor) else None
    content = [{"type": "text", "text": "see "}, part or {"type": "image", "image": image}]
    return llm.chat([{"role": "user", "content": content}], GREEDY, **how)[0]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each call of an encoder got."""
    from mlserve.vision.families.llava import LlavaVision

    counts: list[int] = []
    encode = LlavaVision.encode

    def counting(self: LlavaVision, images: list[DecodedImage]) -> list[torch.Tensor]:
        counts.append(len(images))
        return encode(self, images)

    monkeypatch.setattr(LlavaVision, "encode", counting)
    return counts


def test_a_near_duplicate_is_the_canonical_image(load: Callable[..., LLM], encoded: list[int]) -> None:
    picture = photograph()
    resized = picture.resize((230, 230), Image.Resampling.LANCZOS)
    llm = load(image_identity="perceptual")
    first, near = ask(llm, picture), ask(llm, resized)
    assert_eq(near, first)  # same ids and log-probabilities: it became a request about the first picture
    assert near.metrics.cached_tokens > first.prompt_token_ids.index(IMAGE) + 12
    assert encoded == [1]
    (own,), (report,) = first.images, near.images
    assert own.canonical == own.digest == report.canonical != report.digest
    assert (report.hash_name, own.distance) == ("phash", None)
    assert 0 <= report.distance <= 8


def test_in_exact_mode_it_is_computed_on_its_own(load: Callable[..., LLM], encoded: list[int]) -> None:
    picture = photograph()
    resized = picture.resize((230, 230), Image.Resampling.LANCZOS)
    for llm, how in ((load(), {}), (load(image_identity="perceptual"), {"image_identity": "exact"})):
        encoded.clear()
        first, second = ask(llm, picture, **how), ask(llm, resized, **how)
        assert encoded == [1, 1]
        assert second.images[0].canonical == second.images[0].digest != first.images[0].digest
        assert second.metrics.cached_tokens == second.prompt_token_ids.index(IMAGE) // 4 * 4


def test_near_duplicates_stay_within_a_tenant(load: Callable[..., LLM]) -> None:
    picture = photograph()
    resized = picture.resize((230, 230), Image.Resampling.LANCZOS)
    llm = load(image_identity="perceptual")
    ask(llm, picture, cache_salt="a")
    report = ask(llm, resized, cache_salt="b").images[0]
    assert report.canonical == report.digest
    assert ask(llm, resized, cache_salt="a").images[0].distance is not None


def test_embeddings_of_tenants_do_not_meet(load: Callable[..., LLM], encoded: list[int]) -> None:
    llm = load()
    for salt in ("a", "b", None, "a", "b", None):
        ask(llm, photograph(), cache_salt=salt)
    assert encoded == [1, 1, 1]


def test_a_canonical_image_that_was_evicted_stands_in_for_nobody(load: Callable[..., LLM]) -> None:
    picture = photograph()
    resized = picture.resize((230, 230), Image.Resampling.LANCZOS)
    llm = load(image_identity="perceptual", embedding_cache_memory=0)
    ask(llm, picture)
    near = ask(llm, resized)
    assert near.images[0].canonical == near.images[0].digest
    assert_eq(near, ask(load(), resized))


def test_perceptual_identity_must_be_allowed(load: Callable[..., LLM]) -> None:
    with pytest.raises(RequestError, match="image_identity is 'perceptual', and this engine has 'exact'"):
        ask(load(), photograph(), image_identity="perceptual")


def test_likeness_may_be_allowed_without_being_the_default(load: Callable[..., LLM]) -> None:
    picture = photograph()
    resized = picture.resize((230, 230), Image.Resampling.LANCZOS)
    llm = load(image_identity="phash+dhash", default_image_identity="exact")
    ask(llm, picture, image_identity="perceptual")
    assert ask(llm, resized).images[0].distance is None
    assert ask(llm, resized, image_identity="perceptual").images[0].hash_name == "phash+dhash"
    with pytest.raises(ConfigError, match="default_image_identity is 'perceptual', and image_identity 'exact'"):
        load(default_image_identity="perceptual")


def test_encoding_is_skipped_and_batched(load: Callable[..., LLM], encoded: list[int]) -> None:
    llm = load(enable_prefix_caching=False)
    pictures = [photograph(i, 40) for i in range(3)]
    conversations = [
        [{"role": "user", "content": [{"type": "image", "image": picture}]}] for picture in (*pictures, pictures[0])
    ]
    llm.chat(conversations, GREEDY)
    assert encoded == [3]  # one batch, the picture that is there twice once
    llm.chat(conversations, GREEDY)
    assert encoded == [3]


def test_what_later_chunks_need_is_held_beside_a_full_cache(load: Callable[..., LLM], encoded: list[int]) -> None:
    llm = load(embedding_cache_memory=0, max_num_batched_tokens=5, max_num_seqs=2, enable_prefix_caching=False)
    assert_eq(ask(llm, photograph()), ask(load(), photograph()))
    assert encoded == [1, 1]  # once here, in however many chunks, and once by the other engine
    assert llm.engine.images is not None
    held = llm.engine.images.encoder._unfinished
    assert len(held) == 0
    messages, sources = take_images([{"role": "user", "content": [{"type": "image", "image": photograph(1)}]}])
    ids = render_chat(messages, llm.engine.tokenizer, images=llm.engine.images.text)
    images = llm.engine.images.identify(sources, None, allow_paths=False)
    llm.engine.submit(llm.engine.prepare("gone", ids, GREEDY, images=images))
    while not held:
        llm.engine.step()
    llm.engine.abort("gone")
    gc.collect()
    assert len(held) == 0


def test_embeddings_as_input(load: Callable[..., LLM]) -> None:
    llm = load()
    assert llm.engine.images is not None
    (embeddings,) = llm.engine.images.encoder.model.encode([DecodedImage(np.asarray(photograph(1, 50)))])
    given, own = ask(llm, embeddings), ask(llm, photograph(1, 50))
    assert given.outputs[0].token_ids == own.outputs[0].token_ids
    assert given.images == [None]
    assert own.metrics.cached_tokens == own.prompt_token_ids.index(IMAGE) // 4 * 4  # another kind of mark
    assert ask(llm, embeddings.clone()).metrics.cached_tokens > 20
    assert ask(llm, embeddings * 1.5).metrics.cached_tokens == own.metrics.cached_tokens
    shorter = ask(llm, embeddings[:5])
    assert shorter.prompt_token_ids.count(IMAGE) == 5


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        (torch.zeros(4, 63), r"\[4, 63\]: give \[n, 64\]"),
        (torch.zeros(0, 64), r"\[0, 64\]"),
        (torch.zeros(64), r"\[64\]"),
        (torch.full((2, 64), torch.nan), "not finite"),
    ],
)
def test_wrong_embeddings(load: Callable[..., LLM], embeddings: torch.Tensor, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        ask(load(), embeddings)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (b"no image at all", RequestError),
        (photograph(0, 100), ImageLimitError),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 30, CorruptImageError),
    ],
)
def test_wrong_images_leave_the_engine_as_it_was(load: Callable[..., LLM], source: Any, error: type[Exception]) -> None:
    llm = load(max_image_pixels=9_000)
    with pytest.raises(error):
        ask(llm, source)
    assert not llm.engine.has_work()
    assert_eq(ask(llm, photograph(0, 90)), ask(load(), photograph(0, 90)))


def test_images_of_a_request_are_limited(load: Callable[..., LLM]) -> None:
    content = [{"type": "image", "image": photograph(i, 30)} for i in range(3)]
    with pytest.raises(PromptError, match="the request has 3 images, limit 2: send fewer or raise max_images"):
        load(max_images=2).chat([{"role": "user", "content": content}], GREEDY)
    assert len(load(max_images=3).chat([{"role": "user", "content": content}], GREEDY)[0].images) == 3


def test_urls_are_fetched_only_from_hosts_that_are_named(load: Callable[..., LLM]) -> None:
    url = "http://127.0.0.1:80/cat.png"
    with pytest.raises(RequestError, match="none are fetched here"):
        ask(load(), url)
    with pytest.raises(RequestError, match=r"example\.org|127\.0\.0\.1"):
        ask(load(image_hosts="example.org, *.example.net"), url)
    with pytest.raises(RequestError, match=r"127\.0\.0\.1"):  # named or not, it leads inside
        ask(load(image_hosts="127.0.0.1"), url)
    with pytest.raises(ConfigError, match="image_hosts is ' ,': name at least one host"):
        load(image_hosts=" ,")


def test_an_image_that_no_step_holds(load: Callable[..., LLM]) -> None:
    llm = load("gemma3", max_num_batched_tokens=3, max_num_seqs=2)
    with pytest.raises(CapacityError, match=r"an image is 4 tokens, .* a step holds 3: raise max_num"):
        ask(llm, photograph())


def test_images_whole_in_tight_steps(load: Callable[..., LLM]) -> None:
    """Decodes take of the budget that an image needs: it waits, and everybody is served."""
    llm = load("gemma3", max_num_batched_tokens=7, max_num_seqs=6, enable_prefix_caching=False)
    alone = load("gemma3")
    pictures = [photograph(i, 40) for i in range(4)]
    conversations = [[{"role": "user", "content": "some words"}]] * 3 + [
        [{"role": "user", "content": [{"type": "image", "image": picture}]}] for picture in pictures
    ]
    for output, conversation in zip(llm.chat(conversations, GREEDY), conversations, strict=True):
        assert_eq(output, alone.chat(conversation, GREEDY)[0])


def test_parts_of_other_kinds() -> None:
    picture = photograph()
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:x"}}, {"type": "text", "text": "and"},
            {"type": "image_url", "image_url": "data:y"}, {"type": "image", "image": picture},
        ]},
    ]  # fmt: skip
    plain, images = take_images(messages)
    assert images == ["data:x", "data:y", picture]
    assert plain[0] == messages[0]
    assert plain[1]["content"] == [
        {"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "image"},
    ]  # fmt: skip
    assert "image_url" in messages[1]["content"][0]  # the caller's own messages are left alone
    for part in (
        {"type": "image"},
        {"type": "image_url", "image_url": {}},
        {"type": "image_embeds", "image_embeds": [1]},
    ):
        with pytest.raises(PromptError, match="a part of type"):
            take_images([{"role": "user", "content": [part]}])
