"""The lab: training once, and records that are made only once."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import blockmean
from blockmean.lab import arms, environment, records, tasks, train
from blockmean.lab.data import load
from blockmean.lab.models import MODELS
from blockmean.lab.spec import RunSpec
from blockmean.lab.tasks import Data, steps_per_epoch
from blockmean.lab.train import batches_of, run

REAL_DATA = Path(__file__).parents[3] / "shared" / "data"
SPEC = RunSpec(dataset="digits", model="small", optimizer="AdaGradBMA", lr=0.1, seed=0, steps=5, batch=50)


@pytest.mark.parametrize(
    ("model", "shape", "count"),
    [
        ("small", (1, 28, 28), 322),
        ("small", (3, 32, 32), 466),
        ("large", (1, 28, 28), 139_370),
        ("large", (3, 32, 32), 140_906),
        ("mlp", (1, 28, 28), 55_050),
        ("cnn", (3, 32, 32), 33_834),
    ],
)
def test_models_have_the_parameters_they_are_said_to_have(model, shape, count):
    network = MODELS[model](shape)
    assert sum(p.numel() for p in network.parameters()) == count
    assert network(torch.zeros(2, *shape)).shape == (2, 10)


def without_times(record):
    return {key: value for key, value in record.items() if "seconds" not in key and key != "environment"}


def losses_of(spec):
    seen = []
    run(spec, on_step=lambda step, loss: seen.append(loss))
    return seen


def test_equal_specs_give_equal_runs_and_other_optimizers_start_alike():
    first, again = run(SPEC), run(SPEC)
    assert without_times(first) == without_times(again)
    assert 0 < first["test_error"] < 1
    ours, theirs = losses_of(SPEC), losses_of(replace(SPEC, optimizer="Adagrad", lr=0.03))
    assert len(ours) == len(theirs) == 5
    assert ours[0] == theirs[0]
    assert ours[1] != theirs[1]


def test_an_epoch_is_recorded_when_it_is_over():
    spec = replace(SPEC, steps=9, batch=1000)  # four batches an epoch
    losses, record = losses_of(spec), run(spec)
    assert [epoch["train_loss"] for epoch in record["epochs"]] == [sum(losses[:4]) / 4, sum(losses[4:8]) / 4]
    after_eight = run(replace(spec, steps=8))
    assert record["epochs"] == after_eight["epochs"]
    assert after_eight["epochs"][-1]["test_error"] == after_eight["test_error"]
    assert after_eight["epochs"][-1]["test_loss"] == after_eight["test_loss"]


@pytest.mark.parametrize("dataset", ["digits", "mnist", "cifar10"])
def test_steps_per_epoch_are_those_of_the_data(dataset):
    try:
        images = load(dataset, "raw", REAL_DATA)
    except FileNotFoundError:
        pytest.skip(f"{dataset} is not on this machine")
    assert steps_per_epoch(dataset, 128) == len(images.train) // 128


def test_batches_go_through_every_image_once_an_epoch_and_mirror_half_of_them():
    count, width = 12, 4
    pictures = torch.arange(count * width).view(count, 1, 1, width).float()
    images = Data(pictures, torch.arange(count), pictures, torch.arange(count))
    spec = replace(SPEC, batch=5, steps=40, flip=True)
    batches = list(batches_of(images, spec))
    assert len(batches) == 40
    mirrored = []
    for epoch in range(20):  # two batches of five; two images are left out
        labels = torch.cat([batches[2 * epoch][1], batches[2 * epoch + 1][1]]).tolist()
        assert len(set(labels)) == 10
    for inputs, labels in batches:
        for picture, label in zip(inputs, labels, strict=True):
            assert torch.equal(picture.sort(dim=-1).values, pictures[label])
            mirrored.append(not torch.equal(picture, pictures[label]))
    assert 0.35 < sum(mirrored) / len(mirrored) < 0.65  # 200 tosses: 4 standard deviations
    straight = list(batches_of(images, replace(spec, flip=False)))
    assert all(torch.equal(x, pictures[y]) for x, y in straight)


def test_a_run_that_diverges_ends_there_and_says_when():
    seen = []
    record = run(
        replace(SPEC, model="mlp", optimizer="SGD", lr=1e30, steps=20), on_step=lambda *step: seen.append(step)
    )
    assert 0 < record["diverged_at"] == len(seen) < 20
    assert record["train_loss"] is None
    json.dumps(record, allow_nan=False)


@pytest.mark.usefixtures("quick_workers")
def test_records_are_made_once_and_corrupt_ones_again(tmp_path, capsys):
    specs = [SPEC, replace(SPEC, seed=1)]
    made = list(records.run_all(specs, tmp_path))
    assert len(list(tmp_path.glob("*.json"))) == 2
    stamp = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = list(records.run_all(specs, tmp_path))
    assert stamp == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert sorted(map(json.dumps, made)) == sorted(map(json.dumps, again))

    broken = tmp_path / f"{SPEC.key}.json"
    broken.write_text(broken.read_text()[:100])
    assert records.read(tmp_path, SPEC) is None
    assert f"{broken} cannot be used (Unterminated" in capsys.readouterr().err
    for other in ("[1, 2]", '{"spec": 1}'):
        broken.write_text(other)
        assert records.read(tmp_path, SPEC) is None
        assert "it is no such record" in capsys.readouterr().err
    broken.write_bytes(b"\xff\xfe\x00")
    assert records.read(tmp_path, SPEC) is None
    assert "can't decode byte" in capsys.readouterr().err
    foreign = json.loads((tmp_path / f"{specs[1].key}.json").read_text())
    broken.write_text(json.dumps(foreign))
    assert records.read(tmp_path, SPEC) is None
    assert "belongs to other settings" in capsys.readouterr().err
    list(records.run_all([SPEC], tmp_path))
    assert records.read(tmp_path, SPEC)["spec"] == asdict(SPEC)


def test_specs_that_cannot_run_say_why():
    with pytest.raises(ValueError, match=r"A batch of 5000 cannot be drawn from 4000 images"):
        run(replace(SPEC, batch=5000))
    with pytest.raises(ValueError, match=r"model must be one of small, .* Got 'huge'"):
        run(replace(SPEC, model="huge"))
    with pytest.raises(ValueError, match=r"optimizer must be one of Adagrad, .* Got 'Lion'"):
        run(replace(SPEC, optimizer="Lion"))
    with pytest.raises(ValueError, match=r"inputs must be one of raw, .* Got 'grey'"):
        run(replace(SPEC, inputs="grey"))
    with pytest.raises(ValueError, match=r"steps must be at least 1. Got 0 instead."):
        run(replace(SPEC, steps=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": math.inf}, "lr must be a finite number. Got inf instead."),
        ({"lr": math.nan}, "lr must be a finite number. Got nan instead."),
        ({"options": {"eps": math.inf}}, "The option 'eps' must be made of finite numbers, .* Got inf instead."),
        ({"options": {"betas": {1, 2}}}, r"The option 'betas' must .* Got \{1, 2\} instead."),
        ({"options": {"variant": b"x"}}, "The option 'variant' must .* Got b'x' instead."),
        ({"options": {"speed": 3}}, "AdaGradBMA has no option speed. It has lr_decay, "),
        ({"optimizer": "Adam", "options": {"foreach": True, "fused": True}}, "Adam cannot be made with .*fused"),
        ({"seed": 2**32}, "seed must be between 0 and 4294967295. Got 4294967296 instead."),
        ({"batch": 0}, "A batch of 0 cannot be drawn from 4000 images."),
    ],
)
def test_a_check_finds_what_would_fail_later_without_any_data(changes, message, monkeypatch):
    monkeypatch.setattr(tasks, "load", lambda *_: pytest.fail("data was read"))
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        train.check(replace(SPEC, **changes))
    train.check(SPEC)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("optimizer", arms.OPTIMIZERS)
def test_every_optimizer_learns_with_its_own_learning_rate(optimizer):
    spec = replace(SPEC, optimizer=optimizer, lr=arms.default_rate(optimizer), model="small", batch=100, steps=80)
    losses = losses_of(spec)
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10]) or optimizer == "SGD"  # which is slow on this model
    train.check(spec)


def test_a_learning_rate_of_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"optimizer must be one of .* Got 'Lion'"):
        arms.default_rate("Lion")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda r: {**r, "epochs": r["epochs"][:-1]}, "epochs are missing"),
        (lambda r: {**r, "epochs": []}, "epochs are missing"),
        (
            lambda r: {**r, "epochs": [{**row, "test_error": None} for row in r["epochs"]]},
            "test_error must be a number from 0 to 1. Got None instead.",
        ),
        (lambda r: {**r, "epochs": [{"test_error": 0.1}] * 2}, "'train_loss' is missing"),
        (lambda r: {**r, "epochs": {"0": 1, "1": 2}}, "cannot be used"),
        (lambda r: {**r, "test_error": "0.1"}, "test_error must be a number from 0 to 1. Got '0.1' instead."),
        (lambda r: {**r, "test_error": True}, "Got True instead."),
        (lambda r: {**r, "train_loss": 1e308}, "train_loss must be a number from 0 to 3.5e+38. Got 1e+308 instead."),
        (lambda r: {**r, "train_loss": 10**400}, "train_loss must be a number"),
        (lambda r: {**r, "environment": "x"}, "environment must be an object. Got 'x' instead."),
        (lambda r: {**r, "diverged_at": "x"}, "diverged_at must be a number from 0 to 3. Got 'x' instead."),
        (lambda r: {**r, "diverged_at": 1, "epochs": [3]}, "cannot be used"),
        (lambda r: {key: value for key, value in r.items() if key != "step_seconds"}, "it is no such record"),
    ],
)
def test_records_that_lack_something_are_not_used(tmp_path, capsys, change, complaint):
    spec = replace(SPEC, batch=2000, steps=4)
    record = run(spec)
    assert len(record["epochs"]) == 2
    records.write(tmp_path, spec, record)
    assert records.read(tmp_path, spec) == json.loads(json.dumps(record))
    records.write(tmp_path, spec, change(record))
    assert records.read(tmp_path, spec) is None
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [('"train_loss": NaN', "NaN is not JSON"), ('"train_loss": 1e999', "train_loss must be a number from 0 to")],
)
def test_a_loss_that_is_no_number_makes_a_record_unusable(tmp_path, capsys, text, complaint):
    spec = replace(SPEC, batch=2000, steps=2)
    records.write(tmp_path, spec, run(spec))
    path = tmp_path / f"{spec.key}.json"
    path.write_text(re.sub(r'"train_loss": [\d.]+', text, path.read_text(), count=1))
    assert records.read(tmp_path, spec) is None
    assert f"{path} cannot be used ({complaint}" in capsys.readouterr().err
    with pytest.raises(records.UnusableRecord, match="cannot be used"):
        records.read_strictly(tmp_path, spec)


def test_a_record_that_is_a_folder_or_a_maze_is_unusable(tmp_path):
    path = tmp_path / f"{SPEC.key}.json"
    path.mkdir()
    with pytest.raises(records.UnusableRecord, match="Is a directory"):
        records.read_strictly(tmp_path, SPEC)
    path.rmdir()
    path.write_text("[" * 200_000)
    with pytest.raises(records.UnusableRecord, match="recursion"):
        records.read_strictly(tmp_path, SPEC)


def test_records_are_strict_json(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.store(tmp_path / "record.json", {"loss": float("nan")})
    assert not (tmp_path / "record.json").exists()


def test_a_run_that_breaks_at_its_last_step_has_diverged():
    record = run(replace(SPEC, model="mlp", optimizer="SGD", lr=1e30, steps=1))
    assert record["diverged_at"] == 0
    assert record["train_loss"] is None


def test_records_say_where_and_with_which_code_they_were_made():
    where = run(SPEC)["environment"]
    assert where["threads"] == 1
    assert where["torch"] == torch.__version__
    root = Path(environment.__file__).parents[3]
    if (root / ".git").exists():
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
        assert head[:7] in where["code"]


def test_code_inside_another_repository_is_not_taken_for_it(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    installed = tmp_path / ".venv" / "lib" / "blockmean" / "lab" / "environment.py"
    monkeypatch.setattr(environment, "__file__", str(installed))
    environment._code_version.cache_clear()
    try:
        assert environment.environment()["code"] == f"blockmean {blockmean.__version__}"
    finally:
        environment._code_version.cache_clear()


@pytest.mark.usefixtures("quick_workers")
def test_progress_counts_the_steps_of_records_and_of_runs_that_diverge(tmp_path):
    diverging = replace(SPEC, model="mlp", optimizer="SGD", lr=1e30, steps=7)
    list(records.run_all([SPEC], tmp_path))
    seen = []
    list(records.run_all([SPEC, diverging], tmp_path, on_steps=seen.append))
    assert seen[0] == 5
    assert seen[-1] == 12
    assert seen == sorted(seen)


INTERRUPTED = """
import signal
import sys
from dataclasses import replace
from pathlib import Path
from blockmean.lab.records import run_all
from blockmean.lab.spec import RunSpec

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background ignores it
    spec = RunSpec("digits", "small", "Adagrad", 0.1, seed=0, steps=3, batch=50)
    for record in run_all([spec, replace(spec, steps=1_000_000)], Path(sys.argv[1])):
        print("finished", record["spec"]["steps"], flush=True)
