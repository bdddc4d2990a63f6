"""`blockmean bench race`: real races with a few steps, resumed, refused and half done."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from blockmean import cli
from blockmean.lab.arms import ARMS
from blockmean.lab.tasks import PROFILES

run = CliRunner().invoke
WIDE = {"COLUMNS": "250"}


def race(*arguments: str, **environment: str):
    return run(cli.app, ["bench", "race", *arguments], env={**WIDE, **environment})


def test_list_names_every_task_and_arm():
    for profile, tasks in PROFILES.items():
        lines = race("--list", "--profile", profile).output.splitlines()
        assert [line.split()[:2] for line in lines if line.startswith("task")] == [["task", name] for name in tasks]
        assert [line for line in lines if line.startswith("arm")] == lines[len(tasks) :]
        assert all(any(line.startswith(f"arm   {arm} ") for line in lines) for arm in ARMS)


@pytest.mark.usefixtures("quick_workers")
def test_a_race_runs_resumes_and_redraws(tmp_path: Path):
    arguments = ["--tasks", "mlp-raw", "--arms", "AdamBMA", "--steps", "20", "--seeds", "2", "--jobs", "1"]
    arguments += ["--out", str(tmp_path)]
    result = race(*arguments)
    assert result.exit_code == 0, result.output
    records = tmp_path / "records" / "mlp-raw.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    assert len(lines) == 2 * (4 + 2) + 2  # and two runs that set the target
    for name in ("AdamW", "AdamBMA", "Digits MLP, raw pixels, 20 steps: target", str(tmp_path / "race.json")):
        assert name in result.output
    found = json.loads((tmp_path / "race.json").read_text())
    task = found["tasks"]["mlp-raw"]
    assert set(task["arms"]) == {"AdamW", "AdamBMA"}
    tuned = task["tuned"]["AdamW"]
    assert task["target_runs"][0] == min(tuned.values())
    assert task["target"] == pytest.approx(sum(task["target_runs"]) / 3)
    assert f"{task['arms']['AdamW']['rate']:g}" == min(tuned, key=tuned.__getitem__)
    assert found["environment"]["torch"]
    assert {"race.png", "race.svg", "race-mlp-raw.png", "race-mlp-raw.svg"} <= {p.name for p in tmp_path.iterdir()}

    records.write_text("".join(lines[1:]))
    assert race(*arguments).exit_code == 0
    again = records.read_text().splitlines(keepends=True)
    assert again[:-1] == lines[1:]  # only what was missing
    assert json.loads(again[-1])["key"] == json.loads(lines[0])["key"]

    (tmp_path / "race.json").unlink()
    records.write_text("".join(lines[:-1]))
    redrawn = race(*arguments, "--draw-only")
    assert redrawn.exit_code == 0
    assert "pictures ━" in redrawn.output  # a bar
    assert records.read_text() == "".join(lines[:-1])
    assert (tmp_path / "race.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "mlp,chess"], "There is no task 'chess'. There are mlp-raw; mlp;"),
        (["--arms", "Lion"], "There is no arm 'Lion'. There are AdamW;"),
        (["--tasks", ","], "Give names, separated by ','. Got ',' instead."),
        (["--profile", "slow"], "profile must be one of quick, full. Got 'slow' instead."),
        (["--seeds", "0"], "--seeds"),
        (["--tuning-seeds", "6"], "--tuning-seeds"),
        (["--jobs", "0"], "--jobs"),
        (["--draw-only"], "There are no records of this race in "),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_computed(arguments: list[str], message: str, tmp_path: Path):
    result = race(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "out").exists()


def test_steps_that_were_not_measured_cannot_be_shown(tmp_path: Path):
    out = tmp_path / "steps.jsonl"
    result = run(cli.app, ["bench", "step", "--show-only", "--out", str(out)], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert f"There are no measurements of these networks in {out}. Give their file as --out." in result.output


def test_missing_data_is_named_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("BLOCKMEAN_DATA", raising=False)
    out = tmp_path / "out"
    for task, what in (("mlp", "mnist was not found"), ("transformer-64", "text/tinyshakespeare.txt was not found")):
        result = race(
            "--profile", "full", "--tasks", task, "--arms", "AdamW", "--out", str(out), BLOCKMEAN_CACHE=str(tmp_path)
        )
        assert result.exit_code == 2
        assert what in result.output
        assert "neither --data-dir nor BLOCKMEAN_DATA is given" in result.output
    assert not out.exists()


def test_a_missing_package_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = importlib.import_module

    def without(name: str, package: str | None = None):
        if name == "pytorch_optimizer":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    result = race("--arms", "SOAP,Kron", "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert result.output == "`blockmean bench race` needs pytorch_optimizer. In a checkout: pip install '.[race]'\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("columns", [80, 120])
def test_help_is_complete(columns: int):
    for arguments in (["bench", "--help"], ["bench", "race", "--help"], ["bench", "step", "--help"]):
        text = run(cli.app, arguments, env={"COLUMNS": str(columns)}).output
        assert max(map(len, text.splitlines())) <= columns
        assert "…" not in text
        assert arguments[-2] in text
