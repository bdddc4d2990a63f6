"""Proposition 1, Theorem 1, Lemma 1, Theorem 2 and the formula behind them, against dense linear algebra."""

from __future__ import annotations

import scipy.linalg
import torch
from torch import Tensor

from blockmean import BlockMean, Partition
from blockmean.lab.paper.outcome import Claim, Outcome, ReportConfig, Verdict

TOLERANCE = 1e-11
"""Largest relative error in float64: rounding times the condition number of M (14), with room for SciPy's roots."""


def theorems(config: ReportConfig) -> Outcome:
    """Check every theorem on a random partition: the D that the paper prints, and the result of the library.

    The partition has 12 interleaved blocks of 1 to 12 entries, M the block mean of a random positive definite matrix.
    """
    random = torch.Generator().manual_seed(0)
    sizes = torch.cat([torch.tensor([1]), torch.randint(1, 13, (11,), generator=random)])
    labels = torch.repeat_interleave(torch.arange(12), sizes)
    partition = Partition.from_labels(labels[torch.randperm(len(labels), generator=random)])
    d, L = partition.num_entries, partition.num_blocks
    single = torch.randn(2 * d, d, generator=random, dtype=torch.float64)
    rows = single + partition.expand(torch.randn(2 * d, L, generator=random, dtype=torch.float64))
    full = rows.mT @ rows / len(rows)
    M = BlockMean.fit(full, partition)
    dense = M.to_dense()

    # The paper's notation, and its three D as printed.
    S, B = torch.diag(partition.sizes.double()), M.B
    Lam, S_root = torch.diag(M.lam), torch.diag(partition.sizes.double().sqrt())
    S_unroot = torch.linalg.inv(S_root)
    A = Lam + S_root @ B @ S_root
    D_inverse = torch.linalg.inv(Lam @ S + S @ B @ S) - torch.linalg.inv(Lam @ S)
    D_root = S_unroot @ (_power(A, 0.5) - Lam.sqrt()) @ S_unroot
    D_inverse_root = S_unroot @ (_power(A, -0.5) - _power(Lam, -0.5)) @ S_unroot

    values, times = M.eigenvalues()
    eigenvalues = torch.repeat_interleave(values, times).sort().values
    claims = [
        _claim("Proposition 1: fit is the nearest Λ̄ + B̄", _nearest(full, partition), dense),
        _claim(
            "Theorem 1: inverse",
            torch.linalg.inv(dense),
            M.inverse().to_dense(),
            BlockMean(partition, 1 / M.lam, D_inverse).to_dense(),
        ),
        _claim(
            "Lemma 1: square root",
            _power(dense, 0.5),
            M.sqrt().to_dense(),
            BlockMean(partition, M.lam.sqrt(), D_root).to_dense(),
        ),
        _claim(
            "Theorem 2: inverse square root",
            _power(dense, -0.5),
            M.inverse_sqrt().to_dense(),
            BlockMean(partition, M.lam.rsqrt(), D_inverse_root).to_dense(),
        ),
        _claim("any f: exponential", torch.linalg.matrix_exp(dense), M.apply(torch.exp).to_dense()),
        _claim("any f: logarithm", torch.from_numpy(scipy.linalg.logm(dense.numpy())), M.apply(torch.log).to_dense()),
        _claim("eigenvalues: those of A, and λ_i on s_i − 1 directions", torch.linalg.eigvalsh(dense), eigenvalues),
    ]
    notes = [
        f"A random block-mean matrix of {d} rows in {L} interleaved blocks, in float64. “library” is the result of "
        "`BlockMean`, “as printed” that of the paper's formula for D; the error is the relative distance from dense "
        f"linear algebra (SciPy) in Frobenius norm, and must not exceed {TOLERANCE:.0e}. docs/theory.md has the "
        "statements and short proofs.",
    ]
    return Outcome(claims, notes=notes)


def _claim(claim: str, truth: Tensor, computed: Tensor, printed: Tensor | None = None) -> Claim:
    """Compare the results of the library and of the printed formula with the dense truth."""
    errors = {"library": computed, "as printed": printed}
    found = {name: float((x - truth).norm() / truth.norm()) for name, x in errors.items() if x is not None}
    measured = ", ".join(f"{error:.0e} {name}" for name, error in found.items())
    holds = all(error <= TOLERANCE for error in found.values())
    return Claim(claim, f"relative error {measured}", Verdict.of(holds), exact=True)


def _power(M: Tensor, p: float) -> Tensor:
    """M^p by SciPy, which does not know about blocks."""
    return torch.from_numpy(scipy.linalg.fractional_matrix_power(M.numpy(), p))


def _nearest(M: Tensor, partition: Partition) -> Tensor:
    """The nearest block-mean matrix by least squares over all L + L² coefficients, without Proposition 1."""
    member = torch.nn.functional.one_hot(partition.labels).to(M)  # (d, L)
    diagonal = torch.einsum("mn,mi->mni", torch.eye(len(M)).to(M), member)
    full = torch.einsum("mi,nj->mnij", member, member)
    basis = torch.cat([diagonal.flatten(0, 1), full.flatten(2).flatten(0, 1)], 1)  # (d², L + L²)
    # For a block of one entry λ_i and b_ii have the same column: the driver must handle rank deficiency.
    coefficients: Tensor = torch.linalg.lstsq(basis, M.flatten().unsqueeze(1), driver="gelsd").solution
    return (basis @ coefficients).reshape(M.shape)
