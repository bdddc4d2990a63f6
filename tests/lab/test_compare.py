"""Studies: what they run, which rate they choose, and the intervals of their differences."""

import json
import math
from dataclasses import asdict, replace

import pytest
import scipy.stats

from blockmean.lab.compare import NO_RUNS, Interval, Stage, Study, differences, interval, results_table
from blockmean.lab.paper.protocol import studies
from blockmean.lab.records import append
from blockmean.lab.tasks import Task, steps_per_epoch

ARMS = {
    "diag": {"optimizer": "Adagrad", "options": {"eps": 1e-10}},
    "BMA": {"optimizer": "AdaGradBMA", "options": {"variant": "consistent"}},
}
STUDY = Study("tiny", Task("digits", "small", batch=1000), ARMS, (0.1, 0.01), Stage((7,), 4), Stage((0, 1), 8))


def record_of(spec, last_loss, **changed):
    """A record as `run` writes it, with a chosen loss in its last epoch."""
    epochs = spec.steps // steps_per_epoch(spec.dataset, spec.batch)
    rows = [{"train_loss": last_loss + epochs - e, "test_loss": 1.0, "test_error": 0.5} for e in range(1, epochs + 1)]
    ends = {"train_loss": last_loss, "test_loss": 1.0, "test_error": 0.5, "data_seconds": 1.0}
    times = {"seconds": 2.0, "step_seconds": 1.0}
    record = {"spec": asdict(spec), "environment": {}, "epochs": rows, "diverged_at": None, **ends, **times, **changed}
    return json.loads(json.dumps(record))


@pytest.mark.usefixtures("quick_workers")
def test_a_study_tunes_runs_fresh_seeds_and_is_not_run_twice(tmp_path):
    seen = []
    STUDY.run(tmp_path, None, jobs=2, on_steps=seen.append)
    # 2 arms × (2 rates × 1 seed × 1 epoch + 2 seeds × 2 epochs) × 4 batches
    assert seen[-1] == STUDY.total_steps() == 48
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.jsonl"]
    found = STUDY.findings(tmp_path)
    assert len(found.every) == 8
    for arm, records in found.results.items():
        assert [record["spec"]["seed"] for record in records] == [0, 1]
        assert {record["spec"]["lr"] for record in records} == {found.best[arm]}
        assert [len(record["epochs"]) for record in records] == [2, 2]
    text = STUDY.file(tmp_path).read_text()
    STUDY.run(tmp_path, None, jobs=2)
    assert STUDY.file(tmp_path).read_text() == text


def test_the_best_rate_has_the_smallest_loss_and_no_divergence(tmp_path):
    study = replace(STUDY, rates=(1.0, 0.1, 0.01), tuning=Stage((7, 8), 4))
    losses = {"diag": (0.9, 0.5, 0.7), "BMA": (0.1, 0.6, 0.4)}
    for arm in ARMS:
        for rate, loss in zip(study.rates, losses[arm], strict=True):
            for spec in study.specs(arm, [rate], study.tuning):
                diverged = arm == "BMA" and rate == 1.0 and spec.seed == 8  # one seed is enough
                append(study.file(tmp_path), spec.key, record_of(spec, loss, diverged_at=3 if diverged else None))
    assert study.findings(tmp_path).best == {"diag": 0.1, "BMA": 0.01}
    assert study.findings(tmp_path).tuned["BMA"] == pytest.approx({1.0: math.inf, 0.1: 0.6, 0.01: 0.4})


def test_an_arm_that_misses_a_tuning_run_has_no_best_rate_yet(tmp_path):
    specs = STUDY.tuning_specs()
    for spec in specs[:-1]:
        append(STUDY.file(tmp_path), spec.key, record_of(spec, 1.0))
    assert list(STUDY.findings(tmp_path).best) == ["diag"]
    assert STUDY.findings(tmp_path).results == {}
    final = STUDY.specs("diag", [STUDY.findings(tmp_path).best["diag"]], STUDY.final)
    append(STUDY.file(tmp_path), final[1].key, record_of(final[1], 1.0))
    assert [record["spec"]["seed"] for record in STUDY.findings(tmp_path).results["diag"]] == [1]


