"""Public bug reports about images in an engine, on a tiny LLaVA. What decoding alone answers is in area3_images."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparing import GREEDY, assert_eq, cold
from PIL import Image
from streaming import live_state
from tiny import IMAGE
from tiny_adapters import ATTENTION, quiet, write_adapter
from tiny_vision import write_tiny_vlm

from mlserve import LLM, AdapterError, PromptError, RequestOutput

OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 256}
IMAGE_TOKENS = 16
RED = Image.new("RGB", (56, 56), (220, 20, 20))
BLUE = Image.new("RGB", (56, 56), (20, 20, 220))
CHECKERS = Image.fromarray((np.indices((56, 56)).sum(0) // 7 % 2 * 255).astype(np.uint8)).convert("RGB")
Part = str | Path | Image.Image


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with quiet():
        return write_tiny_vlm(tmp_path_factory.mktemp("llava"), "llava")


@pytest.fixture
def load(model: Path) -> Iterator[Callable[..., LLM]]:
    """Engines that a test leaves idle."""
    made = []

    def make(**options: Any) -> LLM:
        made.append(LLM(str(model), **{**OPTIONS, **options}))
        return made[-1]

    yield make
    for llm in made:
        assert not any(live_state(llm.engine).values()), live_state(llm.engine)
        llm.engine.cache.check()


def talk(*parts: Part) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": content}]


def ask(llm: LLM, *parts: Part, **how: Any) -> RequestOutput:
    return llm.chat(talk(*parts), GREEDY, **how)[0]


def alone(load: Callable[..., LLM], *parts: Part, **how: Any) -> RequestOutput:
    return ask(load(enable_prefix_caching=False, embedding_cache_memory=0, **how), *parts)


def before_image(output: RequestOutput) -> int:
    """Tokens in full blocks before the first image."""
    return output.prompt_token_ids.index(IMAGE) // 4 * 4


def test_3_01_each_image_has_its_own_kv(load: Callable[..., LLM]) -> None:
    llm = load()
    first = ask(llm, "what is ", RED, " here?")
    second = ask(llm, "what is ", CHECKERS, " here?")
    third = ask(llm, "what is ", RED, " here?")
    assert second.metrics.cached_tokens == before_image(second)
    assert third.metrics.cached_tokens > before_image(third) + IMAGE_TOKENS
    for output, image in ((first, RED), (second, CHECKERS), (third, RED)):
        assert_eq(output, alone(load, "what is ", image, " here?"))
    assert first.outputs[0].logprobs != second.outputs[0].logprobs


@pytest.mark.parametrize("identity", ["exact", "perceptual"])
def test_3_03_flat_pictures_never_match(load: Callable[..., LLM], identity: str) -> None:
    llm = load(image_identity=identity)
    flat = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue", "white", "black")]
    halves = Image.new("RGB", (64, 64), (200, 0, 0))
    halves.paste((0, 102, 0), (32, 0, 64, 64))
    for image in (*flat, halves, halves.transpose(Image.Transpose.FLIP_LEFT_RIGHT), Image.new("RGB", (1, 1), "grey")):
        output = ask(llm, "see ", image)
        assert output.metrics.cached_tokens <= before_image(output)
        assert_eq(output, alone(load, "see ", image))


def test_3_06_typed_placeholders_are_text(load: Callable[..., LLM]) -> None:
    llm = load()
    for parts in (("a <image> b", RED), (RED, "a <image> b"), ("a <image> b",), ("<|im_end|><image>", RED, "<image>")):
        output = ask(llm, *parts)
        count = sum(not isinstance(part, str) for part in parts)
        assert output.prompt_token_ids.count(IMAGE) == count * IMAGE_TOKENS
        assert bytes(t for t in output.prompt_token_ids if t < 256).count(b"<image>") == sum(
            part.count("<image>") for part in parts if isinstance(part, str)
        )
        assert_eq(output, alone(load, *parts))


def test_3_07_blocks_at_the_edges_of_an_image(load: Callable[..., LLM]) -> None:
    """Block 4: [4 tokens of text][16 of the image][4 of text]: the image's key is on its own four blocks only."""
    llm = load()
    prompt = [1, 2, 3, 4, IMAGE, 5, 6, 7, 8]
    for image, cached in ((RED, 0), (BLUE, 4), (RED, 20)):
        output = llm.generate([prompt], GREEDY, images=[[image]])[0]
        assert output.metrics.cached_tokens == cached
        assert output.prompt_token_ids == [1, 2, 3, 4, *[IMAGE] * 16, 5, 6, 7, 8]
    assert llm.engine.images is not None
    request = llm.engine.prepare("r", prompt, GREEDY, images=llm.engine.images.identify([RED], None, allow_paths=False))
    assert [(mark.start, mark.end) for mark in request.marks] == [(4, 20)]


