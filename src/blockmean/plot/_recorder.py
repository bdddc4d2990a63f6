"""How an optimizer's matrices between blocks change in training, recorded without touching the training loop."""

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
from blockmean.optim.block_mean import BlockMeanOptimizer
from blockmean.optim.inspection import unwrap
from blockmean.plot._axes import LARGEST
from blockmean.plot._block_matrix import refuse_means
from blockmean.plot._coupling import coupling
from blockmean.plot._history import CouplingHistory, draw_histories

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWNER = "CouplingRecorder"
MOST_SCALARS = 20
"""How many A_ii of each matrix go to TensorBoard."""


class Writer(Protocol):
    """The methods a writer needs; `torch.utils.tensorboard.SummaryWriter` has them."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None: ...
    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None: ...


class CouplingRecorder:
    """Record what an optimizer knows about its blocks every few steps, and draw how it changes.

    It hooks into `optimizer.step()`: the training loop stays as it is, and steps between records cost nothing. A record
    costs `block_statistics()`, which passes over the state and takes the eigenvalues of every A; with a writer, it
    costs a picture too.

    A record has A_ii, the condition of A and the share of the correction, not the L×L matrices (`plot.coupling
    (optimizer)` draws the current ones). Memory is bounded: after `max_records` records every second one is dropped,
    and from then on only every second one is kept, so that they always span the whole training.

    Args:
        optimizer: one of blockmean's, or a wrapper that holds one as `optimizer`.
        every: steps from one record to the next.
        writer: a TensorBoard writer (`pip install tensorboard`). It gets every record, as scalars under
            "coupling/": condition, share of the correction, and A_ii of the 20 blocks where it was largest at the first
            record; and, for up to 4,096 blocks, the picture of `plot.coupling`. The recorder does not close it.
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
    >>> [(record["names"], record["steps"]) for record in recorder.history]
    [(['weight[0]', 'weight[1]'], [2, 4, 6])]
    """

    def __init__(
        self, optimizer: BlockMeanOptimizer, every: int = 100, writer: Writer | None = None, *, max_records: int = 256
    ) -> None:
        optimizer = unwrap(optimizer)
        refuse_means(optimizer, OWNER)
        ours = isinstance(optimizer, BlockMeanOptimizer)
        require(ours, "optimizer", OWNER, "an optimizer of blockmean", type(optimizer).__name__, TypeError)
        for name, value, least in (("every", every, 1), ("max_records", max_records, 2)):
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole, name, OWNER, "a whole number", value, TypeError)
            require(value >= least, name, OWNER, f"at least {least}", value)
        able = writer is None or all(callable(getattr(writer, name, None)) for name in ("add_scalar", "add_figure"))
        require(able, "writer", OWNER, "a TensorBoard SummaryWriter", type(writer).__name__, TypeError)
        self.optimizer, self.every, self.writer, self.max_records = optimizer, every, writer, max_records
        # Resumed training continues the count.
        self.steps = int(max((float(s["step"]) for s in optimizer.state.values() if "step" in s), default=0))
        self._histories: dict[tuple[int, str, int], CouplingHistory] = {}
        self._shown: dict[tuple[int, str, int], list[int]] = {}
        self._records, self._stride = 0, 1
        self._handle = optimizer.register_step_post_hook(self._after_step)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records, one entry per matrix, in plain values that strict JSON can hold.

        Each has `group`, `coupling`, `names` and `sizes` of the blocks, and, record by record, `steps`, `condition`
        (None where A is singular), `correction_share` and `diagonal` (A_ii, one list per record). A number that is
        not finite is None.
        """
        return [history.as_dict() for history in self._histories.values()]

    def save(self, path: str | Path) -> Path:
        """Write the history to a .json file, or to a .csv file with one row per record and block."""
        path = Path(path)
        require(path.suffix in (".json", ".csv"), "path", f"{OWNER}.save", "a .json or .csv file", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            path.write_text(json.dumps(self.history, allow_nan=False) + "\n")
            return path
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["step", "group", "coupling", "block", "entries", "A_ii", "condition", "correction_share"])
            for kept in self.history:
                columns = (kept[key] for key in ("steps", "diagonal", "condition", "correction_share"))
                for step, diagonal, condition, share in zip(*columns, strict=True):
                    for name, size, value in zip(kept["names"], kept["sizes"], diagonal, strict=True):
                        rows.writerow([step, kept["group"], kept["coupling"], name, size, value, condition, share])
        return path

    def draw(self) -> Figure:
        """A_ii per block on a logarithmic axis, the condition of A and the share of the correction, over the steps.

        If blocks are many, the ten that ended highest or changed most are named lines, and a range shows the others:
        all of them in light grey, the middle half darker.
        """
        if not self._histories:
            raise ValueError(f"Nothing is recorded yet: the first record is made after {self.every:,} steps.")
        return draw_histories(list(self._histories.values()))

    def close(self) -> None:
        """Stop recording; the history stays."""
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
                self._history_of(statistics).add(self.steps, statistics)
            if any(len(history.steps) > self.max_records for history in self._histories.values()):
                self._stride *= 2
                for history in self._histories.values():
                    history.thin()
        self._records += 1

    def _history_of(self, statistics: BlockStatistics) -> CouplingHistory:
        key = _key(statistics)
        if key not in self._histories:
            sizes = statistics.sizes.tolist()
            self._histories[key] = CouplingHistory(statistics.group, statistics.coupling, statistics.names, sizes)
        return self._histories[key]

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
    """What identifies a matrix as long as its blocks stay the same."""
    return statistics.group, statistics.coupling, len(statistics.names)
