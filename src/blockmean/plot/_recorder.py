"""How an optimizer's matrices between blocks change in training, without a change to the training loop."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim import Optimizer

from blockmean._checks import require
from blockmean.optim import BlockStatistics
from blockmean.optim.optimizer import BlockMeanOptimizer
from blockmean.plot._axes import LARGEST
from blockmean.plot._coupling import coupling
from blockmean.plot._course import Course, draw_courses

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWNER = "CouplingRecorder"
MOST_SCALARS = 20
"""Blocks of each matrix whose A_ii is written to TensorBoard."""


class Writer(Protocol):
    """What is asked of a writer: `torch.utils.tensorboard.SummaryWriter` has it."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None: ...
    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None: ...


class CouplingRecorder:
    """Keep what an optimizer knows of its blocks every so many steps, and draw its course.

    It hooks into `optimizer.step()`, so that the training loop stays as it is, and costs a count between the recorded
    steps. A recorded one costs `block_statistics()`: a pass over the state, and the eigenvalues of every A; with a
    writer also a picture of it.

    Kept are A_ii, the condition of A and the share of the correction, not the L×L matrices (`plot.coupling(optimizer)`
    draws the present ones). Memory is bounded: after `max_records` records every second one is forgotten, and from
    then on only every second one is kept, so that those there are always span the whole course.

    Args:
        optimizer: one of blockmean's.
        every: steps from one record to the next.
        writer: a TensorBoard writer (`pip install 'blockmean[tensorboard]'`). It gets every record, as scalars under
            "coupling/": condition, share of the correction, and A_ii of the 20 blocks where it was largest at the first
            record; and, where blocks are no more than 4,096, the picture of `plot.coupling`. It is not closed here.
        max_records: records to keep; each is L float32 numbers.

    >>> import torch
    >>> from blockmean import AdamBMA
    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = AdamBMA(layer.named_parameters())
    >>> with CouplingRecorder(optimizer, every=2) as recorder:
    ...     for _ in range(6):
    ...         optimizer.zero_grad()
    ...         layer(torch.ones(4)).sum().backward()
    ...         optimizer.step()
    >>> [(course["names"], course["steps"]) for course in recorder.history]
    [(['weight[0]', 'weight[1]', 'bias'], [2, 4, 6])]
    """

    def __init__(
        self, optimizer: BlockMeanOptimizer, every: int = 100, writer: Writer | None = None, *, max_records: int = 256
    ) -> None:
        ours = isinstance(optimizer, BlockMeanOptimizer)
        require(ours, "optimizer", OWNER, "an optimizer of blockmean", type(optimizer).__name__, TypeError)
        for name, value, least in (("every", every, 1), ("max_records", max_records, 2)):
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole, name, OWNER, "a whole number", value, TypeError)
            require(value >= least, name, OWNER, f"at least {least}", value)
        able = writer is None or all(callable(getattr(writer, name, None)) for name in ("add_scalar", "add_figure"))
        require(able, "writer", OWNER, "a TensorBoard SummaryWriter", type(writer).__name__, TypeError)
        self.optimizer, self.every, self.writer, self.max_records = optimizer, every, writer, max_records
        # Training that was taken up again goes on counting where it was.
        self.steps = int(max((float(s["step"]) for s in optimizer.state.values() if "step" in s), default=0))
        self._courses: dict[tuple[int, str, int], Course] = {}
        self._shown: dict[tuple[int, str, int], list[int]] = {}
        self._records, self._stride = 0, 1
        self._handle = optimizer.register_step_post_hook(self._after_step)

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was recorded, one entry per matrix, in plain values that JSON can hold.

        Each has `group`, `coupling`, `names` and `sizes` of the blocks, and, record by record, `steps`, `condition`
        (None where A is singular), `correction_share` and `diagonal` (A_ii, one list per record).
        """
        return [course.as_dict() for course in self._courses.values()]

    def save(self, path: str | Path) -> Path:
        """Write the history as JSON, or as CSV with one row per record and block, as the name of the file says."""
        path = Path(path)
        require(path.suffix in (".json", ".csv"), "path", f"{OWNER}.save", "a .json or .csv file", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            path.write_text(json.dumps(self.history) + "\n")
            return path
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["step", "group", "coupling", "block", "entries", "A_ii", "condition", "correction_share"])
            for course in self._courses.values():
                records = zip(course.steps, course.diagonal, course.condition, course.correction_share, strict=True)
                for step, diagonal, condition, share in records:
                    for name, size, value in zip(course.names, course.sizes, diagonal.tolist(), strict=True):
                        rows.writerow([step, course.group, course.coupling, name, size, value, condition, share])
        return path

    def draw(self) -> Figure:
        """A_ii per block on a logarithmic axis, the condition of A and the share of the correction, over the steps.

        Where there are many blocks, the ten that ended highest or changed most are lines with names, the others a
        range: all of them light grey, the middle half darker.
        """
        if not self._courses:
            raise ValueError(f"Nothing is recorded yet: the first record is made after {self.every:,} steps.")
        return draw_courses(list(self._courses.values()))

    def close(self) -> None:
        """Stop recording; what was recorded stays."""
        self._handle.remove()

    def __enter__(self) -> CouplingRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            self._record()

    def _record(self) -> None:
        found = self.optimizer.block_statistics()
        if self.writer is not None:
            self._write(self.writer, found)
        if self._records % self._stride == 0:
            for statistics in found:
                self._course_of(statistics).add(self.steps, statistics)
            if any(len(course.steps) > self.max_records for course in self._courses.values()):
                self._stride *= 2
                for course in self._courses.values():
                    course.thin()
        self._records += 1

    def _course_of(self, statistics: BlockStatistics) -> Course:
        key = _key(statistics)
        if key not in self._courses:
            sizes = statistics.sizes.tolist()
            self._courses[key] = Course(statistics.group, statistics.coupling, statistics.names, sizes)
        return self._courses[key]

    def _write(self, writer: Writer, found: list[BlockStatistics]) -> None:
        several = len({statistics.group for statistics in found}) > 1
        for statistics in found:
            place = f"coupling/group{statistics.group}" if several else "coupling"
            matrix = f"{place}/{statistics.coupling}"
            if math.isfinite(statistics.condition):
                writer.add_scalar(f"{matrix}/condition", statistics.condition, self.steps)
            if statistics.correction_share is not None:
                writer.add_scalar(f"{matrix}/correction_share", statistics.correction_share, self.steps)
            largest = statistics.diagonal.argsort(descending=True, stable=True)[:MOST_SCALARS].tolist()
            for i in self._shown.setdefault(_key(statistics), largest):
                writer.add_scalar(f"{place}/A_ii/{statistics.names[i]}", statistics.diagonal[i], self.steps)
        if 0 < sum(len(statistics.names) for statistics in found) <= LARGEST:
            ax = coupling(found, title=f"step {self.steps:,}")
            writer.add_figure("coupling", ax.figure, self.steps)  # which closes it


def _key(statistics: BlockStatistics) -> tuple[int, str, int]:
    """What stays the same for one matrix, as long as its blocks do."""
    return statistics.group, statistics.coupling, len(statistics.names)
