"""The study: what comes next, what is not repeated, and what its records say; on records made by hand and tiny runs."""

import json
import math
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from blockmean import cli
from blockmean.lab.compare import p_value
from blockmean.lab.records import append
from blockmean.lab.study import RUNOFF_SEEDS, TUNING_SEED, Study, make_study
from blockmean.lab.study_cells import ARMS, AXES, BASELINE, PROFILES, PUBLISHED
from blockmean.lab.study_pictures import draw_cell
from blockmean.lab.study_results import equivalent_steps, iteration_ratio, notes, saved, tables, tokens_curve
from blockmean.lab.tasks import epoch_length
from blockmean.lab.train import run

CHOSEN = (BASELINE, "Anova")


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
    lines = [json.loads(line) for line in study.file("XS").read_text().splitlines()]
    assert len({line["key"] for line in lines}) == len(lines)
    runs = [(line["spec"]["optimizer"], line["spec"]["seed"]) for line in lines]
    runoff = [("AdamW", seed) for seed in RUNOFF_SEEDS] * study.cells["XS"].runoff
    tuning = [("AdamW", TUNING_SEED)] * 4 + runoff + [("Anova", TUNING_SEED)] * 4
    assert runs[: len(tuning)] == tuning
    assert {seed for _, seed in runs[len(tuning) :]} == {0, 1}
    assert count == sum(len(study.file(name).read_text().splitlines()) for name in study.cells)
    assert make_study(tmp_path, ["XS", "XS-4x"], CHOSEN, "quick").plan()[0].done == len(lines)


def test_a_study_that_was_stopped_goes_on_where_it_was(tmp_path):
    whole, count = filled(tmp_path / "whole")
    filled(tmp_path / "parts", stop=7)
    parts, rest = filled(tmp_path / "parts")
    assert rest == count - 7
    for name in whole.cells:
        assert whole.file(name).read_text() == parts.file(name).read_text()


def test_the_best_settings_are_those_with_the_smallest_loss(tmp_path):
    study, _ = filled(tmp_path)
    assert study.best("XS", "Anova")[0] == 0.008
    assert study.best("XS-4x", "Anova") == study.best("XS", "Anova")  # it searches nothing there
    for arm in CHOSEN:
        assert {record["spec"]["lr"] for record in study.findings("XS").final[arm]} == {0.008}


def test_adamws_settings_are_not_chosen_by_one_lucky_seed(tmp_path):
    study = make_study(tmp_path, ["XS"], CHOSEN, "quick")
    while (todo := next(study.wanted(), None)) is not None and todo[1] == BASELINE:
        spec = todo[2]
        lucky = (spec.lr, spec.options["weight_decay"], spec.seed) == (0.004, 0.1, TUNING_SEED)
        append(study.file("XS"), spec.key, record_of(spec, loss_of(spec) - 0.05 * lucky))
        found = study.search("XS", BASELINE)
    assert found.best[0] == 0.004
    assert found.tried[found.best] < min(loss for point, loss in found.tried.items() if point != found.best)
    assert study.best("XS", BASELINE)[0] == 0.008
    row = next(table for table in tables(study, "XS") if table.title.endswith("settings")).rows[0]
    assert row[:2] == ["AdamW", "0.008"]
    assert "run-off: 2 × 2" in row[-2]


def test_gains_are_told_as_tokens_of_adamws_own_curve(tmp_path):
    study, _ = filled(tmp_path)
    curve = tokens_curve(study, "XS")
    assert [steps for steps, _ in curve] == [30, 60, 120, 240]
    anova = study.findings("XS").final["Anova"]
    assert saved(curve, anova).median == pytest.approx(0.5, rel=0.01)  # .2 nats is a doubling
    assert saved(curve, anova, 1.5).median == pytest.approx(0.75, rel=0.01)


def test_times_are_those_of_short_runs_where_there_are_any(tmp_path):
    study, _ = filled(tmp_path)
    assert iteration_ratio(study, "XS", "Anova").median == pytest.approx(1)
    assert study.times("XS") == {}
    for arm, specs in study.timing_specs("XS").items():
        for spec in specs:
            seconds = 0.013 if arm == "Anova" else 0.01
            append(study.file("XS-times"), spec.key, record_of(spec, 6.0, seconds))
    assert iteration_ratio(study, "XS", "Anova") == pytest.approx((1.3, 1.3, 1.3))
    assert next(study.wanted(), None) is None


