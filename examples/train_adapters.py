"""Train the demo adapters: small LoRAs that give the embedded model's answers a style, one for each file in data/.

Each line there is a question and an answer in that style. Add a file and train it with --only and its name.

python examples/train_adapters.py [--only pirate] [--steps 100] [--out examples/adapters]
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from mlserve.config import EMBEDDED_MODEL
from mlserve.engine.prompt import render_chat
from mlserve.engine.tokenizer import Tokenizer, load_tokenizer
from mlserve.model.gguf import GGUFTensors, gguf_config
from mlserve.model.gguf_header import read_header
from mlserve.model.sources import find_model

FOLDER = Path(__file__).parent / "adapters"
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "task_type": "CAUSAL_LM"}
BATCH, LEARNING_RATE, WARMUP, SEED = 4, 2e-3, 10, 0
IGNORED = -100  # a label that the loss leaves out

Row = tuple[list[int], list[int]]  # token ids and labels, of equal length


def load_base(path: Path) -> LlamaForCausalLM:
    """The embedded model as transformers knows it."""
    header = read_header(path)
    config = gguf_config(header)
    tensors = GGUFTensors(header, config)
    config.pop("partial_rotary_factor")
    state = {name: tensors.read(name) for name in tensors.shapes}
    model = LlamaForCausalLM.from_pretrained(None, config=LlamaConfig(**config), state_dict=state)
    model.name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"  # what the adapter names as its base
    return model


def encode(line: str, tokenizer: Tokenizer) -> Row:
    """A question and its answer in the chat template. Only the answer is learnt."""
    row = json.loads(line)
    prompt = render_chat([{"role": "user", "content": row["question"]}], tokenizer)
    answer = [*tokenizer.encode(row["answer"]), *tokenizer.eos_token_ids]
    return prompt + answer, [IGNORED] * len(prompt) + answer


def batches(rows: list[Row], count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Shuffled rows as token ids and labels [B, T], padded on the right, where causal attention never looks."""
    rng, queue = random.Random(SEED), list[Row]()
    for _ in range(count):
        if len(queue) < BATCH:
            queue = rng.sample(rows, len(rows))
        chosen, queue = queue[:BATCH], queue[BATCH:]
        length = max(len(ids) for ids, _ in chosen)
        ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in chosen])
        labels = torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in chosen])
        yield ids, labels


def train(model: LlamaForCausalLM, rows: list[Row], steps: int, folder: Path) -> None:
    """Train an adapter, print the loss, and save it in half the bytes. The base model stays as it was."""
    torch.manual_seed(SEED)
    adapted = get_peft_model(model, LoraConfig(**LORA))
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda i: min((i + 1) / WARMUP, 1 - i / steps))
    for step, (ids, labels) in enumerate(batches(rows, steps), 1):
        loss = adapted(input_ids=ids, labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step % 10 == 0 or step == steps:
            print(f"{folder.name}: step {step}, loss {loss.item():.3f}", flush=True)
    for parameter in parameters:
        parameter.data = parameter.data.bfloat16()
    adapted.peft_config["default"].target_modules = LORA["target_modules"]  # PEFT's set has a new order in every run
    adapted.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()  # an empty form
    adapted.unload()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in (FOLDER / "data").glob("*.jsonl"))
    parser.add_argument("--only", choices=names, help="train this one")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the adapters' folders go")
    options = parser.parse_args()
    path = find_model(EMBEDDED_MODEL)
    model, tokenizer = load_base(path), load_tokenizer(path)
    for name in [options.only] if options.only else names:
        lines = (FOLDER / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        train(model, [encode(line, tokenizer) for line in lines], options.steps, options.out / name)


if __name__ == "__main__":
    main()
