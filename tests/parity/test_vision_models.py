"""Models with images against transformers, end to end: prompts, and the log-probabilities of all their tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from comparing import GREEDY, assert_eq
from PIL import Image
from safetensors.torch import load_file
from tiny_adapters import quiet, randomise
from tiny_vision import TINY_FAMILIES, write_tiny_vlm

from mlserve import LLM, RequestOutput
from mlserve.vision.image import DecodedImage

ATOL = 1e-4
OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 512}
PARAMS = replace(GREEDY, prompt_logprobs=0)


def picture(width: int, height: int, seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


A, B, WIDE = picture(40, 56, 0), picture(64, 30, 1), picture(120, 34, 2)
Part = str | Image.Image
CONVERSATIONS: dict[str, list[Part]] = {
    "text": ["hello there"],
    "one": [A, "what is it?"],
    "two": ["first ", A, " second ", B, " differ?"],
    "sizes": [WIDE, B, "side by side"],
    "twice": [A, " and again ", A],
}


def message(parts: list[Part]) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"role": "user", "content": content}


class Twin:
    """transformers' own view of a folder."""

    def __init__(self, folder: Path) -> None:
        with quiet():
            self.model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
            self.processor = transformers.AutoProcessor.from_pretrained(folder)

    def check(self, output: RequestOutput, parts: list[Part]) -> None:
        """Equal prompts; every log-probability within 1e-4, of the prompt's tokens and of the greedy ones."""
        plain = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
        text = self.processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": plain}], add_generation_prompt=True, tokenize=False
        )
        images = [part for part in parts if not isinstance(part, str)] or None
        with quiet():
            inputs = self.processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
        prompt = inputs["input_ids"][0].tolist()
        assert output.prompt_token_ids == prompt
        generated = output.outputs[0].token_ids
        inputs["input_ids"] = torch.tensor([[*prompt, *generated]])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for key in ("token_type_ids", "mm_token_type_ids"):
            if key in inputs:
                inputs[key] = torch.nn.functional.pad(inputs[key], (0, len(generated)))
        with torch.inference_mode():
            expected = self.model(**inputs).logits[0].log_softmax(-1)
        assert generated == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert output.outputs[0].logprobs is not None
        assert output.prompt_logprobs is not None
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        found = torch.tensor([entry.logprob for entry in entries if entry is not None])
        wanted = expected[:-1].gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
        torch.testing.assert_close(found, wanted, atol=ATOL, rtol=0)


@pytest.fixture(scope="module", params=list(TINY_FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with quiet():
        return write_tiny_vlm(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def twin(folder: Path) -> Twin:
    return Twin(folder)


@pytest.fixture(scope="module")
def load(folder: Path) -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        with quiet():
            return LLM(str(folder), **OPTIONS, **options)

    return make


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_like_transformers(load: Callable[..., LLM], twin: Twin, name: str) -> None:
    parts = CONVERSATIONS[name]
    twin.check(load().chat([message(parts)], PARAMS)[0], parts)


def test_together_in_chunks_cached_and_cold(load: Callable[..., LLM]) -> None:
    """All conversations in one batch, in chunks that cut images anywhere; then again from the cache."""
    alone = load(enable_prefix_caching=False)
    conversations = [[message(parts)] for parts in CONVERSATIONS.values()]
    expected = [alone.chat(conversation, GREEDY)[0] for conversation in conversations]
    for chunk in (17, 31):
        llm = load(max_num_seqs=8, max_num_batched_tokens=chunk)
        for output, reference in zip(llm.chat(conversations, GREEDY), expected, strict=True):
            assert_eq(output, reference)
        again = llm.chat(conversations, GREEDY)
        for output, reference in zip(again, expected, strict=True):
            assert_eq(output, reference)
            assert output.metrics.cached_tokens >= (len(output.prompt_token_ids) - 1) // 4 * 4


def test_another_image_under_the_same_text(load: Callable[..., LLM]) -> None:
    """Only what comes before the image is shared, and each answer is that of its image."""
    llm, alone = load(), load(enable_prefix_caching=False)
    cached = []
    for image in (picture(40, 40, 5), picture(40, 40, 6), picture(40, 40, 5)):
        conversation = [message(["look at this one ", image, " and tell"])]
        output = llm.chat(conversation, GREEDY)[0]
        assert_eq(output, alone.chat(conversation, GREEDY)[0])
        cached.append(output.metrics.cached_tokens)
    assert cached[0] == 0
    assert llm.engine.images is not None
    first = output.prompt_token_ids.index(llm.engine.images.encoder.model.placeholder_id)
    assert cached[1] == first // 4 * 4
    assert cached[2] > cached[1]


def test_an_adapter_of_the_language_part(load: Callable[..., LLM], twin: Twin, folder: Path, tmp_path: Path) -> None:
    """With the keys that PEFT writes when it adapts the whole model: equal to PEFT's, images in the prompt or not."""
    from peft import LoraConfig, PeftModel, get_peft_model

    targets = r".*(language_model|text_model)\..*(q_proj|v_proj|down_proj)"
    with quiet():
        whole = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        adapted = get_peft_model(whole, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
        randomise(adapted, 3, 0.1)
        adapted.save_pretrained(tmp_path)
        whole = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        adapted = PeftModel.from_pretrained(whole, tmp_path).eval()
    llm = load(adapters={"a": tmp_path})
    own = twin.model
    twin.model = adapted
    try:
        for name in ("two", "text"):
            output = llm.chat([message(CONVERSATIONS[name])], PARAMS, adapter="a")[0]
            twin.check(output, CONVERSATIONS[name])
            base = llm.chat([message(CONVERSATIONS[name])], PARAMS)[0]
            assert output.prompt_logprobs != base.prompt_logprobs
    finally:
        twin.model = own


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_an_open_clip_tower_in_front_of_transformers_language_part(tmp_path: Path, name: str) -> None:
    """What the tower makes is compared with open_clip's own elsewhere; here, what the language part makes of it."""
    from tiny_open_clip import write_tiny_open_clip_llava

    with quiet():
        folder = write_tiny_open_clip_llava(tmp_path / "model")
        llm = LLM(str(folder), **OPTIONS)
        text = transformers.LlamaConfig(**json.loads((folder / "config.json").read_text())["text_config"])
        twin = transformers.LlamaForCausalLM(text).eval()
    tensors = load_file(folder / "model.safetensors")
    state = {key.removeprefix("language_model."): value for key, value in tensors.items() if "language_model" in key}
    twin.load_state_dict(state)
    parts = CONVERSATIONS[name]
    output = llm.chat([message(parts)], PARAMS)[0]
    assert llm.engine.images is not None
    encoder = llm.engine.images.encoder.model
    ids = torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids])
    images = [DecodedImage(np.asarray(part)) for part in parts if not isinstance(part, str)]
    embeds = twin.get_input_embeddings()(ids).detach()
    if images:
        embeds[ids == encoder.placeholder_id] = torch.cat(encoder.encode(images))
    with torch.inference_mode():
        expected = twin(inputs_embeds=embeds[None]).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    found = torch.tensor([entry.logprob for entry in entries if entry is not None])
    torch.testing.assert_close(found, expected[:-1].gather(1, ids[1:, None])[:, 0], atol=ATOL, rtol=0)
    assert output.outputs[0].token_ids == expected[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist()
