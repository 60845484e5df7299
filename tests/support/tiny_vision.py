"""Tiny random models with images, written to disk as ordinary Hugging Face folders.

`write_tiny_vlm(folder, family)` writes a whole model: weights, config, image processor, tokenizer, chat template. Its
tensors have the names that transformers' `save_pretrained` gives them. Like the models of `tiny`, it has hidden size
64, 2 layers and a vocabulary of 320; the family's special tokens stand where other models have unused ones.

| family | tower | an image is |
|---|---|---|
| llava | CLIP, 28 pixels, patch 7 | 16 tokens |
| llava-siglip | SigLIP, 28 pixels, patch 7 | 16 tokens |
| llava-next | CLIP, squares of 28 pixels, up to 2 x 2 and the whole, patch 7 | up to 16 + 72 tokens |
| idefics3, smolvlm | tiles of 28 pixels, up to 4 in a row, patch 7 | 4 embeddings a tile, one more tile for the whole |
| qwen2-vl, qwen2.5-vl | any size, patch 4, merged by 2 x 2 | one embedding for 8 x 8 pixels, 4 to 64 of them |
| gemma3 | SigLIP, 28 pixels, patch 7 | 4 embeddings between two tokens |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny import BOS, EOS, IM_END, IMAGE, PAD, SPECIAL_TOKENS, VOCABULARY, write_tokenizer

from mlserve.engine.tokenizer import load_tokenizer
from mlserve.model.checkpoint import Checkpoint, read_json
from mlserve.vision.encoder import VisionModel
from mlserve.vision.families import open_vision
from mlserve.vision.image import DecodedImage

FIRST_UNUSED = 256 + len(SPECIAL_TOKENS)

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, **_TEXT}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}
_CLIP = {"model_type": "clip_vision_model", "hidden_act": "quick_gelu", "projection_dim": 16, **_TOWER}
_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER}
_COLOURS = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
_QWEN_TEXT = {**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_QWEN = {
    "image_token_id": FIRST_UNUSED + 2,
    "video_token_id": FIRST_UNUSED + 3,
    "vision_start_token_id": FIRST_UNUSED,
    "vision_end_token_id": FIRST_UNUSED + 1,
}
_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 4 * 64,
    "max_pixels": 64 * 64,
    **_COLOURS,
}
_QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_GEMMA3_TEXT = {
    **_TEXT,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
_GEMMA3_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_TILES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 28}, **_COLOURS}
_TILE_TOKENS = [
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]
_SQUARE = {"size": {"height": 28, "width": 28}, **_COLOURS}


@dataclass(frozen=True)
class TinyFamily:
    """What tells one family's folder from another's."""

    architecture: str  # of transformers
    config: dict[str, Any]
    image_processor: dict[str, Any]  # preprocessor_config.json
    processor: dict[str, Any]  # processor_config.json
    image_text: str  # what the chat template writes for an image
    special_tokens: list[str] = field(default_factory=list)  # ids from FIRST_UNUSED on
    named_tokens: dict[str, str] = field(default_factory=dict)  # what transformers' processor asks the tokenizer for


_PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
_CLIP_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
    **_COLOURS,
}
TINY_FAMILIES = {
    "llava": TinyFamily(
        "LlavaForConditionalGeneration",
        {
            "text_config": _LLAMA,
            "vision_config": _CLIP,
            "image_token_index": IMAGE,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        _CLIP_PROCESSOR,
        {"processor_class": "LlavaProcessor", "patch_size": 7, "num_additional_image_tokens": 1},
        "<image>",
    ),
    "llava-siglip": TinyFamily(
        "LlavaForConditionalGeneration",
        {
            "text_config": {**_LLAMA, "model_type": "qwen2"},
            "vision_config": _SIGLIP,
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        {"image_processor_type": "SiglipImageProcessor", **_SQUARE},
        {"processor_class": "LlavaProcessor", "patch_size": 7, "num_additional_image_tokens": 0},
        "<image>",
    ),
    "llava-next": TinyFamily(
        "LlavaNextForConditionalGeneration",
        {
            "text_config": {**_LLAMA, "model_type": "mistral", "sliding_window": None},
            "vision_config": _CLIP,
            "image_token_index": IMAGE,
            "image_grid_pinpoints": _PINPOINTS,
            "vision_feature_select_strategy": "default",
        },
        {**_CLIP_PROCESSOR, "image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": _PINPOINTS},
        {"processor_class": "LlavaNextProcessor", "patch_size": 7, "num_additional_image_tokens": 1},
        "<image>",
    ),
    "idefics3": TinyFamily(
        "Idefics3ForConditionalGeneration",
        {"text_config": _LLAMA, "vision_config": _TOWER, "image_token_id": IMAGE, "scale_factor": 2},
        {"image_processor_type": "Idefics3ImageProcessor", **_TILES},
        {"processor_class": "Idefics3Processor"},
        "<image>",
        _TILE_TOKENS,
    ),
    "smolvlm": TinyFamily(
        "SmolVLMForConditionalGeneration",
        {"text_config": _LLAMA, "vision_config": _TOWER, "image_token_id": IMAGE, "scale_factor": 2},
        {"image_processor_type": "SmolVLMImageProcessor", **_TILES},
        {"processor_class": "SmolVLMProcessor"},
        "<image>",
        _TILE_TOKENS,
    ),
    "qwen2-vl": TinyFamily(
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": _QWEN_TEXT,
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4}
            | {"mlp_ratio": 2, "patch_size": 4},
            **_QWEN,
        },
        _QWEN_IMAGES,
        {"processor_class": "Qwen2VLProcessor"},
        _QWEN_IMAGE,
        _QWEN_TOKENS,
    ),
    "qwen2.5-vl": TinyFamily(
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": _QWEN_TEXT,
            "vision_config": {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 4}
            | {"intermediate_size": 64, "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]},
            **_QWEN,
        },
        _QWEN_IMAGES,
        {"processor_class": "Qwen2_5_VLProcessor"},
        _QWEN_IMAGE,
        _QWEN_TOKENS,
    ),
    "gemma3": TinyFamily(
        "Gemma3ForConditionalGeneration",
        {
            "text_config": _GEMMA3_TEXT,
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
            "boi_token_index": FIRST_UNUSED,
            "eoi_token_index": FIRST_UNUSED + 1,
            "image_token_index": FIRST_UNUSED + 2,
            "tie_word_embeddings": True,
        },
        {"image_processor_type": "Gemma3ImageProcessor", **_SQUARE},
        {"processor_class": "Gemma3Processor"},
        "<start_of_image>",
        list(_GEMMA3_TOKENS.values()),
        _GEMMA3_TOKENS,
    ),
}

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'IMAGE' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny_vlm(
    folder: Path,
    family: str,
    seed: int = 0,
    *,
    image_processor: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a tiny random model of a family into `folder` (made if need be); returns `folder`.

    `overrides` are keys of config.json; an object is merged into what the family has there. `image_processor` is merged
    into preprocessor_config.json.
    """
    row = TINY_FAMILIES[family]
    config = dict(row.config)
    for key, value in overrides.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    model = _random_model(row.architecture, config, seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _write_json(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": [EOS, IM_END]})
    _write_json(folder / "preprocessor_config.json", {**row.image_processor, **(image_processor or {})})
    processor = dict(row.processor)
    if "vision_feature_select_strategy" in config:
        processor["vision_feature_select_strategy"] = config["vision_feature_select_strategy"]
    if "scale_factor" in config:
        processor["image_seq_len"] = 16 // config["scale_factor"] ** 2
    if "mm_tokens_per_image" in config:
        processor["image_seq_length"] = config["mm_tokens_per_image"]
    _write_json(folder / "processor_config.json", processor)
    _write_tokenizer(folder, row)
    return folder


def open_tiny_vlm(folder: Path, **options: Any) -> VisionModel:
    """The vision part of a model's folder; `options` are those of `open_vision`."""
    tokenizer = load_tokenizer(folder)
    return open_vision(
        read_json(folder / "config.json"),
        folder,
        Checkpoint(folder),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        **options,
    )


def picture(width: int, height: int, seed: int = 0) -> DecodedImage:
    """Noise over a gradient: neighbouring pixels differ, and so do distant regions."""
    noise = np.random.default_rng([seed, width, height]).integers(0, 128, (height, width, 3))
    noise[..., 0] += np.linspace(0, 127, width, dtype=np.int64)
    noise[..., 1] += np.linspace(0, 127, height, dtype=np.int64)[:, None]
    return DecodedImage(noise.astype(np.uint8))


def _random_model(architecture: str, config: dict[str, Any], seed: int) -> Any:
    """As in `tiny`: weights large enough for mistakes to show, and no special token is likely to be generated."""
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**{"tie_word_embeddings": False, **config})).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            parameter.data = 0.2 * noise + parameter.data.mean().round()  # 0 where a norm adds 1 to its weight
        else:
            parameter.data = 0.15 * noise
    if not model.config.tie_word_embeddings:
        model.lm_head.weight.data[BOS:] = 0.0
    return model


def _write_tokenizer(folder: Path, row: TinyFamily) -> None:
    write_tokenizer(folder, VOCABULARY)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    template = {key: value for key, value in tokenizer["added_tokens"][0].items() if key not in ("id", "content")}
    for i, token in enumerate(row.special_tokens, start=FIRST_UNUSED):
        del vocab[f"<unused{i}>"]
        vocab[token] = i
        tokenizer["added_tokens"].append({"id": i, "content": token, **template})
    _write_json(folder / "tokenizer.json", tokenizer)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = _CHAT_TEMPLATE.replace("IMAGE", row.image_text)
    settings["extra_special_tokens"] = row.named_tokens
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
