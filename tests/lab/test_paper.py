"""The figures and tables of the paper that need no long training."""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from blockmean import BlockMean, Partition
from blockmean.lab.data import load
from blockmean.lab.paper import PARTS, Outcome, ReportConfig, Verdict, small_fisher, timing
from blockmean.lab.paper.architecture import architecture
from blockmean.lab.paper.related_work import RANKS, approximations
from blockmean.lab.paper.small_fisher import fisher
from blockmean.lab.paper.table1 import PRINTED

# The package has the functions of these names; here the modules are meant.
fig1, fig4, table4 = (importlib.import_module(f"blockmean.lab.paper.{name}") for name in ("fig1", "fig4", "table4"))

UNTIMED = ("theorems", "fig1", "fig2", "fig3", "fig4", "table1", "table2", "table3")
PICTURES = {"fig1": ["fig1"], "fig2": ["fig2"], "fig3": ["fig3", "fig3-storage"], "fig4": ["fig4"]}


def config(folder: Path) -> ReportConfig:
    return ReportConfig(out=folder / "pictures", records=folder / "records")


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Fisher matrix of fewer images, which is as good for everything but the numbers themselves."""
    monkeypatch.setattr(small_fisher, "SAMPLES", 400)


def texts(outcome: Outcome) -> list[str]:
    return [claim.claim + claim.measured for claim in outcome.claims] + outcome.notes


def test_the_parts_come_in_the_order_of_the_paper_and_say_what_they_are():
    assert list(PARTS)[:9] == [*UNTIMED, "table4"]
    for part in PARTS.values():
        first = (part.__doc__ or "").partition("\n")[0]
        assert 30 < len(first) < 120
        assert first.endswith(".")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The outcome of a part, drawn once."""

    @functools.cache
    def of(name: str) -> Outcome:
        return PARTS[name](config(tmp_path_factory.mktemp(name)))

    return of


def each(names: Iterable[str], slow: Container[str] = ()) -> pytest.MarkDecorator:
    """Every part, in the worker that draws it."""
    marks = {name: [pytest.mark.xdist_group(name), *([pytest.mark.slow] if name in slow else [])] for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=own) for name, own in marks.items()])


@each(UNTIMED)
def test_a_part_holds_where_it_is_mathematics_and_shows_what_it_promises(
    name: str, few_images: None, drawn: Callable[[str], Outcome]
):
    outcome = drawn(name)
    assert any(claim.exact for claim in outcome.claims)
    assert not [claim for claim in outcome.claims if claim.exact and claim.verdict != Verdict.HOLDS]
    assert not [text for text in texts(outcome) if "nan" in text or "None" in text]
    assert [picture.path.name for picture in outcome.pictures] == PICTURES.get(name, [])
    for picture in outcome.pictures:
        assert ET.parse(picture.svg).getroot().tag.endswith("svg")
        assert picture.png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert picture.caption.endswith(".")
    for table in outcome.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.header)}


@each(PICTURES, slow={"fig1", "fig3", "fig4"})
def test_pictures_and_findings_are_the_same_every_time(
    name: str, tmp_path: Path, few_images: None, drawn: Callable[[str], Outcome]
):
    first = drawn(name)
    torch.manual_seed(123)  # of no importance
    again = PARTS[name](config(tmp_path))
    assert (first.claims, first.tables) == (again.claims, again.tables)
    assert [p.svg.read_bytes() for p in first.pictures] == [p.svg.read_bytes() for p in again.pictures]


def test_gradient_descent_zig_zags_along_the_axes():
    points = fig1._descend(fig1._quadratic, fig1.WORST, 4).points
    expected = torch.tensor([[2.5, 2.0], [1.6, 2.0], [1.6, 1.28], [1.024, 1.28], [1.024, 0.8192]], dtype=torch.float64)
    torch.testing.assert_close(points, expected, rtol=1e-12, atol=0)
    # No other starting point is worse: of all directions, none loses less of f in the long run.
    angles = torch.linspace(0, math.pi, 181, dtype=torch.float64)
    ends = [fig1._descend(fig1._quadratic, torch.stack([a.cos(), a.sin()]), 1).left[-1] for a in angles]
    assert max(ends) <= 0.64 + 1e-12


