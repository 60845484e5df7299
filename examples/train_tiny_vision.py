"""Train the eyes of tiny-vision: a small CLIP tower and a projector for the embedded language model, which stays as is.

Pictures are drawn as they are needed: one shape of one colour, anywhere, of any size, on a dark to grey background.
First the image's tokens learn to look like the words for colour and shape, in the language model's own embeddings; it
needn't run for that. Then it reads them in chats, and the loss of its answers goes on through it into the eyes.

python examples/train_tiny_vision.py [--align-steps 4200] [--steps 150] [--out vision/tiny]
"""

import argparse
import math
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoImageProcessor, LlavaConfig, LlavaForConditionalGeneration

from mlserve.config import EMBEDDED_MODEL
from mlserve.engine.prompt import ImageText, render_chat
from mlserve.engine.tokenizer import load_tokenizer
from mlserve.model.gguf import GGUFTensors, gguf_config
from mlserve.model.gguf_header import read_header
from mlserve.model.sources import find_model

FOLDER = Path(__file__).parent.parent / "vision" / "tiny"  # with all settings
COLOURS = {"red": (220, 30, 30), "green": (30, 170, 50), "blue": (40, 70, 220)}
COLOURS |= {"yellow": (240, 220, 40), "purple": (140, 40, 170), "white": (250, 250, 250)}
CORNERS = {"circle": 60, "square": 4, "triangle": 3, "star": 10}
WORDS = (list(COLOURS), list(CORNERS))
QUESTIONS = ("What colour is the shape?", "What shape is it?")
IMAGE_TOKEN = "<empty_output>"  # a special token that the language model has and chats don't use
SIDE, BATCH, CHATS, SEED = 96, 16, 8, 0
IGNORED = -100  # a label that the loss leaves out

Picture = tuple[Image.Image, tuple[int, int]]  # with the places of its colour and its shape in WORDS


def draw(rng: random.Random, variety: float = 1.0) -> Picture:
    """One shape somewhere in a picture, upright but for a few degrees. Colours vary a little.

    variety: from 0, where all shapes are large and near the middle, to 1.
    """
    labels = (rng.randrange(len(WORDS[0])), rng.randrange(len(WORDS[1])))
    shape, grey = WORDS[1][labels[1]], rng.randrange(130)
    radius = SIDE * rng.uniform(0.4 - 0.18 * variety, 0.4)
    turn = rng.uniform(-0.1, 0.1) + (math.pi / 4 if shape == "square" else 0)
    x, y = (rng.uniform(radius, SIDE - radius) for _ in "xy")

    def near(colour: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(max(0, min(255, value + rng.randint(-20, 20))) for value in colour)

    image = Image.new("RGB", (SIDE, SIDE), near((grey,) * 3))
    angles = [turn + math.tau * i / CORNERS[shape] for i in range(CORNERS[shape])]
    radii = [radius * (0.42 if shape == "star" and i % 2 else 1) for i in range(len(angles))]
    outline = [(x + r * math.sin(a), y - r * math.cos(a)) for r, a in zip(radii, angles, strict=True)]
    ImageDraw.Draw(image).polygon(outline, fill=near(COLOURS[WORDS[0][labels[0]]]))
    return image, labels


class Student:
    """The embedded language model, with eyes that have learnt nothing yet."""

    def __init__(self) -> None:
        path = find_model(EMBEDDED_MODEL)
        self.tokenizer = load_tokenizer(path, (FOLDER / "chat_template.jinja").read_text(encoding="utf-8"))
        self.processor = AutoImageProcessor.from_pretrained(FOLDER)
        self.whole = LlavaForConditionalGeneration(LlavaConfig.from_pretrained(FOLDER))
        header = read_header(path)
        tensors = GGUFTensors(header, gguf_config(header))
        language = {name.removeprefix("model."): tensors.read(name) for name in tensors.shapes}
        self.whole.model.language_model.load_state_dict(language)
        self.whole.tie_weights()
        self.whole.requires_grad_(False)
        self.tower, self.projector = self.whole.model.vision_tower, self.whole.model.multi_modal_projector
        self.eyes = nn.ModuleDict({"vision_tower": self.tower, "multi_modal_projector": self.projector})
        self.eyes.requires_grad_(True)
        initialise(self.tower)

    def pixels(self, pictures: list[Picture]) -> Tensor:
        """[B, 3, 32, 32]"""
        pixels: Tensor = self.processor(images=[image for image, _ in pictures], return_tensors="pt")["pixel_values"]
        return pixels

    def word(self, word: str) -> Tensor:
        """[H], the language model's embedding of a word, at the beginning of a line and within it."""
        table = self.whole.model.language_model.embed_tokens.weight
        return torch.stack([table[self.tokenizer.encode(spelling)].mean(0) for spelling in (word, f" {word}")]).mean(0)

    def chat(self, labels: tuple[int, int], kinds: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Questions about an image and their answers: token ids and labels, [T]. Only the answers are learnt."""
        messages: list[dict[str, Any]] = []
        ids, learnt = list[int](), list[int]()
        for kind in kinds:
            parts = [{"type": "text", "text": QUESTIONS[kind]}, *([] if messages else [{"type": "image"}])]
            messages.append({"role": "user", "content": parts})
            prompt = render_chat(messages, self.tokenizer, images=ImageText(IMAGE_TOKEN))
            at = prompt.index(self.whole.config.image_token_id)
            prompt[at : at + 1] = [prompt[at]] * self.whole.config.image_seq_length
            word = WORDS[kind][labels[kind]]
            messages.append({"role": "assistant", "content": word})
            answer = [*self.tokenizer.encode(word), *self.tokenizer.eos_token_ids]
            learnt += [IGNORED] * (len(prompt) - len(ids)) + answer
            ids = prompt + answer
        return ids, learnt

    def read(self, pictures: list[Picture], kinds: list[tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor]:
        """Read a chat about each picture: logits [N, V] of all answers' tokens, these tokens, and their rows [N]."""
        rows = [self.chat(labels, asked) for (_, labels), asked in zip(pictures, kinds, strict=True)]
        length = max(len(ids) for ids, _ in rows)  # padded on the right, where causal attention never looks
        ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in rows])[:, 1:]
        hidden = self.whole.model(input_ids=ids, pixel_values=self.pixels(pictures)).last_hidden_state[:, :-1]
        learnt = labels != IGNORED
        return self.whole.lm_head(hidden[learnt]), labels[learnt], learnt.nonzero()[:, 0]


