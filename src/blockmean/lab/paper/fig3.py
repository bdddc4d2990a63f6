"""Figure 3: a matrix and its block mean approximation, compared with other approximations."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure
from torch import Tensor

from blockmean import BlockMean, Partition, plot
from blockmean.lab.paper.outcome import Claim, Outcome, ReportConfig, Verdict
from blockmean.lab.paper.related_work import related_work
from blockmean.lab.picture import save


def fig3(config: ReportConfig) -> Outcome:
    """A matrix and its block mean; error against storage of block mean, diagonal, block diagonal and low rank.

    The matrix holds the second moments of made-up gradients. Every gradient has one value per block, correlated between
    blocks and rising inside each, and noise on top. The block mean keeps what blocks have in common and averages the
    rest.
    """
    random = torch.Generator().manual_seed(0)
    partition = Partition.from_sizes([6, 14, 9, 4, 15])
    mixing = torch.tensor([[1.0, 0, 0], [0.8, 0.4, 0], [-0.7, 0.3, 0.2], [0, 0.9, 0.6], [0.1, -0.5, 0.5]])
    common = torch.randn(400, 3, generator=random) @ mixing.mT  # (N, L)
    rise = torch.cat([torch.linspace(0.7, 1.3, size) for size in partition.sizes])
    rows = partition.expand(common) * rise + 0.8 * torch.randn(400, partition.num_entries, generator=random)
    M = rows.mT @ rows / len(rows)
    approximation = BlockMean.fit(M, partition)
    left_out = M - approximation.to_dense()

    error = float(left_out.norm() / M.norm())
    kept = float(approximation.norm() / M.norm())
    L, d = partition.num_blocks, partition.num_entries
    figure = Figure(figsize=(9.6, 3.3), layout="constrained")
    panels: list[tuple[Tensor | BlockMean, str]] = [
        (M, f"M: {d}×{d} = {d * d:,} numbers"),
        (approximation, f"block mean: {L} + {L}×{L} = {L + L * L} numbers"),
        (left_out, f"difference: {error:.1%} of ‖M‖"),
    ]
    for ax, (matrix, title) in zip(figure.subplots(1, 3), panels, strict=True):
        plot.blocks(matrix, partition, ax=ax, grid=False, vmax=float(M.abs().max()), colorbar=matrix is left_out)
        ax.set_title(title, fontsize=10)
    claims = [
        Claim(
            "Proposition 1 is an orthogonal projection: error² + kept² = 1",
            f"differs by {error**2 + kept**2 - 1:+.1e}",
            Verdict.of(abs(error**2 + kept**2 - 1) < 1e-5),  # float32
            exact=True,
        ),
    ]
    caption = f"A matrix, its block mean approximation ({L + L * L} numbers for {d * d:,}) and the difference."
    others = related_work(config)
    pictures = [save(figure, config.out / "fig3", caption), *others.pictures]
    return Outcome([*claims, *others.claims], pictures, others.tables, others.notes)
