"""Benchmarks run, their records are complete, and pictures draw from them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from blockmean.lab import timing
from blockmean.lab.arms import seed_everything
from blockmean.lab.spec import RunSpec
from blockmean.lab.train import run
from support.scripts import load_script, run_script

ROOT = Path(__file__).parent.parent


def load(path: str) -> ModuleType:
    """Import a script that is not part of the package."""
    return load_script(ROOT / path)


def run_benchmark(name: str, *arguments: object) -> str:
    """What a benchmark prints."""
    return run_script(ROOT / "benchmarks" / f"{name}.py", *map(str, arguments))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_every_script_finds_what_it_imports(path: Path):
    assert load(str(path.relative_to(ROOT))).__doc__


shares_the_record = pytest.mark.xdist_group("algebra benchmark")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("benchmarks") / "algebra.json"
    # In a process of its own: it makes malloc keep what is freed.
    command = [sys.executable, str(ROOT / "benchmarks" / "algebra.py"), "--quick", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(out.read_text())


@shares_the_record
def test_the_record_says_where_it_was_taken(record: dict):
    environment = record["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["threads"] == 1
    assert {"python", "scipy", "cpu", "cores", "date", "code", "load"} <= set(environment)


@shares_the_record
def test_the_record_says_whether_page_faults_count(record: dict):
    assert isinstance(record["memory_kept"], bool)


@shares_the_record
def test_every_point_has_times_ratios_and_quartiles_in_order(record: dict):
    assert {point["sweep"] for point in record["points"]} == {"d", "L"}
    for point in record["points"]:
        for table in ("seconds", "ratio_to_read", "ratio_to_read_and_write", "ratio_to_block_mean"):
            assert "inverse_sqrt @ v" in point[table]
            for value in point[table].values():
                assert 0 < value["lower"] <= value["median"] <= value["upper"]
        assert point["ratio_to_read"]["read v"]["median"] == 1


@shares_the_record
def test_dense_rivals_are_there_where_affordable_and_compute_the_same(record: dict):
    small, large = record["points"][:2]
    assert "dense torch, eigh @ v" in small["seconds"]
    assert "dense SciPy, eigh @ v" in small["seconds"]
    assert small["relative_error"] < 1e-5  # float32 products around a float64 root
    assert "dense torch, eigh @ v" not in large["seconds"]
    assert large["relative_error"] is None


@shares_the_record
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_memory_of_the_dense_way_is_at_least_one_matrix(record: dict):
    point = record["points"][0]
    assert point["peak_bytes"]["dense torch, eigh @ v"] >= 4 * point["d"] ** 2
    assert record["points"][1]["peak_bytes"] is None  # not measured, which is not 0


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_bytes_sees_what_was_freed_again():
    million = 2**20
    script = f"""
import torch
from blockmean.lab import timing
from blockmean.lab.arms import seed_everything

def operation():
    return torch.ones(16 * {million}).sum()  # float32

