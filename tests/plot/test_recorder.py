"""CouplingRecorder: what it keeps and when, what it draws and writes, what it refuses."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import pytest
import torch
from torch import nn

from blockmean import AdaGradBMA, AdamBMA, NaturalGradientBMA
from blockmean.plot import CouplingRecorder

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def task(make=AdamBMA, width=4, **options):
    """A model, an optimizer of it, and a function that takes steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 2))
    optimizer = make(model.named_parameters(), **options)
    rng = torch.Generator().manual_seed(0)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            x = torch.rand(8, 5, generator=rng)
            (model(x) - x[:, :2]).square().mean().backward()
            optimizer.step()

    return optimizer, train


def labels(ax) -> list[str]:
    return [line.get_label() for line in ax.lines if not line.get_label().startswith("_")]


@pytest.mark.parametrize("coupling", ["all", "module", "none"])
def test_it_keeps_what_the_optimizer_says_every_k_steps(coupling):
    optimizer, train = task(coupling=coupling)
    twin, train_twin = task(coupling=coupling)
    recorder = CouplingRecorder(optimizer, every=3)
    train(7)
    expected = []
    for _ in range(2):
        train_twin(3)
        expected.append(twin.block_statistics())
    assert len(recorder.history) == len(expected[0]) == (2 if coupling == "module" else 1)
    for i, course in enumerate(recorder.history):
        assert course["steps"] == [3, 6]
        assert course["coupling"] == expected[0][i].coupling
        assert course["names"] == expected[0][i].names
        assert course["sizes"] == expected[0][i].sizes.tolist()
        for record in range(2):
            statistics = expected[record][i]
            assert course["diagonal"][record] == pytest.approx(statistics.diagonal.tolist(), rel=1e-6)  # float32
            assert course["correction_share"][record] == statistics.correction_share
            assert course["condition"][record] == (statistics.condition if statistics.condition < math.inf else None)


def test_between_records_nothing_is_computed(monkeypatch: pytest.MonkeyPatch):
    optimizer, train = task()
    calls = []
    real = optimizer.block_statistics
    monkeypatch.setattr(optimizer, "block_statistics", lambda: calls.append(recorder.steps) or real())
    recorder = CouplingRecorder(optimizer, every=10)
    train(25)
    assert calls == [10, 20]


def test_training_is_the_same_with_and_without_it():
    results = []
    for record in (True, False):
        optimizer, train = task(coupling="all", refresh_every=3)
        if record:
            CouplingRecorder(optimizer, every=2)
        train(9)
        results.append([p.detach() for group in optimizer.param_groups for p in group["params"]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_closing_stops_it_and_keeps_what_there_is():
    optimizer, train = task()
    with CouplingRecorder(optimizer, every=1) as recorder:
        train(2)
    train(3)
    assert recorder.history[0]["steps"] == [1, 2]
    recorder.close()  # twice does no harm


def test_it_counts_on_where_training_was_taken_up_again():
    optimizer, train = task()
    train(5)
    recorder = CouplingRecorder(optimizer, every=2)
    train(4)
    assert recorder.history[0]["steps"] == [6, 8]


@pytest.mark.parametrize("max_records", [4, 5])
def test_memory_is_bounded_and_the_records_span_the_whole_course(max_records):
    optimizer, train = task()
    recorder = CouplingRecorder(optimizer, every=2, max_records=max_records)
    train(2)
    for _ in range(20):
        train(2)
        steps = recorder.history[0]["steps"]
        assert len(steps) <= max_records
    assert steps[0] == 2
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    assert len(gaps) == 1  # evenly spaced
    assert steps[-1] + gaps.pop() > 42  # the next one is not there yet
    assert {len(recorder.history[0][key]) for key in ("condition", "correction_share", "diagonal")} == {len(steps)}


def test_a_singular_matrix_has_no_condition():
    layer = nn.Linear(3, 2)
    optimizer = AdamBMA(layer.named_parameters())
    recorder = CouplingRecorder(optimizer, every=1)
    for _ in range(2):
        layer.weight.grad = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 0.0]])  # the second row sums to zero
        optimizer.step()
    conditions = recorder.history[0]["condition"]
    assert conditions == [None, None]
    json.loads(json.dumps(recorder.history, allow_nan=False))
    recorder.draw()


def test_new_parameter_groups_get_courses_of_their_own():
    optimizer, train = task()
    recorder = CouplingRecorder(optimizer, every=1)
    train(2)
    late = nn.Parameter(torch.ones(2, 3))
    optimizer.add_param_group({"params": [("late", late)]})
    late.grad = torch.ones_like(late)
    train_step = optimizer.step
    train_step()
    assert [(course["group"], course["steps"]) for course in recorder.history] == [(0, [1, 2, 3]), (1, [3])]
    assert "group 1: late[0]" in labels(recorder.draw().axes[0])


