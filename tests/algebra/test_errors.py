"""Every refusal of the algebra: the right kind of error, naming what was wrong, the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from blockmean import BlockMean, Partition
from blockmean._checks import require
from support.strategies import make_definite

NAN, INF = float("nan"), float("inf")
PAIR = Partition.from_sizes([2, 1], names=["conv", "bias"])
WEIGHT = torch.zeros(2, 3)


def check(action: Callable[[], Any], error: type[Exception], *parts: str) -> None:
    """`action` raises exactly `error`, and its message has all the parts."""
    with pytest.raises(error) as caught:
        action()
    assert caught.type is error
    for part in parts:
        assert part in str(caught.value), f"{part!r} is missing in: {caught.value}"


def matrix(lam: list[float], B: list[list[float]], partition: Partition = PAIR) -> BlockMean:
    return BlockMean(partition, torch.tensor(lam, dtype=torch.float64), torch.tensor(B, dtype=torch.float64))


def test_a_check_says_parameter_owner_rule_and_value_and_nan_fails() -> None:
    expected = "The 'lr' parameter of AdaGradBMA must be >= 0. Got nan instead."
    check(lambda: require(NAN >= 0, "lr", "AdaGradBMA", ">= 0", NAN), ValueError, expected)
    require(True, "lr", "AdaGradBMA", ">= 0", 1.0)


# ---------------------------------------------------------------- partitions

PARTITIONS: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "no sizes": (lambda: Partition.from_sizes([]), ValueError, ("'sizes'", "non-empty")),
    "a size of zero": (lambda: Partition.from_sizes([2, 0]), ValueError, ("positive", "Got 0 for block 1")),
    "a negative size": (lambda: Partition.from_sizes([-3]), ValueError, ("positive", "Got -3 for block 0")),
    "sizes that are floats": (lambda: Partition.from_sizes([1.0]), TypeError, ("'sizes'", "whole numbers", "float")),
    "sizes in a table": (lambda: Partition.from_sizes([[1, 2]]), ValueError, ("one-dimensional", "shape (1, 2)")),
    "one size": (lambda: Partition.from_sizes(3), ValueError, ("one-dimensional", "shape ()")),
    "too few names": (
        lambda: Partition.from_sizes([1, 2], names=["a"]),
        ValueError,
        ("'names'", "Partition.from_sizes", "each of the 2 blocks", "1 names"),
    ),
    "no labels": (lambda: Partition.from_labels([]), ValueError, ("'labels'", "non-empty")),
    "labels with a hole": (lambda: Partition.from_labels([0, 2]), ValueError, ("from 0 to 2", "Missing: 1.")),
    "labels from one": (lambda: Partition.from_labels([1, 2]), ValueError, ("from 0 to 2", "Missing: 0.")),
    "a huge label": (lambda: Partition.from_labels([0, 10**15]), ValueError, (f"to {10**15}", "Missing: 1.")),
    "a negative label": (lambda: Partition.from_labels([0, -1]), ValueError, ("'labels'", ">= 0", "Got -1")),
    "labels that are floats": (
        lambda: Partition.from_labels(torch.tensor([0.0, 1.0])),
        TypeError,
        ("'labels'", "whole numbers", "torch.float32"),
    ),
    "labels that are a mask": (lambda: Partition.from_labels([True, False]), TypeError, ("whole", "torch.bool")),
    "complex labels": (lambda: Partition.from_labels(torch.tensor([1j])), TypeError, ("whole", "complex")),
    "names for other labels": (
        lambda: Partition.from_labels([0, 1], names=["a", "b", "c"]),
        ValueError,
        ("Partition.from_labels", "2 blocks", "3 names"),
    ),
    "an unknown cut": (
        lambda: Partition.of(WEIGHT, by="layer"),
        ValueError,
        ("'by'", "'tensor'", "'element'", "Got 'layer'"),
    ),
    "a callable with an unknown answer": (
        lambda: Partition.of(WEIGHT, by=lambda name, tensor: None),
        ValueError,
        ("'by'", "Got None"),
    ),
    "modules without names": (
        lambda: Partition.of([WEIGHT], by="module"),
        ValueError,
        ("by module", "needs names", "named_parameters()"),
    ),
    "labels of a callable that do not fit": (
        lambda: Partition.of({"w": WEIGHT}, by=lambda name, tensor: torch.arange(2)),
        ValueError,
        ("w [2, 3]", "broadcast", "(2,)"),
    ),
    "labels of a callable with a hole": (
        lambda: Partition.of({"w": WEIGHT}, by=lambda name, tensor: torch.tensor([0, 1, 3])),
        ValueError,
        ("w [2, 3]", "Missing: 2."),
    ),
    "labels of a callable that are floats": (
        lambda: Partition.of({"w": WEIGHT}, by=lambda name, tensor: tensor),
        TypeError,
        ("w [2, 3]", "whole numbers", "torch.float32"),
    ),
    "no parameters": (lambda: Partition.of([]), ValueError, ("'params'", "at least one tensor with entries")),
    "only empty parameters": (lambda: Partition.of(torch.zeros(0)), ValueError, ("at least one tensor",)),
    "parameters that are no tensors": (
        lambda: Partition.of([1.0]),
        TypeError,
        ("'params'", "(name, tensor) pairs", "Got 1.0"),
    ),
    "parameter groups": (lambda: Partition.of([{"params": [WEIGHT]}]), TypeError, ("'params'", "(name, tensor)")),
    "triples": (lambda: Partition.of([("w", WEIGHT, 1)]), TypeError, ("(name, tensor) pairs",)),
    "a number as a name": (lambda: Partition.of([(0, WEIGHT)]), TypeError, ("(name, tensor) pairs", "Got (0")),
    "the same tensor under two names": (
        lambda: Partition.of([("a", WEIGHT), ("b", WEIGHT)]),
        ValueError,
        ("same tensor twice", "number 1 'b' is number 0 'a'", "Leave one"),
    ),
    "the same tensor under one name": (
        lambda: Partition.of([("w", WEIGHT), ("w", WEIGHT)]),
        ValueError,
        ("number 1 'w' is number 0 'w'",),
    ),
    "groups of another number of blocks": (
        lambda: PAIR.coarsen([0, 0, 1]),
        ValueError,
        ("'groups'", "each of the 2 blocks", "3 groups"),
    ),
    "names for other groups": (
        lambda: PAIR.coarsen([0, 0], names=["a", "b"]),
        ValueError,
        ("Partition.coarsen", "1 blocks", "2 names"),
    ),
    "sums of too few entries": (
        lambda: PAIR.block_sum(torch.zeros(4, 2)),
        ValueError,
        ("Partition.block_sum", "(..., 3), one value per entry", "Got (4, 2)"),
    ),
    "sums of a scalar": (lambda: PAIR.block_sum(torch.tensor(1.0)), ValueError, ("(..., 3)", "Got ()")),
    "an expansion of entries": (
        lambda: PAIR.expand(torch.zeros(3)),
        ValueError,
        ("Partition.expand", "(..., 2), one value per block", "Got (3,)"),
    ),
}


@pytest.mark.parametrize("case", PARTITIONS)
def test_partitions_refuse(case: str) -> None:
    action, error, parts = PARTITIONS[case]
    check(action, error, *parts)


def test_a_module_without_parameters_is_refused() -> None:
    check(lambda: Partition.of(nn.Tanh()), ValueError, "at least one tensor")


# ---------------------------------------------------------------- matrices

GOOD = matrix([1.0, 1.0], [[1.0, 0.5], [0.5, 1.0]])
FLOAT32 = torch.ones(3)

MATRICES: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "sizes for a partition": (lambda: BlockMean([2, 1], [1.0], [[1.0]]), TypeError, ("a Partition", "Got [2, 1]")),
    "too few lam": (
        lambda: BlockMean(PAIR, [1.0], [[1.0, 0.0], [0.0, 1.0]]),
        ValueError,
        ("'lam'", "(..., 2), one value per block", "Got (1,)"),
    ),
    "a B of entries": (lambda: BlockMean(PAIR, [1.0, 1.0], torch.eye(3)), ValueError, ("'B'", "(..., 2, 2)", "(3, 3)")),
    "a B that is a vector": (lambda: BlockMean(PAIR, [1.0, 1.0], [1.0, 1.0]), ValueError, ("'B'", "Got (2,)")),
    "NaN in lam": (lambda: matrix([NAN, 1.0], [[1.0, 0.0], [0.0, 1.0]]), ValueError, ("'lam'", "finite", "NaN")),
    "infinity in B": (lambda: matrix([1.0, 1.0], [[INF, 0.0], [0.0, 1.0]]), ValueError, ("'B'", "finite")),
    "half precision": (
        lambda: BlockMean(PAIR, torch.ones(2).half(), torch.eye(2)),
        TypeError,
        ("'lam'", "float32 or float64", "torch.float16"),
    ),
    "complex numbers": (lambda: BlockMean(PAIR, [1.0, 1.0], torch.eye(2) * 1j), TypeError, ("'B'", "complex")),
    "fit of a table": (lambda: BlockMean.fit(WEIGHT, PAIR), ValueError, ("BlockMean.fit", "square", "shape (2, 3)")),
    "fit of a vector": (lambda: BlockMean.fit(FLOAT32, PAIR), ValueError, ("square", "shape (3,)")),
    "fit with sizes that do not add up": (
        lambda: BlockMean.fit(torch.eye(4), PAIR),
        ValueError,
        ("'M'", "3 x 3", "sizes=[2, 1]", "shape (4, 4)"),
    ),
    "fit of NaN": (lambda: BlockMean.fit(torch.eye(3) * NAN, PAIR), ValueError, ("'M'", "BlockMean.fit", "finite")),
    "fit of infinity": (lambda: BlockMean.fit(torch.eye(3) + INF, PAIR), ValueError, ("'M'", "finite")),
    "fit of half precision": (lambda: BlockMean.fit(torch.eye(3).bfloat16(), PAIR), TypeError, ("'M'", "bfloat16")),
    "one row": (lambda: BlockMean.from_rows(FLOAT32, PAIR), ValueError, ("'G'", "(..., rows, entries)", "Got (3,)")),
    "rows of too many entries": (
        lambda: BlockMean.from_rows(torch.ones(2, 4), PAIR),
        ValueError,
        ("'G'", "BlockMean.from_rows", "one value per entry", "(2, 4)"),
    ),
    "rows of NaN": (lambda: BlockMean.from_rows(torch.ones(2, 3) * NAN, PAIR), ValueError, ("'G'", "finite")),
    "rows of whole numbers of another kind": (
        lambda: BlockMean.from_rows(torch.ones(2, 3).half(), PAIR),
        TypeError,
        ("'G'", "float16"),
    ),
    "a weight of NaN": (
        lambda: BlockMean.from_rows(torch.ones(2, 3), PAIR, weight=NAN),
        ValueError,
        ("'weight'", "finite", "Got nan"),
    ),
    "rows whose squares overflow": (
        lambda: BlockMean.from_rows(torch.full((1, 3), 1e30), PAIR),
        ValueError,
        ("range of torch.float32", "Scale"),
    ),
    "a power that overflows": (lambda: (GOOD * 10).power(500), ValueError, ("range of torch.float64", "Scale")),
    "an exponential that overflows": (
        lambda: matrix([100.0, 1.0], [[0.0, 0.0], [0.0, 0.0]]).to(torch.float32).apply(torch.exp),
        ValueError,
        ("range of torch.float32",),
    ),
    "an inverse that overflows": (
        lambda: matrix([1e-310, 1.0], [[1.0, 0.0], [0.0, 1.0]]).inverse(),
        ValueError,
        ("range of torch.float64",),
    ),
    "conversion to half precision": (
        lambda: GOOD.to(torch.float16),
        TypeError,
        ("BlockMean.to", "float32 or float64", "torch.float16"),
    ),
    "conversion to whole numbers": (lambda: GOOD.to(torch.int64), TypeError, ("BlockMean.to", "torch.int64")),
    "a foreign state": (
        lambda: BlockMean.from_state_dict({"lam": torch.ones(2), "weight": torch.ones(2)}),
        ValueError,
        ("Not the state of a BlockMean", "['lam', 'weight']"),
    ),
    "a state with something more": (
        lambda: BlockMean.from_state_dict({**GOOD.state_dict(), "more": torch.ones(1)}),
        ValueError,
        ("Not the state", "'more'"),
    ),
    "a dense matrix of 8 terabytes": (
        lambda: BlockMean(Partition.from_sizes([10**6]), [1.0], torch.ones(1, 1).double()).to_dense(),
        ValueError,
        ("1000000 x 1000000", "8,000,000,000,000 bytes", "1,073,741,824", "max_bytes=None"),
    ),
    "a dense matrix above the limit given": (lambda: GOOD.to_dense(max_bytes=71), ValueError, ("72 bytes", "71")),
    "an operator of a batch": (
        lambda: (GOOD * torch.ones(4)).to_scipy(),
        ValueError,
        ("'batch'", "to_scipy", "empty", "(4,)"),
    ),
    "an operator on complex vectors": (lambda: GOOD.to_scipy() @ np.array([1j, 0, 0]), TypeError, ("complex128",)),
    "an unknown norm": (lambda: GOOD.norm("max"), ValueError, ("'ord'", "'fro', 'nuc' or 2", "Got 'max'")),
    "a product with a scalar": (lambda: GOOD @ torch.tensor(1.0), ValueError, ("a vector or a matrix", "a scalar")),
    "a scalar from the left": (lambda: torch.tensor(1.0) @ GOOD, ValueError, ("BlockMean @", "Got ()")),
    "a product with too short a vector": (
        lambda: GOOD @ torch.ones(2).double(),
        ValueError,
        ("BlockMean @", "(..., 3), one value per entry", "(2,)"),
    ),
    "a product with a matrix of too few rows": (lambda: GOOD @ torch.ones(2, 3).double(), ValueError, ("(3, 2)",)),
    "a product with another dtype": (
        lambda: GOOD @ FLOAT32,
        TypeError,
        ("BlockMean @", "torch.float64", "torch.float32"),
    ),
    "a complex multiple": (lambda: GOOD * torch.tensor(1j), TypeError, ("real", "complex")),
    "complex damping": (lambda: GOOD.damped(torch.tensor(1j)), TypeError, ("real", "complex")),
    "a multiple of NaN": (lambda: GOOD * NAN, ValueError, ("finite",)),
    "damping of infinity": (lambda: GOOD.damped(INF), ValueError, ("'lam'", "finite")),
    "a power of NaN": (lambda: GOOD.power(NAN), ValueError, ("'p'", "finite number", "Got nan")),
    "a power of infinity": (lambda: GOOD.power(INF), ValueError, ("'p'", "Got inf")),
    "a function that gives a number": (lambda: GOOD.apply(lambda x: 1.0), ValueError, ("apply", "same shape")),
    "a function that sums": (lambda: GOOD.apply(lambda x: x.sum()), ValueError, ("apply", "same shape")),
    "a function with complex values": (lambda: GOOD.apply(lambda x: (x + 0j).sqrt()), ValueError, ("a real tensor",)),
    "a function with a gradient of its own": (
        lambda: GOOD.apply(lambda x: x * torch.ones(1, requires_grad=True)),
        ValueError,
        ("apply", "must not itself depend", "require gradients"),
    ),
    "a function with a pole at an eigenvalue of A": (
        lambda: matrix([1.0, 2.0], [[0.0, 0.0], [0.0, 0.0]]).apply(lambda x: 1 / (x - 2)),
        ValueError,
        ("apply", "not finite at the eigenvalue 2 of A"),
    ),
    "a function with a pole at a λ": (
        lambda: matrix([1.0, 2.0], [[1.0, 0.0], [0.0, 0.0]]).apply(lambda x: 1 / (x - 1)),
        ValueError,
        ("apply", "not finite", "λ = 1 of block 0 ('conv', 2 entries)"),
    ),
}


@pytest.mark.parametrize("case", MATRICES)
def test_matrices_refuse(case: str) -> None:
    action, error, parts = MATRICES[case]
    check(action, error, *parts)


@pytest.mark.parametrize("operation", ["__add__", "__sub__", "__matmul__"])
def test_mixing_partitions_names_both(operation: str) -> None:
    other = make_definite(Partition.from_sizes([1, 2]), 0)
    parts = ("same partition", "sizes=[2, 1]", "sizes=[1, 2]")
    check(lambda: getattr(GOOD, operation)(other), ValueError, *parts)


# ---------------------------------------------------------------- singular and indefinite matrices

NEGATIVE_INSIDE = matrix([-0.5, 1.0], [[1.0, 0.0], [0.0, 1.0]])  # λ of block 0
NEGATIVE_BETWEEN = matrix([1.0, 1.0], [[1.0, 2.0], [2.0, 0.0]])  # A = [[3, 2√2], [2√2, 1]]
ASYMMETRIC = matrix([1.0, 1.0], [[1.0, 0.5], [0.0, 1.0]])
NEEDS_DEFINITE = ("inverse_sqrt", "logdet", "sqrt")


@pytest.mark.parametrize("name", NEEDS_DEFINITE)
def test_an_indefinite_block_is_named_with_its_lam(name: str) -> None:
    parts = (f"BlockMean.{name}", "not positive", "λ = -0.5 of block 0 ('conv', 2 entries)")
    check(getattr(NEGATIVE_INSIDE, name), ValueError, *parts)


@pytest.mark.parametrize("name", NEEDS_DEFINITE)
def test_indefinite_coupling_is_named_with_its_eigenvalue(name: str) -> None:
    parts = (f"BlockMean.{name}", "not positive", "is -1, its largest 5", "damped(δ)")
    check(getattr(NEGATIVE_BETWEEN, name), ValueError, *parts)


def test_a_broken_power_names_itself_and_the_matrix_of_the_batch() -> None:
    check(lambda: NEGATIVE_INSIDE.power(0.3), ValueError, "power(0.3)", "semi-definite", "λ = -0.5")
    batch = NEGATIVE_INSIDE * torch.tensor([0.0, 1.0])
    check(batch.sqrt, ValueError, "λ = -0.5 of block 0", "(matrix [1] of the batch)")


@pytest.mark.parametrize("name", [*NEEDS_DEFINITE, "apply"])
def test_an_asymmetric_matrix_is_told_what_takes_it(name: str) -> None:
    arguments = (torch.exp,) if name == "apply" else ()
    parts = (f"BlockMean.{name} needs a symmetric matrix", "0.707", "inverse()", "power(n)")  # 0.5 √2
    check(lambda: getattr(ASYMMETRIC, name)(*arguments), ValueError, *parts)


def test_singular_matrices_have_no_inverse() -> None:
    inside = matrix([0.0, 1.0], [[1.0, 0.0], [0.0, 1.0]])
    check(inside.inverse, ValueError, "BlockMean.inverse", "singular", "λ = 0 of block 0 ('conv', 2 entries)")
    between = matrix([1.0, 0.0], [[0.5, 1.0], [1.0, 1.0]])  # A = [[2, √2], [√2, 1]]
    check(between.inverse, ValueError, "BlockMean.inverse", "singular", "condition number", "damped(δ)")
    check(lambda: between.solve(torch.ones(3).double()), ValueError, "singular")
    check(lambda: between.power(-2), ValueError, "singular")
    check(between.inverse_sqrt, ValueError, "not positive definite")
    zero = matrix([0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]])
    check(zero.inverse, ValueError, "singular")
    check(zero.logdet, ValueError, "not positive definite", "λ = 0 of block 0")


@pytest.mark.parametrize("diagonal", [[-10.0, 1.0, 1.0], [-1e200, 1.0, 1e200], [-1e-200, -5.0, 0.0]])
def test_negative_diagonals_of_any_size_are_refused_in_words(diagonal: list[float]) -> None:
    M = matrix(diagonal, (torch.ones(3, 3) - torch.eye(3)).tolist(), Partition.from_sizes([1, 1, 1]))
    assert not M.is_positive_definite()
    check(M.inverse_sqrt, ValueError, "not positive definite", "smallest eigenvalue")
