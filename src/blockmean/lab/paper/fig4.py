"""Figure 4: the empirical Fisher of the 322-parameter network and its block means with 10, 27 and 45 blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from matplotlib.figure import Figure
from torch import Tensor, nn

from blockmean import BlockMean, Partition, plot
from blockmean.lab.paper.outcome import Claim, Outcome, ReportConfig, Table, Verdict
from blockmean.lab.paper.small_fisher import (
    CUTS,
    SAMPLES,
    TRAINED,
    correlations,
    small_fisher,
    untrained,
    with_whole_biases,
)
from blockmean.lab.picture import save

PAPER = (0.1036, 0.1024, 0.0998)
"""The mean square errors in the paper."""


def fig4(config: ReportConfig) -> Outcome:
    """The empirical Fisher of the 322-parameter network with 10, 27 and 45 blocks, and the error of each."""
    fisher = small_fisher(config)
    partitions = [Partition.of(_named(untrained()), with_whole_biases(by)) for by in CUTS]
    counts = [p.num_blocks for p in partitions]
    shown = MAIN(fisher.trained)
    approximations = [BlockMean.fit(shown, p) for p in partitions]
    errors = _errors(shown, partitions)

    figure = Figure(figsize=(10.4, 9.4), layout="constrained")
    panels: list[tuple[Tensor | BlockMean, str]] = [(shown, "(a) original")]
    for letter, M, error in zip("bcd", approximations, errors, strict=True):
        panels.append((M, f"({letter}) {M.partition.num_blocks}×{M.partition.num_blocks} blocks, MSE {error:.4f}"))
    for i, (ax, (matrix, title)) in enumerate(zip(figure.subplots(2, 2).flat, panels, strict=True)):
        # The first has the lines of the coarsest partition for orientation; colours are the same in all four.
        blocks = partitions[0] if i == 0 else None
        plot.blocks(matrix, blocks, ax=ax, title=title, vmax=0.5, colorbar=i % 2 == 1)
        ax.images[0].set_interpolation("none")  # keeps the cells in an SVG as they are, in a quarter of the bytes
    figure.suptitle(r"empirical Fisher matrix as correlations $F_{ij}/\sqrt{F_{ii}F_{jj}}$")
    data = "MNIST" if config.profile == "paper" else "the embedded digits"
    caption = (
        f"Empirical Fisher matrix of the 322-parameter net on {SAMPLES:,} images of {data}, after {TRAINED} steps of "
        "AdaGrad, as correlations F_ij / √(F_ii F_jj), and its block means. Colours are cut off at ± 0.5."
    )

    nested = all(fine.refines(coarse) for coarse, fine in pairwise(partitions))
    tried = {
        (weights, name): _errors(normalise(matrix), partitions)
        for weights, matrix in (("initial", fisher.initial), ("trained", fisher.trained))
        for name, normalise in NORMALISATIONS.items()
    }
    falling = all(a >= b >= c for a, b, c in tried.values())
    nearest = min(tried, key=lambda key: _distance(tried[key]))
    main = _distance(errors)
    claims = [
        Claim(
            "Figure 4: its partitions are nested, and a finer one is never further from the matrix",
            f"{counts[2]} blocks inside {counts[1]} inside {counts[0]}; MSE {_list(errors)}; "
            f"so with each of {len(tried)} normalisations",
            Verdict.of(counts == [10, 27, 45] and nested and falling),
            exact=True,
        ),
        Claim(
            "the block mean from per-sample block sums is that of the dense matrix",
            f"curvature.empirical_fisher differs from BlockMean.fit by {fisher.deviation:.0e} at most, relative",
            Verdict.of(fisher.deviation < 1e-12),
            exact=True,
        ),
        Claim(
            f"Figure 4: MSE {_list(PAPER)} (within 10%), with a normalisation that the paper does not give",
            f"{_list(errors)} as correlations; nearest of all tried: {_list(tried[nearest])} ({', '.join(nearest)})",
            Verdict.of(main < math.log(1.1)),
        ),
    ]
    rows = [["the paper", "not stated", *_cells(PAPER), "–"]]
    rows += [[name, weights, *_cells(e), f"{math.exp(_distance(e)):.2f}×"] for (weights, name), e in tried.items()]
    table = Table(
        "Figure 4: mean square error of the block means under normalisations that the paper may have used",
        ["normalisation of F", "weights", "10 blocks", "27 blocks", "45 blocks", "furthest from the paper's"],
        rows,
    )
    notes = [
        "The paper says neither at which weights its matrix is taken, nor over how many images, nor how its values are "
        "“normalized for better visualization”; an MSE depends on all of these. This figure shows correlations: they "
        "have no free constant, and Z⁻¹HZ⁻¹ is the matrix that AdaGrad-BMA approximates by a block mean. The last "
        "column is the largest factor by which one of the three is off.",
    ]
    return Outcome(claims, [save(figure, config.out / "fig4", caption)], [table], notes)


def _clipped(F: Tensor, quantile: float) -> Tensor:
    """F divided by a quantile of |F_ij|, and cut off at ± 1."""
    return (F / F.abs().flatten().quantile(quantile)).clamp(-1, 1)


def _decades(F: Tensor) -> Tensor:
    """The magnitude on a logarithmic scale: 1 is the largest, 0 is six decades below it or less."""
    return (1 + (F.abs() / F.abs().max()).log10() / 6).clamp(0, 1)


MAIN = correlations
NORMALISATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "correlations F_ij / √(F_ii F_jj)": MAIN,
    "divided by the largest |F_ij|": lambda F: F / F.abs().max(),
    "divided by the mean of F_ii": lambda F: F / F.diagonal().mean(),
    "divided by the root mean square": lambda F: F / F.square().mean().sqrt(),
    "cut off at the 95% quantile of |F_ij|": lambda F: _clipped(F, 0.95),
    "cut off at the 99% quantile of |F_ij|": lambda F: _clipped(F, 0.99),
    "log |F_ij|, six decades as 0 to 1": _decades,
}


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters under the names of the paper's layers."""
    names = [*(f"conv {i}" for i in range(1, 5)), "linear"]
    kinds = [f"{name} {kind}" for name in names for kind in ("weight", "bias")]
    return list(zip(kinds, model.parameters(), strict=True))


def _errors(matrix: Tensor, partitions: list[Partition]) -> list[float]:
    """The mean square error of each block mean."""
    return [float((matrix - BlockMean.fit(matrix, p).to_dense()).square().mean()) for p in partitions]


def _distance(errors: list[float]) -> float:
    """The largest |log| of the ratios to the paper's errors."""
    return max(abs(math.log(ours / theirs)) for ours, theirs in zip(errors, PAPER, strict=True))


def _cells(errors: Sequence[float]) -> list[str]:
    return [f"{error:.3g}" if error < 0.01 else f"{error:.4f}" for error in errors]


def _list(errors: Sequence[float]) -> str:
    return ", ".join(_cells(errors))