def test_the_picture_shows_all_three_courses():
    optimizer, train = task(coupling="all", partition="tensor")
    recorder = CouplingRecorder(optimizer, every=2)
    train(8)
    (course,) = recorder.history
    above, middle, below = recorder.draw().axes
    assert labels(above) == course["names"]
    for i, line in enumerate(above.lines):
        assert line.get_xdata().tolist() == [2, 4, 6, 8]
        assert line.get_ydata().tolist() == pytest.approx([diagonal[i] for diagonal in course["diagonal"]])
    drawn = [None if math.isnan(y) else y for y in middle.lines[0].get_ydata()]
    assert drawn == course["condition"]
    assert ("singular" in middle.get_title(loc="right")) == (None in drawn)
    assert below.lines[0].get_ydata().tolist() == pytest.approx(course["correction_share"])
    assert [ax.get_yscale() for ax in (above, middle, below)] == ["log", "log", "linear"]
    assert below.get_xlabel() == "step"


def test_of_many_blocks_the_highest_and_the_most_changed_are_named():
    param = nn.Parameter(torch.zeros(40, 4))
    optimizer = AdamBMA([("w", param)], betas=(0.9, 0.5))
    recorder = CouplingRecorder(optimizer, every=1)
    signs = torch.ones(40, 4)
    signs[:, 0] = -1  # of four entries one goes against the others: A_ii = 1
    signs[7] = 1  # all agree: A_ii = 4
    for step in range(6):
        param.grad = signs.clone()
        if step >= 3:
            param.grad[5] = torch.tensor([1.0, -0.9, 1.0, -0.9])  # falls
        optimizer.step()
    above = recorder.draw().axes[0]
    assert len(labels(above)) == 10
    assert {"w[7]", "w[5]"} <= set(labels(above))
    assert "30 further blocks" in above.get_legend().get_title().get_text()
    assert len(above.collections) == 2  # the range of all, and of the middle half


def test_many_matrices_are_not_all_named():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(13)))
    optimizer = AdamBMA(model.named_parameters(), coupling="module")
    recorder = CouplingRecorder(optimizer, every=1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.rand(4, 3)).square().sum().backward()
        optimizer.step()
    _, middle, _ = recorder.draw().axes
    assert len(labels(middle)) == 10
    assert len(middle.lines) == 13
    assert "3 other matrices" in middle.get_legend().get_title().get_text()


def test_a_diagonal_that_is_one_by_definition_is_not_drawn():
    optimizer, train = task(AdaGradBMA)
    recorder = CouplingRecorder(optimizer, every=1)
    train(2)
    condition, share = recorder.draw().axes
    assert condition.get_ylabel() == "condition of $A$"
    assert share.get_ylabel() == "share of correction"
    low, high = condition.get_ylim()
    assert low <= max(recorder.history[0]["condition"]) <= high
    assert len(condition.get_yticks()) > 1


def test_blocks_without_data_are_left_out_and_counted():
    model = nn.Linear(3, 4)
    optimizer = AdamBMA(model.named_parameters(), partition="tensor")
    recorder = CouplingRecorder(optimizer, every=1)
    weight = model.weight
    for _ in range(2):
        weight.grad, model.bias.grad = torch.ones_like(weight), torch.tensor([1.0, -1.0, 1.0, -1.0])
        optimizer.step()
    above = recorder.draw().axes[0]
    assert labels(above) == ["weight"]
    assert above.get_title(loc="right").startswith("left out: 1 block whose")


@pytest.mark.parametrize("make", [AdamBMA, AdaGradBMA, NaturalGradientBMA])
def test_it_works_with_every_optimizer_and_pictures_can_be_saved(make, tmp_path: Path):
    optimizer, train = task(make)
    recorder = CouplingRecorder(optimizer, every=2)
    train(4)
    recorder.draw().savefig(tmp_path / "course.svg")
    assert ET.parse(tmp_path / "course.svg").getroot().tag.endswith("svg")


def test_history_is_saved_as_json_and_csv(tmp_path: Path):
    optimizer, train = task(coupling="module")
    recorder = CouplingRecorder(optimizer, every=2)
    train(6)
    path = recorder.save(tmp_path / "new" / "course.json")
    assert json.loads(path.read_text()) == recorder.history
    with recorder.save(str(tmp_path / "course.csv")).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * (4 + 2)
    first = recorder.history[0]
    assert rows[0]["block"] == "0.weight[0]"
    assert float(rows[0]["A_ii"]) == first["diagonal"][0][0]
    assert [row["condition"] for row in rows[::4][:3]] == ["" if c is None else str(c) for c in first["condition"]]
    with pytest.raises(ValueError, match=r"must be a .json or .csv file. Got 'course.txt'"):
        recorder.save("course.txt")


