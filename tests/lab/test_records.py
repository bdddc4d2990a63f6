"""Records: one line each, made only once, whatever happens to the processes that write them."""

import hashlib
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from blockmean.lab.records import Records, append, run_all, store
from blockmean.lab.spec import RunSpec
from blockmean.lab.steps import read
from blockmean.lab.study_cells import PUBLISHED as CELLS
from blockmean.lab.train import run

RESULTS = Path(__file__).parents[2] / "results"
SPEC = RunSpec(dataset="digits", model="small", optimizer="AdaGradBMA", lr=0.1, seed=0, steps=5, batch=50)

# ---------------------------------------------------------------- the published ones

PUBLISHED = {
    "cifar10-large": (65, "a55d5e7257c807b0"),
    "cifar10-small": (75, "1f90f0d5928de571"),
    "mnist-large": (65, "b46f5303a36b3e45"),
    "mnist-small": (75, "e65ac7ad0dc3823e"),
    "steps": (24, "d1eb4905c997bab7"),
    "steps-avx2": (24, "518f1da712ac6a08"),
    "race/autoencoder": (110, "e7875e35a1576010"),
    "race/cnn": (101, "4317109f86d2033e"),
    "race/mlp": (110, "cc1073d380b880c1"),
    "race/mlp-raw": (110, "13cf3bd2eaea5d32"),
    "race/resnet": (101, "fb89b570aa7f683f"),
    "race/transformer-192": (110, "c8ea2629cc1462bb"),
    "race/transformer-64": (110, "79ffd688227d9550"),
    "measurements": (2, "bb1fdea86df2b300"),
    "study/S-end": (17, "5e7ea386b49ec4e2"),
    "study/XS-end": (82, "beb7d7dd833994b4"),
    "study/XS-fewer-means": (56, "a5868cd464b115bd"),
    "study/XS-nadam-schedule": (12, "723f58ab0b432951"),
    "study/XS-other-lift": (20, "5009cbd3c845ee0a"),
}
"""The digest of every study, taken when its records were one file each: keys and contents."""


GROWING = {
    "step-times.jsonl",
    "digits-mlp.jsonl",
    *(f"study/{cell}{what}.jsonl" for cell in CELLS for what in ("", "-times")),
}
"""Files of studies that go on."""


