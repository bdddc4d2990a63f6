"""Figure 5 from records: which studies are drawn, and what is said of them."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from test_compare import record_of

from blockmean.lab.paper.fig5 import curves, fig5, find
from blockmean.lab.paper.outcome import ReportConfig, Verdict
from blockmean.lab.paper.protocol import studies
from blockmean.lab.records import append
from blockmean.lab.report import write_report


@pytest.fixture
def painted() -> None:
    """For tests whose pictures are written."""


@pytest.fixture(autouse=True)
def only_words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others read words and numbers; to write the pictures would take most of their time."""
    if "painted" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)


def publish(folder: Path, study, losses: dict[str, list[float]]) -> None:
    """Write the records of a study whose arms end with these losses per seed, times 100; all prefer the rate 0.1."""
    for arm, values in losses.items():
        for spec in study.specs(arm, study.rates, study.tuning):
            append(study.file(folder), spec.key, record(spec, 1.0 if spec.lr == 0.1 else 2.0))
        for spec, loss in zip(study.specs(arm, [0.1], study.final), values, strict=False):
            append(study.file(folder), spec.key, record(spec, loss))


def record(spec, loss, **changed):
    return record_of(spec, loss, test_error=loss / 10, **changed)


def verdicts(tmp_path: Path, losses: dict[str, list[float]]) -> list[str]:
    study = studies("quick")[0]
    publish(tmp_path / "records", study, losses)
    return [claim.verdict for claim in fig5(ReportConfig(tmp_path, tmp_path / "records")).claims]


def test_a_clear_gain_holds_and_full_is_reached(tmp_path):
    found = verdicts(tmp_path, {"diag": [1.0, 1.1, 1.2], "BMA": [0.8, 0.91, 1.0], "full": [0.79, 0.9, 1.0]})
    assert found == [Verdict.HOLDS, Verdict.HOLDS, Verdict.HOLDS]


def test_a_clear_loss_does_not_hold(tmp_path):
    found = verdicts(tmp_path, {"diag": [0.8, 0.9, 1.0], "BMA": [1.0, 1.11, 1.2], "full": [0.7, 0.8, 0.9]})
    assert found == [Verdict.FAILS, Verdict.FAILS, Verdict.FAILS]


def test_what_seeds_cannot_tell_apart_is_noise(tmp_path):
    found = verdicts(tmp_path, {"diag": [1.0, 1.1, 1.2], "BMA": [1.1, 1.0, 1.2], "full": [0.9, 1.2, 1.1]})
    assert found == [Verdict.NOISE, Verdict.NOISE, Verdict.NOISE]


def test_one_seed_gives_no_verdict(tmp_path):
    study = studies("quick", seeds=1)[0]
    publish(tmp_path, study, {"diag": [1.0], "BMA": [0.5], "full": [0.5]})
    claims = fig5(ReportConfig(tmp_path, tmp_path, seeds=1)).claims
    assert {claim.verdict for claim in claims} == {Verdict.UNKNOWN}
    assert {claim.measured for claim in claims} == {"one seed says nothing of noise"}


def test_a_verdict_waits_for_all_runs(tmp_path):
    publish(tmp_path, studies("quick")[0], {"diag": [1.0, 1.1, 1.2], "BMA": [0.8, 0.91], "full": [0.7, 0.8, 0.9]})
    outcome = fig5(ReportConfig(tmp_path, tmp_path))
    assert {claim.verdict for claim in outcome.claims} == {Verdict.UNKNOWN}
    assert {claim.measured for claim in outcome.claims} == {"BMA has 2 of 3 runs"}
    assert [row[2] for row in outcome.tables[0].rows] == ["3", "2 of 3", "3"]