operation()  # the first call also brings torch's own code into memory
print(timing.peak_bytes(operation))
"""
    # In a process of its own: this one may have kept freed memory of other tests.
    peak = int(timing.run_alone(["-c", script]))
    assert abs(peak - 64 * million) < 8 * million  # the kernel counts pages in batches


def test_interleaving_takes_every_operation_equally_often():
    samples = timing.interleaved({"a": lambda: sum(range(50_000)), "b": lambda: sum(range(200_000))}, 5)
    assert {name: len(own) for name, own in samples.items()} == {"a": 5, "b": 5}
    assert timing.summary([3.0, 1.0, 2.0]) == {"median": 2.0, "lower": 1.5, "upper": 2.5}
    assert timing.ratios({"a": [1.0, 2.0], "b": [2.0, 8.0]}, "a")["b"]["median"] == 3.0


@shares_the_record
def test_the_picture_is_drawn_from_the_record_alone(record: dict, tmp_path: Path):
    pictures = load("docs/figures.py").algebra_cost(record, tmp_path)
    assert [path.name for path in pictures] == ["algebra_cost.svg", "algebra_cost.png"]
    assert all(path.stat().st_size > 5000 for path in pictures)


def test_pictures_of_the_documentation_are_small():
    pictures = list((ROOT / "docs" / "img").iterdir())
    assert {path.name for path in pictures} >= {"fig2.svg", "fig3.svg", "algebra_cost.svg"}
    assert all(path.stat().st_size < 200_000 for path in pictures)


@pytest.mark.study  # four processes
def test_the_epoch_benchmark_writes_a_whole_record(tmp_path: Path):
    out = tmp_path / "epoch.json"
    printed = run_benchmark("epoch", "--dataset", "digits", "--rounds", 1, "--out", out)
    record = json.loads(out.read_text())
    assert set(record["epochs"]) == {"diag", "diag, fused", "BMA", "full"}
    for (row,) in record["epochs"].values():
        parts = [row[name] for name in ("reading data", "forward and backward", "optimizer", "drawing batches")]
        assert min(parts) >= 0
        assert 0 < sum(parts) < 1.1 * row["epoch"]  # processor seconds cannot exceed the clock's
        assert row["evaluation"] > 0
    assert printed.startswith("| seconds | epoch |")


def test_the_first_step_benchmark_measures_moves_in_units_of_the_rate(tmp_path: Path):
    out = tmp_path / "first_step.json"
    run_benchmark("first_step", "--dataset", "digits", "--models", "small", "--seeds", 2, "--out", out)
    record = json.loads(out.read_text())
    floors = [seed[name] for seed in record["models"]["small"] for name in seed]
    assert len(floors) == 4
    assert all(0.5 < floor["largest move"] < 1e6 and floor["differences left"] >= 0 for floor in floors)


def test_lost_runs_are_followed_step_by_step_and_not_made_again(tmp_path: Path):
    out = tmp_path / "lost_runs.json"
    arguments = ["--datasets", "digits", "--model", "small", "--arms", "diag, √(r + ε)", "BMA", "--seeds", 0]
    arguments += ["--steps", 5, "--out", out]
    run_benchmark("lost_runs", *arguments)
    printed = run_benchmark("lost_runs", *arguments)
    assert printed.startswith("| data, arm |")  # nothing was run the second time
    diagonal, corrected = (run["steps"] for run in json.loads(out.read_text())["runs"])
    assert all(len(column) == 5 for column in diagonal.values())
    assert max(diagonal["correction"]) < 1e-5 < min(corrected["correction"])
    assert diagonal["smallest eigenvalue"] == [None] * 5


def test_the_first_epoch_is_compared_with_the_same_seeds(tmp_path: Path):
    script = load("benchmarks/first_epoch.py")
    runs = [
        {"variation": "ReLU", "arm": arm, "seed": seed, "sum": value + seed}
        for arm, value in (("diag", 900), ("BMA", 890), ("full", 850))
        for seed in (0, 100)
    ]
    assert "| ReLU | 950 (900–1000) | 940 (890–990) | 900 (850–950) | -10 (-10 to -10) | -50 (-50 to -50) |" in (
        script.table(runs, "sum")
    )
    study = script.first_epoch(script.VARIATIONS["the study's protocol"], "BMA", 0, 3, "digits", None)
    same = RunSpec("digits", "small", lr=0.1, seed=0, steps=3, batch=100, flip=True, curve=True, **script.ARMS["BMA"])
    assert study["sum"] == pytest.approx(500 * sum(run(same)["losses"]) / 3, rel=1e-4)  # kept to five digits
    assert len(study["by fifties"]) == 1
    for name in ("not mirrored, not shuffled", "ReLU"):
        other = script.first_epoch(script.VARIATIONS[name], "BMA", 0, 3, "digits", None)
        assert math.isfinite(other["sum"]) and other["sum"] != study["sum"]


def test_the_page_has_the_records_of_the_large_model():
    script = load("benchmarks/large_model.py")
    page = (ROOT / "docs" / "results.md").read_text()
    study = script.study("mnist")
    table = script.table(study, script.records(study, ROOT / "results"))
    assert "| diag | 0.01 | 650, 1383, 1383 | – | 0.647 | 2 of 3 |" in table
    assert table in page
    study = script.study("cifar10")  # whose best rates differ: diag's is the one to beat
    table = script.table(study, script.fresh_records(study, ROOT / "results"))
    assert "| Anova | 0.001 | 653, 657, 653, 634, 649 | −327 ± 19 | 0.330 | 0 of 5 |" in table
    assert table in page


def test_the_first_look_is_a_study_whose_settings_are_those_of_its_record():
    look = load("benchmarks/first_look.py")
    published = json.loads((ROOT / "benchmarks" / "results" / "first_look.json").read_text())
    assert published["arms"] == look.ARMS
    assert len(published["rows"]) >= 5
    studies = {study.name: study for study in look.studies(look.TASKS, look.ARMS)}
    for row in published["rows"]:
        study = studies[row["task"]]
        assert published["tasks"][study.name].items() <= vars(study.task).items()
        for arm, found in row["arms"].items():
            assert [f"{rate:g}" for rate in study.rates_of(arm)] == list(found["tuning"])
            assert len(study.final.seeds) == len(found["train_loss"])


@pytest.mark.usefixtures("quick_workers")
def test_the_first_look_is_summarised_from_records(tmp_path: Path):
    look = load("benchmarks/first_look.py")
    arms = {arm: look.ARMS[arm] for arm in ("AdamW", "AdamBMA")}
    tiny = replace(look.TASKS["MNIST MLP, raw"], dataset="digits", steps=3)
    (study,) = look.studies({"tiny": tiny}, arms)
    study = replace(study, rates=(1e-3, 1e-2), final=study.final._replace(seeds=(0, 1)))
    study.run(tmp_path, None, jobs=1)
    found = study.findings(tmp_path)
    rows = look.summary(found, look.BASELINE)
    ours, theirs = rows["AdamBMA"]["train_loss"], rows["AdamW"]["train_loss"]
    gains = [a - b for a, b in zip(ours, theirs, strict=True)]
    assert rows["AdamBMA"]["difference"]["mean"] == pytest.approx(sum(gains) / 2)
    assert "difference" not in rows["AdamW"]


@pytest.mark.study
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_iterations_and_peak_memory_are_measured_beside_adamw(tmp_path: Path):
    out = tmp_path / "cost.json"
    run_benchmark("step_cost", "--tasks", "mlp-raw,paper-small", "--repetitions", 2, "--out", out)
    record = json.loads(out.read_text())
    ratios = {row["optimizer"]: row["ratio"]["median"] for row in record["rows"]}
    adamw = ["AdamW, fused", "AdamW", "AdamBMA", "Anova", "SOAP"]
    assert list(ratios) == [*adamw, "Adagrad, fused", "AdaGradBMA"] and min(ratios.values()) > 0
    assert ratios["AdamW, fused"] == ratios["Adagrad, fused"] == 1
    # Anova's state is half of AdamW's in these layers, its temporaries are larger.
    assert -0.5 < record["peak_beyond_adamw"]["Anova"] < 0.3 < record["peak_beyond_adamw"]["SOAP"]


def test_variants_of_anova_differ_from_the_defaults_in_what_they_are_named_after():
    options = load("benchmarks/anova_options.py")
    studies = options.studies()
    assert list(studies) == ["mlp-raw", "mlp", "autoencoder", "transformer-64"]
    for study in studies.values():
        specs = study.final_specs(study.findings(ROOT / "nowhere").best)
        assert len({spec.key for spec in specs}) == len(options.VARIANTS) * len(options.SEEDS)
        assert {spec.optimizer for spec in specs} == {"Anova"} and {spec.lr for spec in specs} == set(study.rates)
        assert [spec.seed for spec in specs[:: len(options.VARIANTS)]] == list(options.SEEDS)


@pytest.mark.usefixtures("quick_workers")
def test_variants_of_anova_are_summarised_from_records(tmp_path: Path):
    options = load("benchmarks/anova_options.py")
    study = options.studies()["mlp"]
    arms = {name: study.arms[name] for name in ("defaults", "4 means")}
    tiny = replace(study.task, dataset="digits", steps=3)
    study = replace(study, task=tiny, arms=arms, final=study.final._replace(seeds=(0, 1), steps=3))
    study.run(tmp_path, None, jobs=1)
    rows = options.summary(study.findings(tmp_path))
    gains = [a - b for a, b in zip(rows["4 means"]["final_loss"], rows["defaults"]["final_loss"], strict=True)]
    assert rows["4 means"]["difference"]["mean"] == pytest.approx(sum(gains) / 2)
    assert rows["defaults"]["step_time_ratio"] == 1


def test_the_transformer_runs_every_rate_with_every_seed(tmp_path: Path):
    script = load("benchmarks/transformer.py")
    studies = script.studies(script.PROFILES["quick"]["transformer-64"])
    specs = [spec for study in studies.values() for spec in study.final_specs(study.findings(tmp_path).best)]
    assert len({spec.key for spec in specs}) == 2 * len(script.RATES) * len(script.SEEDS)
    assert {spec.lr for spec in specs} == set(script.RATES)


def test_steps_of_shards_exchange_what_the_formulas_say():
    script = load("benchmarks/communication.py")
    record = json.loads((ROOT / "benchmarks" / "results" / "communication.json").read_text())
    for row in record["rows"]:
        if row["sweep"] == "L":
            assert row["bytes_per_step"] == script.adam_bma(row["shapes"])
            assert row["collectives_per_step"] == 1
        elif row["sweep"] == "k":
            assert row["bytes_per_step"] == pytest.approx(script.anova(row["shapes"], row["options"]["means"]))
            assert row["collectives_per_step"] == (2 + 5) / 2  # a refresh in every second step
    assert set(record["sent"]) == {"2", "4"}


def test_the_matrices_of_the_large_model_are_those_of_llama():
    shapes = load("benchmarks/communication.py").llama_70b()
    assert sum(units * inputs for units, inputs in shapes) + 161 * 8192 == 68_976_648_192


def test_shards_are_as_far_from_one_process_as_rounding_is():
    record = json.loads((ROOT / "benchmarks" / "results" / "sharded_rounding.json").read_text())
    rms = {(row["optimizer"], row["dtype"], row["kind"]): row["rms"] for row in record["rows"]}
    for optimizer in ("AdamBMA", "Anova"):
        for dtype in ("float64", "float32"):
            assert rms[optimizer, dtype, "one"] == 0
            # DDP takes the step of one process, but averages half batches: more than one unit in the last place.
            rounding = max(rms[optimizer, dtype, kind] for kind in ("rounded", "DDP"))
            assert 0 < rms[optimizer, dtype, "FSDP2"] < 2 * rounding


def test_the_overhead_is_measured_per_tensor(tmp_path: Path):
    overhead, out = load("benchmarks/overhead.py"), tmp_path / "overhead.json"
    run_benchmark("overhead", "--tensors", 20, "--repetitions", 3, "--out", out)
    record = json.loads(out.read_text())
    assert [row["optimizer"] for row in record["rows"]] == list(overhead.OPTIMIZERS)
    assert record["rows"][0]["ratio"]["median"] == 1
    assert all(0 < row["microseconds_per_tensor"]["median"] < 1000 for row in record["rows"])


def test_the_rare_expert_has_a_gradient_in_two_steps_of_a_hundred_and_is_judged_by_held_out_data():
    script = load("benchmarks/anova_rates.py")
    seed_everything(0)
    model, loss_of, batches, (inputs, targets) = script.SETTINGS["expert"].problem(0, 100)
    rare = list(model.experts[-1].parameters())
    used = []
    for _ in range(100):
        x, y = next(batches)
        model.zero_grad()
        loss_of(model(x), y).backward()
        used.append([param.grad is not None for param in rare])
        assert model.body.weight.grad is not None
    assert used.count([True] * 4) == 2 and used.count([False] * 4) == 98
    with torch.no_grad():
        untrained = loss_of(model(inputs), targets).item()
    script.SETTINGS["expert"] = script.SETTINGS["expert"]._replace(steps=2)
    assert script.run("expert", torch.optim.AdamW, 0.0, 0, {})["loss"] == untrained


def test_tables_of_rates_leave_out_tasks_without_records():
    script = load("benchmarks/anova_rates.py")
    records = [{"task": "expert", "arm": arm, "rate": 1e-3, "seed": 0, "loss": 1.0} for arm in script.OPTIMIZERS]
    assert [row[0] for row in script.brief(records)] == ["an expert used in 2% of the steps"]
    assert len(script.draw(records).axes) == 1


def test_the_modes_that_a_generator_covers_are_counted_and_runs_not_made_again(tmp_path: Path):
    script, out = load("benchmarks/gan.py"), tmp_path / "gan.jsonl"
    centres = script.centres()
    near, far = centres[:2] + script.SPREAD, centres[:1] + 4 * script.SPREAD
    assert script.coverage(torch.cat([near.repeat(99, 1), far, far])) == {"modes": 2, "near": pytest.approx(0.99)}
    assert script.coverage(torch.cat([far.repeat(199, 1), centres[:1]]))["modes"] == 0  # half a percent
    arguments = ["--rates", 1e-3, "--seeds", 0, 1, "--steps", 4, "--out", out]
    printed = run_benchmark("gan", *arguments)
    assert "| 0.001, AdamW | 2 |" in printed and "| 0.001, Anova | 2 |" in printed
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 4
    assert all({"midway", "end", "seconds", "environment"} <= set(record) for record in records)
    assert all(0 <= record[when]["modes"] <= 8 for record in records for when in ("midway", "end"))
    assert run_benchmark("gan", *arguments) == printed == run_benchmark("gan", "--table", "--out", out)
    assert len(out.read_text().splitlines()) == 4
