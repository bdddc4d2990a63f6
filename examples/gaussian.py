"""A Gaussian whose covariance is a block-mean matrix: likelihood, samples and fit in O(d + L³), and a Gaussian process.

    python examples/gaussian.py

The log-density of N(0, Σ) needs Σ⁻¹x (Theorem 1) and log det Σ (the eigenvalues); a sample needs Σ^½z (Lemma 1).

The block mean E(C) of the sample covariance C is the maximum-likelihood estimate. Σ is a block-mean matrix if and only
if its inverse P is, so tr(PC) = tr(P E(C)), because E is self-adjoint: the log-likelihood −N/2 (log det Σ + tr(Σ⁻¹C))
depends on C only through E(C). It is strictly concave in P, and its gradient in P, N/2 (P⁻¹ − E(C)), vanishes only at
Σ = E(C). With L or more samples, E(C) is positive definite with probability one, however many entries there are.

Grouped observations follow such a Gaussian. If y_k = f(t_i) + noise for every k in group i, with a Gaussian process f,
the covariance of y is K(t_i, t_j) between groups i and j plus the noise on the diagonal, which is exactly a block-mean
matrix. (As Theorem 1 shows, the posterior of f depends only on the group means. The likelihood, from which the noise
is learnt, depends on all of y.)
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from blockmean import BlockMean, Partition

LARGE = 1_000_000  # entries
BLOCKS = 20


def log_likelihood(rows: Tensor, covariance: BlockMean) -> Tensor:
    """The log-density of each row (n, d) under N(0, Σ)."""
    d = covariance.shape[-1]
    squares = (rows * covariance.solve(rows.mT).mT).sum(-1)
    return -0.5 * (squares + covariance.logdet() + d * math.log(2 * math.pi))


def sample(covariance: BlockMean, count: int, random: torch.Generator) -> Tensor:
    """Rows Σ^½z, (count, d)."""
    z = torch.randn(count, covariance.shape[-1], generator=random, dtype=covariance.dtype)
    rows: Tensor = z @ covariance.sqrt()  # Σ^½ is symmetric
    return rows


def random_covariance(partition: Partition, random: torch.Generator) -> BlockMean:
    """Blocks that depend on each other with either sign, each with its own variance inside."""
    L = partition.num_blocks
    factor = torch.randn(L, L, generator=random, dtype=torch.float64) / L**0.5
    return BlockMean(partition, 0.5 + torch.rand(L, generator=random, dtype=torch.float64), factor @ factor.mT)


def slope(rows: Tensor, covariance: BlockMean) -> float:
    """The norm of the gradient of the mean log-likelihood in λ and B; autograd differentiates through the algebra."""
    lam, B = covariance.lam.clone().requires_grad_(), covariance.B.clone().requires_grad_()
    log_likelihood(rows, BlockMean(covariance.partition, lam, B)).mean().backward()
    assert lam.grad is not None and B.grad is not None
    return float(torch.cat([lam.grad, B.grad.flatten()]).norm())


class Small(NamedTuple):
    """Results that dense matrices can check."""

    density_error: float  # against torch.distributions, relative
    slope_at_truth: float
    slope_at_fit: float
    gain: float  # mean log-likelihood of the fit above that of the true covariance, on the training samples


def small() -> Small:
    """d = 60 in 5 interleaved blocks, 100 samples."""
    random = torch.Generator().manual_seed(0)
    partition = Partition.from_labels(torch.arange(60) % 5)
    truth = random_covariance(partition, random)
    rows = sample(truth, 100, random)
    fit = BlockMean.from_rows(rows, partition, weight=1 / len(rows))
    ours = log_likelihood(rows, truth)
    theirs = MultivariateNormal(torch.zeros(60, dtype=torch.float64), truth.to_dense()).log_prob(rows)
    gain = (log_likelihood(rows, fit) - ours).mean()
    return Small(float(((ours - theirs) / theirs).abs().max()), slope(rows, truth), slope(rows, fit), float(gain))


class Large(NamedTuple):
    """A fit whose dense covariance would exceed any memory."""

    seconds: float
    error: float  # of the estimate of A, relative, in the Frobenius norm
    lam_error: float  # of the estimate of λ, relative, the largest
    log_likelihood: float  # of a fresh sample under the fit, per entry
    expected: float  # its mean under the truth: minus the entropy, per entry


def large(samples: int = 100, at_once: int = 10) -> Large:
    """d = 10⁶: draw samples, fit a few at a time, and compute the likelihood of a fresh one."""
    random = torch.Generator().manual_seed(0)
    partition = Partition.from_sizes([LARGE // BLOCKS] * BLOCKS)
    truth = random_covariance(partition, random)
    start = time.perf_counter()
    root, fit = truth.to(torch.float32), None
    for _ in range(samples // at_once):
        part = BlockMean.from_rows(sample(root, at_once, random), partition, weight=1 / samples)
        fit = part if fit is None else fit + part
    assert fit is not None
    fresh = float(log_likelihood(sample(root, 1, random).double(), fit.to(torch.float64)))
    entropy = 0.5 * (float(truth.logdet()) + LARGE * (1 + math.log(2 * math.pi)))
    return Large(
        time.perf_counter() - start,
        float((fit.A - truth.A).norm() / truth.A.norm()),
        float(((fit.lam - truth.lam) / truth.lam).abs().max()),
        fresh / LARGE,
        -entropy / LARGE,
    )


class Process(NamedTuple):
    """Gaussian process regression with observations in groups."""

    dense_error: float  # of the posterior mean and deviation on a part of the data, against dense algebra
    noise: float  # standard deviation of the noise, learnt from the marginal likelihood
    error: float  # root mean square of posterior mean minus true function, halfway between neighbouring places
    calibration: float  # the same in units of the posterior deviation; 1 is right
    observations: int


def kernel(s: Tensor, t: Tensor) -> Tensor:
    """Squared exponential, of length 0.15."""
    return torch.exp(-0.5 * ((s[:, None] - t) / 0.15) ** 2)


def posterior(y: Tensor, M: BlockMean, cross: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation at new places, from the covariance M of y and K(new, groups) (m, L)."""
    rows = M.partition.expand(cross)  # (m, d)
    mean = rows @ M.solve(y)
    return mean, (1 - (rows * M.solve(rows.mT).mT).sum(-1)).clamp(min=0).sqrt()


