"""A matrix as coloured cells, with the boundaries of its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from blockmean._checks import require
from blockmean.curvature import Curvature
from blockmean.matrix import BlockMean
from blockmean.partition import Partition
from blockmean.plot._axes import FONT, LARGEST, LINE, cell_size, draw_lines, new_axes, with_room

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def blocks(
    matrix: Tensor | BlockMean | Curvature,
    partition: Partition | None = None,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    vmax: float | None = None,
    grid: bool | None = None,
    colorbar: bool = True,
) -> Axes:
    """Draw a matrix as coloured cells with the boundaries of its blocks: red above 0, white at 0, blue below.

    Rows are labelled with the names of the blocks and columns with their sizes (rows too, where blocks have no names),
    as far as there is room. Interleaved blocks are drawn one block after the other. Cells that are not finite are
    yellow.

    Args:
        matrix: (d, d): a dense one, a BlockMean or a Curvature.
        partition: the blocks to mark; those of a BlockMean by default, a single block for a dense matrix.
        ax: where to draw; a new figure by default.
        title: above the matrix.
        vmax: the value of the darkest colour, by default the largest there is. Values beyond it are cut off.
        grid: whether to draw a thin line around every cell, by default where cells are large enough.
        colorbar: whether to draw the scale next to the matrix.

    >>> M = BlockMean(Partition.from_sizes([2, 1]), lam=[2.0, 3.0], B=[[1.0, 0.5], [0.5, 0.0]])
    >>> blocks(M, title="3 entries in 2 blocks").get_title()
    '3 entries in 2 blocks'
    """
    if isinstance(matrix, Curvature):
        matrix = matrix.matrix
    wanted = "a Tensor or BlockMean, or a Curvature"
    require(isinstance(matrix, Tensor | BlockMean), "matrix", "plot.blocks", wanted, matrix, TypeError)
    shape = tuple(matrix.shape)
    square = len(shape) == 2 and 0 < shape[0] == shape[1] <= LARGEST
    require(square, "matrix", "plot.blocks", f"square, with at most {LARGEST} rows", f"shape {shape}")
    require(vmax is None or vmax > 0, "vmax", "plot.blocks", "> 0", vmax)
    d = shape[0]
    if partition is None:
        partition = matrix.partition if isinstance(matrix, BlockMean) else Partition.from_sizes([d])
    require(partition.num_entries == d, "partition", "plot.blocks", f"one of {d} entries, as the matrix has", partition)

    values = (matrix.to_dense() if isinstance(matrix, BlockMean) else matrix).detach().cpu().double()
    if not partition.is_contiguous:
        order = partition.labels.argsort(stable=True)
        values = values[order][:, order]
    largest = float(values.nan_to_num(0, 0, 0).abs().max())
    vmax = vmax or largest or 1.0

    ax = ax or new_axes()
    image = ax.imshow(values.numpy(), cmap="RdBu_r", vmin=-vmax, vmax=vmax, extent=(0, d, d, 0))
    image.set_cmap(image.get_cmap().with_extremes(bad="gold"))
    cell = cell_size(ax, d)
    if grid or (grid is None and cell >= 6):
        draw_lines(ax, range(1, d), d, color="0.75", linewidth=0.5)
    ends = partition.sizes.cumsum(0).tolist()
    # Lines may cover a twentieth of the picture at most, however many blocks there are.
    draw_lines(ax, [0, *ends], d, color="0.15", linewidth=min(1.0, 0.05 * cell * d / len(ends)))
    _label(ax, partition, cell)
    if title is not None:
        ax.set_title(title)
    if colorbar:
        scale = ax.figure.colorbar(
            image, ax=ax, extend="both" if largest > vmax else "neither", fraction=0.046, pad=0.03
        )
        scale.ax.tick_params(labelsize=FONT)
    return ax


def _label(ax: Axes, partition: Partition, cell: float) -> None:
    """Label the matrix with names and sizes of its blocks; `cell` is the height of a row in points."""
    sizes = [f"{size:,}" for size in partition.sizes.tolist()]
    numbered = partition.names == tuple(str(i) for i in range(partition.num_blocks))
    names = sizes if numbered else partition.names
    middles = (partition.sizes.cumsum(0) - partition.sizes / 2).tolist()
    largest_first = partition.sizes.argsort(descending=True, stable=True).tolist()
    for place, texts, points in (
        (ax.set_yticks, names, [LINE for _ in names]),
        (ax.set_xticks, sizes, [0.65 * FONT * (1 + len(size)) for size in sizes]),
    ):
        kept = with_room([cell * middle for middle in middles], points, largest_first)
        place([middles[i] for i in kept], [texts[i] for i in kept], fontsize=FONT)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)  # the outermost lines are drawn already
