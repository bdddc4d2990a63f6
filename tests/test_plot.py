"""Pictures: what is drawn, where labels stand, what is refused."""

from __future__ import annotations

import itertools
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch

import blockmean
from blockmean import BlockMean, Partition, plot

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZES = Partition.from_sizes([2, 5, 3])


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def small() -> BlockMean:
    return BlockMean(SIZES, torch.tensor([2.0, 1.0, 3.0]), torch.linspace(-1, 1, 9).reshape(3, 3))


def texts(labels) -> list[str]:
    return [label.get_text() for label in labels]


def line_count(ax, colour: str) -> int:
    wanted = matplotlib.colors.to_rgba(colour)
    return sum(len(lines.get_segments()) for lines in ax.collections if tuple(lines.get_colors()[0]) == wanted)


def test_cells_are_the_entries_and_colours_are_centred_at_zero():
    ax = plot.blocks(small())
    (image,) = ax.images
    np.testing.assert_array_equal(image.get_array(), small().to_dense().double().numpy())
    assert image.get_clim() == (-image.get_clim()[1], 4.0)  # the largest entry: λ_3 + b_33


def test_boundaries_and_cells_of_a_small_matrix_are_drawn():
    ax = plot.blocks(small())
    assert line_count(ax, "0.15") == 2 * 4  # three blocks have four edges, along rows and along columns
    assert line_count(ax, "0.75") == 2 * 9  # inner edges of ten cells
    assert line_count(plot.blocks(small(), grid=False), "0.75") == 0


def test_a_large_matrix_has_boundaries_only():
    partition = Partition.from_sizes([100, 200, 22])
    ax = plot.blocks(torch.eye(322), partition)
    assert line_count(ax, "0.75") == 0
    assert line_count(ax, "0.15") == 2 * 4
    assert line_count(plot.blocks(torch.eye(322), partition, grid=True), "0.75") == 2 * 321


def test_sizes_label_blocks_without_names():
    ax = plot.blocks(small())
    assert texts(ax.get_xticklabels()) == texts(ax.get_yticklabels()) == ["2", "5", "3"]
    assert ax.get_yticks().tolist() == [1.0, 4.5, 8.5]  # the middle of each block


def test_names_label_rows_and_sizes_columns():
    partition = Partition.of(torch.nn.Linear(4, 3))
    ax = plot.blocks(torch.eye(15), partition)
    assert texts(ax.get_yticklabels()) == ["weight", "bias"]
    assert texts(ax.get_xticklabels()) == ["12", "3"]


def test_labels_without_room_are_left_out_the_smallest_first():
    ax = plot.blocks(torch.eye(300), Partition.from_sizes([100, *[1] * 100, 100]))
    labels = texts(ax.get_yticklabels())
    assert labels[0] == labels[-1] == "100"
    assert 2 < len(labels) < 50


def test_no_two_labels_overlap():
    partition = Partition.of(torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3), torch.nn.Linear(9, 10)), by="kernel")
    ax = plot.blocks(torch.eye(partition.num_entries), partition)
    ax.figure.draw_without_rendering()
    for labels, side in ((ax.get_yticklabels(), "y"), (ax.get_xticklabels(), "x")):
        spans = sorted(getattr(label.get_window_extent(), f"interval{side}").tolist() for label in labels)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_interleaved_blocks_are_drawn_block_after_block():
    partition = Partition.from_labels([0, 1, 0, 1, 1])
    M = torch.arange(25.0).reshape(5, 5)
    order = [0, 2, 1, 3, 4]
    drawn = plot.blocks(M, partition).images[0].get_array()
    np.testing.assert_array_equal(drawn, M[order][:, order].double().numpy())


def test_a_dense_matrix_without_a_partition_is_one_block():
    ax = plot.blocks(torch.eye(4))
    assert line_count(ax, "0.15") == 2 * 2
    assert texts(ax.get_xticklabels()) == ["4"]


def test_vmax_cuts_off_and_the_scale_shows_it():
    ax = plot.blocks(small(), vmax=1.0, title="cut")
    assert ax.images[0].get_clim() == (-1.0, 1.0)
    assert ax.get_title() == "cut"
    assert ax.images[0].colorbar.extend == "both"
    assert plot.blocks(small()).images[0].colorbar.extend == "neither"
    assert plot.blocks(small(), colorbar=False).images[0].colorbar is None


def test_zero_and_not_finite_entries_can_be_drawn():
    assert plot.blocks(torch.zeros(3, 3)).images[0].get_clim() == (-1.0, 1.0)
    M = torch.tensor([[1.0, torch.nan], [-torch.inf, 2.0]])
    assert plot.blocks(M).images[0].get_clim() == (-2.0, 2.0)


def test_it_draws_into_given_axes_and_opens_no_figure():
    ax = matplotlib.figure.Figure().subplots()
    assert plot.blocks(small(), ax=ax) is ax
    assert not plt.get_fignums()


def test_gradients_and_half_precision_do_not_matter():
    ax = plot.blocks(torch.eye(3, dtype=torch.bfloat16, requires_grad=True))
    drawn = ax.images[0].get_array()
    assert drawn.reshape(3, 3).tolist() == torch.eye(3).tolist()


@pytest.mark.parametrize("d", [10, 322])
def test_png_and_svg_are_written(tmp_path: Path, d: int):
    ax = plot.blocks(torch.randn(d, d), Partition.from_sizes([d // 2, d - d // 2]))
    ax.figure.savefig(tmp_path / "m.png")
    ax.figure.savefig(tmp_path / "m.svg")
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ET.parse(tmp_path / "m.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([[1.0]],), {}, TypeError, "a Tensor or BlockMean"),
        ((torch.ones(2, 3),), {}, ValueError, r"square, with at most 4096 rows. Got 'shape \(2, 3\)'"),
        ((torch.ones(3),), {}, ValueError, "square"),
        ((torch.empty(0, 0),), {}, ValueError, "square"),
        ((torch.empty(1, 1).expand(5000, 5000),), {}, ValueError, "at most 4096"),
        ((torch.ones(3, 3), SIZES), {}, ValueError, "one of 3 entries"),
        ((torch.ones(3, 3),), {"vmax": 0.0}, ValueError, "must be > 0"),
        ((torch.ones(3, 3),), {"vmax": float("nan")}, ValueError, "must be > 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        plot.blocks(*arguments, **options)


def test_a_batch_is_refused():
    with pytest.raises(ValueError, match="square"):
        plot.blocks(BlockMean(SIZES, torch.ones(4, 3), torch.zeros(3, 3)))


def test_without_matplotlib_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'blockmean\[lab\]'"):
        plot.blocks(torch.eye(2))


def test_importing_the_library_imports_nothing_of_the_lab_extra():
    code = "import sys, blockmean; print(*sys.modules, sep='\\n'); blockmean.plot.blocks"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"matplotlib", "scipy", "typer", "rich"} & {name.partition(".")[0] for name in loaded}
    assert blockmean.plot is plot