SIMILAR = {
    "at full": ([1.0, 1.1, 1.2], [0.81, 0.9, 1.0], [0.8, 0.9, 1.0], Verdict.HOLDS),
    "better than full": ([1.0, 1.1, 1.2], [0.5, 0.6, 0.7], [0.8, 0.9, 1.0], Verdict.HOLDS),
    "three quarters of the way": ([1.0, 1.1, 1.2], [0.85, 0.95, 1.051], [0.8, 0.9, 1.0], Verdict.HOLDS),
    "one quarter of the way": ([1.0, 1.1, 1.2], [0.95, 1.05, 1.151], [0.8, 0.9, 1.0], Verdict.FAILS),
    "at diag": ([1.0, 1.1, 1.2], [1.0, 1.1, 1.201], [0.8, 0.9, 1.0], Verdict.FAILS),
    "half way": ([1.0, 1.1, 1.2], [0.91, 0.99, 1.1], [0.8, 0.9, 1.0], Verdict.NOISE),
    "full and diag cannot be told apart": ([1.0, 1.1, 1.2], [0.5, 0.6, 0.7], [0.8, 1.2, 1.0], Verdict.NOISE),
    "full is worse than diag": ([0.8, 0.9, 1.0], [0.8, 0.9, 1.0], [1.0, 1.1, 1.201], Verdict.NOISE),
}


@pytest.mark.parametrize("case", SIMILAR)
def test_similar_to_full_is_past_the_middle_between_diag_and_full(tmp_path, case):
    diag, bma, full, expected = SIMILAR[case]
    assert verdicts(tmp_path, {"diag": diag, "BMA": bma, "full": full})[2] == expected


def test_a_seed_that_does_no_better_than_guessing_is_named(tmp_path, painted):
    publish(tmp_path, studies("quick")[0], {"diag": [0.5, 0.6, 0.7], "BMA": [0.4, 2.3026, 0.5]})
    outcome = fig5(ReportConfig(tmp_path, tmp_path))
    assert outcome.claims[0].verdict is Verdict.NOISE
    assert outcome.claims[0].measured.endswith("smaller with 2 of 3 seeds; BMA: 1 stuck; without: −6 ± 25")
    assert outcome.tables[0].rows[1][2] == "3, 1 stuck"
    assert "stuck are not drawn, only counted" in outcome.pictures[0].caption


@pytest.mark.parametrize(
    ("losses", "left"),
    [([2.31, 2.31, 0.6], "BMA: 2 stuck; without: −4 with one seed"), ([2.31] * 3, "3 stuck; without: no pair of runs")],
)
def test_few_seeds_that_move_are_told_as_few(tmp_path, losses, left):
    publish(tmp_path, studies("quick")[0], {"diag": [0.5, 0.6, 0.7], "BMA": losses})
    assert fig5(ReportConfig(tmp_path, tmp_path)).claims[0].measured.endswith(left)


@pytest.mark.parametrize(
    ("losses", "drawn"),
    [([0.4, 2.3026, 0.6], [0.5, 0.4, 0.6]), ([0.4, 1.5, 0.5], [0.8, 0.4, 1.5, 0.5]), ([2.31] * 3, [2.31] * 4)],
)
def test_runs_that_are_stuck_are_not_drawn_unless_all_are(tmp_path, losses, drawn):
    publish(tmp_path, studies("quick")[0], {"BMA": losses})
    ax = Figure().subplots()
    curves(ax, find(ReportConfig(tmp_path, tmp_path))[0].results, "train_loss")
    assert [line.get_ydata()[-1] for line in ax.lines] == pytest.approx(drawn)  # the mean first


def test_published_records_stand_in_for_what_the_profile_does_not_run_and_say_so(tmp_path, painted):
    own, published = tmp_path / "records", tmp_path / "results"
    arms = {"diag": [1.0, 1.1, 1.2], "BMA": [0.8, 0.91, 1.0], "Adam": [0.9, 0.9, 0.9], "AdamBMA": [0.8, 0.9, 0.9]}
    publish(own, studies("quick")[0], arms)
    publish(published, studies("paper")[1], arms)  # three of five seeds
    config = ReportConfig(tmp_path / "out", own, published=published)
    names = [(one.study.name, one.published) for one in find(config)]
    assert names == [
        ("digits-small", False),
        ("cifar10-small", True),
    ]
    outcome = fig5(config)
    assert [picture.path.name for picture in outcome.pictures] == ["fig5", "fig5-own"]
    assert all(picture.svg.stat().st_size > 1000 and picture.png.exists() for picture in outcome.pictures)
    text = outcome.pictures[0].svg.read_text()
    assert text.count("CIFAR-10, small model (published records)") == 2  # loss and error
    assert "authors" in outcome.pictures[0].caption
    assert any("published records" in note for note in outcome.notes)
    assert any("no records here of mnist-small, mnist-large, cifar10-large" in note for note in outcome.notes)
    assert len(outcome.tables) == 5
    first = outcome.tables[3]  # of CIFAR-10 alone: here epoch 1 of 20 has a loss of 19 more than the last
    assert first.title == "CIFAR-10, small model (published records): training loss of the first epoch"
    assert first.rows[0] == ["diag", "910", "–", "10050.0", "–"]
    assert first.rows[1][:4] == ["BMA", "857", "−53", "9951.7"]
    assert first.rows[1][4].startswith("−98.3 ± ")