def test_a_method_that_depends_on_coordinates_is_noticed(monkeypatch: pytest.MonkeyPatch):
    A = torch.tensor([[2.0, 1.0], [-0.5, 0.3]], dtype=torch.float64)
    assert fig1._newton_deviation(A) < 1e-13

    def descend(loss, start, steps, rate):
        points = [start]
        for _ in range(steps):
            points.append(points[-1] - 0.01 * torch.autograd.functional.jacobian(loss, points[-1]))
        return points

    monkeypatch.setattr(fig1, "_newton", descend)
    assert fig1._newton_deviation(A) > 0.01


def test_the_fisher_matrix_is_that_of_a_plain_loop():
    data = load("digits")
    images, labels = data.train[:7].double(), data.train_labels[:7]
    model = small_fisher.untrained()
    found = small_fisher.fisher(model, images, labels)
    expected = torch.zeros(322, 322, dtype=torch.float64)
    for image, label in zip(images, labels, strict=True):
        loss = nn.functional.cross_entropy(model.double()(image.unsqueeze(0)), label.unsqueeze(0))
        g = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        expected += g.outer(g) / 7
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-15)


def test_the_fisher_matrix_is_measured_once_and_kept_to_six_digits(
    tmp_path: Path, few_images: None, monkeypatch: pytest.MonkeyPatch
):
    made = []
    monkeypatch.setattr(small_fisher, "fisher", lambda *given: made.append(fisher(*given)) or made[-1])
    first = small_fisher.small_fisher(config(tmp_path))
    for kept, F in zip(first[:2], made, strict=True):
        torch.testing.assert_close(kept, F, rtol=5e-6, atol=0)
        assert torch.equal(kept, kept.mT)
    assert not torch.allclose(first.initial, first.trained, rtol=0.1)
    assert 0 < first.deviation < 1e-12

    report = replace(config(tmp_path), measure=False)
    again = small_fisher.small_fisher(report)
    assert len(made) == 2
    assert all(torch.equal(a, b) for a, b in zip(first[:2], again[:2], strict=True))
    path = tmp_path / "records" / "measurements.jsonl"
    record = json.loads(path.read_text())
    triangle = record["trained"]
    for spoilt, complaint in (
        ({"trained": triangle[1:]}, "entries are missing"),
        ({"deviation": math.nan}, "NaN is not JSON"),
        ({"deviation": None}, "deviation must be a number"),
        ({"initial": None}, "has no len"),
        ({"initial": [None, *triangle[1:]]}, "initial must be a number"),
        ({"trained": [1e308, *triangle[1:]]}, r"trained must be a number from -1e\+38 to 1e\+38. Got 1e\+308 instead."),
        ({"trained": [1e308] * len(triangle)}, "trained must be a number"),
        ({"trained": [triangle[0], 1e30, *triangle[2:]]}, "trained must have F_ij² ≤ F_ii F_jj"),
        ({"initial": [0.0] * len(triangle)}, "the trace of initial must be positive. Got 0 instead."),
        ({"environment": "x"}, "environment must be an object"),
    ):
        path.write_text(json.dumps(record | spoilt))
        with pytest.raises(
            FileNotFoundError, match=r"`blockmean reproduce fig4 --profile quick --records .*` meas"
        ) as error:
            small_fisher.small_fisher(report)
        assert re.search(rf"^The record fig4-quick in {path} cannot be used \(.*{complaint}", str(error.value))


