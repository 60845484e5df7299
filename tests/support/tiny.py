"""Tiny random models, written to disk as ordinary Hugging Face folders.

`write_tiny(folder)` writes the model that the tests call TINY: Llama, 2 layers, hidden 64, 4 heads of which 2 KV heads,
vocabulary 320, 512 positions, float32. Other families and shapes come by name and by keyword. As a fixture (10 ms):

    @pytest.fixture(scope="session")
    def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny(tmp_path_factory.mktemp("tiny"))

Weights are normal(0, 0.15), not the usual 0.02: logits then spread over several units, so that a wrong cache block,
mask or rotation changes the answer and not only its last digits. Norm weights are spread about their neutral value, so
that a forgotten one shows. Rows of the output layer that belong to special tokens are zero (unless it is tied):
generation ends early only if a test wants it to.

The tokenizer is byte-level without merges: ids 0 to 255 are the bytes themselves, then the specials of
`SPECIAL_TOKENS`, then `<unused262>` and so on up to the vocabulary's size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

BOS, EOS, IM_START, IM_END, PAD, IMAGE = range(256, 262)
SPECIAL_TOKENS = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<pad>", "<image>")
VOCABULARY = 320

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "sliding_window": None,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    },
}


def write_tiny(
    folder: Path,
    family: str = "llama",
    seed: int = 0,
    *,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a tiny random model and its tokenizer into `folder` (made if need be); returns `folder`.

    `overrides` are keys of config.json; a value of `...` removes the key. With `shards` > 1 the weights are spread over
    that many files with an index.
    """
    config = _COMMON | _FAMILIES[family] | overrides
    config = {key: value for key, value in config.items() if value is not ...}
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": [EOS, IM_END]})
    tensors = {name: tensor.to(dtype) for name, tensor in random_weights(config, seed).items()}
    _write_weights(folder, tensors, shards)
    write_tokenizer(folder, config["vocab_size"])
    return folder


def random_weights(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Tensors by their Hugging Face names, for a config of any of the families here."""
    generator = torch.Generator().manual_seed(seed)
    is_gemma = config["model_type"].startswith("gemma")
    tensors = {}
    for name, shape in _shapes(config):
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 0.2 * noise + (0.0 if is_gemma else 1.0)
        else:
            tensors[name] = 0.15 * noise
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"][BOS : IMAGE + 1] = 0.0
    return tensors


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    model_type = config["model_type"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        for name, out, into in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
            yield f"{prefix}self_attn.{name}_proj.weight", (out, into)
            if config.get("attention_bias") or (model_type == "qwen2" and name != "o"):
                yield f"{prefix}self_attn.{name}_proj.bias", (out,)
        if model_type in ("qwen3", "gemma3_text"):
            yield f"{prefix}self_attn.q_norm.weight", (head_dim,)
            yield f"{prefix}self_attn.k_norm.weight", (head_dim,)
        for name, out, into in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            yield f"{prefix}mlp.{name}_proj.weight", (out, into)
            if config.get("mlp_bias"):
                yield f"{prefix}mlp.{name}_proj.bias", (out,)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if model_type == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for norm in norms:
            yield f"{prefix}{norm}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden)


def _write_weights(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})


def write_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> None:
    """tokenizer.json and tokenizer_config.json (with a ChatML template, which adds no <bos>)."""
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    vocab |= {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's alphabet)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