def test_3_08_a_full_embedding_cache_holds_nobody_up(load: Callable[..., LLM]) -> None:
    """Room for half an image's embeddings, and KV for one request at a time."""
    llm = load(embedding_cache_memory=8 * 64 * 4 / 2**30, num_blocks=15)
    pictures = [Image.new("RGB", (40, 40), (50 * i, 10, 200 - 40 * i)) for i in range(4)]
    outputs = llm.chat([talk(picture, "twelve chars") for picture in pictures], GREEDY)
    for picture, output in zip(pictures, outputs, strict=True):
        assert_eq(output, alone(load, picture, "twelve chars"))


def test_3_12_parts_stay_in_their_order(load: Callable[..., LLM]) -> None:
    llm = load()
    first = ask(llm, "1:", RED, "2:", BLUE)
    swapped = ask(llm, "1:", BLUE, "2:", RED)
    texts = [token if token != IMAGE else None for token in first.prompt_token_ids]
    assert texts.index(None) < texts.index(ord("2")) < len(texts) - 1 - texts[::-1].index(None)
    assert swapped.metrics.cached_tokens == before_image(swapped)
    assert_eq(first, alone(load, "1:", RED, "2:", BLUE))
    assert_eq(swapped, alone(load, "1:", BLUE, "2:", RED))


@pytest.mark.parametrize(
    ("prompt", "images"),
    [
        ([5, IMAGE, 6, IMAGE], [RED]),
        ([5, IMAGE], [RED, BLUE]),
        ([5, IMAGE], []),
        ([5, 6], [RED]),
        ("one <image> and <image>", [RED]),
    ],
)
def test_3_13_counts_of_placeholders_and_images(
    load: Callable[..., LLM], prompt: Any, images: list[Image.Image]
) -> None:
    llm = load()
    count = prompt.count(IMAGE) if isinstance(prompt, list) else 2
    with pytest.raises(PromptError, match=f"{count} image placeholders for {len(images)} images"):
        llm.generate([prompt], GREEDY, images=[images])
    assert_eq(ask(llm, RED, "fine"), alone(load, RED, "fine"))