def test_measurements_that_take_long_say_how_far_they_are(
    tmp_path: Path, few_images: None, few_rounds: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(timing, "ARMS", {"small": timing.LARGE})  # without the slow one
    told: dict[str, list[tuple[int, int]]] = {}
    watched = replace(
        config(tmp_path), on_progress=lambda what, done, total: told.setdefault(what, []).append((done, total))
    )
    small_fisher.small_fisher(watched)
    timing.timings(watched)
    assert list(told) == ["Fisher matrices of Figures 3 and 4", "iterations of Table 4, small model"]
    for steps in told.values():
        assert len({total for _, total in steps}) == 1
        assert [done for done, _ in steps] == list(range(steps[0][1] + 1))


def test_approximations_have_the_errors_that_theory_gives():
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(100, 60, generator=random, dtype=torch.float64)
    G = rows.mT @ rows
    fine, coarse = Partition.from_sizes([10, 20, 30]), Partition.from_sizes([60])
    found = {(one.method, one.size): one for one in approximations(G, [fine, coarse])}
    values = torch.linalg.eigvalsh(G)
    for k in RANKS:
        assert found["low rank", f"rank {k}"].error == pytest.approx(
            float(values[:-k].norm() / values.norm()), rel=1e-9
        )
        assert found["low rank", f"rank {k}"].numbers == 60 * k
    for partition, size in ((fine, "3 blocks"), (coarse, "1 block")):
        kept = float(BlockMean.fit(G, partition).norm() / G.norm())
        assert found["block mean", size].error == pytest.approx(math.sqrt(1 - kept**2))
    assert found["block mean", "3 blocks"].numbers == 3 + 6
    inside = sum(float(block.square().sum()) for block in (G[:10, :10], G[10:30, 10:30], G[30:, 30:]))
    assert found["block diagonal", "3 blocks"].error == pytest.approx(math.sqrt(1 - inside / float(G.norm()) ** 2))
    assert found["block diagonal", "3 blocks"].numbers == 55 + 210 + 465
    assert found["diagonal", "–"].numbers == 60


def test_a_parameter_without_gradient_has_no_correlations():
    F = torch.tensor([[4.0, 0.0, 2.0], [0.0, 0.0, 0.0], [2.0, 0.0, 9.0]], dtype=torch.float64)
    third = 1 / 3
    torch.testing.assert_close(
        small_fisher.correlations(F), torch.tensor([[1.0, 0, third], [0, 0, 0], [third, 0, 1]]).double()
    )
    for normalise in fig4.NORMALISATIONS.values():
        assert normalise(F).isfinite().all()


def test_partitions_of_figure_4_are_those_of_its_caption():
    model = small_fisher.small((1, 28, 28))
    cuts = {by: Partition.of(model, small_fisher.with_whole_biases(by)) for by in small_fisher.CUTS}
    sizes = {by: partition.sizes.tolist() for by, partition in cuts.items()}
    assert sizes["tensor"] == [27, 3, 81, 3, 81, 3, 81, 3, 30, 10]
    assert sizes["unit"] == [*[9] * 3, 3, *([*[27] * 3, 3] * 3), *[3] * 10, 10]
    assert sizes["kernel"] == [*[9] * 3, 3, *([*[9] * 9, 3] * 3), *[3] * 10, 10]


def test_a_layer_that_differs_from_the_paper_is_noticed():
    wrong = ["Conv 5x5, 3", *PRINTED[1:]]
    for printed in (wrong, PRINTED[:-1], [*PRINTED, "Softmax, 10"]):
        assert architecture(1, "small", printed).claims[0].verdict == Verdict.FAILS
    first = architecture(1, "small", PRINTED).tables[0].rows[0]
    assert first == ["Conv 3x3, 3 → Tanh", "3×28×28", "30", "3×32×32", "84", "Conv 3x3, 3"]


# ---------------------------------------------------------------- Table 4


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", {"quick": {"small": 3, "large": 1}})


def test_table_4_is_measured_once(tmp_path: Path, few_rounds: None, monkeypatch: pytest.MonkeyPatch):
    first = PARTS["table4"](config(tmp_path))
    record = json.loads((tmp_path / "records" / "measurements.jsonl").read_text())
    assert record["environment"]["threads"] == 1
    for name, rounds in (("small", 3), ("large", 1)):
        samples = record["models"][name]
        assert len(samples["forward_backward"]) == rounds
        assert samples["step"].keys() == timing.ARMS[name].keys()
        assert all(len(times) == rounds and min(times) > 0 for times in samples["step"].values())
    assert [row[0] for row in first.tables[0].rows][:4] == [
        "small model, full",
        "small model, diag",
        "small model, diag, fused",
        "small model, BMA",
    ]
    assert len(first.claims) == 5
    assert not any(claim.exact for claim in first.claims)

    monkeypatch.setattr(timing, "_measure", lambda *_: pytest.fail("it is measured again"))
    assert PARTS["table4"](config(tmp_path)) == first


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda text: text[:-40], "cannot be used"),
        (lambda text: '{"key": "table4-quick"}', "'environment' is missing"),
        (lambda text: text.replace('"batch": 100', '"batch": 64'), "it belongs to other settings"),
        (lambda text: json.dumps({**json.loads(text), "models": {}}), "'small'"),
        (lambda text: json.dumps(without_a_round(json.loads(text))), "rounds are missing"),
        (lambda text: json.dumps(with_a_time(json.loads(text), None)), "a time in ms must be a number"),
        (lambda text: json.dumps(with_a_time(json.loads(text), 0.0)), "Got 0.0 instead."),
        (lambda text: json.dumps(with_a_time(json.loads(text), 1e308)), "Got 1e+308 instead."),
        (lambda text: json.dumps(with_a_time(json.loads(text), math.nan)), "NaN is not JSON"),
        (lambda text: json.dumps({**json.loads(text), "environment": "x"}), "environment must be an object"),
    ],
)
def test_a_record_that_cannot_be_used_is_named_and_made_again(spoil, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "ROUNDS", {"quick": {"small": 1}})
    monkeypatch.setattr(timing, "ARMS", {"small": timing.LARGE})  # without the slow one
    path = tmp_path / "measurements.jsonl"
    here = ReportConfig(tmp_path, records=tmp_path)
    timing.timings(here)
    text = path.read_text()
    assert not capsys.readouterr().err
    path.write_text(spoil(text))
    again = timing.timings(here)
    complained = capsys.readouterr().err
    assert f"The record table4-quick in {path} cannot be used" in complained
    assert complaint in complained
    assert "counts as missing" in complained
    made = json.loads(path.read_text().splitlines()[-1])
    assert made == {"key": "table4-quick", **json.loads(json.dumps(again))}
    assert list(tmp_path.iterdir()) == [path]


