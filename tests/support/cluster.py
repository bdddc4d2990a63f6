"""Real processes that share a process group, started once per test run and given one function after another."""

from __future__ import annotations

import datetime
import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

TIMEOUT = 120
"""Seconds after which a test is taken for hung, and its processes end."""
AFTER_AN_ERROR = 20
"""Seconds for which the others may go on when one process has failed: it may have left them waiting."""

FORKSERVER = multiprocessing.get_context("forkserver")
# One process imports what is slow to import, and those of the clusters are its children. It does not see sys.path,
# so that it can import installed packages only, and says nothing if it cannot.
FORKSERVER.set_forkserver_preload(
    [
        "torch._dynamo",  # which DTensors need
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "blockmean.lab.train",
    ]
)


def _serve(rank: int, world: int, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((function(*args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


class Cluster:
    """`world` processes with gloo. `run` lets all of them call one function, and returns what each of them returned.

    The processes start with the first call, and anew after a call that did not end.
    """

    def __init__(self, world: int, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.starts = 0
        self.pipes: list[Any] = []
        self.processes: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + TIMEOUT
        while len(results) + len(errors) < self.world:
            pending = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results and rank not in errors]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    result, error = pipe.recv()
                except EOFError:
                    result, error = None, "the process has died"
                (errors if error else results)[rank] = error or result
                deadline = time.monotonic() + (AFTER_AN_ERROR if errors else TIMEOUT)
            if not ready:
                self.close()
                raise TimeoutError(f"only ranks {sorted([*results, *errors])} answered: " + "\n".join(errors.values()))
        if any(not process.is_alive() for process in self.processes):
            self.close()
        assert not errors, "\n".join(f"rank {rank}: {error}" for rank, error in errors.items())
        return [results[rank] for rank in range(self.world)]

    def _start(self) -> None:
        self.starts += 1
        store = str(self.folder / f"store-{self.starts}")
        for rank in range(self.world):
            here, there = FORKSERVER.Pipe()
            process = FORKSERVER.Process(target=_serve, args=(rank, self.world, store, there), daemon=True)
            process.start()
            there.close()  # so that the death of the process ends a wait for it
            self.pipes.append(here)
            self.processes.append(process)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.pipes, self.processes = [], []
