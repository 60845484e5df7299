from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mlserve.errors import UnsupportedModelError
from mlserve.model.rope import Rope, RopeScaling, rope_from_config, rope_from_parameters, rotation
from mlserve.model.settings import Settings


def config(**values: Any) -> Settings:
    return Settings({"max_position_embeddings": 512} | values)


def test_default_frequencies_are_powers_of_theta() -> None:
    rope = rope_from_config(config(rope_theta=10_000.0), head_dim=8)
    assert rope.frequencies == pytest.approx((1.0, 0.1, 0.01, 0.001))
    assert (rope.scaling, rope.attention_factor, rope.max_positions) == (RopeScaling.DEFAULT, 1.0, 512)


def test_rotation_is_cosine_and_sine_of_the_angles() -> None:
    rope = Rope(RopeScaling.DEFAULT, (1.0, 0.5), attention_factor=2.0, max_positions=10)
    cos, sin = rotation(torch.tensor([0, 3]), torch.tensor(rope.frequencies), rope)
    assert cos.tolist() == [[2.0, 2.0], pytest.approx([2 * math.cos(3.0), 2 * math.cos(1.5)])]
    assert sin.tolist() == [[0.0, 0.0], pytest.approx([2 * math.sin(3.0), 2 * math.sin(1.5)])]


def test_m_rope_turns_each_section_by_its_own_component() -> None:
    scaling = {"type": "mrope", "mrope_section": [1, 2, 1]}
    rope = rope_from_config(config(rope_scaling=scaling), head_dim=8)
    assert (rope.scaling, rope.sections) == (RopeScaling.DEFAULT, (1, 2, 1))
    frequencies = torch.tensor(rope.frequencies)
    positions = torch.tensor([[1, 2], [30, 40], [500, 600]])
    cos, _ = rotation(positions, frequencies, rope)
    by_frequency = torch.tensor([[1, 30, 30, 500], [2, 40, 40, 600]])
    torch.testing.assert_close(cos, (by_frequency * frequencies).cos())
    same, _ = rotation(torch.tensor([7, 7]), frequencies, rope)
    torch.testing.assert_close(same, (7 * frequencies).cos().expand(2, 4))


@pytest.mark.parametrize("section", [[1, 2], [1, 2, 3], [4, "x", 0], 4])
def test_m_rope_sections_must_fit(section: object) -> None:
    with pytest.raises(UnsupportedModelError, match="mrope_section"):
        rope_from_config(config(rope_scaling={"type": "mrope", "mrope_section": section}), head_dim=8)


def test_old_and_new_spelling_are_the_same() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    old = rope_from_config(config(rope_theta=5e5, rope_scaling=scaling), head_dim=8)
    new = rope_from_config(config(rope_parameters=scaling | {"rope_theta": 5e5}), head_dim=8)
    plain = rope_from_config(config(rope_theta=5e5), head_dim=8)
    assert old == new
    assert old.frequencies == pytest.approx([frequency / 4 for frequency in plain.frequencies])


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_scalings_that_depend_on_length_end_at_the_trained_one(scaling: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "original_max_position_embeddings": 128}
    params = {"rope_type": scaling, "rope_theta": 1e4, "factor": 4.0} | (factors if scaling == "longrope" else {})
    rope = rope_from_parameters(params, 8, 512)
    assert rope.frequencies == pytest.approx((1.0, 0.1, 0.01, 0.001))  # the long factors would show
    assert rope.max_positions == (128 if scaling == "longrope" else 512)


def test_yarn_reaches_beyond_the_trained_length() -> None:
    params = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    rope = rope_from_parameters(params, 8, 512)
    assert rope.max_positions == 2048
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    params = {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }  # fmt: skip
    rope = rope_from_parameters(params, 8, 4096)
    # wavelengths are 6, 63, 628 and 6283: below 512 / 4 kept, above 512 divided by 8
    assert rope.frequencies == pytest.approx((1.0, 0.1, 0.01 / 8, 0.001 / 8))


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"rope_type": "su"}, "'su'"),
        ({"type": "mrope", "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "linear"}, "no factor"),
        ({"rope_type": "linear", "factor": "two"}, "factor as 'two'"),
        ({"rope_type": "linear", "factor": -2.0}, "factor as -2.0"),
        ({"rope_type": "linear", "factor": math.inf}, "factor as inf"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "'beta_fast'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}, "short_factor"),
    ],
)
def test_what_is_not_served_is_named(params: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        rope_from_parameters({"rope_theta": 1e4} | params, 8, 512)
