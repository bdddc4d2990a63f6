"""plot.shares: what is drawn and named, long models, what is refused; and who refuses Anova."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import matplotlib
import pytest
import torch

from blockmean import AdamBMA, Anova, plot
from blockmean.optim import MeanStatistics
from blockmean.optim.inspection import Parts

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def trained(**options) -> Anova:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 12, 3), torch.nn.Flatten(), torch.nn.Linear(48, 10))
    optimizer = Anova(model.named_parameters(), **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.rand(5, 3, 4, 4)).square().sum().backward()
        optimizer.step()
    return optimizer


def statistics(name: str, entries: int = 200, energy=(4.0, 3.0, 2.0, 1.0), group: int = 0) -> MeanStatistics:
    return MeanStatistics(group, name, (10, entries // 10), (2, 2), Parts(*energy))


def names(ax) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def bars(ax) -> list[list[float]]:
    """The widths of the four parts, row by row."""
    return [list(row) for row in zip(*([bar.get_width() for bar in part] for part in ax.containers), strict=True)]


def marks(ax) -> list[float]:
    return [float(segment[0][0]) for segment in ax.collections[-1].get_segments()]


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_every_matrix_is_a_bar_of_its_four_shares_with_a_mark_for_chance():
    optimizer = trained()
    found = optimizer.block_statistics()
    ax = plot.shares(optimizer, title="after three steps")
    assert names(ax) == ["0.weight", "2.weight"]
    assert bars(ax) == [pytest.approx(list(s.shares)) for s in found]
    assert marks(ax) == pytest.approx([s.chance.means for s in found])
    assert texts(ax)[:2] == [f"{s.shares.means:.0%}" for s in found]
    assert ax.get_title() == "after three steps"
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["grand means", "means per unit", "means per input", "remainder", "means by chance"]
    assert ax.get_ylim() == (2, 0)  # the first matrix is on top


def test_statistics_wrapped_optimizers_and_given_axes_do_as_well():
    optimizer = trained()
    found = optimizer.block_statistics()
    _, ax = plt.subplots()
    assert plot.shares(found, ax) is ax
    assert names(ax) == ["0.weight", "2.weight"]
    assert names(plot.shares(found[1])) == ["2.weight"]
    assert names(plot.shares(SimpleNamespace(optimizer=optimizer))) == ["0.weight", "2.weight"]


def test_title_legend_and_names_do_not_overlap():
    ax = plot.shares(trained(), title="a title")
    ax.figure.canvas.draw()
    boxes = [ax.title.get_window_extent(), ax.get_legend().get_window_extent(), ax.get_window_extent()]
    heights = [(box.y0, box.y1) for box in boxes]
    assert heights[0][0] >= heights[1][1]
    assert heights[1][0] >= heights[2][1]
    figure = ax.figure.bbox
    assert all(figure.x0 <= box.x0 and box.x1 <= figure.x1 for box in boxes)
    assert all(label.get_window_extent().x0 >= figure.x0 for label in ax.get_yticklabels())


def test_groups_are_named_and_dead_matrices_are_said_to_be():
    ax = plot.shares([statistics("a"), statistics("a", energy=(0, 0, 0, 0), group=1)])
    assert names(ax) == ["group 0: a", "group 1: a"]
    assert texts(ax)[:2] == ["90%", "no gradient"]
    assert bars(ax)[1] == [0, 0, 0, 0]


def test_long_models_show_modules_with_averages_weighted_by_entries():
    found = [statistics("embed.weight")]
    for i in range(60):
        found.append(statistics(f"layers.{i}.attention.weight", 200, (1, 0, 0, 0)))
        found.append(statistics(f"layers.{i}.mlp.weight", 600, (0, 0, 0, 1)))
        found.append(statistics(f"layers.{i}.dead.weight", 200, (0, 0, 0, 0)))
    ax = plot.shares(found)
    assert names(ax)[:2] == ["embed.weight", "layers.0 (3 matrices)"]
    assert len(bars(ax)) == 61
    assert bars(ax)[1] == pytest.approx([0.25, 0, 0, 0.75])
    chance = {s.shape: s.chance.means for s in found}
    assert marks(ax)[1] == pytest.approx((400 * chance[10, 20] + 600 * chance[10, 60]) / 1000)
    assert "rows" not in ax.get_xlabel()


@pytest.mark.parametrize("name", ["layers.{}.weight", "param{}"])
def test_rows_beyond_all_room_are_left_out_evenly(name):
    ax = plot.shares([statistics(name.format(i)) for i in range(300)])
    assert len(bars(ax)) == 75
    assert names(ax)[0] == name.format(0)
    assert all(int("".join(filter(str.isdigit, label))) % 4 == 0 for label in names(ax))
    assert ax.get_xlabel() == "share of the gradient's energy (one in 4 of 300 rows)"


def test_labels_without_room_are_left_out():
    _, ax = plt.subplots(figsize=(5, 4))
    plot.shares([statistics(f"param{i}") for i in range(30)], ax)
    assert len(bars(ax)) == 30
    assert names(ax) == [f"param{i}" for i in range(0, 30, 2)]


def test_what_has_no_means_is_refused():
    param = torch.zeros(12, 10, requires_grad=True)
    with pytest.raises(ValueError, match=r"plot.shares: no matrix has means yet. Take a step first, with means='auto'"):
        plot.shares(Anova([param]))
    with pytest.raises(TypeError, match=r"AdamBMA has matrices between blocks instead. plot.coupling\(optimizer\)"):
        plot.shares(AdamBMA([param]))
    for wrong in ([], 3, torch.optim.SGD([param], lr=0.1), ["a"]):
        with pytest.raises(TypeError, match=r"parameter of plot.shares must be an Anova or its block_statistics"):
            plot.shares(wrong)


@pytest.mark.parametrize("steps", [False, True])
def test_pictures_of_matrices_between_blocks_refuse_anova_and_name_the_right_function(steps):
    optimizer = trained() if steps else Anova([torch.zeros(12, 10, requires_grad=True)])
    for draw in (plot.coupling, plot.correlation, plot.CouplingRecorder):
        with pytest.raises(TypeError, match=r"Anova has means instead. plot.shares\(optimizer\) draws them"):
            draw(optimizer)
    if steps:
        for source in (optimizer.block_statistics(), optimizer.block_statistics()[0]):
            with pytest.raises(TypeError, match=r"plot.coupling is about matrices between blocks"):
                plot.coupling(source)


def test_statistics_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        statistics("a").group = 1
