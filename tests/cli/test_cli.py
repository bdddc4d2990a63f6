"""The command line, inside this process and once as a user calls it."""

from __future__ import annotations

import builtins
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

import blockmean
from blockmean import cli
from blockmean.lab import data, paper
from blockmean.lab.arms import OPTIMIZERS
from blockmean.lab.models import MODELS
from blockmean.lab.paper import PARTS, Claim, Outcome, ReportConfig, Verdict
from blockmean.lab.paper.protocol import studies
from blockmean.lab.records import Records
from blockmean.lab.sources import DamagedData
from support.small_data import small_mnist, write

run = CliRunner().invoke


def test_version():
    result = run(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"blockmean {blockmean.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["bench", "race", "--help"]])
def test_help_imports_nothing_that_takes_seconds(arguments: list[str]):
    code = (
        "import sys; from blockmean.cli import app; app(standalone_mode=False); "
        "print('loaded:', *{'torch', 'matplotlib', 'scipy', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert len(result.stdout.splitlines()) > 1
    assert result.stdout.splitlines()[-1].split() == ["loaded:"]


def test_without_a_command_it_shows_help():
    assert "reproduce" in run(cli.app, []).output


def test_list_names_every_part():
    result = run(cli.app, ["reproduce", "--list"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines] == list(PARTS)
    assert all(len(line.split()) > 3 for line in lines)  # each says what it is


def test_only_the_parts_that_are_asked_for(tmp_path: Path):
    result = run(cli.app, ["reproduce", "theorems", "fig2", "--out", str(tmp_path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "Theorem 2" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"fig2.svg", "fig2.png", "report.html", "records"}
    assert f"report: {tmp_path / 'report.html'}" in result.output
    assert re.search(r"^report +━+ 100%", result.output, re.MULTILINE)  # a bar


def test_records_that_are_not_there_are_refused_before_anything_is_drawn(tmp_path: Path):
    out, records = tmp_path / "out", tmp_path / "none"
    result = run(cli.app, ["report", "--records", str(records), "--out", str(out)], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert f"There is no folder {records}. Give the one that `blockmean reproduce` wrote." in result.output
    assert not out.exists()


def test_pictures_are_the_same_bytes_every_time(tmp_path: Path):
    first, second = (PARTS["fig2"](ReportConfig(tmp_path / name, tmp_path)).pictures for name in "ab")
    assert [picture.svg.read_bytes() for picture in first] == [picture.svg.read_bytes() for picture in second]


def outcome(verdict: Verdict, exact: bool) -> Outcome:
    return Outcome([Claim("two is two", "2", Verdict.HOLDS, exact=True), Claim("one is two", "1", verdict, exact)])


@pytest.mark.parametrize(
    ("verdict", "exact", "code"),
    [(Verdict.FAILS, True, 1), (Verdict.FAILS, False, 0), (Verdict.NOISE, False, 0), (Verdict.UNKNOWN, False, 0)],
)
def test_only_mathematics_that_fails_gives_exit_code_1(
    verdict: Verdict, exact: bool, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(paper, "PARTS", {"part": lambda config: outcome(verdict, exact)})
    result = run(cli.app, ["report", "--out", str(tmp_path)])
    assert result.exit_code == code
    assert str(verdict) in result.output


@pytest.mark.parametrize("error", [FileNotFoundError, DamagedData])
def test_a_part_without_good_data_does_not_withhold_the_rest(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def without_data(config: ReportConfig) -> Outcome:
        raise error("mnist was not found")

    monkeypatch.setattr(paper, "PARTS", {"a": without_data, "b": lambda config: outcome(Verdict.NOISE, False)})
    result = run(cli.app, ["report", "--out", str(tmp_path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "a is not in the report: mnist was not found" in result.output
    assert "mnist was not found" in (tmp_path / "report.html").read_text()


def test_a_part_that_is_wrong_is_not_taken_for_a_wrong_argument(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def broken(config: ReportConfig) -> Outcome:
        raise ValueError("a bug")

    monkeypatch.setattr(paper, "PARTS", {"a": broken})
    result = run(cli.app, ["report", "--out", str(tmp_path)])
    assert isinstance(result.exception, ValueError)
    assert "Usage" not in result.output


def test_missing_data_is_named_before_the_first_run(tmp_path: Path):
    source, contents = small_mnist()
    write(tmp_path, contents)
    arguments = ["reproduce", "fig5", "--profile", "paper", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    with patch.dict(data.SOURCES, {"mnist": source}):
        result = run(cli.app, arguments, env={"COLUMNS": "300", "BLOCKMEAN_CACHE": str(tmp_path / "cache")})
    assert result.exit_code == 2
    assert "cifar10 was not found" in result.output
    assert "%" not in result.output  # no bar was shown
    assert not (tmp_path / "out").exists()


def test_damaged_data_is_named_once(tmp_path: Path):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"not gzip")
    for name in ("train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (tmp_path / name).write_bytes(b"")
    arguments = ["reproduce", "fig5", "--profile", "paper", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    result = run(cli.app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert result.output.count("is truncated or damaged") == result.output.count("with --download") == 1


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are found in /proc")
def test_a_killed_worker_ends_reproduce_in_one_line(tmp_path: Path):
    blockmean_command = str(Path(sys.executable).parent / "blockmean")
    command = [
        blockmean_command,
        "reproduce",
        "fig5",
        "--jobs",
        "1",
        "--epochs",
        "1000",
        "--out",
        str(tmp_path / "out"),
    ]
    records = tmp_path / "out" / "records" / "digits-small.jsonl"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (records.exists() and records.stat().st_size) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (worker,) = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(worker, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(
        r"The process of the run digits-small-\w+-\w+ was killed; .* "
        rf"Finished runs are in {re.escape(str(records))}: run the same command again to resume, .*\.\n",
        errors,
    )
    assert Records(records).every()


def test_records_of_an_older_version_are_named(tmp_path: Path):
    folder = tmp_path / "records" / "digits-small"
    folder.mkdir(parents=True)
    (folder / "digits-small-Adagrad-0.json").write_text("{}")
    for command, code in (("reproduce", 2), ("report", 0)):  # which shows the other parts
        result = run(cli.app, [command, "fig5", "--out", str(tmp_path)], env={"COLUMNS": "400"})
        assert result.exit_code == code
        assert f"{folder} has one file per record, as older versions wrote them." in result.output
    assert not folder.with_suffix(".jsonl").exists()


def test_the_report_names_records_that_cannot_be_used(tmp_path: Path):
    study = studies("quick")[0]
    path = study.file(tmp_path / "records")
    path.parent.mkdir()
    keys = [spec.key for spec in study.tuning_specs()[:2]]
    path.write_text("".join(f'{{"key": "{key}", "train_loss": NaN}}\n' for key in keys))
    result = run(cli.app, ["report", "fig5", "--out", str(tmp_path)], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    for key in keys:
        problem = f"fig5: The record {key} in {path} cannot be used (NaN is not JSON); it counts as missing."
        assert problem in result.output
        assert key in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", ["reproduce", "report", "train", "inspect"])
def test_help_is_complete(command: str, columns: int):
    overview = run(cli.app, ["--help"], env={"COLUMNS": str(columns)}).output
    own = run(cli.app, [command, "--help"], env={"COLUMNS": str(columns)}).output
    for text in (overview, own):
        assert max(map(len, text.splitlines())) <= columns
        assert "…" not in text
        assert "..." not in text.partition("\n")[2]
    assert command in overview


def test_the_help_of_train_names_every_choice():
    text = run(cli.app, ["train", "--help"], env={"COLUMNS": "80"}).output
    for name in (*OPTIMIZERS, *MODELS, *data.DATASETS, *data.PREPARATIONS):
        assert name in text


@pytest.mark.parametrize("record", [None, '{"key": "table4-quick"}\n'])
def test_report_measures_nothing(record: str | None, tmp_path: Path):
    path = tmp_path / "records" / "measurements.jsonl"
    if record is not None:
        path.parent.mkdir()
        path.write_text(record)
    result = run(cli.app, ["report", "table4", "--out", str(tmp_path)], env={"COLUMNS": "300"})
    assert result.exit_code == 0
    command = f"blockmean reproduce table4 --profile quick --records {tmp_path / 'records'}"
    assert f"`{command}` measures it" in result.output
    assert (path.read_text() if path.exists() else None) == record


def test_paths_are_printed_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(paper, "PARTS", {"part": lambda config: outcome(Verdict.NOISE, False)})
    out = tmp_path / "[bold]"
    result = run(cli.app, ["report", "--out", str(out)])
    assert f"report: {out / 'report.html'}" in result.output


@pytest.mark.parametrize("part", ["fig4", "fig5"])
def test_download_fetches_what_is_not_here(part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = []
    monkeypatch.setattr(data, "fetch", lambda source: asked.append(source.name) or tmp_path)
    monkeypatch.setattr(data, "find", lambda source, folder: ([], ["a file"] if source.name == "mnist" else []))
    arguments = ["reproduce", part, "--profile", "paper", "--download", "--data-dir", str(tmp_path), "--out"]
    run(cli.app, [*arguments, str(tmp_path / "out")])
    assert asked == ["mnist"]


@pytest.mark.parametrize("command", ["reproduce", "report"])
def test_an_unknown_part_or_profile_lists_what_there_is(command: str, tmp_path: Path):
    result = run(cli.app, [command, "fig9", "--out", str(tmp_path)], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "There is no part fig9" in result.output
    assert all(name in result.output for name in PARTS)
    result = run(cli.app, [command, "fig5", "--profile", "slow", "--out", str(tmp_path)], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "must be one of quick, paper" in result.output


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("reproduce", "--out"),
        ("reproduce", "--records"),
        ("report", "--out"),
        ("train", "--out"),
        ("inspect", "--out"),
    ],
)
def test_a_folder_that_cannot_be_made_is_named_before_anything_runs(command: str, option: str, tmp_path: Path):
    (tmp_path / "file").touch()
    parts = {"train": [], "inspect": ["small"]}.get(command, ["fig2"])
    folder = tmp_path / "file" / "folder"
    arguments = [command, *parts, "--out", str(tmp_path / "out"), option, str(folder)]
    result = run(cli.app, arguments, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert f"{folder} cannot be a folder: {tmp_path / 'file'} is a file." in result.output
    assert "%" not in result.output  # no bar was shown


def test_a_folder_without_permission_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may write everywhere
    folder = tmp_path / "a" / "b"
    for command in (["train"], ["inspect", "small"], ["report"]):
        result = run(cli.app, [*command, "--out", str(folder)], env={"COLUMNS": "300"})
        assert result.exit_code == 2
        assert f"{folder} cannot be written: there is no permission to write to {tmp_path}." in result.output
    assert not folder.parent.exists()


def test_the_full_study_without_data_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("BLOCKMEAN_DATA", raising=False)
    monkeypatch.setenv("BLOCKMEAN_CACHE", str(tmp_path))
    command = ["reproduce", "fig5", "--profile", "paper", "--jobs", "1", "--out", str(tmp_path)]
    result = run(cli.app, command, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "--data-dir" in result.output
    assert "Traceback" not in result.output


@pytest.mark.study  # with 63 short runs
def test_the_quick_profile_from_nothing_to_the_report_and_again_from_records(tmp_path: Path):
    out = tmp_path / "out"
    command = ["reproduce", "fig5", "--seeds", "2", "--epochs", "1", "--out", str(out)]
    result = run(cli.app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "about five minutes of processor time" in result.output
    records = out / "records" / "digits-small.jsonl"
    first, *others = records.read_text().splitlines(keepends=True)
    assert 1 + len(others) == len(studies("quick")[0].arms) * (5 + 2)
    page = (out / "report.html").read_text()
    assert page.count("data:image/svg+xml") >= 2
    assert "MNIST, 4,000 digits, small model: AdaGrad-BMA reaches a smaller training loss than diag" in page

    records.write_text("".join([*others, first[:100]]))  # as a killed process leaves it
    again = run(cli.app, command, env={"COLUMNS": "200"})
    assert again.exit_code == 0, again.output
    assert len(Records(records).every()) == 1 + len(others)
    assert records.read_text().startswith("".join(others))  # nothing else ran again
    (out / "report.html").unlink()
    only_report = run(cli.app, ["report", "fig5", "--seeds", "2", "--epochs", "1", "--out", str(out)])
    assert only_report.exit_code == 0
    assert (out / "report.html").exists()


def test_train_shows_how_it_goes_and_leaves_a_plot_and_a_record(tmp_path: Path):
    command = ["train", "--model", "small", "--optimizer", "AdaGradBMA", "--epochs", "1", "--out", str(tmp_path)]
    command += ["--option", "variant=weighted", "--option", "eps=1e-8"]
    result = run(cli.app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "held-out loss" in result.output and "held-out error" in result.output
    (record,) = Records(tmp_path / "train.jsonl").every()
    assert record["spec"]["options"] == {"variant": "weighted", "eps": 1e-8}
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl", ".png", ".svg"}


def test_train_says_that_a_run_diverged(tmp_path: Path):
    command = ["train", "--model", "mlp", "--optimizer", "SGD", "--lr", "1e30", "--epochs", "1", "--out", str(tmp_path)]
    result = run(cli.app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "Diverged at step" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--option", "variant"], "--option must look like key=value. Got 'variant'"),
        (["--option", "variant=best"], "variant"),
        (["--option", "speed=3"], "Anova has no option speed. It has betas, eps, weight_decay,"),
        (["--option", "lr=3"], "Give the learning rate as --lr, not as an option. Got 'lr=3'."),
        (["--seed", "-1"], "seed must be between 0 and 4294967295. Got -1 instead."),
        (["--optimizer", "Lion"], "optimizer must be one of"),
        (["--optimizer", "AdamW", "--compare", "SGD"], "Give --optimizer or --compare, not both."),
        (["--compare", "AdamW,Lion"], "optimizer must be one of"),
        (["--compare", ","], "Give names, separated by ','. Got ',' instead."),
        (["--compare", "Anova,SGD", "--option", "means=1"], "SGD has no option means. It has momentum,"),
        (["--optimizer", "AdaGradFull"], "AdaGradFull would need"),
        (["--model", "huge"], "model must be one of small, large, mlp, cnn, convnet, resnet, resnet10, module:object."),
        (["--model", "no_such_module:build"], "cannot be imported: No module named 'no_such_module'"),
        (["--model", "torch.nn:Linear"], "or a function without arguments that returns one"),
        (["--model", "torch.nn:Identity"], "optimizer got an empty parameter list"),
        (["--inputs", "grey"], "inputs must be one of"),
        (["--lr", "inf"], "lr must be a finite number. Got inf instead."),
        (["--lr", "nan"], "lr must be a finite number. Got nan instead."),
        (["--lr", "-1"], "Got -1.0 instead."),
        (["--option", "eps=1e999"], "The option 'eps' must be made of finite numbers"),
        (["--option", "betas={1, 2}"], "The option 'betas' must be made of finite numbers"),
        (["--option", "eps={[]: 1}"], "eps"),
        (["--dataset", "imagenet"], "dataset must be one of"),
        (["--batch", "5000"], "A batch of 5000 cannot be drawn from 4000 images"),
    ],
)
def test_train_names_what_is_wrong(arguments: list[str], message: str, tmp_path: Path):
    out = tmp_path / "out"
    result = run(cli.app, ["train", *arguments, "--out", str(out)], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in result.output
    assert "loss" not in result.output and "0/" not in result.output  # no bar was shown
    assert not out.exists()


def test_train_looks_for_the_data_before_it_draws_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("BLOCKMEAN_DATA", raising=False)
    monkeypatch.setenv("BLOCKMEAN_CACHE", str(tmp_path))
    out = tmp_path / "out"
    result = run(cli.app, ["train", "--dataset", "mnist", "--out", str(out)], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "mnist was not found" in result.output
    assert not re.search(r"\b0/\d", result.output)  # a bar counts steps; a folder may be called gw0
    assert not out.exists()


@pytest.mark.parametrize(
    ("optimizer", "given", "rate"),
    [("AdaGradBMA", [], 0.01), ("AdamBMA", [], 0.003), ("AdamW", [], 0.003), ("AdamBMA", ["--lr", "0.001"], 0.001)],
)
def test_train_takes_a_learning_rate_that_suits_the_optimizer(
    optimizer: str, given: list[str], rate: float, tmp_path: Path
):
    command = ["train", "--model", "mlp", "--optimizer", optimizer, *given, "--epochs", "1", "--batch", "1000"]
    command += ["--out", str(tmp_path)]
    result = run(cli.app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    (record,) = Records(tmp_path / "train.jsonl").every()
    assert record["spec"]["lr"] == rate
    assert f"{optimizer} (lr {rate:g})" in result.output


@pytest.mark.slow  # what a user sees first
def test_a_first_call_ends_with_a_good_test_error(tmp_path: Path):
    result = run(cli.app, ["train", "--epochs", "2", "--out", str(tmp_path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    (record,) = Records(tmp_path / "train.jsonl").every()
    assert record["test_error"] < 0.05  # of 1,000 digits; chance is 0.9


def test_compare_trains_several_optimizers_on_the_same_batches(tmp_path: Path):
    command = [
        "train",
        "--compare",
        "AdamW,Anova, AdamW,SGD",
        "--model",
        "mlp",
        "--epochs",
        "1",
        "--out",
        str(tmp_path),
    ]
    result = run(cli.app, command, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    records = Records(tmp_path / "train.jsonl").every()
    assert sorted(record["spec"]["optimizer"] for record in records) == ["AdamW", "Anova", "SGD"]
    assert len({record["losses"][0] for record in records}) == 1  # same weights, same first batch
    assert len({record["losses"][-1] for record in records}) == 3
    assert "…" not in result.output
    for record in records:
        assert f"{record['test_error']:.2%}" in result.output
        assert f"{record['train_loss']:.4f}" in result.output
        assert f"{record['test_loss']:.4f}" in result.output
    assert "Anova beside AdamW: training loss" in result.output
    assert "100%" not in result.output  # no bars are left above the table
    first, second, _ = sorted(record["test_error"] for record in records)
    noise = 1.96 * ((first * (1 - first) + second * (1 - second)) / 1000) ** 0.5
    assert f"less than {100 * noise:.1f} points apart are within noise (1,000 predictions)" in result.output
    (picture,) = tmp_path.glob("compare-digits-mlp-*.svg")
    assert {path.suffix for path in tmp_path.glob("compare-*")} == {".png", ".svg"}
    assert str(picture) in result.output.replace("\n", "")


@pytest.mark.slow  # what the help text shows first
def test_the_first_comparison_takes_half_a_minute_of_processor_time_at_most(tmp_path: Path):
    before = os.times()
    command = [sys.executable, "-m", "blockmean", "train", "--compare", "AdamW,Anova", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 30
    assert "Look at the training loss first" in result.stdout


def test_compare_names_the_run_that_diverged(tmp_path: Path):
    command = ["train", "--compare", "SGD,AdamW", "--lr", "1e30", "--model", "mlp", "--batch", "1000", "--epochs", "1"]
    result = run(cli.app, [*command, "--out", str(tmp_path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "SGD: diverged at step" in result.output
    assert "Look at" not in result.output  # at one number
    assert list(tmp_path.glob("compare-*.png"))


OWN_MODELS = """
from torch import nn

class Flat(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.linear = nn.Linear(784, classes)

    def forward(self, x):
        return self.linear(x.view(len(x), -1))

shared = Flat()

def too_few():
    return Flat(2)
"""


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module with models of the user's in the current folder."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models.py").write_text(OWN_MODELS)
    yield "own_models"
    sys.modules.pop("own_models", None)


@pytest.mark.parametrize("name", ["Flat", "shared"])
def test_train_takes_a_model_of_the_users_own(name: str, own_models: str, tmp_path: Path):
    command = ["train", "--model", f"{own_models}:{name}", "--compare", "AdamW,Anova", "--epochs", "1", "--out", "out"]
    result = run(cli.app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    records = Records(tmp_path / "out" / "train.jsonl").every()
    assert len(records) == 2
    assert len({record["losses"][0] for record in records}) == 1  # the second run starts where the first one started


def test_a_model_of_the_users_own_that_does_not_fit_is_refused(own_models: str, tmp_path: Path):
    command = ["train", "--model", f"{own_models}:too_few", "--out", "out"]
    result = run(cli.app, command, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "model 'own_models:too_few', loss 'cross_entropy' and the data" in result.output
    assert "do not fit together: Target" in result.output
    assert not (tmp_path / "out").exists()


def test_train_shows_a_run_that_diverges_at_once(tmp_path: Path):
    command = ["train", "--model", "mlp", "--optimizer", "SGD", "--lr", "1e38", "--batch", "4000", "--epochs", "1"]
    result = run(cli.app, [*command, "--out", str(tmp_path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "Diverged at step 1" in result.output
    assert "no held-out error after 1 steps" in result.output


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make importing `package` fail as if it were not installed."""
    real = builtins.__import__

    def fake(name, *rest):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fake)


def test_without_typer_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    without("typer", monkeypatch)
    for name in [name for name in sys.modules if name.startswith("blockmean.cli")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit, match=r"needs typer\. In a checkout: pip install '\.\[lab\]'"):
        importlib.import_module("blockmean.cli")


def test_without_scipy_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("blockmean.lab.paper")]:
        monkeypatch.delitem(sys.modules, name)
    without("scipy", monkeypatch)
    result = run(cli.app, ["reproduce"])
    assert result.exit_code == 1
    assert "needs scipy. In a checkout: pip install '.[lab]'" in str(result.exception) + result.output


def test_as_a_user_calls_it(tmp_path: Path):
    command = [str(Path(sys.executable).parent / "blockmean"), "reproduce", "fig2", "--out", "pictures"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "pictures/report.html" in result.stdout
    assert (tmp_path / "pictures" / "fig2.png").stat().st_size > 1000
