"""Figure 2: a diagonal and a full matrix, and their expansions."""

from __future__ import annotations

import torch
from matplotlib.figure import Figure

from blockmean import BlockMean, Partition, plot
from blockmean.lab.paper.outcome import Claim, Outcome, ReportConfig, Verdict
from blockmean.lab.picture import save


def fig2(config: ReportConfig) -> Outcome:
    """Λ, Λ̄, B and B̄ for the partition vector s = (2, 5, 3), with the same size of cells and the same colours."""
    partition = Partition.from_sizes([2, 5, 3])
    lam = torch.tensor([0.5, -0.4, 1.0])
    B = torch.tensor([[0.8, -0.7, -0.3], [0.2, 0.5, 0.9], [-0.5, -1.0, 0.3]])
    diagonal = BlockMean(partition, lam, torch.zeros(3, 3)).to_dense()
    full = BlockMean(partition, torch.zeros(3), B).to_dense()

    figure = Figure(figsize=(7.4, 2.7))
    left = 0.2  # all sizes are in inches; a cell is 0.2 wide in all four
    for matrix, name in ((torch.diag(lam), r"\Lambda"), (diagonal, r"\bar\Lambda"), (B, "B"), (full, r"\bar B")):
        width = 0.2 * len(matrix)
        ax = figure.add_axes((left / 7.4, (1.3 - width / 2) / 2.7, width / 7.4, width / 2.7))
        blocks = partition if len(matrix) == 10 else Partition.from_sizes([1, 1, 1])
        plot.blocks(matrix, blocks, ax=ax, title=f"${name}$", vmax=1.0, grid=True, colorbar=False)
        if len(matrix) == 3:
            ax.set(xticks=[], yticks=[])
        left += width + 0.6

    repeats = torch.equal(full, torch.repeat_interleave(B, partition.sizes, 0).repeat_interleave(partition.sizes, 1))
    repeats &= torch.equal(diagonal, torch.diag(torch.repeat_interleave(lam, partition.sizes)))
    claim = Claim(
        "Definitions 1 and 2: Λ̄ and B̄ repeat λ_i and b_ij over the blocks",
        "all 200 entries",
        Verdict.of(repeats),
        exact=True,
    )
    caption = "Expansion matrices of a diagonal matrix Λ and a full matrix B for the partition vector s = (2, 5, 3)."
    return Outcome([claim], [save(figure, config.out / "fig2", caption)])