def test_an_arm_that_diverges_with_every_rate_has_no_best_one(tmp_path):
    for spec in STUDY.tuning_specs():
        diverged_at = 1 if spec.optimizer == "Adagrad" else None
        append(STUDY.file(tmp_path), spec.key, record_of(spec, 1.0, diverged_at=diverged_at))
    assert list(STUDY.findings(tmp_path).best) == ["BMA"]
    assert list(STUDY.findings(tmp_path).tuned) == ["diag", "BMA"]


def test_intervals_are_those_of_a_t_test():
    values = [0.3, -0.1, 0.25, 0.4, 0.05]
    found = interval(values)
    low, high = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert found.mean - found.half_width == pytest.approx(low)
    assert found.mean + found.half_width == pytest.approx(high)
    assert interval([1.0]) is None
    assert interval([1.0, math.inf]) is None
    assert str(Interval(-0.012345, 0.00456)) == "−0.0123 ± 0.0046"
    assert str(Interval(35.71, 223.4)) == "+36 ± 223"
    assert str(Interval(0.5, 0.0)) == "+0.50000 ± 0.00000"


def test_differences_are_taken_between_equal_seeds():
    specs = STUDY.specs("diag", [0.1], Stage((0, 1, 2, 3), 4))
    theirs = [record_of(spec, loss) for spec, loss in zip(specs, (1.0, 2.0, 3.0, 9.0), strict=True)]
    ours = [record_of(spec, loss) for spec, loss in zip(specs, (0.5, 1.7, 2.6, 0.0), strict=True)]
    found = differences([ours[2], ours[0], ours[1]], theirs, lambda record: record["train_loss"])
    assert found == [2.6 - 3.0, 0.5 - 1.0, 1.7 - 2.0]
    assert differences(ours[:2], theirs[1:], lambda record: math.inf) == [0.0]


@pytest.mark.usefixtures("quick_workers")
def test_without_tuning_every_arm_runs_its_only_rate(tmp_path):
    study = replace(STUDY, rates={"diag": (0.1,), "BMA": (0.01,)}, tuning=NO_RUNS)
    assert study.tuning_specs() == []
    study.run(tmp_path, None, jobs=1)
    found = study.findings(tmp_path)
    assert study.is_complete(tmp_path)
    assert found.best == {"diag": 0.1, "BMA": 0.01}
    assert [len(records) for records in found.results.values()] == [2, 2]
    assert [row[:3] for row in results_table(study, found, [], "").rows] == [["diag", "0.1", "2"], ["BMA", "0.01", "2"]]
    with pytest.raises(ValueError, match=r"Without tuning every arm has one rate. Got another number for diag, BMA"):
        replace(STUDY, tuning=NO_RUNS)


def test_the_papers_protocol():
    quick, paper = studies("quick"), studies("paper")
    assert {study.task.dataset for study in quick} == {"digits"}
    assert [study.name for study in paper] == ["mnist-small", "cifar10-small", "mnist-large", "cifar10-large"]
    for study in [*quick, *paper]:
        assert study.rates == (1.0, 0.1, 0.01, 0.001, 0.0001)
        assert study.task.batch == 100
        assert study.task.flip == (study.task.dataset == "cifar10")
        assert not set(study.tuning.seeds) & set(study.final.seeds)
        assert ("full" in study.arms) == (study.task.model == "small")
        assert study.arms["BMA"]["options"]["eigenvalue_floor"] == 1e-10
    changed = studies("paper", seeds=3, epochs=7)
    assert {(study.final.seeds, study.epochs(study.final)) for study in changed} == {((0, 1, 2), 7)}
    with pytest.raises(ValueError, match=r"profile must be one of quick, paper. Got 'fast'"):
        studies("fast")
