"""Pictures: what is drawn, where labels stand, what is refused."""

from __future__ import annotations

import dataclasses
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


def test_without_matplotlib_the_message_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot.blocks(torch.eye(2))


def test_importing_the_library_imports_nothing_of_the_lab_extra():
    code = "import sys, blockmean; print(*sys.modules, sep='\\n'); blockmean.plot.blocks"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"matplotlib", "scipy", "typer", "rich"} & {name.partition(".")[0] for name in loaded}
    assert blockmean.plot is plot


# ---------------------------------------------------------------- coupling


def matrix_with(A, sizes=None, names=None) -> BlockMean:
    """A block-mean matrix with the given A and λ = 0.1 everywhere."""
    A = torch.as_tensor(A, dtype=torch.float64)
    s = torch.tensor(sizes or [2] * len(A), dtype=torch.float64)
    lam = torch.full((len(A),), 0.1, dtype=torch.float64)
    B = (A - torch.diag(lam)) / torch.outer(s, s).sqrt()
    return BlockMean(Partition.from_sizes(s.long(), names=names), lam, B)


def heat_map(ax) -> np.ndarray:
    """The colours' numbers, NaN where there are none."""
    return np.ma.filled(np.ma.masked_invalid(ax.images[-1].get_array()), np.nan)


def trained(make, dims=((6, 4), (4, 3))):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(*shape) for shape in dims))
    optimizer = make(model.named_parameters())
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.rand(8, dims[0][0])).square().mean().backward()
        optimizer.step()
    return optimizer


A3 = [[4.0, -3.0, 0.2], [-3.0, 9.0, 0.6], [0.2, 0.6, 0.01]]


def test_correlations_are_entries_of_A_over_the_roots_of_its_diagonal():
    ax = plot.coupling(matrix_with(A3), title="three")
    expected = [[1.0, -0.5, 1.0], [-0.5, 1.0, 2.0], [1.0, 2.0, 1.0]]  # by hand; A3 is indefinite
    np.testing.assert_allclose(heat_map(ax), expected, rtol=1e-12)
    np.testing.assert_allclose(plot.correlation(matrix_with(A3)), expected, rtol=1e-12)
    assert ax.images[-1].get_clim() == (-1, 1)
    assert {"−0.50", "1.00", "2.00"} == set(texts(ax.texts))
    assert ax.get_title() == "three"


def test_the_scale_stands_beside_the_heat_map_on_a_logarithmic_axis():
    strip, bar = plot.coupling(matrix_with(A3)).child_axes
    assert strip.get_xscale() == "log"
    (dots,) = strip.lines
    np.testing.assert_allclose(dots.get_xdata(), [4.0, 9.0, 0.01])
    np.testing.assert_allclose(dots.get_ydata(), [0.5, 1.5, 2.5])
    assert texts(strip.texts) == ["4", "9", "0.01"]
    assert r"\sqrt{A_{ii} A_{jj}}" in bar.get_ylabel()
    assert "indefinite" in bar.get_ylabel()  # the 2 above
    (bar,) = plot.coupling(matrix_with(torch.eye(2) * 3), scale=False).child_axes
    assert "indefinite" not in bar.get_ylabel()
    assert not plot.coupling(matrix_with(A3), scale=False, colorbar=False).child_axes


def test_negative_curvature_is_blue_and_its_diagonal_is_minus_one():
    ax = plot.coupling(matrix_with([[-4.0, 1.0], [1.0, 1.0]]))
    np.testing.assert_allclose(heat_map(ax), [[-1.0, 0.5], [0.5, 1.0]])
    strip, bar = ax.child_axes
    colours = {line.get_color(): float(line.get_xdata()[0]) for line in strip.lines}
    assert colours == pytest.approx({"#b2182b": 1.0, "#2166ac": 4.0})
    assert texts(strip.texts) == ["−4", "1"]
    assert "|A_{ii} A_{jj}|" in bar.get_ylabel()


def test_blocks_without_data_are_grey_and_said_to_be_so():
    ax = plot.coupling(matrix_with([[1.0, 0.0, 0.5], [0.0, 0.0, 0.0], [0.5, 0.0, 1.0]]))
    np.testing.assert_array_equal(np.isnan(heat_map(ax)), [[0, 1, 0], [1, 1, 1], [0, 1, 0]])
    grey = np.ma.filled(np.ma.masked_invalid(ax.images[0].get_array()), 0)
    np.testing.assert_array_equal(grey, np.isnan(heat_map(ax)))
    assert texts(ax.get_legend().get_texts()) == ["no data: $A_{ii}$ is 0 up to rounding"]
    assert texts(ax.child_axes[0].texts) == ["1", "–", "1"]
    assert plot.coupling(matrix_with(A3)).get_legend() is None


