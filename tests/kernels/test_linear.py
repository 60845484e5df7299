"""Native linear layers and embeddings against the reference."""

from __future__ import annotations

import pytest
import torch
from tolerances import LINEAR, assert_close

from mlserve.kernels.cpu.ops import CpuOps
from mlserve.kernels.reference import ReferenceOps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "out", "size"),
    [(1, 96, 64), (2, 17, 576), (5, 3, 1000), (7, 40, 37), (13, 960, 64), (133, 33, 1537), (400, 48, 96), (0, 16, 8)],
    ids=lambda n: str(n),
)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_linear(
    native: CpuOps, reference: ReferenceOps, rows: int, out: int, size: int, dtype: torch.dtype, with_bias: bool
) -> None:
    weight = (torch.randn(out, size) * size**-0.5).to(dtype)
    bias = torch.randn(out).to(dtype) if with_bias else None
    x = torch.randn(rows, size)
    packed = native.pack_linear(weight, bias)
    assert (packed.out_features, packed.in_features) == (out, size)
    y = native.linear(x, packed)
    assert y.shape == (rows, out)
    assert_close(y, reference.linear(x, reference.pack_linear(weight, bias)), LINEAR)


def test_linear_reads_strided_rows(native: CpuOps, reference: ReferenceOps) -> None:
    wide = torch.randn(9, 3, 48)
    x, weight = wide[:, 1], torch.randn(20, 48) * 0.1
    assert_close(
        native.linear(x, native.pack_linear(weight)), reference.linear(x, reference.pack_linear(weight)), LINEAR
    )


def test_linear_packs_a_strided_weight(native: CpuOps, reference: ReferenceOps) -> None:
    x, weight = torch.randn(2, 48), (torch.randn(48, 20) * 0.1).T
    assert_close(
        native.linear(x, native.pack_linear(weight)), reference.linear(x, reference.pack_linear(weight)), LINEAR
    )


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_has_the_same_bits_in_any_batch(native: CpuOps, dtype: torch.dtype) -> None:
    packed = native.pack_linear((torch.randn(40, 1200) * 0.03).to(dtype), torch.randn(40))
    x = torch.randn(1300, 1200)
    alone = torch.cat([native.linear(row[None], packed) for row in x[:200]])
    for rows in (2, 3, 4, 5, 6, 7, 193, 400, 1300):
        assert torch.equal(native.linear(x[:rows], packed)[:200], alone[:rows])


def test_linear_keeps_nan_to_its_row(native: CpuOps) -> None:
    packed = native.pack_linear(torch.randn(33, 64))
    x = torch.randn(8, 64)
    x[3, 5] = torch.nan
    assert native.linear(x, packed).isnan().all(1).tolist() == [t == 3 for t in range(8)]


def test_weights_outlive_the_ops_that_packed_them() -> None:
    packed = CpuOps().pack_linear(torch.full((16, 8), 0.5))
    assert torch.equal(CpuOps().linear(torch.ones(1, 8), packed), torch.full((1, 16), 4.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 133])
def test_embedding_is_exact(native: CpuOps, reference: ReferenceOps, dtype: torch.dtype, tokens: int) -> None:
    table = torch.randn(37, 75).to(dtype)
    ids = torch.randint(0, 37, (tokens,))
    rows = native.embedding(ids, native.pack_linear(table))
    assert rows.shape == (tokens, 75)
    assert torch.equal(rows, reference.embedding(ids, reference.pack_linear(table)))


@pytest.mark.parametrize("token", [-1, 37])
def test_embedding_refuses_ids_outside_the_vocabulary(native: CpuOps, token: int) -> None:
    packed = native.pack_linear(torch.randn(37, 8))
    with pytest.raises(IndexError, match=f"token id {token}, vocabulary 37"):
        native.embedding(torch.tensor([0, token]), packed)


def test_wrong_arguments_are_refused(native: CpuOps) -> None:
    packed = native.pack_linear(torch.randn(16, 8))
    with pytest.raises(ValueError, match="of the weight's width"):
        native.linear(torch.randn(2, 9), packed)
    with pytest.raises(ValueError, match="float32"):
        native.linear(torch.randn(2, 8).bfloat16(), packed)
    with pytest.raises(TypeError, match="dtype Double: use float32"):
        native.pack_linear(torch.randn(16, 8).double())
    with pytest.raises(ValueError, match="a bias must be"):
        native.pack_linear(torch.randn(16, 8), torch.randn(8))
