from __future__ import annotations

import pytest
import torch

from mlserve.adapters.slots import slots_bytes
from mlserve.config import CacheConfig, ModelOptions
from mlserve.engine import build
from mlserve.engine.build import GIB, num_blocks
from mlserve.engine.memory import GRAPH_BYTES, KV_SHARE, Claims, graph_bytes, kv_budget
from mlserve.errors import ConfigError
from mlserve.model.base_weights import base_shape
from mlserve.model.config import DecoderConfig
from mlserve.model.loader import open_model

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def model(tiny_model_dir: object) -> DecoderConfig:
    return open_model(ModelOptions(str(tiny_model_dir), device="cpu")).config


def test_budget_is_a_share_of_what_the_claims_leave() -> None:
    claims = Claims(weights=3 * GIB, activations=2 * GIB, adapters=GIB, graphs=GIB)
    assert claims.total == 7 * GIB
    assert kv_budget(57 * GIB, claims) == int(KV_SHARE * 50 * GIB)
    assert kv_budget(7 * GIB, claims) == 0
    assert kv_budget(GIB, claims) == 0


def test_graphs_hold_their_logits() -> None:
    assert graph_bytes(256, 1000) == GRAPH_BYTES + 256 * 1000 * 12


def test_a_pool_on_a_gpu(monkeypatch: pytest.MonkeyPatch, model: DecoderConfig) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 4 * GIB))
    per_block = 16 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, head size, bytes
    blocks = num_blocks(CacheConfig(), model, torch.float32, CUDA, Claims(activations=GIB, adapters=GIB))
    assert blocks == int(KV_SHARE * GIB) // per_block
    for config, expected in ((CacheConfig(num_blocks=5), 5), (CacheConfig(kv_memory=0.5), GIB // 2 // per_block)):
        assert num_blocks(config, model, torch.float32, CUDA, Claims(activations=4 * GIB)) == expected
    with pytest.raises(ConfigError, match=r"the budget is 0\.0 MiB: raise kv_memory or lower block_size"):
        num_blocks(CacheConfig(), model, torch.float32, CUDA, Claims(activations=4 * GIB))


def test_a_pool_on_a_cpu_claims_nothing(model: DecoderConfig) -> None:
    blocks = num_blocks(CacheConfig(), model, torch.float32, torch.device("cpu"), Claims(activations=100 * GIB))
    assert blocks == build.CPU_KV_GIB * GIB // (16 * 512)


def test_slots_with_all_linears(model: DecoderConfig) -> None:
    """By hand, for TINY: hidden 64, 4 heads of 16 of which 2 have keys, MLP 128, vocabulary 320, 2 layers."""
    qkv, out = 3 * 64 + 128, 64 + 64
    gate_up, down = 2 * 64 + 256, 128 + 64
    embed, lm_head = 320 + 64, 64 + 320
    per_rank = 2 * (qkv + out + gate_up + down) + embed + lm_head
    assert slots_bytes(base_shape(model), 8, 16, torch.bfloat16) == 8 * 16 * per_rank * 2