def test_tensorboard_gets_scalars_and_the_heat_map(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="needs the extra blockmean[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    optimizer, train = task(coupling="all", width=30)
    with SummaryWriter(str(tmp_path)) as writer:
        recorder = CouplingRecorder(optimizer, every=2, writer=writer, max_records=2)
        train(6)
    assert not plt.get_fignums()
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
    events.Reload()
    tags = events.Tags()
    blocks = [tag for tag in tags["scalars"] if tag.startswith("coupling/A_ii/")]
    assert len(blocks) == 20  # of 34
    shares = events.Scalars("coupling/all/correction_share")
    assert [event.step for event in shares] == [2, 4, 6]  # all of them, though two are kept
    (course,) = recorder.history
    kept = dict(zip(course["steps"], course["correction_share"], strict=True))
    assert {event.step: event.value for event in shares if event.step in kept} == pytest.approx(kept)
    name = blocks[0].removeprefix("coupling/A_ii/")
    values = {event.step: event.value for event in events.Scalars(blocks[0])}
    for step, diagonal in zip(course["steps"], course["diagonal"], strict=True):
        assert values[step] == pytest.approx(diagonal[course["names"].index(name)])
    images = events.Images("coupling")
    assert [image.step for image in images] == [2, 4, 6]
    assert images[0].encoded_image_string.startswith(b"\x89PNG")
    assert min(images[0].width, images[0].height) > 300


def test_nothing_is_drawn_before_the_first_record():
    optimizer, train = task()
    recorder = CouplingRecorder(optimizer, every=1000)
    train(3)
    with pytest.raises(ValueError, match="the first record is made after 1,000 steps"):
        recorder.draw()
    assert recorder.history == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "'every' parameter of CouplingRecorder must be at least 1. Got 0"),
        ({"every": 1.5}, TypeError, "'every' parameter of CouplingRecorder must be a whole number"),
        ({"max_records": 1}, ValueError, "'max_records' parameter of CouplingRecorder must be at least 2"),
        ({"writer": "runs"}, TypeError, "must be a TensorBoard SummaryWriter. Got 'str'"),
    ],
)
def test_wrong_arguments_are_refused_and_leave_no_hook(options, error, message):
    optimizer, _ = task()
    with pytest.raises(error, match=message):
        CouplingRecorder(optimizer, **options)
    assert not optimizer._optimizer_step_post_hooks


class Wrapper:
    """As accelerate and transformers make: the optimizer is an attribute, and `step` calls it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


def test_a_wrapped_optimizer_is_recorded():
    optimizer, train = task()
    recorder = CouplingRecorder(Wrapper(Wrapper(optimizer)), every=1)
    assert recorder.optimizer is optimizer
    train(2)
    assert recorder.history[0]["steps"] == [1, 2]


def test_numbers_that_are_not_finite_are_null_in_json_and_empty_in_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    optimizer, train = task()
    recorder = CouplingRecorder(optimizer, every=1)
    real = optimizer.block_statistics

    def broken():
        (found,) = real()
        A = found.A.clone()
        A[0], A[1] = math.nan, math.inf
        nan = torch.full_like(found.change, math.nan)
        return [dataclasses.replace(found, A=A, change=nan)]

    monkeypatch.setattr(optimizer, "block_statistics", broken)
    train(1)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    (kept,) = json.loads(recorder.save(tmp_path / "course.json").read_text(), parse_constant=refuse)
    assert kept["diagonal"][0][:2] == [None, None]
    assert kept["diagonal"][0][2] > 0
    assert kept["correction_share"] == [None]
    with recorder.save(tmp_path / "course.csv").open() as file:
        first = next(csv.DictReader(file))
    assert (first["A_ii"], first["correction_share"]) == ("", "")
    assert "0.weight[2]" in labels(recorder.draw().axes[0])


def test_other_optimizers_are_refused():
    with pytest.raises(TypeError, match=r"must be an optimizer of blockmean. Got 'SGD'"):
        CouplingRecorder(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    wrapper = Wrapper(None)
    wrapper.optimizer = wrapper
    with pytest.raises(TypeError, match=r"must be an optimizer of blockmean. Got 'Wrapper'"):
        CouplingRecorder(wrapper)
