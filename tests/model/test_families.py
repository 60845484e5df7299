from __future__ import annotations

from typing import Any

import pytest

from mlserve.errors import UnsupportedModelError
from mlserve.kernels import Activation
from mlserve.model.config import DecoderConfig
from mlserve.model.families import FAMILIES, decoder_config

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def describe(architecture: str, **overrides: Any) -> DecoderConfig:
    return decoder_config({"architectures": [architecture]} | SIZES | overrides)


def windows(config: DecoderConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_sizes_are_taken_over(architecture: str) -> None:
    config = describe(architecture, head_dim=16)
    assert (config.architecture, config.num_layers, config.max_positions) == (architecture, 6, 512)
    assert (config.q_size, config.kv_size) == (64, 32)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (320, 64, 128)


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    llama = describe("LlamaForCausalLM")
    assert (llama.head_dim, llama.norm_eps, llama.tied_embeddings, llama.qkv_bias) == (16, 1e-6, False, False)
    assert llama.activation is Activation.SILU
    assert windows(describe("MistralForCausalLM")) == [4096] * 6
    assert windows(describe("MistralForCausalLM", sliding_window=None)) == [None] * 6
    qwen2 = describe("Qwen2ForCausalLM")
    assert (qwen2.qkv_bias, qwen2.o_bias, windows(qwen2)) == (True, False, [None] * 6)
    qwen3 = describe("Qwen3ForCausalLM")
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias) == (128, True, False)


def test_absent_keys_of_gemma3() -> None:
    gemma = describe("Gemma3ForCausalLM")
    assert (gemma.head_dim, gemma.tied_embeddings, gemma.sandwich_norms, gemma.qk_norm) == (256, True, True, True)
    assert (gemma.attention_scale, gemma.embedding_multiplier) == (256**-0.5, 8.0)
    assert gemma.activation is Activation.GELU_TANH
    assert windows(gemma) == [4096] * 5 + [None]
    assert [layer.rope for layer in gemma.layers] == [1] * 5 + [0]
    full, sliding = gemma.ropes
    assert full.frequencies[1] == pytest.approx(1e6 ** (-2 / 256))
    assert sliding.frequencies[1] == pytest.approx(1e4 ** (-2 / 256))


def test_qwen_windows_from_a_layer_on() -> None:
    on = {"use_sliding_window": True, "sliding_window": 7}
    assert windows(describe("Qwen2ForCausalLM", max_window_layers=4, **on)) == [None] * 4 + [7, 7]
    assert windows(describe("Qwen2ForCausalLM", **on)) == [None] * 6  # from layer 28 on
    kinds = ["sliding_attention", "full_attention"] * 3
    assert windows(describe("Qwen3ForCausalLM", layer_types=kinds, **on)) == [7, None] * 3


def test_soft_caps_of_gemma3() -> None:
    gemma = describe("Gemma3ForCausalLM", attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    assert (gemma.attention_soft_cap, gemma.logit_soft_cap) == (50.0, 30.0)


@pytest.mark.parametrize(
    ("architecture", "overrides", "named"),
    [
        ("GPT2LMHeadModel", {}, "'GPT2LMHeadModel'"),
        ("LlamaForCausalLM", {"architectures": None}, "None"),
        ("LlamaForCausalLM", {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "MistralForCausalLM"),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("Qwen3ForCausalLM", {"num_experts": 8}, "num_experts"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("LlamaForCausalLM", {"hidden_act": "relu"}, "hidden_act as 'relu'"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "mystery"}}, "'mystery'"),
        ("LlamaForCausalLM", {"rope_scaling": "yarn"}, "rope_scaling as 'yarn'"),
        ("LlamaForCausalLM", {"hidden_size": "64"}, "hidden_size as '64'"),
        ("LlamaForCausalLM", {"vocab_size": None}, "no vocab_size"),
        ("LlamaForCausalLM", {"vocab_size": True}, "vocab_size as True"),
        ("LlamaForCausalLM", {"num_hidden_layers": 10**9}, "num_hidden_layers as 1000000000"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "4 query heads can't share 3 key heads"),
        ("LlamaForCausalLM", {"head_dim": 15}, "head_dim is 15"),
        ("LlamaForCausalLM", {"tie_word_embeddings": "yes"}, "tie_word_embeddings as 'yes'"),
        ("LlamaForCausalLM", {"rms_norm_eps": -1e-6}, "rms_norm_eps as -1e-06"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 6}, "layer_types"),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 5}, "layer_types"),
        ("Gemma3ForCausalLM", {"layer_types": ["chunked_attention"] * 6}, "chunked_attention"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
    ],
)
def test_what_is_not_served_is_named(architecture: str, overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        describe(architecture, **overrides)