def without_a_round(record):
    record["models"]["small"]["step"]["BMA"].pop()
    return record


def with_a_time(record, milliseconds):
    record["models"]["small"]["step"]["BMA"][0] = milliseconds
    return record


def test_table_4_does_not_need_to_know_the_machine(tmp_path: Path, few_rounds: None):
    PARTS["table4"](config(tmp_path))
    path = tmp_path / "records" / "measurements.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), "environment": {"date": None}}))
    outcome = PARTS["table4"](config(tmp_path))
    assert outcome.notes[0].startswith("Measured on ?, on one thread")


def test_a_median_has_the_interval_of_the_sign_test():
    ratios = [float(i) for i in range(1, 21)]
    assert table4._ratio(ratios, [1.0] * 20) == (10.5, 6.0, 15.0)  # covers the median with probability .9586
    few = table4._ratio([2.0, 9.0], [1.0, 3.0])
    assert few.median == 2.5
    assert table4._compare(few, 1.0) is table4._compare(few, 9.0) is Verdict.NOISE


def test_a_cost_is_compared_beyond_its_noise():
    interval = table4.Interval(1.2, 1.1, 1.3)
    verdicts = [table4._compare(interval, bound) for bound in (1.4, 1.2, 1.0)]
    assert verdicts == [Verdict.HOLDS, Verdict.NOISE, Verdict.FAILS]
