"""Hypothesis strategies: partitions of every kind, and matrices over them from seeds that hypothesis draws."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from blockmean import BlockMean, Partition

# The same examples in every run, on every machine; no database folder.
settings.register_profile("blockmean", deadline=None, max_examples=30, derandomize=True, database=None)
settings.load_profile("blockmean")

KINDS = ("one block", "single entries", "one giant block", "mixed", "reordered", "interleaved")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**32 - 1)


@st.composite
def labels(draw: st.DrawFn, max_blocks: int = 5, max_size: int = 5) -> list[int]:
    """The block of each entry."""
    kind = draw(st.sampled_from(KINDS))
    if kind == "one block":
        return [0] * draw(st.integers(1, 12))
    if kind == "single entries":
        return list(range(draw(st.integers(1, 8))))
    if kind == "one giant block":
        sizes = draw(st.permutations([1, 2, 40]))
    else:
        sizes = draw(st.lists(st.integers(1, max_size), min_size=1, max_size=max_blocks))
    entries = [i for i, size in enumerate(sizes) for _ in range(size)]
    if kind == "reordered":
        return entries[::-1]
    return draw(st.permutations(entries)) if kind == "interleaved" else entries


@st.composite
def partitions(draw: st.DrawFn, max_blocks: int = 5, max_size: int = 5) -> Partition:
    return Partition.from_labels(draw(labels(max_blocks, max_size)))


@st.composite
def definite(draw: st.DrawFn) -> BlockMean:
    """A symmetric positive definite block-mean matrix; see `make_definite`."""
    return make_definite(draw(partitions()), draw(seeds()))


@st.composite
def general(draw: st.DrawFn) -> BlockMean:
    """A block-mean matrix that is neither symmetric nor definite; see `make_general`."""
    return make_general(draw(partitions()), draw(seeds()))


def make_definite(partition: Partition, seed: int) -> BlockMean:
    """Eigenvalues between 0.3 and 5. B itself may be indefinite, and λ of single entries is 0, negative or positive."""
    A = _between(0.3, 5, partition.num_blocks, seed, symmetric=True)
    return _assemble(partition, A, 0.5 + 2.5 * _uniform(partition.num_blocks, seed + 1), seed)


def make_general(partition: Partition, seed: int) -> BlockMean:
    """Singular values between 0.3 and 5, λ of either sign."""
    A = _between(0.3, 5, partition.num_blocks, seed, symmetric=False)
    lam = (0.5 + 2.5 * _uniform(partition.num_blocks, seed + 1)) * randn(partition.num_blocks, seed=seed + 2).sign()
    return _assemble(partition, A, lam, seed)


def _assemble(partition: Partition, A: Tensor, lam: Tensor, seed: int) -> BlockMean:
    arbitrary = torch.tensor([0.0, -1.5, 2.0])[torch.randint(3, (len(lam),), generator=generator(seed))].double()
    lam = torch.where(partition.sizes == 1, arbitrary, lam)
    root = partition.sizes.double().sqrt()
    return BlockMean(partition, lam, (A - lam.diag()) / torch.outer(root, root))


def _between(low: float, high: float, L: int, seed: int, *, symmetric: bool) -> Tensor:
    """A random L×L matrix with singular values in [low, high]."""
    left, _ = torch.linalg.qr(randn(L, L, seed=seed + 3))
    right = left if symmetric else torch.linalg.qr(randn(L, L, seed=seed + 4))[0]
    A = (left * (low + (high - low) * _uniform(L, seed + 5))) @ right.mT
    return (A + A.mT) / 2 if symmetric else A


def _uniform(n: int, seed: int) -> Tensor:
    return torch.rand(n, generator=generator(seed), dtype=torch.float64)