def digest(contents: Mapping[str, Any]) -> str:
    lines = sorted(f"{key} {json.dumps(record, sort_keys=True)}\n" for key, record in contents.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_study_is_known():
    found = {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*") if path.is_file()}
    assert found - GROWING == {f"{study}.jsonl" for study in PUBLISHED}


@pytest.mark.parametrize("study", PUBLISHED)
def test_published_records_are_what_they_were(study: str):
    path = RESULTS / f"{study}.jsonl"
    if study.startswith("steps"):  # one file per network and threads, with a row per optimizer
        lines = {(line["network"], line["threads"]) for line in lines_of(path)}
        contents = {f"{name}-{threads}": asdict(*read(path, [name], threads)) for name, threads in lines}
    else:
        contents = {line.pop("key"): line for line in lines_of(path)}
    assert (len(contents), digest(contents)) == PUBLISHED[study]


def test_no_published_record_is_there_twice_or_cut_off():
    for study in PUBLISHED:
        path = RESULTS / f"{study}.jsonl"
        assert path.read_bytes().endswith(b"}\n")
        keys = [line["key"] for line in lines_of(path)]
        assert len(keys) == len(set(keys)), study


# ---------------------------------------------------------------- lines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "study.jsonl"


def test_a_record_is_one_line_and_the_last_of_a_key_counts(path: Path):
    for key, value in (("a", 1), ("b", None), ("a", 2)):
        append(path, key, {"value": value})
    assert path.read_text() == '{"key": "a", "value": 1}\n{"key": "b", "value": null}\n{"key": "a", "value": 2}\n'
    assert Records(path).every() == [{"value": 2}, {"value": None}]


@pytest.mark.parametrize("kept", range(1, 25))
def test_a_line_that_was_cut_off_is_ignored_and_the_next_one_is_whole(path: Path, kept: int):
    append(path, "a", {"value": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "a", "value": 2}\n'[:kept])  # whole but for its end, if kept is 24
    assert Records(path).every() == [{"value": 2 if kept == 24 else 1}]
    append(path, "b", {"value": 3})
    assert Records(path).every()[-1] == {"value": 3}
    append(path, "a", {"value": 4})
    assert Records(path).every() == [{"value": 4}, {"value": 3}]


def test_a_full_disk_is_named_and_costs_one_record(path: Path):
    append(path, "a", {"value": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot take the record b: the disk is full"):
            append(path, "b", {"value": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append(path, "c", {"value": 3})
    assert Records(path).every() == [{"value": 1}, {"value": 3}]


def add_many(path: Path, name: str) -> None:
    for i in range(100):
        append(path, f"{name}-{i}", {"values": [name] * 5000})


def test_processes_that_write_at_once_do_not_mix_their_lines(path: Path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=add_many, args=(path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    found = {line["key"]: set(line["values"]) for line in lines_of(path)}
    assert found == {f"{name}-{i}": {name} for name in "abc" for i in range(100)}


def test_records_are_strict_json(path: Path):
    for write in (lambda record: append(path, "a", record), lambda record: store(path, record)):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write({"loss": float("nan")})
    assert not path.exists()


def test_a_folder_of_an_older_version_is_named(path: Path):
    older = path.with_suffix("")
    older.mkdir()
    (older / "a.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=rf"^{older} has one file per record, .* join them into {path}"):
        Records(path)
    append(path, "a", {})
    assert Records(path).every() == [{}]


# ---------------------------------------------------------------- runs


def test_runs_are_made_once_and_those_with_a_corrupt_record_again(path: Path, capsys: pytest.CaptureFixture[str]):
    specs = [SPEC, replace(SPEC, seed=1)]
    made = list(run_all(specs, path))
    text = path.read_text()
    assert text.count("\n") == 2
    again = list(run_all(specs, path))
    assert path.read_text() == text
    assert sorted(map(json.dumps, made)) == sorted(map(json.dumps, again))

    first, second = text.splitlines()
    foreign = json.dumps({**json.loads(second), "key": SPEC.key})
    for broken, complaint in (
        (first[:100], "Unterminated"),
        (f'{{"key": "{SPEC.key}", "spec": 1}}', "'environment' is missing"),
        (f'{{"key": "{SPEC.key}", \ufffd', "Expecting property name"),
        (f'{{"key": "{SPEC.key}", "spec": ' + "[" * 200_000, "maximum recursion"),
        (foreign, "it belongs to other settings"),
    ):
        path.write_text(f"{broken}\n{second}\n")
        known = Records(path)
        assert [record["spec"]["seed"] for record in known.of(specs)] == [1]
        (problem,) = known.unusable
        assert problem.startswith(f"The record {SPEC.key} in {path} cannot be used ({complaint}")
    list(run_all([SPEC], path))
    assert f"{problem}; it counts as missing." in capsys.readouterr().err
    assert len(Records(path).of(specs)) == 2
    path.write_bytes(b"\xff\xfe\x00\n[1, 2]\n3\n\n")
    assert Records(path).of([SPEC]) == []
    list(run_all([SPEC], path))
    (record,) = Records(path).of([SPEC])
    assert record["spec"] == asdict(SPEC)


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
        (lambda r: {key: value for key, value in r.items() if key != "step_seconds"}, "step_seconds missing"),
    ],
)
def test_records_that_lack_something_are_not_used(path, change, complaint):
    spec = replace(SPEC, batch=2000, steps=4)
    record = run(spec)
    assert len(record["epochs"]) == 2
    append(path, spec.key, record)
    assert Records(path).of([spec]) == [json.loads(json.dumps(record))]
    append(path, spec.key, change(record))
    known = Records(path)
    assert known.of([spec]) == []
    assert complaint in known.unusable[0]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [('"train_loss": NaN', "NaN is not JSON"), ('"train_loss": 1e999', "train_loss must be a number from 0 to")],
)
def test_a_loss_that_is_no_number_makes_a_record_unusable(path: Path, text: str, complaint: str):
    spec = replace(SPEC, batch=2000, steps=2)
    append(path, spec.key, run(spec))
    path.write_text(re.sub(r'"train_loss": [\d.]+', text, path.read_text(), count=1))
    known = Records(path)
    assert known.of([spec]) == []
    assert f"cannot be used ({complaint}" in known.unusable[0]


def test_progress_counts_the_steps_of_records_and_of_runs_that_diverge(path):
    diverging = replace(SPEC, model="mlp", optimizer="SGD", lr=1e30, steps=7)
    list(run_all([SPEC], path))
    seen = []
    list(run_all([SPEC, diverging], path, on_steps=seen.append))
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
        [sys.executable, str(script), str(tmp_path / "study.jsonl")],
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
    known = Records(tmp_path / "study.jsonl")
    assert len(known.every()) == 1
    assert known.of([RunSpec("digits", "small", "Adagrad", 0.1, seed=0, steps=3, batch=50)])


def test_workers_do_not_outlive_the_process_that_started_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    command = [sys.executable, str(script), str(tmp_path / "study.jsonl")]
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
    command = [sys.executable, str(script), str(tmp_path / "study.jsonl")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert [process.stdout.readline() for _ in range(3)] == [f"finished {seed}\n" for seed in range(3)]
        os.kill(busiest(children_of(process.pid)), signal.SIGKILL)
        try:
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    endless = RunSpec("digits", "small", "Adagrad", 0.1, seed=0, steps=1_000_000, batch=50)
    assert output.startswith(f"The process of the run {endless.key} was killed")
    assert f"Finished runs are in {tmp_path / 'study.jsonl'}: run the same command again to resume" in output
    assert not errors
    assert len(Records(tmp_path / "study.jsonl").every()) == 3


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