"""


def test_an_interruption_loses_only_the_run_in_progress(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "records")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "finished 3\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert len(list((tmp_path / "records").iterdir())) == 1
    assert records.read(tmp_path / "records", RunSpec("digits", "small", "Adagrad", 0.1, seed=0, steps=3, batch=50))


def test_workers_do_not_outlive_the_process_that_started_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    command = [sys.executable, str(script), str(tmp_path / "records")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "finished 3\n"
        process.terminate()
        process.wait(timeout=20)
        # The pipe closes only when the last process that can write to it is gone.
        assert process.stdout.read() == ""


KILLED = """
import sys
from dataclasses import replace
from pathlib import Path
from blockmean.lab.records import WorkerKilled, run_all
from blockmean.lab.spec import RunSpec

if __name__ == "__main__":
    endless = RunSpec("digits", "small", "Adagrad", 0.1, seed=0, steps=1_000_000, batch=50)
    short = [replace(endless, steps=3, seed=seed) for seed in range(3)]
    try:
        for record in run_all([short[0], endless, *short[1:]], Path(sys.argv[1]), jobs=2):
            print("finished", record["spec"]["seed"], flush=True)
    except WorkerKilled as error:
        print(error)
"""


def children_of(pid: int) -> list[int]:
    """The worker processes of a process, without multiprocessing's tracker."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(p) for p in pids if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are found in /proc")
def test_a_killed_worker_is_reported_with_the_run_it_was_making(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(tmp_path / "records")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert [process.stdout.readline() for _ in range(3)] == [f"finished {seed}\n" for seed in range(3)]
        os.kill(busiest(children_of(process.pid)), signal.SIGKILL)
        try:
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    endless = RunSpec("digits", "small", "Adagrad", 0.1, seed=0, steps=1_000_000, batch=50)
    assert output.startswith(f"The process of the run {endless.key} was killed")
    assert f"Finished runs are in {tmp_path / 'records'}: run the same command again to resume" in output
    assert not errors
    assert len(list((tmp_path / "records").iterdir())) == 3


def busiest(pids: list[int]) -> int:
    """The process that uses the processor from now on; the others only wait."""

    def ticks(pid: int) -> int:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))

    before = {pid: ticks(pid) for pid in pids}
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.1)
        used = {pid: ticks(pid) - before[pid] for pid in pids}
        if max(used.values()) >= 50:  # half a second
            return max(used, key=used.__getitem__)
    raise AssertionError(f"no worker is at work: {used}")
