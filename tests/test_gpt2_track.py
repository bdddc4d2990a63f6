"""The script for GPUs, with a tiny model on CPUs: formats of token files, both optimizers, processes, resuming."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.scripts import run_script

SCRIPT = Path(__file__).parent.parent / "examples" / "gpt2_track.py"
TINY = ["--layers=2", "--heads=2", "--width=32", "--context=16", "--vocabulary=16", "--warm-up=4"]
TINY += ["--batch=8", "--device-batch=2", "--lr=1e-2"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sums as tokens: nanoGPT's format, modded-nanogpt's, the latter in two files."""
    folder, rng = tmp_path_factory.mktemp("tokens"), random.Random(0)

    def sums(count: int) -> list[int]:
        pairs = [(rng.randrange(10), rng.randrange(10)) for _ in range(count)]
        return [token for a, b in pairs for token in (a, 10, b, 11, (a + b) // 10, (a + b) % 10, 12)]

    def write(name: str, tokens: list[int], *header: int) -> None:
        numbers = struct.pack(f"<{len(tokens)}H", *tokens)
        (folder / name).write_bytes((struct.pack("<256i", *header, *[0] * 253) if header else b"") + numbers)

    tokens = sums(500)
    middle = 1601  # 100 windows of 16 inputs, and a last target
    write("train.bin", tokens)
    write("train_1.bin", tokens[:middle], 20240520, 1, middle)
    write("train_2.bin", tokens[middle - 1 :], 20240520, 1, len(tokens) - middle + 1)
    write("held_out.bin", sums(100))
    return folder


def command(folder: Path, data: Path, *options: str, train: tuple[str, ...] = ("train.bin",)) -> list[str]:
    files = ["--train", *(str(data / name) for name in train), "--held-out", str(data / "held_out.bin")]
    return [*TINY, *files, "--record", str(folder / "record.jsonl"), *options]


def record_in(folder: Path, event: str = "evaluation") -> list[dict[str, Any]]:
    """The lines of a record about an event."""
    lines = map(json.loads, (folder / "record.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def losses(folder: Path) -> list[float]:
    return [line["held_out_loss"] for line in record_in(folder)]


def start(arguments: list[str], processes: int) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), *arguments], stderr=subprocess.PIPE, env=environment
    )


@pytest.mark.parametrize("optimizer", ["AdamW", "Anova"])
def test_a_run_learns_and_leaves_a_record(optimizer: str, data: Path, tmp_path: Path):
    printed = run_script(
        SCRIPT, *command(tmp_path, data, "--steps=60", "--evaluate-every=25", f"--optimizer={optimizer}")
    )
    (head,), lines = record_in(tmp_path, "start"), record_in(tmp_path)
    assert [line["step"] for line in lines] == [25, 50, 60]
    assert lines[0]["held_out_loss"] > lines[-1]["held_out_loss"]
    assert lines[-1]["held_out_loss"] < 2.2  # the frequencies of tokens alone give 2.41
    assert lines[-1]["tokens"] == 60 * 8 * 16
    assert all(line["step_ms"] > line["optimizer_ms"] > 0 for line in lines)
    assert lines[-1]["seconds"] < 60 and lines[-1]["peak_memory_bytes"] is None
    assert head["options"]["optimizer"] == optimizer and head["options"]["steps"] == 60
    assert head["environment"]["torch"] and head["environment"]["gpu"] is None
    assert head["parameters"] == 2 * (12 * 32**2 + 2 * 32) + 2 * 16 * 32 + 32
    assert printed.count("held-out loss") == 3


def test_files_with_and_without_a_header_hold_the_same_tokens(data: Path, tmp_path: Path):
    options = "--steps=4", "--evaluate-every=4"
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    run_script(SCRIPT, *command(tmp_path / "one", data, *options))
    run_script(SCRIPT, *command(tmp_path / "two", data, *options, train=("train_1.bin", "train_2.bin")))
    assert losses(tmp_path / "one") == losses(tmp_path / "two")


def test_a_batch_that_cannot_be_divided_is_refused(data: Path, tmp_path: Path):
    with pytest.raises(SystemExit, match="--batch must be a multiple of --device-batch times 1 processes, got 9"):
        run_script(SCRIPT, *command(tmp_path, data, "--batch=9"))


@pytest.mark.xdist_group("processes")
def test_two_processes_take_the_steps_of_one_and_go_on_after_a_crash(data: Path, tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    options = "--steps=40", "--evaluate-every=5"
    run_script(SCRIPT, *command(tmp_path / "one", data, *options))
    checkpoint = tmp_path / "two" / "checkpoint.pt"
    arguments = command(tmp_path / "two", data, *options, f"--checkpoint={checkpoint}")
    crashing = start(arguments, processes=2)
    deadline = time.monotonic() + 180
    while not checkpoint.exists() and crashing.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    crashing.terminate()  # torchrun ends its processes
    crashing.communicate(timeout=180)
    assert checkpoint.exists() and crashing.returncode != 0
    again = start(arguments, processes=2)
    _, errors = again.communicate(timeout=180)
    assert again.returncode == 0, errors.decode()
    first, second = record_in(tmp_path / "two", "start")
    assert first["environment"]["processes"] == 2
    assert first["step"] == 0 < second["step"] < 40
    assert [line["step"] for line in record_in(tmp_path / "two")] == list(range(5, 41, 5))
    # The same forward passes in both. Gradients are added in another order, and bfloat16 may amplify the rounding.
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=0.005)
