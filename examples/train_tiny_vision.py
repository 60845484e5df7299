"""Train the eyes of tiny-vision: a small CLIP tower and a projector for the embedded language model, which stays as is.

Pictures are drawn as they are needed: one shape of one colour, anywhere, of any size, on a dark to grey background.
First the image's tokens learn to look like the words for colour and shape, in the language model's own embeddings; it
needn't run for that. Then it reads them in chats, and the loss of its answers goes on through it into the eyes.

python examples/train_tiny_vision.py [--align-steps 4200] [--steps 150] [--out vision/tiny]
"""

import argparse
import math
import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from coloured_shapes import WORDS, Chat, Picture, chat, draw
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoImageProcessor, LlavaConfig, LlavaForConditionalGeneration

from mlserve.config import EMBEDDED_MODEL
from mlserve.engine.prompt import ImageText, render_chat
from mlserve.engine.tokenizer import load_tokenizer
from mlserve.model.gguf import GGUFTensors, gguf_config
from mlserve.model.gguf_header import read_header
from mlserve.model.sources import find_model

FOLDER = Path(__file__).parent.parent / "vision" / "tiny"  # with all settings
BATCH, CHATS, HELD_OUT, SEED = 16, 8, 200, 0


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


class Student:
    """The embedded language model, frozen, with eyes that have learnt nothing yet."""

    def __init__(self) -> None:
        path = find_model(EMBEDDED_MODEL)
        self.tokenizer = load_tokenizer(path, (FOLDER / "chat_template.jinja").read_text(encoding="utf-8"))
        self.processor = AutoImageProcessor.from_pretrained(FOLDER)
        self.whole = LlavaForConditionalGeneration(LlavaConfig.from_pretrained(FOLDER))
        header = read_header(path)
        tensors = GGUFTensors(header, gguf_config(header))
        language = {name.removeprefix("model."): tensors.read(name) for name in tensors.shapes}
        self.whole.model.language_model.load_state_dict(language)
        self.whole.requires_grad_(False)
        parts = ("vision_tower", "multi_modal_projector")
        self.eyes = nn.ModuleDict({name: getattr(self.whole.model, name) for name in parts}).requires_grad_(True)
        initialise(self.eyes["vision_tower"])
        self.words = [torch.stack([self.word(word) for word in kind]) for kind in WORDS]  # [6, H] and [4, H]

    def word(self, word: str) -> Tensor:
        """[H], the language model's embedding of a word, at the beginning of a line and within it."""
        table = self.whole.model.language_model.embed_tokens.weight
        return torch.stack([table[self.tokenizer.encode(spelling)].mean(0) for spelling in (word, f" {word}")]).mean(0)

    def encode(self, messages: Chat) -> tuple[list[int], list[bool]]:
        """A chat's token ids, and which of them are learnt: those of answers, [T]."""
        ids, learnt = list[int](), list[bool]()
        for turn in range(1, len(messages), 2):
            prompt = render_chat(messages[:turn], self.tokenizer, images=ImageText(self.whole.config.image_token))
            at = prompt.index(self.whole.config.image_token_id)
            prompt[at : at + 1] = [prompt[at]] * self.whole.config.image_seq_length
            answer = [*self.tokenizer.encode(messages[turn]["content"]), *self.tokenizer.eos_token_ids]
            learnt += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
            ids = prompt + answer
        return ids, learnt

    def read(self, pictures: list[Picture], kinds: list[tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor]:
        """Read a chat about each picture: logits [N, V] of all answers' tokens, these tokens, and their rows [N]."""
        chats = [self.encode(chat(labels, asked)) for (_, labels), asked in zip(pictures, kinds, strict=True)]
        columns = ([torch.tensor(row) for row in rows] for rows in zip(*chats, strict=True))
        ids, learnt = (pad_sequence(rows, batch_first=True) for rows in columns)  # on the right, where nothing looks
        inputs = self.processor(images=[image for image, _ in pictures], return_tensors="pt")
        hidden = self.whole.model(input_ids=ids, **inputs).last_hidden_state[:, :-1]
        return self.whole.lm_head(hidden[learnt[:, 1:]]), ids[learnt], learnt.nonzero()[:, 0]

    @torch.inference_mode()
    def num_right(self, pictures: list[Picture], kind: int) -> int:
        """Of how many pictures greedy decoding says the right word, and no more."""
        logits, answers, rows = self.read(pictures, [(kind,)] * len(pictures))
        return len(pictures) - len(rows[logits.argmax(-1) != answers].unique())

    def chat_loss(self, rng: random.Random) -> Tensor:
        """Both questions about each picture, in either order."""
        pictures = [draw(rng) for _ in range(CHATS)]
        logits, answers, _ = self.read(pictures, [rng.choice([(0, 1), (1, 0)]) for _ in pictures])
        return F.cross_entropy(logits, answers)

    def alignment_loss(self, rng: random.Random, done: float) -> Tensor:
        """Tokens 0, 2, ... should be the word for the colour, tokens 1, 3, ... that for the shape."""
        variety = min(1.0, 2 * done)  # if there is all of it from the beginning, shapes take very long to be learnt
        pictures = [draw(rng, variety) for _ in range(BATCH)]
        inputs = self.processor(images=[image for image, _ in pictures], return_tensors="pt")
        features = torch.stack(list(self.whole.model.get_image_features(**inputs).pooler_output))
        scale, loss = torch.cat(self.words).square().sum(1).mean(), torch.zeros(())
        for kind, labels in enumerate(torch.tensor([labels for _, labels in pictures]).T):
            own, words = features[:, kind::2], self.words[kind]
            cosines = (F.normalize(own, dim=-1) @ F.normalize(words, dim=-1).T).mean(1)
            distance = (own - words[labels][:, None]).square().sum(-1).mean() / scale
            loss = loss + F.cross_entropy(12 * cosines, labels) + 0.3 * distance
        return loss


def train(rates: dict[nn.Module, float], steps: int, warmup: int, next_loss: Callable[[float], Tensor]) -> None:
    """AdamW, with learning rates that rise over `warmup` steps and fall to nothing along a cosine."""
    groups = [{"params": list(part.parameters()), "lr": rate} for part, rate in rates.items()]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = LambdaLR(optimiser, lambda i: min((i + 1) / warmup, 1) * (1 + math.cos(math.pi * i / steps)) / 2)
    for step in range(1, steps + 1):
        loss = next_loss(step / steps)
        loss.backward()
        nn.utils.clip_grad_norm_([parameter for part in rates for parameter in part.parameters()], 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step % warmup == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--align-steps", type=int, default=4200, help=f"of {BATCH} pictures")
    parser.add_argument("--steps", type=int, default=150, help=f"of {CHATS} chats")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where model.safetensors goes")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    student, rng = Student(), random.Random(SEED)
    train({student.eyes: 1e-3}, options.align_steps, 50, lambda done: student.alignment_loss(rng, done))
    rates = {student.eyes["multi_modal_projector"]: 5e-4, student.eyes["vision_tower"]: 1e-4}
    train(rates, options.steps, 10, lambda _: student.chat_loss(rng))
    tensors = {name: tensor.half().contiguous() for name, tensor in student.eyes.state_dict().items()}
    save_file(tensors, options.out / "model.safetensors", {"format": "pt"})
    student.eyes.load_state_dict(tensors)  # measured is what the file holds
    rng = random.Random(SEED + 1)
    new = [[draw(rng) for _ in range(CHATS)] for _ in range(HELD_OUT // CHATS)]
    colour, shape = (sum(student.num_right(pictures, kind) for pictures in new) / HELD_OUT for kind in (0, 1))
    print(f"of {HELD_OUT} new pictures: colour {colour:.1%}, shape {shape:.1%} right")


if __name__ == "__main__":
    main()
