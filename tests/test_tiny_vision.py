"""The embedded vision model: its files, the script that trained it, and what it sees."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, LlavaConfig, LlavaForConditionalGeneration
from tree import ROOT, load_example

from mlserve import LLM, SamplingParams
from mlserve.config import EMBEDDED_MODEL
from mlserve.engine.prompt import ImageText, render_chat
from mlserve.engine.tokenizer import load_tokenizer
from mlserve.model.gguf import gguf_config
from mlserve.model.gguf_header import read_header
from mlserve.model.sources import find_model

FOLDER = ROOT / "vision" / "tiny"
NUM_TOKENS = 16  # of an image: a grid of 4 x 4
PICTURES = 50


def read_json(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return settings


@pytest.fixture(scope="module")
def shapes() -> ModuleType:
    return load_example("coloured_shapes")


def test_files() -> None:
    names = "chat_template.jinja config.json model.safetensors preprocessor_config.json"
    assert sorted(path.name for path in FOLDER.iterdir()) == names.split()
    assert (FOLDER / "model.safetensors").stat().st_size < 10 * 2**20


def test_language_part_is_the_embedded_model() -> None:
    config = read_json("config.json")
    assert config["base_model"] == EMBEDDED_MODEL
    embedded = gguf_config(read_header(find_model(EMBEDDED_MODEL)))
    for neutral, value in (("rope_scaling", None), ("partial_rotary_factor", 1.0)):
        assert embedded.pop(neutral) == value
    assert {key: config["text_config"][key] for key in embedded} == embedded


def test_image_token_is_a_special_token_of_the_vocabulary() -> None:
    tokenizer = load_tokenizer(find_model(EMBEDDED_MODEL))
    token = read_json("config.json")["image_token"]
    assert tokenizer.encode(token) == [read_json("config.json")["image_token_index"]]
    assert tokenizer.token_id(token) in tokenizer.special_ids
    assert tokenizer.vocab_size == read_json("config.json")["text_config"]["vocab_size"]


def test_weights_are_those_of_the_configured_eyes() -> None:
    tensors = load_file(FOLDER / "model.safetensors")
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(LlavaConfig.from_pretrained(FOLDER)).model
    wanted = {
        f"{part}.{name}": tensor.shape
        for part in ("vision_tower", "multi_modal_projector")
        for name, tensor in getattr(model, part).state_dict().items()
    }
    assert {name: tensor.shape for name, tensor in tensors.items()} == wanted
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert sum(tensor.numel() for tensor in tensors.values()) == 2_264_064
    assert model.config.image_seq_length == NUM_TOKENS


def test_images_become_squares_with_values_around_zero() -> None:
    processor = AutoImageProcessor.from_pretrained(FOLDER)
    pixels = processor(images=Image.new("RGB", (90, 40), (255, 0, 255)), return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 32, 32)
    assert pixels.amin((0, 2, 3)).tolist() == pixels.amax((0, 2, 3)).tolist() == [1.0, -1.0, 1.0]


def test_chat_template_puts_images_before_questions() -> None:
    tokenizer = load_tokenizer(find_model(EMBEDDED_MODEL), (FOLDER / "chat_template.jinja").read_text(encoding="utf-8"))
    text, image = {"type": "text", "text": "Which?"}, {"type": "image"}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text, image, image]},
        {"role": "assistant", "content": "both"},
    ]
    ids = render_chat(messages, tokenizer, images=ImageText("<empty_output>"))
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<empty_output><empty_output>Which?<|im_end|>\n"
        "<|im_start|>assistant\nboth<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_pictures_show_what_their_labels_say(shapes: ModuleType) -> None:
    colours, forms = shapes.WORDS
    rng, seen = random.Random(3), set()
    for _ in range(200):
        image, (colour, shape) = shapes.draw(rng)
        common = sorted(image.getcolors(), reverse=True)[:2]  # the background's and the shape's
        assert sum(count for count, _ in common) == image.width * image.height
        named = shapes.COLOURS[colours[colour]]
        nearest = [max(abs(a - b) for a, b in zip(pixel, named, strict=True)) for _, pixel in common]
        assert min(nearest) <= 20
        seen.add((colour, shape))
    assert len(seen) == len(colours) * len(forms)
    again, first = shapes.draw(random.Random(3)), shapes.draw(random.Random(3))
    assert again[1] == first[1]
    assert again[0].tobytes() == first[0].tobytes()


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    """A few steps of the command that a user runs."""
    command = [sys.executable, str(ROOT / "examples" / "train_tiny_vision.py"), "--out", str(tmp_path)]
    command += ["--align-steps", "100", "--steps", "1"]
    unsafe = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}  # it imports its neighbour
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, env=unsafe)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\d+\.\d{3})\n", done.stdout)]
    assert len(losses) == 2, done.stdout
    assert losses[1] < 2.5  # 3.4 before the first step
    assert re.search(r"\nof 200 new pictures: colour [\d.]+%, shape [\d.]+% right\n$", done.stdout), done.stdout
    trained, shipped = (load_file(folder / "model.safetensors") for folder in (tmp_path, FOLDER))
    assert {name: tensor.shape for name, tensor in trained.items()} == {
        name: tensor.shape for name, tensor in shipped.items()
    }


@pytest.mark.slow
def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_example("image_chat").main() == [["red", "circle"], ["yellow", "triangle"]]
    cached = re.findall(r"(\d+) of (\d+) prompt tokens came from the cache", capsys.readouterr().out)
    assert cached == [("0", "31"), ("32", "48"), ("0", "31"), ("32", "48")]


@pytest.mark.slow
def test_it_sees(shapes: ModuleType) -> None:
    """Pictures that it wasn't trained on, served in one batch."""
    rng = random.Random(1000)
    pictures = [shapes.draw(rng) for _ in range(PICTURES)]
    llm = LLM(model="tiny-vision")
    for kind, wanted in ((0, 0.96), (1, 0.9)):  # 100 % and 96 % when they were trained
        text = {"type": "text", "text": shapes.QUESTIONS[kind]}
        chats = [[{"role": "user", "content": [{"type": "image", "image": image}, text]}] for image, _ in pictures]
        outputs = llm.chat(chats, SamplingParams(max_tokens=8))
        answers = [output.outputs[0].text for output in outputs]
        right = [shapes.WORDS[kind][labels[kind]] for _, labels in pictures]
        assert sum(a == b for a, b in zip(answers, right, strict=True)) >= wanted * PICTURES, answers
