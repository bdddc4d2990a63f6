"""Orthonormal columns: what they span, and what happens where the given ones say too little."""

import pytest
import torch

from blockmean import _linalg
from blockmean._linalg import INERTIA


def orthonormalized(Y, V):
    return _linalg.orthonormalized([Y], [V])[0]


def random(n, k, seed=1, batch=()):
    return torch.randn(*batch, n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(n, k, seed=0, batch=()):
    return torch.linalg.qr(random(n, k, seed, batch)).Q


def assert_orthonormal(W):
    eye = torch.eye(W.shape[-1], dtype=W.dtype).expand(*W.shape[:-2], -1, -1)
    torch.testing.assert_close(W.mT @ W, eye, rtol=0, atol=1e-14)  # a few rounding errors, whatever the condition


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_the_first_columns_span_what_those_of_y_and_a_little_of_v_span(batch, scale):
    V, Y = orthonormal(9, 4, batch=batch), random(9, 4, batch=batch)
    found = orthonormalized(scale * Y, V)
    assert_orthonormal(found)
    Z = Y / Y.norm(dim=-2, keepdim=True) + INERTIA * V
    for k in range(1, 5):  # Gram and Schmidt: column by column
        W = found[..., :k]
        torch.testing.assert_close(W @ (W.mT @ Z[..., :k]), Z[..., :k])
    torch.testing.assert_close((found * Z).sum(-2) > 0, torch.ones(*batch, 4, dtype=torch.bool))  # and none is flipped


def test_columns_that_are_nearly_parallel_become_orthonormal_to_all_digits():
    V, Y = orthonormal(30, 5), random(30, 1) + 1e-9 * random(30, 5, seed=2)
    found = orthonormalized(Y, V)
    assert_orthonormal(found)
    common = Y[:, :1] / Y[:, :1].norm()
    assert float((found[:, :1] - common).norm()) < 2 * INERTIA


def test_columns_that_are_zero_in_y_stay_where_they_were():
    V = orthonormal(9, 3)
    torch.testing.assert_close(orthonormalized(torch.zeros_like(V), V), V)
    Y = random(9, 3)
    Y[:, 1] = 0
    found = orthonormalized(Y, V)
    assert_orthonormal(found)
    rest = V[:, 1] - found[:, 0] * (found[:, 0] @ V[:, 1])
    torch.testing.assert_close(found[:, 1], rest / rest.norm())


def test_columns_that_are_zero_in_both_stay_zero():
    V, Y = orthonormal(9, 3), random(9, 3)
    V[:, 2], Y[:, 2] = 0, 0
    found = orthonormalized(Y, V)
    assert not found[:, 2].any()
    assert_orthonormal(found[:, :2])


def test_where_a_factor_fails_the_old_columns_stay_and_the_rest_of_the_batch_goes_on():
    V, Y = orthonormal(9, 2, batch=(3,)), random(9, 2, batch=(3,))
    Y[0] = torch.nan
    Y[1, :, 1] = Y[1, :, 0]  # parallel, and the old columns cancel what would keep them apart
    Y[1] /= Y[1].norm(dim=-2, keepdim=True)
    V[1] = torch.stack([Y[1, :, 0], -Y[1, :, 0]], -1)
    found = orthonormalized(Y, V)
    assert torch.equal(found[:2], V[:2])
    assert_orthonormal(found[2])
    assert not torch.equal(found[2], V[2])


def test_single_precision_goes_in_and_out():
    V, Y = orthonormal(9, 3).float(), random(9, 3).float()
    found = orthonormalized(Y, V)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, orthonormalized(Y.double(), V.double()).float(), rtol=0, atol=0)
    assert orthonormalized(Y[:, :0], V[:, :0]).shape == (9, 0)