def test_the_curve_is_interpolated_in_the_logarithm_and_not_extended():
    curve = [(50.0, 4.0), (100.0, 3.0), (200.0, 2.5)]
    assert equivalent_steps(curve, 3.5) == pytest.approx(50 * math.sqrt(2))
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
    assert notes(empty) == [f"{name}: no final runs yet." for name in PROFILES["quick"]]
    study, _ = filled(tmp_path, ("XS", "XS-4x", "finetune"))
    assert notes(study) == []
    found = {table.title: table for name in study.cells for table in tables(study, name)}
    results = next(table for table in found.values() if "p" in table.header)
    assert [row[0] for row in results.rows] == ["Anova", "AdamW"]
    row = dict(zip(results.header, results.rows[0], strict=True))
    assert row["− AdamW's"] == "−0.20000 ± 0.00000"
    assert row["tokens × AdamW's"].startswith("0.50 (")
    assert row["seconds × AdamW's"].startswith("0.50 (")
    rates = next(table for table in found.values() if "lr" in table.header[0])
    assert rates.header[1:] == ["3e-05", "0.0001", "0.0003", "0.001", "0.003"]
    assert len(rates.rows) == 2
    ablations = next(table for title, table in found.items() if title.endswith("ablations"))
    assert [row[0] for row in ablations.rows] == ["means=0", "means=4, hidden layers"]
    assert draw_cell(study, "XS", tmp_path / "picture").svg.stat().st_size > 1_000
    partly, _ = filled(tmp_path / "partly", stop=10)
    assert any("final runs" in note for note in notes(partly))


def test_a_real_study_runs_and_resumes(tmp_path, monkeypatch, quick_workers):
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("BLOCKMEAN_CACHE", str(tmp_path / "cache"))
    small = make_study(tmp_path, ["XS"], CHOSEN, "quick")
    cell = small.cells["XS"]
    budgets = dict.fromkeys(CHOSEN, 1)
    task = replace(cell.task, steps=4, batch=2)
    few = {"seeds": 1, "runoff": 1, "curve": (2.0,), "curve_seeds": 1}
    cell = replace(cell, task=task, arms=budgets, ablations={}, longer="", **few)
    study = Study({"XS": cell}, CHOSEN, tmp_path)
    said = []
    study.run(None, 2, lambda name, arm, record: said.append(arm))
    assert sorted(said) == ["AdamW"] * 4 + ["AdamW × 2", "Anova", "Anova"]  # tuning, run-off, final
    kept = study.file("XS").read_text()
    study.run(None, 1, pytest.fail)
    assert study.file("XS").read_text() == kept
    record = study.findings("XS").final["AdamW"][0]
    again = run(study.spec("XS", "AdamW", study.best("XS", "AdamW"), 0))
    assert record["test_loss"] == again["test_loss"]


def test_a_text_of_the_users_own_takes_the_place_of_the_documentation(tmp_path):
    study = make_study(tmp_path, ["XS", "finetune"], CHOSEN, "full", tmp_path / "own.txt")
    assert study.cells["XS"].task.dataset == study.cells["XS"].task.tokenizer == str(tmp_path / "own.txt")
    assert study.cells["finetune"].task.dataset == "shakespeare"
    assert study.cells["finetune"].task.tokenizer == str(tmp_path / "own.txt")


def test_adamw_has_twice_the_budget_of_any_other():
    for cell in PUBLISHED.values():
        others = [budget for arm, budget in {**cell.arms, **cell.search_less}.items() if arm != BASELINE]
        assert cell.arms[BASELINE] >= 2 * max(others)
    assert PUBLISHED["XS"].arms[BASELINE] == 2 * PUBLISHED["XS"].arms["Anova"]
    assert len(AXES) == 5 and set(PUBLISHED["XS"].arms) <= set(ARMS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cells": ["XL"]}, "There is no cell 'XL'. There are XS; XS-4x; XS-16k;"),
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