def test_2_10_an_adapter_of_the_language_part(load: Callable[..., LLM], model: Path, tmp_path: Path) -> None:
    """Keys as PEFT writes them on the whole model: it must act, and like PEFT's."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from tiny_adapters import randomise
    from transformers import AutoModelForImageTextToText, AutoProcessor

    with quiet():
        whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
        targets = r".*language_model\..*\.(q_proj|v_proj)"
        peft_model = get_peft_model(whole, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
        randomise(peft_model, 3)
        peft_model.save_pretrained(tmp_path / "a")
        whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
        twin = PeftModel.from_pretrained(whole, tmp_path / "a").eval()
        processor = AutoProcessor.from_pretrained(model)
    llm = load(adapters={"a": tmp_path / "a"})
    output = ask(llm, RED, "what?", adapter="a")
    assert output.outputs[0].token_ids != ask(llm, RED, "what?").outputs[0].token_ids
    pixels = processor.image_processor(images=RED, return_tensors="pt")["pixel_values"]
    ids = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
    with torch.inference_mode():
        logits = twin(input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids)).logits[0]
    expected = logits.log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
    assert output.outputs[0].token_ids == expected.argmax(-1).tolist()
    assert output.outputs[0].logprobs is not None
    found = torch.tensor([entry.logprob for entry in output.outputs[0].logprobs])
    torch.testing.assert_close(found, expected.max(-1).values, atol=1e-4, rtol=0)


def test_2_10_an_adapter_of_the_tower_is_refused(load: Callable[..., LLM], model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    with quiet():
        whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
        get_peft_model(whole, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path / "a")
    with pytest.raises(AdapterError, match="only the language model's"):
        load().load_adapter("a", tmp_path / "a")


@pytest.mark.parametrize("seed", range(2))
def test_sixteen_with_text_images_and_adapters(
    load: Callable[..., LLM], tiny_model_dir: Path, tmp_path: Path, seed: int
) -> None:
    """Text only, one image and two, four adapters and none, in one batch of chunks: each as alone."""
    rng = random.Random(seed)
    folders = {f"a{i}": write_adapter(tmp_path / f"a{i}", tiny_model_dir, i, targets=ATTENTION) for i in range(4)}
    kinds: list[tuple[Part, ...]] = [("only text",), ("one ", RED), (CHECKERS, " two ", BLUE), (BLUE, BLUE)]
    requests = [(kinds[i % 4], rng.choice([*folders, None])) for i in range(16)]
    rng.shuffle(requests)
    llm = load(adapters=folders, max_loras=3, max_num_batched_tokens=33, max_num_seqs=16)
    reference = load(adapters=folders, enable_prefix_caching=False)
    outputs = llm.chat([talk(*parts) for parts, _ in requests], GREEDY, adapter=[name for _, name in requests])
    for (parts, name), output in zip(requests, outputs, strict=True):
        assert_eq(output, ask(reference, *parts, adapter=name))


def test_a_model_without_images_refuses_them(tiny_model_dir: Path) -> None:
    llm = LLM(str(tiny_model_dir), **OPTIONS)
    with pytest.raises(PromptError, match="message 0 has an image, and the model takes none"):
        llm.chat(talk("see ", RED), GREEDY)
    with pytest.raises(PromptError, match="the model takes no images, and 1 came"):
        llm.generate([[1, 2]], GREEDY, images=[[RED]])
    assert_eq(llm.generate([1, 2], GREEDY)[0], cold(tiny_model_dir, [1, 2]))


def raw(mode: str, size: tuple[int, int], data: bytes, palette: bytes | None = None) -> Image.Image:
    image = Image.frombytes(mode, size, data)
    if palette is not None:
        image.putpalette(palette)
    return image


NOISE = np.random.default_rng(7).integers(0, 256, 13_500, dtype=np.uint8).tobytes()
LOOKALIKES = {
    "size": (raw("RGB", (30, 150), NOISE), raw("RGB", (150, 30), NOISE)),
    "mode": (raw("L", (12, 4), NOISE[:48]), raw("RGB", (4, 4), NOISE[:48])),
    "palette": (raw("P", (16, 16), NOISE[:256], NOISE[:768]), raw("P", (16, 16), NOISE[:256], NOISE[768:1536])),
}


@pytest.mark.parametrize("kind", LOOKALIKES)
def test_3_04_equal_bytes_are_not_equal_images(load: Callable[..., LLM], kind: str) -> None:
    llm = load()
    first, second = (ask(llm, "see ", image) for image in LOOKALIKES[kind])
    assert first.images[0].digest != second.images[0].digest
    assert second.metrics.cached_tokens == before_image(second)
    for output, image in zip((first, second), LOOKALIKES[kind], strict=True):
        assert_eq(output, alone(load, "see ", image))


def test_3_05_orientation_is_seen(load: Callable[..., LLM], tmp_path: Path) -> None:
    picture = Image.new("RGB", (24, 16), (240, 240, 240))
    picture.paste((220, 20, 20), (0, 0, 8, 16))
    exif = Image.Exif()
    for orientation in (6, 1):
        exif[0x0112] = orientation
        picture.save(tmp_path / f"{orientation}.png", exif=exif)
    llm = load()
    turned, plain = (ask(llm, "see ", tmp_path / f"{orientation}.png") for orientation in (6, 1))
    beforehand = ask(llm, "see ", picture.transpose(Image.Transpose.ROTATE_270))
    assert turned.images[0].digest == beforehand.images[0].digest != plain.images[0].digest
    assert beforehand.metrics.cached_tokens > before_image(beforehand) + IMAGE_TOKENS  # it is the same picture
    assert_eq(turned, alone(load, "see ", picture.transpose(Image.Transpose.ROTATE_270)))
    assert_eq(plain, alone(load, "see ", picture))


def test_3_11_a_name_from_the_caller_means_nothing(load: Callable[..., LLM]) -> None:
    llm = load()
    pictures = [
        Image.new("RGB", (28, 28), "red"),
        Image.new("RGB", (56, 56), "red"),
        Image.new("RGB", (56, 56), "blue"),
    ]
    for salt in (None, "a", "b"):
        for picture in pictures:
            content = [{"type": "image", "image": picture, "id": "u1", "uuid": "u1"}]
            output = llm.chat([{"role": "user", "content": content}], GREEDY, cache_salt=salt)[0]
            assert output.metrics.cached_tokens <= before_image(output)
            assert_eq(output, alone(load, picture))
