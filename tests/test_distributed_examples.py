"""Training on several processes by torchrun: examples, crashes, and wrappers of other people."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from support.cluster import Cluster
from support.optimizers import assert_same
from support.zero import difference

EXAMPLES = Path(__file__).parent.parent / "examples"
STEPS, SAVE_EVERY = 30, 10
TIMEOUT = 180
"""Seconds after which a run is taken for hung."""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


def start(example: str, folder: Path, *options: str, processes: int = 2, restarts: int = 0) -> subprocess.Popen:
    # Without the second, a restarted process may find the address of one that has died in the store of torchrun.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment.pop("BLOCKMEAN_DATA", None)  # the text that every installation has
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", str(EXAMPLES / f"{example}.py"), "--batch=8"]
    command += [f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", f"--checkpoints={folder}", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(run: subprocess.Popen) -> str:
    """What a run has printed; it must have ended well."""
    try:
        printed, errors = run.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        run.terminate()  # torchrun ends its processes
        printed, errors = run.communicate()
        raise AssertionError(f"still running after {TIMEOUT} s: {printed}{errors}") from None
    assert run.returncode == 0, errors
    return printed


def saved(example: str, folder: Path) -> dict[str, Any]:
    """The last checkpoint, whole."""
    path = folder / "latest.pt"
    if example == "fsdp_train":
        path = folder / "whole.pt"
        dcp_to_torch_save(folder / f"step-{(folder / 'latest').read_text()}", path)
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module", params=["fsdp_train", pytest.param("ddp_train", marks=pytest.mark.study)])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, str]:
    """An example, the folder of its checkpoints, and what it printed."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, finish(start(request.param, folder))


def test_an_example_trains(uninterrupted):
    _, _, printed = uninterrupted
    steps = [line.split() for line in printed.splitlines()]
    assert [words[1] for words in steps] == ["10:", "20:", "30:"]
    losses = [float(words[3].rstrip(",")) for words in steps]
    assert 5 > losses[0] > losses[1] > losses[2]
    assert steps[-1][4] == f"{STEPS * 8 * 64:,}"  # tokens


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of torchrun in /proc")
def test_a_run_whose_process_was_killed_ends_where_the_uninterrupted_run_ends(uninterrupted, tmp_path):
    example, folder, printed = uninterrupted
    run = start(example, tmp_path, "--save-every=2", restarts=1)  # early, to be in time on a busy machine
    deadline = time.monotonic() + TIMEOUT
    markers = [tmp_path / "latest", tmp_path / "latest.pt"]
    while not any(marker.exists() for marker in markers) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(children(run.pid)[-1], signal.SIGKILL)
    again = finish(run)
    assert "goes on after step" in again
    assert again.splitlines()[-1].split(" tokens")[0] == printed.splitlines()[-1].split(" tokens")[0]
    assert_same(saved(example, tmp_path), saved(example, folder))


def children(parent: int) -> list[int]:
    """The processes that a process has started, in order."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == parent:
            found.append(int(path.parent.name))
    return sorted(found)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the threads of a process in /proc")
def test_no_thread_of_gloo_outlives_the_process_group(tmp_path):
    script = tmp_path / "threads.py"
    script.write_text(
        "import os, runpy\nfrom pathlib import Path\n"
        f"runpy.run_path({str(EXAMPLES / 'ddp_train.py')!r})\n"
        "names = [comm.read_text().strip() for comm in Path('/proc/self/task').glob('*/comm')]\n"
        "os.write(1, f'threads: {names}\\n'.encode())\n"  # at once: the other process writes to the same pipe
    )
    lines = finish(start(str(script.with_suffix("")), tmp_path, "--steps=10")).splitlines()
    threads = [line for line in lines if line.startswith("threads:")]
    assert len(threads) == 2
    assert not any("gloo" in line for line in threads), threads


def test_a_finished_run_goes_on_with_another_number_of_processes(uninterrupted):
    example, folder, _ = uninterrupted
    printed = finish(start(example, folder, f"--steps={STEPS + 10}", "--save-every=1000", processes=1))
    first, last = printed.splitlines()
    assert first == f"goes on after step {STEPS}"
    assert last.startswith(f"step {STEPS + 10}: loss ")


@pytest.mark.parametrize(("cls", "options"), [("AdamBMA", {}), ("Anova", {"means": 2})])
def test_state_divided_by_zero_redundancy_changes_nothing(two: Cluster, cls: str, options: dict[str, Any]):
    assert max(two.run(difference, cls, {**options, "lr": 1e-2})) < 1e-12  # rounding: batches of Anova differ
