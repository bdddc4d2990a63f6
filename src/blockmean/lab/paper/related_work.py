"""With Figure 3: error and storage of the block mean and of the approximations in the paper's related work."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from blockmean import BlockMean, Partition
from blockmean.lab.paper.outcome import Claim, Outcome, ReportConfig, Table, Verdict
from blockmean.lab.paper.small_fisher import correlations, small_fisher, untrained, with_whole_biases
from blockmean.lab.picture import Picture, save

CUTS = ("kernel", "unit", "tensor", "module", "all")
RANKS = (1, 2, 3, 5, 10, 20, 50)
SERIES = {
    "block mean": ("tab:blue", "o"),
    "block mean and diagonal": ("tab:cyan", "o"),
    "diagonal": ("0.25", "D"),
    "block diagonal": ("tab:red", "s"),
    "low rank": ("tab:green", "^"),
}


class Approximation(NamedTuple):
    """One way to approximate a symmetric matrix: the numbers that it keeps, and its relative Frobenius error."""

    method: str
    size: str  # blocks or rank
    numbers: int
    error: float


def related_work(config: ReportConfig) -> Outcome:
    """Approximate one Fisher matrix, and σI, in every way."""
    fisher = small_fisher(config)
    d = len(fisher.trained)
    partitions = [Partition.of(untrained(), with_whole_biases(by)) for by in CUTS]
    found = approximations(fisher.trained, partitions)
    identity = approximations(0.3 * torch.eye(d, dtype=torch.float64), partitions)
    table = Table(
        f"Approximations of the empirical Fisher of the 322-parameter net, {d * (d + 1) // 2:,} numbers in a triangle",
        ["approximation", "blocks or rank", "numbers kept", "relative error", "relative error for G = σI"],
        [
            [one.method, one.size, f"{one.numbers:,}", f"{one.error:.3f}", f"{of_identity.error:.3f}"]
            for one, of_identity in zip(found, identity, strict=True)
        ],
    )
    finest = [one for one in found if one.method == "block mean"][-1]
    rank = max((x for x in found if x.method == "low rank" and x.numbers <= finest.numbers), key=lambda x: x.numbers)
    notes = [
        "Numbers kept: one triangle of a symmetric matrix or block; λ and B of a block mean, rank · d for low rank. "
        "“block mean and diagonal” is Z E(Z⁻¹GZ⁻¹) Z with Z² the diagonal of G, the form that AdaGrad-BMA uses.",
        f"Nearest to this Fisher: {_nearest(found)}. Not compared in the paper: low rank has the relative error "
        f"{rank.error:.3f} with {rank.numbers:,} numbers ({rank.size}), the block mean {finest.error:.3f} with "
        f"{finest.numbers:,} ({finest.size}). Low rank takes at least d numbers and is singular unless something is "
        "added to it; a block mean can take as few as two, and in general has an inverse.",
        f"With fewer numbers than the diagonal: {_as_small_as_diagonal(found)}. With the initial weights: "
        f"{_as_small_as_diagonal(approximations(fisher.initial, partitions))}.",
    ]
    return Outcome([_exact(identity, d)], [_draw(found, config)], [table], notes)


def approximations(G: Tensor, partitions: list[Partition]) -> list[Approximation]:
    """Every approximation of a symmetric matrix G, (d, d)."""
    d, made = len(G), []

    def keep(method: str, size: str, numbers: int, approximation: Tensor) -> None:
        made.append(Approximation(method, size, numbers, float((G - approximation).norm() / G.norm())))

    z = G.diagonal().sqrt()
    for p in reversed(partitions):
        L = p.num_blocks
        keep("block mean", _blocks(p), L * (L + 3) // 2, BlockMean.fit(G, p).to_dense())
    for p in reversed(partitions):
        L = p.num_blocks
        scaled = z.outer(z) * BlockMean.fit(correlations(G), p).to_dense()
        keep("block mean and diagonal", _blocks(p), d + L * (L + 1) // 2, scaled)
    keep("diagonal", "–", d, G.diagonal().diag())
    for p in partitions:
        if p.num_blocks > 1:
            inside = p.labels.unsqueeze(1) == p.labels
            keep("block diagonal", _blocks(p), int((p.sizes * (p.sizes + 1) // 2).sum()), G * inside)
    values, vectors = torch.linalg.eigh(G)
    for k in RANKS:
        keep("low rank", f"rank {k}", k * d, vectors[:, -k:] * values[-k:] @ vectors[:, -k:].mT)
    return made


def _blocks(partition: Partition) -> str:
    return f"{partition.num_blocks} blocks" if partition.num_blocks > 1 else "1 block"


def _nearest(found: list[Approximation]) -> str:
    """The best approximation within several budgets of numbers."""
    best_of = []
    for numbers in (100, 500, 1_000, 10_000):
        best = min((one for one in found if one.numbers <= numbers), key=lambda one: one.error)
        best_of.append(f"{best.method} ({best.size}) with at most {numbers:,} numbers")
    return ", ".join(best_of)


def _as_small_as_diagonal(found: list[Approximation]) -> str:
    """The finest block mean that keeps no more numbers than the diagonal, compared with it."""
    diagonal = next(one for one in found if one.method == "diagonal")
    blocks = [one for one in found if one.method == "block mean" and one.numbers <= diagonal.numbers]
    block_mean = max(blocks, key=lambda one: one.numbers)
    return (
        f"relative error {block_mean.error:.3f} with {block_mean.numbers} ({block_mean.size}), "
        f"the diagonal {diagonal.error:.3f} with {diagonal.numbers}"
    )


def _exact(identity: list[Approximation], d: int) -> Claim:
    """The paper's claim about low rank."""
    wrong = max(one.error for one in identity if one.method.startswith("block mean"))
    ranks = {k: one.error for k, one in zip(RANKS, (x for x in identity if x.method == "low rank"), strict=True)}
    return Claim(
        "§5: for G = σI the block mean is exact, even of a single block; rank k misses √(1 − k/d)",
        f"relative error {wrong:.0e}; low rank {ranks[1]:.3f} (rank 1) to {ranks[50]:.3f} (rank 50)",
        Verdict.of(wrong < 1e-12 and all(abs(e - math.sqrt(1 - k / d)) < 1e-12 for k, e in ranks.items())),
        exact=True,
    )


def _draw(found: list[Approximation], config: ReportConfig) -> Picture:
    """Error against the numbers kept, one line per method."""
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    ax = figure.subplots()
    for method, (colour, marker) in SERIES.items():
        points = [one for one in found if one.method == method]
        ax.plot(
            [one.numbers for one in points],
            [one.error for one in points],
            color=colour,
            marker=marker,
            markersize=5,
            label=method,
        )
        right = method == "block diagonal"
        for one in points if right or method in ("block mean", "low rank") else []:
            ax.annotate(
                one.size,
                (one.numbers, one.error),
                xytext=(4, 5) if right else (-5, -10),
                textcoords="offset points",
                ha="left" if right else "right",
                fontsize=8,
                color=colour,
            )
    ax.set(
        xscale="log", xlabel="numbers kept", ylabel="relative error, Frobenius norm", xlim=(1, 3e4), ylim=(-0.04, 1.03)
    )
    ax.grid(alpha=0.3)
    ax.legend(loc="lower left", fontsize=9)
    caption = (
        "The empirical Fisher matrix of the 322-parameter network: the error of approximations against the numbers "
        "that they keep. Lower and further left is better."
    )
    return save(figure, config.out / "fig3-storage", caption)
