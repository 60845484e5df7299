from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from paged import PagedRun, PagedSequence
from tiny import write_tiny

from mlserve.config import DType, ModelOptions
from mlserve.model.decoder import Decoder
from mlserve.model.loader import load_model

PROMPT = [7, 200, 31, 31, 64, 5, 90, 17, 111, 42, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("gemma3"), "gemma3")


def load(folder: Path, dtype: DType = DType.FLOAT32) -> Decoder:
    return load_model(ModelOptions(model=str(folder), device="cpu", kernels="reference", dtype=dtype)).decoder


@pytest.mark.parametrize("rows", [[10], [0, 4, 9], list(range(11)), [9, 2, 9, *range(8)]], ids=str)
def test_wanted_rows_are_those_of_all(folder: Path, rows: list[int]) -> None:
    decoder = load(folder)
    _, every = PagedRun(decoder).prefill(PROMPT)
    wanted = PagedRun(decoder).step([(PagedSequence(PROMPT), 11)], rows=rows)
    assert wanted.shape == (len(rows), 320)
    torch.testing.assert_close(wanted, every[rows], atol=1e-5, rtol=0)


def test_without_wanted_rows_kv_is_still_written(folder: Path) -> None:
    decoder = load(folder)
    _, every = PagedRun(decoder).prefill(PROMPT)
    run, sequence = PagedRun(decoder), PagedSequence(PROMPT)
    assert run.step([(sequence, 6)], rows=[]).shape == (0, 320)
    torch.testing.assert_close(run.step([(sequence, 5)]), every[6:], atol=1e-5, rtol=0)


def test_sequences_of_one_step_do_not_meet(folder: Path) -> None:
    decoder = load(folder)
    alone = [PagedRun(decoder).prefill(ids)[1] for ids in (PROMPT, PROMPT[::-1], PROMPT[:1])]
    chunks = [(PagedSequence(ids), len(ids)) for ids in (PROMPT, PROMPT[::-1], PROMPT[:1])]
    torch.testing.assert_close(PagedRun(decoder).step(chunks), torch.cat(alone), atol=1e-5, rtol=0)


def test_attention_soft_cap_changes_attention_and_a_wide_one_does_not(folder: Path) -> None:
    decoder = load(folder)
    _, plain = PagedRun(decoder).prefill(PROMPT)

    def capped(cap: float) -> torch.Tensor:
        config = dataclasses.replace(decoder.config, attention_soft_cap=cap)
        return PagedRun(Decoder(config, decoder.weights, decoder.ops)).prefill(PROMPT)[1]

    torch.testing.assert_close(capped(1e4), plain, atol=1e-4, rtol=0)
    assert (capped(0.5) - plain).abs().max() > 0.1
    torch.testing.assert_close(capped(0.5)[0], plain[0])  # the first token attends to itself alone


def test_logits_are_float32_whatever_the_storage(folder: Path) -> None:
    _, exact = PagedRun(load(folder)).prefill(PROMPT)
    for dtype in (DType.BFLOAT16, DType.FLOAT16):
        _, logits = PagedRun(load(folder, dtype)).prefill(PROMPT)
        assert logits.dtype == torch.float32
        error = (logits - exact).abs().max() / exact.abs().max()
        assert 0 < error < (0.1 if dtype is DType.BFLOAT16 else 0.01)


def test_gates_and_projections_are_fused(folder: Path) -> None:
    layer = load(folder).weights.layers[0]
    assert (layer.qkv_proj.out_features, layer.qkv_proj.in_features) == (128, 64)
    assert (layer.gate_up_proj.out_features, layer.gate_up_proj.in_features) == (256, 64)


def test_tied_output_layer_is_the_embedding_itself(folder: Path, tmp_path: Path) -> None:
    tied = load(folder).weights
    assert tied.lm_head is tied.embedding
    untied = load(write_tiny(tmp_path / "llama")).weights
    assert untied.lm_head is not untied.embedding
