"""Real processes that share a process group, started once and given one function after another."""

from __future__ import annotations

import datetime
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

TIMEOUT = 120
"""Seconds after which a test is taken for hung, and its processes end."""


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
    """`world` processes with gloo. `run` lets all of them call one function, and returns what each of them returned."""

    def __init__(self, world: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, str(folder / "store"), there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waited = 0.0
        while len(results) + len(errors) < len(self.pipes):
            open_pipes = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results and rank not in errors]
            for ready in wait(open_pipes, timeout=5):
                rank = self.pipes.index(ready)
                result, error = ready.recv()
                (errors if error else results)[rank] = error or result
                waited = 0.0
            else:
                waited += 5
            if waited >= (20 if errors else TIMEOUT):  # whoever failed leaves the others waiting
                self.close()
                raise TimeoutError(f"only ranks {sorted([*results, *errors])} answered: " + "\n".join(errors.values()))
        assert not errors, "\n".join(f"rank {rank}: {error}" for rank, error in errors.items())
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
