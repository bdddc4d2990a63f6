"""The study: what comes next, what is not repeated, and what its records say; on records made by hand and tiny runs."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from blockmean import cli
from blockmean.lab.compare import p_value
from blockmean.lab.records import append
from blockmean.lab.study import TUNING_SEEDS, Study, make_study, tuning_loss
from blockmean.lab.study_cells import ARMS, AXES, BASELINE, PROFILES, PUBLISHED
from blockmean.lab.study_pictures import draw_cell
from blockmean.lab.study_results import equivalent_steps, iteration_seconds, notes, saved, tables, tokens_curve
from blockmean.lab.tasks import epoch_length
from blockmean.lab.train import run

CHOSEN = (BASELINE, "Anova")
RECORDS = Path(__file__).parents[2] / "results" / "study"


def record_of(spec, loss, seconds=0.01):
    """A record as `run` writes it."""
    count = spec.steps // epoch_length(spec)
    epoch = {"train_loss": loss, "test_loss": loss, "test_error": 0.5}
    record = {
        "spec": asdict(spec),
        "environment": {},
        "epochs": [{**epoch, "seconds": (i + 1) * epoch_length(spec) * seconds} for i in range(count)],
        "diverged_at": None,
        **epoch,
        "seconds": spec.steps * seconds,
        "step_seconds": 0.1 * spec.steps * seconds,
        "parameters": 100,
        "state_bytes": 800,
        "losses": [loss],
    }
    return json.loads(json.dumps(record))


def loss_of(spec):
    """Anova is better by .2 nats, both want a rate of .008, and doubling the steps is worth .2 nats."""
    rate = 0.02 * math.log2(spec.lr / 0.008) ** 2
    gain = 0.2 if spec.optimizer == "Anova" else 0.0
    return 5 + rate - gain - 0.2 * math.log2(spec.steps / 60) + 0.001 * (spec.seed % 7)


def filled(folder, cells=("XS", "XS-4x"), stop=10**6):
    """A study whose runs have all been made, by hand; and how many that took."""
    study = make_study(folder, cells, CHOSEN, "quick")
    count = 0
    while count < stop and (todo := next(study.wanted(), None)) is not None:
        name, _, spec = todo
        append(study.file(name), spec.key, record_of(spec, loss_of(spec)))
        count += 1
    return study, count


def test_tuning_comes_first_then_fresh_seeds_and_nothing_runs_twice(tmp_path):
    study, count = filled(tmp_path)
    assert list(study.cells) == ["XS-tuning", "XS", "XS-4x"]  # the first was not asked for, but has the settings
    runs = {name: [json.loads(line) for line in study.file(name).read_text().splitlines()] for name in study.cells}
    assert sum(map(len, runs.values())) == count == len({line["key"] for own in runs.values() for line in own})
    tuning = [(line["spec"]["optimizer"], line["spec"]["seed"]) for line in runs["XS-tuning"]]
    assert tuning == [("AdamW", seed) for _ in range(4) for seed in TUNING_SEEDS] + [("Anova", TUNING_SEEDS[0])] * 4
    assert {line["spec"]["seed"] for line in runs["XS"]} == {0, 1}
    assert {line["spec"]["split"] for line in runs["XS"]} == {"pieces"}
    assert make_study(tmp_path, ["XS"], CHOSEN, "quick").plan()[1].done == len(runs["XS"])


def test_a_study_that_was_stopped_goes_on_where_it_was(tmp_path):
    whole, count = filled(tmp_path / "whole")
    filled(tmp_path / "parts", stop=7)
    parts, rest = filled(tmp_path / "parts")
    assert rest == count - 7
    for name in whole.cells:
        assert whole.file(name).read_text() == parts.file(name).read_text()


def test_a_cell_whose_settings_others_take_is_tuned_and_no_more(tmp_path):
    study, _ = filled(tmp_path, ("XS-4x",))
    assert [row.final for row in study.plan()] == [0, 0, 4]
    assert not study.file("XS").exists()
    assert len(study.findings("XS-4x").final["Anova"]) == 2
    assert notes(study) == []


def test_the_best_settings_are_those_with_the_smallest_loss(tmp_path):
    study, _ = filled(tmp_path)
    assert study.best("XS", "Anova")[0] == 0.008
    assert study.best("XS-4x", "Anova") == study.best("XS", "Anova")  # it searches nothing there
    for arm in CHOSEN:
        assert {record["spec"]["lr"] for record in study.findings("XS").final[arm]} == {0.008}


def test_adamws_settings_are_not_chosen_by_one_lucky_seed(tmp_path):
    study = make_study(tmp_path, ["XS-tuning"], [BASELINE], "quick")
    while (todo := next(study.wanted(), None)) is not None:
        name, _, spec = todo
        lucky = (spec.lr, spec.seed) == (0.004, TUNING_SEEDS[0])
        append(study.file(name), spec.key, record_of(spec, loss_of(spec) - 0.03 * lucky))
    tried = study.search("XS-tuning", BASELINE).tried
    assert study.best("XS-tuning", BASELINE)[0] == 0.008
    lines = [json.loads(line) for line in study.file("XS-tuning").read_text().splitlines()]
    assert len(lines) == len(tried) * len(TUNING_SEEDS)
    assert min(lines, key=lambda line: line["train_loss"])["spec"]["lr"] == 0.004
    row = next(table for table in tables(study, "XS-tuning") if table.title.endswith("settings")).rows[0]
    assert row[:2] == ["AdamW", "0.008"]
    assert "2 seeds each" in row[-2]


def test_settings_of_language_models_are_chosen_without_the_held_out_text(tmp_path):
    whole = make_study(tmp_path)
    spec = whole.tuning_specs("XS-tuning", BASELINE, ARMS[BASELINE].start)[0]
    record = {**record_of(spec, 3.0), "test_loss": 2.0}
    assert tuning_loss(record) == 3.0
    assert tuning_loss({**record, "diverged_at": 4, "train_loss": None}) == math.inf
    for name, arm in (("vision", "SGD"), ("M", BASELINE)):
        other = whole.tuning_specs(name, arm, ARMS[arm].start)[0]
        assert other.split == "validation"
        assert tuning_loss({**record, "spec": asdict(other)}) == 2.0


def test_gains_are_told_as_tokens_of_adamws_own_curve(tmp_path):
    study, _ = filled(tmp_path)
    curve = tokens_curve(study, "XS")
    assert [steps for steps, _ in curve] == [30, 60, 120, 240]
    anova = study.findings("XS").final["Anova"]
    adamw = study.findings("XS").final[BASELINE]
    assert saved(curve, anova, adamw)[:3] == pytest.approx((0.5, 0.5, 0.5))  # .2 nats is a doubling
    assert saved(curve, anova, adamw, 1.5).ratio == pytest.approx(0.75)
    assert saved(curve, adamw, adamw).ratio == pytest.approx(1)  # AdamW saves nothing
    apart = [
        {**record, "test_loss": record["test_loss"] + shift} for record, shift in zip(anova, (-0.1, 0.1), strict=True)
    ]
    found = saved(curve, apart, adamw)
    assert found.ratio == pytest.approx(0.5)
    assert (found.low, found.high) == (0.0, math.inf)  # of two seeds nothing can be said
    assert str(found) == "0.50 (< 0.25–> 2.00)"
    assert saved(curve[:1], anova, adamw) is None
    assert saved(curve, anova, []) is None
    assert saved(curve, anova[:1], [adamw[0], {**adamw[1], "diverged_at": 3}]) is None


def test_a_ratio_has_the_ends_of_the_paired_interval(tmp_path):
    study, _ = filled(tmp_path)
    curve, adamw = tokens_curve(study, "XS"), study.findings("XS").final[BASELINE]
    shifts = (-0.002, 0.002)
    ours = [{**record, "test_loss": record["test_loss"] - 0.1 + x} for record, x in zip(adamw, shifts, strict=True)]
    half = 12.7062 * 0.002  # t of one degree of freedom, times the standard error
    assert saved(curve, ours, adamw)[:3] == pytest.approx([2 ** (-0.5 + x / 0.2) for x in (0, -half, half)], rel=1e-4)


def test_times_are_those_of_short_runs_where_there_are_any(tmp_path):
    study, _ = filled(tmp_path)
    assert iteration_seconds(study, "XS") == pytest.approx(dict.fromkeys(CHOSEN, 0.01))
    assert study.times("XS") == {}
    for arm, specs in study.timing_specs("XS").items():
        for spec in specs:
            step = {"step_seconds": 0.004 * spec.steps if arm == "Anova" else 0.001 * spec.steps}
            append(study.file("XS-times"), spec.key, {**record_of(spec, 6.0), **step})
    # Forward and backward pass: 9 ms beside AdamW's steps, 6 ms beside Anova's, which can only be noise.
    assert iteration_seconds(study, "XS") == pytest.approx({BASELINE: 0.0085, "Anova": 0.0115})
    assert next(study.wanted(), None) is None


def test_the_curve_is_interpolated_without_flattering_and_not_extended():
    curve = [(steps, 2 + 100 / steps) for steps in (50.0, 100.0, 200.0)]
    for loss, line in ((3.5, 50 * 2**0.5), (2.7, 100 * 2**0.6)):
        true = 100 / (loss - 2)
        assert equivalent_steps(curve, loss) == pytest.approx(true, rel=0.035)
        assert equivalent_steps(curve, loss) < line  # straight pieces are above the curve
    assert equivalent_steps(curve, 3.0) == pytest.approx(100)
    assert equivalent_steps(curve, 2.5) == pytest.approx(200)
    assert equivalent_steps(curve, 4.5) == 0.0
    assert equivalent_steps(curve, 2.4) == math.inf


def test_the_p_value_is_that_of_a_paired_t_test():
    scipy = pytest.importorskip("scipy.stats")
    values = [0.1, 0.3, 0.2, -0.1, 0.25]
    assert p_value(values) == pytest.approx(scipy.ttest_1samp(values, 0).pvalue)
    assert p_value([0.1]) is None
    assert p_value([0.1, math.inf]) is None


def test_tables_notes_and_pictures_come_from_whatever_records_there_are(tmp_path):
    empty = make_study(tmp_path / "empty", None, CHOSEN, "quick")
    assert [table for name in empty.cells for table in tables(empty, name)] == []
    assert [note for note in notes(empty) if "final" in note] == [
        f"{name}: no final runs yet." for name in PROFILES["quick"] if name != "XS-tuning"
    ]
    assert notes(empty)[0] == "XS-tuning: the search is not over of AdamW; Anova."
    study, _ = filled(tmp_path, ("XS", "XS-4x", "finetune"))
    assert notes(study) == []
    found = {table.title: table for name in study.cells for table in tables(study, name)}
    results = next(table for table in found.values() if "p" in table.header)
    assert [row[0] for row in results.rows] == ["Anova", "AdamW"]
    row = dict(zip(results.header, results.rows[0], strict=True))
    assert row["− AdamW's"] == "−0.20000 ± 0.00000"
    assert row["tokens × AdamW's"] == "0.50"  # all pairs differ by the same
    assert row["seconds × AdamW's"] == "0.50"
    rates = next(table for table in found.values() if "lr" in table.header[0])
    assert rates.header[1:] == ["3e-05", "0.0001", "0.0003", "0.001", "0.003"]
    assert len(rates.rows) == 2
    ablations = next(table for title, table in found.items() if title.endswith("ablations"))
    assert [row[0] for row in ablations.rows] == ["means=0", "means=4, but for the vocabulary"]
    assert draw_cell(study, "XS", tmp_path / "picture").svg.stat().st_size > 1_000
    partly, _ = filled(tmp_path / "partly", stop=10)
    assert "XS-tuning: the search is not over of Anova." in notes(partly)


def test_a_real_study_runs_and_resumes(tmp_path, monkeypatch, quick_workers):
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("BLOCKMEAN_CACHE", str(tmp_path / "cache"))
    small = make_study(tmp_path, ["XS"], CHOSEN, "quick")
    cell = small.cells["XS"]
    budgets = dict.fromkeys(CHOSEN, 1)
    task = replace(cell.task, steps=4, batch=2)
    few = {"seeds": 1, "baseline_seeds": 2, "curve": (2.0,), "curve_seeds": 1}
    cell = replace(cell, task=task, arms=budgets, ablations={}, longer="", like="", **few)
    study = Study({"XS": cell}, CHOSEN, tmp_path)
    said = []
    study.run(None, 2, lambda name, arm, record: said.append(arm))
    assert sorted(said) == ["AdamW"] * 3 + ["AdamW × 2", "Anova", "Anova"]
    kept = study.file("XS").read_text()
    study.run(None, 1, pytest.fail)
    assert study.file("XS").read_text() == kept
    record = study.findings("XS").final["AdamW"][0]
    again = run(study.spec("XS", "AdamW", study.best("XS", "AdamW"), 0))
    assert record["test_loss"] == again["test_loss"]


def test_a_text_of_the_users_own_takes_the_place_of_the_documentation(tmp_path):
    study = make_study(tmp_path, ["XS", "finetune"], CHOSEN, "full", tmp_path / "own.txt")
    assert study.cells["XS"].task.dataset == study.cells["XS"].task.tokenizer == str(tmp_path / "own.txt")
    assert study.tuning_specs("XS-tuning", BASELINE, ARMS[BASELINE].start)[0].split == "validation"
    assert study.cells["finetune"].task.dataset == "shakespeare"
    assert study.cells["finetune"].task.tokenizer == str(tmp_path / "own.txt")


def test_adamw_has_twice_the_budget_of_any_other():
    for cell in PUBLISHED.values():
        others = [budget for arm, budget in {**cell.arms, **cell.search_less}.items() if arm != BASELINE]
        assert cell.arms[BASELINE] >= 2 * max(others)
    assert len(AXES) == 5 and set(PUBLISHED["XS"].arms) <= set(ARMS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cells": ["XL"]}, "There is no cell 'XL'. There are XS-tuning; XS; XS-4x;"),
        ({"arms": ["Lion"]}, "There is no arm 'Lion'. There are AdamW;"),
        ({"profile": "slow"}, "profile must be one of quick, full"),
    ],
)
def test_names_that_do_not_exist_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_study(tmp_path, **arguments)


def command(*arguments):
    return CliRunner().invoke(cli.app, ["bench", "study", *map(str, arguments)], env={"COLUMNS": "250"})


def test_the_command_shows_its_plan_and_what_the_records_say(tmp_path):
    study, _ = filled(tmp_path, ("XS",))
    said = command("--plan", "--records", tmp_path)
    assert said.exit_code == 0, said.output
    assert all(name in said.output for name in PROFILES["quick"])
    assert "of processor time" in said.output
    kept = study.file("XS").read_text()
    shown = command("--show-only", "--cells", "XS", "--arms", "AdamW;Anova", "--records", tmp_path, "--out", tmp_path)
    assert shown.exit_code == 0, shown.output
    assert "tokens × AdamW's" in shown.output and "sensitivity" in shown.output
    assert (tmp_path / "study-XS.png").exists()
    assert study.file("XS").read_text() == kept
    refused = command("--cells", "XL")
    assert refused.exit_code == 2 and "There is no cell 'XL'" in refused.output


def test_the_command_names_packages_that_are_missing(tmp_path, monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name="pytorch_optimizer")

    monkeypatch.setattr("blockmean.lab.study.find", absent)
    result = command("--records", tmp_path)
    assert isinstance(result.exception, SystemExit)
    assert "pytorch_optimizer" in str(result.exception) and "[race]" in str(result.exception)


def test_cells_that_are_only_tuned_are_not_timed(tmp_path):
    study, _ = filled(tmp_path, ("XS-4x",))
    assert {name: len(study.timing_specs(name)) for name in study.cells} == {"XS-tuning": 0, "XS": 0, "XS-4x": 2}
    assert [table.header[-1] for table in tables(study, "XS-tuning")][:1] == ["validation loss"]
    assert tables(make_study(RECORDS, ["XS-tuning"]), "XS-tuning")[0].header[-1] == "training loss"
