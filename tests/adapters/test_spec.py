from __future__ import annotations

import pytest
import torch

from mlserve.adapters.dora import row_scales
from mlserve.adapters.spec import AdapterLimits, BaseShape, LoraWeights, Module, Site, targets_of, targets_text
from mlserve.errors import ConfigError, CorruptAdapterError


def test_paths_and_order_of_sites() -> None:
    sites = [Site(Module.EMBED_TOKENS), Site(Module.LM_HEAD), Site(Module.Q_PROJ, 0), Site(Module.DOWN_PROJ, 0)]
    sites += [Site(Module.Q_PROJ, 2), Site(Module.Q_PROJ, 10)]
    shuffled = [sites[index] for index in (3, 5, 0, 4, 2, 1)]
    assert sorted(shuffled, key=lambda site: site.order) == sites
    assert [site.path for site in sites[1:4]] == ["lm_head", "layers.0.self_attn.q_proj", "layers.0.mlp.down_proj"]


def test_base_shape() -> None:
    base = BaseShape(3, 8, 50, {Module.Q_PROJ: (16, 8), Module.DOWN_PROJ: (8, 32)})
    assert base.size(Module.DOWN_PROJ) == (8, 32)
    assert base.size(Module.EMBED_TOKENS) == (8, 50)
    assert base.size(Module.LM_HEAD) == (50, 8)
    assert base.size(Module.K_PROJ) is None
    assert Site(Module.Q_PROJ, 2) in base
    assert Site(Module.LM_HEAD) in base
    assert Site(Module.Q_PROJ, 3) not in base
    assert Site(Module.K_PROJ, 0) not in base
    assert len([*base.layer_sites()]) == 6


def test_text_of_targets() -> None:
    sites = [Site(Module.V_PROJ, 5), *(Site(Module.Q_PROJ, layer) for layer in (0, 1, 2, 4, 7, 8))]
    assert (
        targets_text(targets_of([*sites, Site(Module.LM_HEAD)]))
        == "q_proj (layers 0-2, 4, 7-8), v_proj (layer 5), lm_head"
    )


@pytest.mark.parametrize("options", [{"max_rank": 0}, {"max_bytes": -1}])
def test_limits_that_nothing_fits(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="give a number above 0"):
        AdapterLimits(**options)


def test_row_scales() -> None:
    """More rows than are computed at once, in bfloat16 too."""
    torch.manual_seed(0)
    weight = torch.randn(9000, 8)
    lora = LoraWeights(torch.randn(2, 8), torch.randn(9000, 2), 0.5, torch.rand(9000))
    for stored in (weight, weight.bfloat16()):
        changed = stored.double() + 0.5 * lora.b.double() @ lora.a.double()
        want = lora.magnitude.double() / changed.pow(2).sum(1).sqrt()
        torch.testing.assert_close(row_scales(lora, stored).double(), want, atol=0, rtol=1e-5)


def test_rows_without_length() -> None:
    weight = torch.ones(4, 8)
    lora = LoraWeights(torch.ones(1, 8), torch.tensor([[0.0], [-0.5], [0.0], [0.0]]), 2.0, torch.ones(4))
    with pytest.raises(CorruptAdapterError, match="has the norm 0"):
        row_scales(lora, weight)