def test_what_is_zero_up_to_rounding_is_no_data():
    """Under cross-entropy the gradients of the last layer sum to zero, but not exactly: correlations would be noise."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    data = torch.rand(50, 5), torch.randint(3, (50,))
    for matrix in (blockmean.curvature.empirical_fisher, blockmean.curvature.ggn, blockmean.curvature.hessian):
        found = matrix(model, torch.nn.functional.cross_entropy, data)
        assert plot.correlation(found).isnan().any(0).tolist() == [True] * 4
        assert plot.correlation(found).isnan().all(0).tolist() == [False, False, True, True]
    optimizer = blockmean.AdamBMA(model.named_parameters(), partition="tensor", coupling="all")
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    assert plot.correlation(optimizer).isnan().all(0).tolist() == [False, False, True, True]


def test_all_blocks_without_data_can_be_drawn(tmp_path: Path):
    ax = plot.coupling(matrix_with(torch.zeros(2, 2)))
    assert np.isnan(heat_map(ax)).all()
    ax.figure.savefig(tmp_path / "none.png")
    (statistics,) = trained(lambda p: blockmean.AdamBMA(p, coupling="all")).block_statistics()
    broken = dataclasses.replace(statistics, A=torch.full_like(statistics.A, torch.nan))
    assert np.isnan(heat_map(plot.coupling(broken))).all()


def test_interleaved_and_single_entry_blocks_have_correlations():
    rows = torch.randn(50, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    partition = Partition.from_labels([0, 1, 0, 2, 0])
    M = BlockMean.from_rows(rows, partition)
    u = partition.block_sum(rows)
    expected = torch.nn.functional.cosine_similarity(u.T.unsqueeze(1), u.T.unsqueeze(0), dim=-1)
    torch.testing.assert_close(plot.correlation(M), expected)


@pytest.mark.parametrize("coupling", ["all", "module", "none"])
def test_an_optimizer_is_drawn_along_one_diagonal(coupling):
    optimizer = trained(lambda p: blockmean.AdamBMA(p, coupling=coupling))
    found = optimizer.block_statistics()
    ax = plot.coupling(optimizer)
    names = [name for statistics in found for name in statistics.names]
    assert texts(ax.get_yticklabels()) == names
    diagonal = torch.cat([statistics.diagonal for statistics in found])
    if coupling == "none":
        assert not ax.images
        assert "not coupled" in ax.get_xlabel()
        np.testing.assert_allclose(ax.lines[0].get_xdata(), diagonal)
        assert ax.get_xscale() == "log"
        return
    A = torch.block_diag(*(statistics.A for statistics in found))
    coupled = torch.block_diag(*(torch.ones_like(statistics.A) for statistics in found)).bool()
    expected = (A / torch.outer(diagonal, diagonal).sqrt()).where(coupled, torch.nan)
    np.testing.assert_allclose(heat_map(ax), expected, rtol=1e-12)
    legend = ax.get_legend()
    assert (legend is not None and "not coupled" in texts(legend.get_texts())) == (coupling == "module")
    one = plot.coupling(found[-1])
    assert texts(one.get_yticklabels()) == found[-1].names


def test_a_wrapped_optimizer_is_drawn_like_its_own():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    optimizer = trained(lambda p: blockmean.AdamBMA(p, coupling="all"))
    wrapped = Wrapper(Wrapper(optimizer))
    np.testing.assert_array_equal(plot.correlation(wrapped), plot.correlation(optimizer))
    np.testing.assert_array_equal(heat_map(plot.coupling(wrapped)), heat_map(plot.coupling(optimizer)))


def test_a_curvature_is_drawn_like_its_matrix():
    data = torch.rand(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    found = blockmean.curvature.empirical_fisher(model, torch.nn.functional.cross_entropy, data)
    np.testing.assert_array_equal(plot.correlation(found), plot.correlation(found.matrix))
    np.testing.assert_array_equal(heat_map(plot.coupling(found)), heat_map(plot.coupling(found.matrix)))
    drawn = plot.blocks(found)
    np.testing.assert_array_equal(drawn.images[0].get_array(), found.matrix.to_dense().double().numpy())
    assert texts(drawn.get_yticklabels())[0] == "0.weight"


def test_the_diagonal_that_is_one_by_definition_is_no_scale():
    optimizer = trained(lambda p: blockmean.AdaGradBMA(p))
    ax = plot.coupling(optimizer)
    np.testing.assert_allclose(heat_map(ax), optimizer.block_statistics()[0].A)
    (bar,) = ax.child_axes
    assert "by definition" in bar.get_ylabel()


def test_parameter_groups_are_told_apart():
    params = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
    optimizer = blockmean.AdamBMA([{"params": [params[0]], "coupling": "all"}, {"params": [params[1]]}])
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    ax = plot.coupling(optimizer)
    expected = [f"group {group}: param0[{unit}]" for group in range(2) for unit in range(2)]
    assert texts(ax.get_yticklabels()) == expected
    assert np.isfinite(heat_map(ax)).tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def gram(L: int, names=None) -> BlockMean:
    rows = torch.randn(2 * L, 2 * L, generator=torch.Generator().manual_seed(0))
    return BlockMean.from_rows(rows, Partition.from_sizes([2] * L, names=names))


def net_names(width: int) -> list[str]:
    return [
        *(f"features.0.weight[{i}]" for i in range(width)),
        "features.0.bias",
        *(f"features.2.weight[{i}]" for i in range(width)),
        "features.2.bias",
    ]


@pytest.mark.parametrize("L", [1, 5, 34, 300])
def test_labels_never_overlap_and_all_lies_inside_the_picture(tmp_path: Path, L: int):
    names = net_names(L // 2 - 1) if L >= 34 else [f"module.{i}.weight" for i in range(L)]
    ax = plot.coupling(gram(L, names), title="a title")
    ax.figure.savefig(tmp_path / "coupling.png")
    ax.figure.savefig(tmp_path / "coupling.svg")
    assert (tmp_path / "coupling.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ET.parse(tmp_path / "coupling.svg").getroot().tag.endswith("svg")
    for labels, side in ((ax.get_yticklabels(), "y"), (ax.get_xticklabels(), "x")):
        spans = sorted(getattr(label.get_window_extent(), f"interval{side}").tolist() for label in labels)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    outer, inner = ax.figure.bbox, ax.get_tightbbox()
    assert outer.x0 <= inner.x0 and inner.x1 <= outer.x1
    assert outer.y0 <= inner.y0 and inner.y1 <= outer.y1
    numbers = {1: 1, 5: 25}.get(L, 0)
    assert len(ax.texts) == numbers


def test_many_blocks_are_labelled_by_parameter_with_lines_matrix_with():
    ax = plot.coupling(gram(300, net_names(149)))
    assert texts(ax.get_yticklabels()) == [
        "features.0.weight",
        "features.0.bias",
        "features.2.weight",
        "features.2.bias",
    ]
    assert line_count(ax, "0.15") == 2 * (3 + 2)  # three inner boundaries, two edges
    assert ax.get_yticks().tolist() == [74.5, 149.5, 224.5, 299.5]


def test_many_parameters_are_labelled_by_module():
    names = [f"layers.{i // 10}.part{i % 10}.weight" for i in range(200)]
    ax = plot.coupling(gram(200, names))
    assert texts(ax.get_yticklabels()) == [f"layers.{i}" for i in range(20)]


def test_many_numbers_are_thinned_evenly():
    ax = plot.coupling(gram(300))
    shown = [int(text) for text in texts(ax.get_yticklabels())]
    assert len(shown) > 30
    assert len({b - a for a, b in itertools.pairwise(shown)}) == 1


def test_coupling_draws_into_given_axes():
    figure = matplotlib.figure.Figure(layout="constrained")
    ax = figure.subplots()
    size = figure.get_size_inches().tolist()
    assert plot.coupling(gram(40), ax=ax) is ax
    assert not plt.get_fignums()
    assert figure.get_size_inches().tolist() == size
    assert len(ax.get_yticks()) < 40  # a small picture has no room for all of them


def test_many_blocks_that_are_not_coupled_can_be_drawn():
    param = torch.zeros(5000, 2, requires_grad=True)
    optimizer = blockmean.AdamBMA([param])
    param.grad = torch.rand(5000, 2)
    optimizer.step()
    assert len(plot.coupling(optimizer).lines[0].get_xdata()) == 5000
    (statistics,) = optimizer.block_statistics()
    dense = dataclasses.replace(statistics, A=torch.zeros(1, 1).expand(5000, 5000))
    with pytest.raises(ValueError, match=r"at most 4,096 blocks \(take a coarser partition.*Got '5,000 blocks'"):
        plot.coupling(dense)
    with pytest.raises(ValueError, match=r"at most 100,000 blocks.*Got '100,001 blocks'"):
        plot.coupling(dataclasses.replace(statistics, names=["block"] * 100_001))
    with pytest.raises(ValueError, match=r"at most 4,096 blocks.*Got '5,000 blocks'"):
        plot.correlation(BlockMean(Partition.from_sizes([1] * 5000), torch.ones(5000), torch.zeros(5000, 5000)))


@pytest.mark.parametrize("draw", [plot.coupling, plot.correlation])
def test_what_has_no_coupling_is_refused(draw):
    with pytest.raises(TypeError, match="must be a BlockMean, an optimizer of blockmean or its block_statistics"):
        draw(torch.eye(3))
    with pytest.raises(TypeError, match="must be a BlockMean"):
        draw([])
    with pytest.raises(TypeError, match="must be a BlockMean"):
        draw(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    with pytest.raises(ValueError, match="knows nothing yet"):
        draw(blockmean.AdamBMA([torch.zeros(2, 2, requires_grad=True)]))
    with pytest.raises(ValueError, match=r"must be a single matrix. Got 'a batch of \[4\]'"):
        draw(BlockMean(SIZES, torch.ones(4, 3), torch.zeros(3, 3)))