def process() -> Process:
    """A function drawn from the prior, observed 20,000 times at 40 places with noise of standard deviation 0.5."""
    random = torch.Generator().manual_seed(0)
    t = torch.linspace(0, 1, 40, dtype=torch.float64)
    between = (t[1:] + t[:-1]) / 2
    places = torch.cat([t, between])
    jitter = 1e-9 * torch.eye(len(places), dtype=torch.float64)
    z = torch.randn(len(places), generator=random, dtype=torch.float64)
    f = torch.linalg.cholesky(kernel(places, places) + jitter) @ z
    groups = torch.randint(40, (20_000,), generator=random)
    noise = torch.randn(20_000, generator=random, dtype=torch.float64)
    partition, y = Partition.from_labels(groups), f[groups] + 0.5 * noise

    log_noise = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_noise], line_search_fn="strong_wolfe")

    def model() -> BlockMean:
        return BlockMean(partition, (2 * log_noise).exp().expand(40), kernel(t, t))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -log_likelihood(y[None], model()).mean() / len(y)
        loss.backward()
        return loss

    optimizer.step(closure)
    M, cross = model().detach(), kernel(between, t)
    mean, deviation = posterior(y, M, cross)
    wrong = mean - f[40:]
    return Process(
        _dense_error(y[:500], groups[:500], M, cross),
        float(log_noise.detach().exp()),
        float(wrong.square().mean().sqrt()),
        float((wrong / deviation).square().mean().sqrt()),
        len(y),
    )


def _dense_error(y: Tensor, groups: Tensor, M: BlockMean, cross: Tensor) -> float:
    """The largest difference from the textbook formulas with a dense matrix, on part of the observations."""
    part = BlockMean(Partition.from_labels(groups), M.lam, M.B)
    dense, rows = part.to_dense(), cross[:, groups]
    mean = rows @ torch.linalg.solve(dense, y)
    deviation = (1 - (rows * torch.linalg.solve(dense, rows.mT).mT).sum(-1)).clamp(min=0).sqrt()
    found = posterior(y, part, cross)
    return float(torch.stack([found[0] - mean, found[1] - deviation]).abs().max())


def main() -> None:
    s = small()
    print("d = 60, 100 samples")
    print(f"  log-density against torch.distributions.MultivariateNormal: relative error {s.density_error:.0e}")
    print(f"  gradient of the log-likelihood: {s.slope_at_truth:.2f} at the true Σ, {s.slope_at_fit:.0e} at the fit")
    print(f"  which is the maximum: {s.gain:.3f} above the true Σ per sample")
    l = large()
    print(f"d = {LARGE:,}, L = {BLOCKS}, 100 samples; a dense Σ in float64 would take {8 * LARGE**2 / 1e12:.0f} TB")
    print(
        f"  samples, fit and likelihood in {l.seconds:.1f} s; relative error of A {l.error:.2f}, of λ {l.lam_error:.0e}"
    )
    print(f"  log-density of a fresh sample per entry {l.log_likelihood:.4f}, expected {l.expected:.4f}")
    p = process()
    print(f"Gaussian process, {p.observations:,} observations at 40 places")
    print(f"  against dense algebra on 500 of them: {p.dense_error:.0e}")
    print(f"  noise learnt by maximum likelihood: {p.noise:.4f}, true 0.5")
    print(f"  error between the places {p.error:.4f}, {p.calibration:.2f} posterior deviations")


if __name__ == "__main__":
    main()