def test_tables_show_what_was_chosen_and_reached(tmp_path):
    study = studies("quick")[0]
    publish(tmp_path, study, {"diag": [1.0, 1.1, 1.5], "BMA": [0.8, 0.9, 1.0]})
    best, rates = fig5(ReportConfig(tmp_path, tmp_path)).tables
    assert [row[:4] for row in best.rows] == [["diag", "0.1", "3", "48.0"], ["BMA", "0.1", "3", "36.0"]]
    assert best.rows[0][4] == "–"
    assert best.rows[1][4] == "−12 ± 17"  # 40 batches × (−0.2, −0.2, −0.5), t = 4.303
    assert rates.header == ["optimizer", "1", "0.1", "0.01", "0.001", "0.0001"]
    assert rates.rows[0] == ["diag", "80.0", "40.0", "80.0", "80.0", "80.0"]


def test_without_records_it_says_so(tmp_path):
    outcome = fig5(ReportConfig(tmp_path, tmp_path))
    assert (outcome.pictures, outcome.tables) == ([], [])
    assert outcome.claims[0].measured == "diag has 0 of 3 runs, BMA has 0 of 3 runs"
    assert {claim.verdict for claim in outcome.claims} == {Verdict.UNKNOWN}
    assert any("no records here of digits-small, mnist-small" in note for note in outcome.notes)


def test_published_records_do_not_pass_for_those_of_this_profile(tmp_path):
    publish(tmp_path / "results", studies("paper")[0], {"diag": [1.0] * 5, "BMA": [0.9] * 5})
    config = ReportConfig(tmp_path, tmp_path / "records", profile="paper", epochs=3, published=tmp_path / "results")
    assert not any(one.results for one in find(config))


def test_it_is_said_which_code_made_the_records(tmp_path):
    study = studies("quick")[0]
    publish(tmp_path, study, {"diag": [1.0, 1.1, 1.2]})
    made = {"code": "abc123", "torch": "2.13.0", "cpu": "a processor"}
    for spec in study.specs("diag", [0.1], study.final):
        append(study.file(tmp_path), spec.key, record(spec, 1.0, environment=made))
    note = fig5(ReportConfig(tmp_path, tmp_path)).notes[-1]
    assert note.endswith(": 5 runs by code ?, torch ?, ?; 3 runs by code abc123, torch 2.13.0, a processor.")


@pytest.mark.parametrize(("name", "verdict"), [("diag", Verdict.HOLDS), ("BMA", Verdict.FAILS)])
def test_a_run_that_diverges_is_infinitely_bad(tmp_path, painted, name, verdict):
    study = studies("quick")[0]
    publish(tmp_path, study, {"diag": [1.0, 1.1, 1.2], "BMA": [0.8, 0.9, 1.0]})
    spec = study.specs(name, [0.1], study.final)[0]
    whole = record(spec, 1.0)
    append(study.file(tmp_path), spec.key, {**whole, "diverged_at": 3, "epochs": whole["epochs"][:1]})
    outcome = fig5(ReportConfig(tmp_path, tmp_path))
    assert [claim.verdict for claim in outcome.claims[:2]] == [verdict, verdict]
    assert "no mean, runs diverged" in outcome.claims[0].measured
    assert f"{name}: 1 diverged" in outcome.claims[0].measured