def initialise(tower: nn.Module) -> None:
    """CLIP's own initial weights are so small that a small tower takes very long to get going."""
    for name, module in tower.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif name.endswith("patch_embedding"):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        elif name.endswith("position_embedding"):  # sines and cosines of row and column, after the class token
            side, quarter = math.isqrt(len(module.weight) - 1), module.weight.shape[1] // 4
            waves = torch.outer(torch.arange(side), torch.linspace(0.1, math.tau, quarter))
            rows, columns = waves.repeat_interleave(side, 0), waves.repeat(side, 1)
            module.weight.data[1:] = torch.cat([rows.sin(), rows.cos(), columns.sin(), columns.cos()], 1)


class Optimiser:
    """AdamW whose learning rates rise over `warmup` steps, and then fall to nothing along a cosine."""

    def __init__(self, rates: dict[nn.Module, float], steps: int, warmup: int) -> None:
        self.parameters = [parameter for module in rates for parameter in module.parameters()]
        groups = [{"params": list(module.parameters()), "lr": rate} for module, rate in rates.items()]
        self.adam = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.adam, lambda i: min((i + 1) / warmup, 1) * (1 + math.cos(math.pi * i / steps)) / 2
        )

    def step(self, loss: Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adam.step()
        self.adam.zero_grad()
        self.schedule.step()


def align(student: Student, steps: int, rng: random.Random) -> None:
    """Tokens 0, 2, ... of an image learn to be the word for its colour, tokens 1, 3, ... that for its shape."""
    words = [torch.stack([student.word(word) for word in kind]) for kind in WORDS]
    scale = torch.cat(words).square().sum(1).mean()
    optimiser = Optimiser({student.eyes: 1e-3}, steps, warmup=50)
    right = [0.0, 0.0]  # per cent in 200 steps
    for step in range(1, steps + 1):
        pictures = [draw(rng, min(1.0, 2 * step / steps)) for _ in range(BATCH)]  # else shapes take very long
        features = student.whole.model.get_image_features(student.pixels(pictures)).pooler_output
        loss = torch.zeros(())
        for kind, labels in enumerate(torch.tensor([labels for _, labels in pictures]).T):
            own, target = torch.stack(list(features))[:, kind::2], words[kind][labels]
            likeness = (F.normalize(own, dim=-1) @ F.normalize(words[kind], dim=-1).T).mean(1)
            distance = (own - target[:, None]).square().sum(-1).mean() / scale
            loss = loss + F.cross_entropy(12 * likeness, labels) + 0.3 * distance
            right[kind] += (likeness.argmax(1) == labels).float().mean().item() / 2
        optimiser.step(loss)
        if step % 200 == 0:
            print(f"align {step}: loss {loss.item():.3f}, colour {right[0]:.1f} %, shape {right[1]:.1f} %", flush=True)
            right = [0.0, 0.0]


def teach(student: Student, steps: int, rng: random.Random) -> None:
    """Both questions about each picture, in either order."""
    optimiser = Optimiser({student.projector: 5e-4, student.tower: 1e-4}, steps, warmup=10)
    for step in range(1, steps + 1):
        pictures = [draw(rng) for _ in range(CHATS)]
        logits, answers, _ = student.read(pictures, [rng.choice([(0, 1), (1, 0)]) for _ in pictures])
        loss = F.cross_entropy(logits, answers)
        optimiser.step(loss)
        if step % 10 == 0:
            print(f"teach {step}: loss {loss.item():.3f}", flush=True)


@torch.inference_mode()
def examine(student: Student, count: int, rng: random.Random) -> list[float]:
    """For each question the share of pictures of which greedy decoding says the right word, and no more."""
    right = [0, 0]
    for _ in range(count // CHATS):
        pictures = [draw(rng) for _ in range(CHATS)]
        for kind in (0, 1):
            logits, answers, rows = student.read(pictures, [(kind,)] * CHATS)
            right[kind] += CHATS - len(rows[logits.argmax(-1) != answers].unique())
    return [number / (count // CHATS * CHATS) for number in right]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--align-steps", type=int, default=4200, help=f"of {BATCH} pictures")
    parser.add_argument("--steps", type=int, default=150, help=f"of {CHATS} chats")
    parser.add_argument("--held-out", type=int, default=200, help="pictures to measure with")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where model.safetensors goes")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    student, rng = Student(), random.Random(SEED)
    align(student, options.align_steps, rng)
    teach(student, options.steps, rng)
    tensors = {name: tensor.half().contiguous() for name, tensor in student.eyes.state_dict().items()}
    save_file(tensors, options.out / "model.safetensors", {"format": "pt"})
    student.eyes.load_state_dict(tensors)  # measured is what the file holds
    colour, shape = examine(student, options.held_out, random.Random(SEED + 1))
    print(f"held out, {options.held_out} pictures: colour {colour:.1%}, shape {shape:.1%}")


if __name__ == "__main__":
    main()