def spoil(path: Path, key: str, old: str, new: str) -> None:
    """Change the record of a key."""
    before, start, rest = path.read_text().partition(f'{{"key": "{key}"')
    line, end, after = rest.partition("\n")
    assert old in line
    path.write_text(before + start + line.replace(old, new, 1) + end + after)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"train_loss": 1.0', '"train_loss": NaN'),
        ('"train_loss": 1.0', '"train_loss": null'),
        ('"train_loss": 1.0', '"train_loss": 1e308'),
        ('"environment": {}', '"environment": "x"'),
        ('"environment": {}', '"environment": null'),
        ('"test_error": 0.1', '"test_error": []'),
    ],
)
def test_an_arm_with_a_corrupt_tuning_run_stays_in_the_table_and_the_record_is_named(tmp_path, capsys, old, new):
    study = studies("quick")[0]
    publish(tmp_path, study, {"diag": [1.0, 1.1, 1.2], "BMA weighted": [0.8, 0.9, 1.0]})
    spec = study.specs("BMA weighted", [0.1], study.tuning)[0]
    spoil(study.file(tmp_path), spec.key, old, new)
    outcome = fig5(ReportConfig(tmp_path, tmp_path))
    assert outcome.tables[0].rows[1] == ["BMA weighted", "none yet", "4 of 5 tuning runs", "–", "–", "–", "–"]
    (problem,) = outcome.unusable
    assert problem.startswith(f"The record {spec.key} in {study.file(tmp_path)} cannot be used (")
    page = write_report({"fig5": outcome}, ReportConfig(tmp_path, tmp_path), tmp_path / "report.html").read_text()
    assert "Records that cannot be used, and count as missing:" in page
    assert spec.key in page


def test_a_corrupt_final_run_counts_as_missing(tmp_path):
    study = studies("quick")[0]
    publish(tmp_path, study, {"diag": [1.0, 1.1, 1.2], "BMA": [0.8, 0.9, 1.0]})
    spec = study.specs("BMA", [0.1], study.final)[1]
    spoil(study.file(tmp_path), spec.key, '"train_loss": 0.9', '"train_loss": NaN')
    outcome = fig5(ReportConfig(tmp_path, tmp_path))
    assert [row[2] for row in outcome.tables[0].rows] == ["3", "2 of 3"]
    assert outcome.claims[0].measured == "BMA has 2 of 3 runs"
    assert len(outcome.unusable) == 1


def test_a_study_whose_records_are_all_corrupt_is_not_taken_for_one_without_records(tmp_path):
    study = studies("quick")[0]
    publish(tmp_path, study, {"diag": [1.0, 1.1, 1.2]})
    path = study.file(tmp_path)
    path.write_text("".join(f"{line[:60]}\n" for line in path.read_text().splitlines()))
    outcome = fig5(ReportConfig(tmp_path, tmp_path))
    assert [table.rows for table in outcome.tables] == [[["diag", "none yet", "0 of 5 tuning runs", *["–"] * 4]]]
    assert len(outcome.unusable) == 5
    assert not outcome.pictures
    assert not any("no records here of digits-small" in note for note in outcome.notes)


def test_an_arm_that_diverges_with_every_rate_stays_in_the_table(tmp_path, painted):
    study = studies("quick")[0]
    publish(tmp_path, study, {"diag": [1.0, 1.1, 1.2]})
    for spec in study.specs("Adam", study.rates, study.tuning):
        append(study.file(tmp_path), spec.key, record(spec, 1.0, diverged_at=3, epochs=[], train_loss=None))
    for spec in study.specs("AdamBMA", study.rates, study.tuning):
        append(study.file(tmp_path), spec.key, record(spec, 1.0))
    best, rates = fig5(ReportConfig(tmp_path, tmp_path)).tables
    assert best.rows[1] == ["Adam", "none", "diverged with every rate", "–", "–", "–", "–"]
    assert best.rows[2] == ["AdamBMA", "1", "0 of 3", "–", "–", "–", "–"]
    assert rates.rows[1] == ["Adam", *["diverged"] * 5]
