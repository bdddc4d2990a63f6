"""Anova's steady step on a GPU, by Triton: its tables and launches.

Seven launches take all matrices of a group through a step, whatever their shapes. Those of another dtype, and those
whose rows do not start at multiples of 16 bytes, have launches of their own. `triton_kernels` has the code of the
device, and is imported when it is first launched. Starts and refreshes are not here: torch's operations do them.

Bytes of global memory for a parameter, float32, k = q = 32:

    pass 1    G 4; parts of GV 8q/STRIP = 2 and of UG 8k/TILE = 0.25, which are written and read    6.25
    pass 2    G, M, θ read, M, θ written                                                             20
    means     states, left and right: about 2000/O + 1800/I

26.3 for large matrices, where a fused AdamW has 28. Pass 1 reads G again for every further 32 means. Caches have to
serve 12 more: tiles of pass 2 share left, right and V.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockmean.optim.base import State
from blockmean.optim.batches import MEANS, counts
from blockmean.optim.decomposition import max_factor

MOST = 128
"""Columns of U or V: L Lᵀ has to fit into registers."""

TILE, STRIP, PIECE, STEP = 1024, 128, 16, 16
"""Pass 1: rows and columns of a program, columns of each of its warps, and rows at a time."""

UPDATE_TILE, UPDATE_STRIP = 32, 64
"""Pass 2: rows and columns of a program."""

BLOCKS = {32: (32, 4), 64: (32, 4), 128: (16, 8)}
"""Between the passes: rows or columns of a program, and its warps, by the columns of U and V, padded."""

WIDTH = 64
"""`add`: columns of a program."""

PRECISION = "ieee" if torch.version.hip else "tf32x3"
"""Of products in both passes, never plain TF32. AMD's matrix cores multiply float32 as it is."""


class Shape(NamedTuple):
    """A matrix and the columns of U and V."""

    units: int  # O
    inputs: int  # I
    k: int
    q: int


def why_not(device: torch.device, shape: Shape) -> str | None:
    """Why a matrix on this device cannot take its steps here; None if it can.

    >>> why_not(torch.device("cpu"), Shape(8, 8, 2, 2))
    'Triton has no kernels for cpu'
    """
    if device.type != "cuda":  # torch calls AMD's cuda as well
        return f"Triton has no kernels for {device.type}"
    if max(shape.k, shape.q) > MOST:
        return f"Triton's kernels take at most {MOST} means of a side"
    if TILE * shape.inputs >= 2**31 or shape.units >= 2**31:
        return f"Triton's kernels have too few bits for {shape.units} × {shape.inputs} entries"
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton's kernels need compute capability 8.0"
    return None


def scratch_lengths(shape: Shape, tiles: int, strips: int, rows: int, columns: int) -> dict[str, int]:
    """What a matrix has in scratch, in the order of the table; `rows` and `columns` are blocks of them."""
    O, I, k, q = shape
    return {
        "GV_PARTS": strips * O * q,
        "ROW_PARTS": strips * O,  # ‖G_i‖²
        "UG_PARTS": tiles * k * I,
        "K_PARTS": tiles * strips * (1 + k * q),  # ‖G‖² | K
        "R_PARTS": rows * q,  # squares
        "L_PARTS": columns * k * k,  # L Lᵀ
        "SUMS": k * q + q + k * k,  # K | squares of R | L Lᵀ
        "SCALES": k * q + q + k + 3,  # D_K K_m | D_R | D_L | ‖E‖²/‖F‖² | c | what may be rounding
        "ROWS": 4 * O,  # ‖G_i‖² | ‖F_i‖² | v_E as it was | c D_E
        "LEFT": O * (q + k),
        "RIGHT": k * I,
    }


class TritonMatrices:
    """Matrices of given shapes and one dtype, which take their steps together: which program has which part of them.

    `read` is pass 1, and changes nothing; `write` is the rest of a step. Neither waits for the device.

    Args:
        is_aligned: whether rows of parameters, gradients and averages start at multiples of 16 bytes.
    """

    def __init__(self, shapes: Sequence[Shape], device: torch.device, dtype: torch.dtype, is_aligned: bool) -> None:
        self.shapes, self.device = shapes, device
        if self._is_capturing():
            raise RuntimeError("Take two steps before a CUDA graph is captured: Anova's second one compiles kernels.")
        data_type = getattr(_kernels().tl, str(dtype).removeprefix("torch."))
        self._options = {"DTYPE": data_type, "ALIGNED": is_aligned, "PRECISION": PRECISION}
        most = max(max(shape.k, shape.q) for shape in shapes)
        self._chunks, self._pad = math.ceil(most / 32), max(32, 1 << (most - 1).bit_length())
        self._block, self._warps = BLOCKS[self._pad]
        self._size = len(shapes)  # of scratch, in which totals come first
        self._offsets: list[list[int]] = []
        maps: list[list[Tensor]] = [[] for _ in range(5)]
        tiles, sides, update_tiles, first_sums, second_sums = maps
        for i, shape in enumerate(shapes):
            (O, I, k, q), at = shape, {"TOTAL": i}
            n_tiles, n_strips, n_rows, n_columns = (
                math.ceil(n / size) for n, size in ((O, TILE), (I, STRIP), (O, self._block), (I, self._block))
            )
            for name, length in scratch_lengths(shape, n_tiles, n_strips, n_rows, n_columns).items():
                at[name], self._size = self._size, self._size + length + -length % 4
            self._offsets.append(list(at.values()))
            for sums, source, stride, parts, width, target in (
                (first_sums, at["K_PARTS"], 1 + k * q, n_tiles * n_strips, 1, i),
                (first_sums, at["K_PARTS"] + 1, 1 + k * q, n_tiles * n_strips, k * q, at["SUMS"]),
                (second_sums, at["R_PARTS"], q, n_rows, q, at["SUMS"] + k * q),
                (second_sums, at["L_PARTS"], k * k, n_columns, k * k, at["SUMS"] + k * q + q),
            ):
                sums.append(_grid([source], [stride], [parts], [width], [target], range(0, width, WIDTH)))
            tiles.append(_grid([i], range(n_tiles), range(n_strips)))
            sides += _grid([i], range(n_rows), [0]), _grid([i], range(n_columns), [1])
            update_tiles.append(_grid([i], range(-(-O // UPDATE_TILE)), range(-(-I // UPDATE_STRIP))))
        self._tiles, self._sides, self._update_tiles, *self._sums = (self._on_device(torch.cat(one)) for one in maps)
        self._rows: list[int] = []
        self._table = torch.empty(0, dtype=torch.int64)
        self._captured: list[Tensor] = []

    def read(self, tensors: Sequence[Sequence[Tensor]], sign: float) -> tuple[Tensor, Tensor]:
        """The table and scratch for `write`. Scratch begins with ‖G‖² of every matrix.

        Args:
            tensors: of every matrix its parameter, gradient and state, contiguous and alive until `write` is called.
        """
        scratch = torch.empty(self._size, dtype=torch.float32, device=self.device)
        with torch.cuda.device_of(scratch):  # where Triton launches
            table = self._table_of([[tensor.data_ptr() for tensor in one] for one in tensors])
            _kernels().project[(len(self._tiles), self._chunks)](
                table, self._tiles, scratch, sign, **self._options,
                TILE=TILE, STRIP=STRIP, PIECE=PIECE, STEP=STEP, num_warps=STRIP // PIECE, num_stages=3,
            )  # fmt: skip
            self._add(self._sums[0], scratch)
        return table, scratch

    def write(self, table: Tensor, scratch: Tensor, ok: Tensor, rates: Tensor, numbers: Mapping[str, float]) -> None:
        """Nothing at all happens if `ok` is 0.

        Args:
            rates: the learning rate, and the largest factor c at it.
        """
        kernels, sides, eps, sign = _kernels(), self._sides, float(numbers["eps"]), float(numbers["sign"])
        news, mean_news, rest_news = (1.0 - numbers[name] for name in ("beta1", "mean_beta", "beta2"))
        block = {"PAD": self._pad, "BLOCK": self._block, "num_warps": self._warps, "num_stages": 1}
        with torch.cuda.device_of(scratch):
            kernels.update_sides[(len(sides),)](ok, table, sides, scratch, news, TILE=TILE, STRIP=STRIP, **block)
            self._add(self._sums[1], scratch)
            kernels.update_grand[(len(self.shapes),)](
                ok, rates, table, scratch, news, mean_news, rest_news, eps, PAD=self._pad, num_warps=1
            )
            kernels.precondition[(len(sides),)](ok, table, sides, scratch, rest_news, eps, **block)
            kernels.update[(len(self._update_tiles),)](
                ok, rates, table, self._update_tiles, scratch, sign, news, float(numbers["weight_decay"]),
                TILE=UPDATE_TILE, STRIP=UPDATE_STRIP, **self._options, num_warps=4, num_stages=1,
            )  # fmt: skip

    def _add(self, sums: Tensor, scratch: Tensor) -> None:
        _kernels().add[(len(sums),)](sums, scratch, WIDTH=WIDTH, num_warps=4)

    def _table_of(self, addresses: Sequence[Sequence[int]]) -> Tensor:
        """Addresses, shape and offsets of every matrix, copied to the device if something has changed."""
        columns = zip(addresses, self.shapes, self._offsets, strict=True)
        rows = [value for parts in columns for part in parts for value in part]
        table = self._table if rows == self._rows else self._on_device(torch.tensor(rows))
        if self._is_capturing():
            self._captured.append(table)  # a graph reads it at every replay
        else:
            self._rows, self._table = rows, table
        return table

    def _on_device(self, values: Tensor) -> Tensor:
        """A copy that nobody waits for: from pinned memory, which torch does not reuse before it has been copied."""
        if self.device.type == "cuda":
            values = values.pin_memory()
        if self._is_capturing():
            self._captured.append(values)  # a graph copies it at every replay
        return values.to(self.device, non_blocking=True)

    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class TritonStep:
    """One step of the matrices of a group, as `NativeMatrices` takes it on a CPU. `kept` has what shapes determine."""

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        numbers: Mapping[str, Any],
        refreshes: Sequence[bool],
        bounds: object,
        kept: dict[Any, TritonMatrices],
    ) -> None:
        self._params, self._numbers, self._refreshes = params, numbers, refreshes
        self._device = params[0].device
        alike: dict[tuple[torch.dtype, bool], list[tuple[Shape, list[Tensor]]]] = {}
        for param, grad, state in zip(params, grads, states, strict=True):
            shape = Shape(len(param), param.shape[1:].numel(), *counts(state))
            tensors = [param, grad, *(state[name] for name in ("exp_avg", *MEANS))]
            is_aligned = shape.inputs % 8 == 0 and not any(tensor.data_ptr() % 16 for tensor in tensors[:3])
            alike.setdefault((param.dtype, is_aligned), []).append((shape, tensors))
        self._work = []
        for kind, members in alike.items():
            shapes = [shape for shape, _ in members]
            if kind not in kept or (kept[kind].shapes, kept[kind].device) != (shapes, self._device):
                kept[kind] = TritonMatrices(shapes, self._device, *kind)
            self._work.append((kept[kind], [tensors for _, tensors in members]))

    def read(self) -> Tensor:
        """Pass 1. ‖G‖² of every matrix."""
        sign = float(self._numbers["sign"])
        self._read = [matrices.read(tensors, sign) for matrices, tensors in self._work]
        pairs = zip(self._work, self._read, strict=True)
        totals = [scratch[: len(tensors)] for (_, tensors), (_, scratch) in pairs]
        return totals[0] if len(totals) == 1 else torch.cat(totals)

    def write(self, ok: Tensor | None = None) -> list[int]:
        """Update state and parameters. Returns which matrices are due for a refresh, which torch does."""
        ok = torch.ones(1, device=self._device) if ok is None else ok.to(self._device)
        lr, rates = self._numbers["lr"], torch.empty(2, device=self._device)
        for rate, value in zip(rates, (lr, max_factor(lr)), strict=True):
            rate.fill_(value)
        for (matrices, _), (table, scratch) in zip(self._work, self._read, strict=True):
            matrices.write(table, scratch, ok, rates, self._numbers)
        torch.autograd.graph.increment_version(self._params)
        return [i for i, due in enumerate(self._refreshes) if due]


def _grid(*sides: Sequence[int]) -> Tensor:
    """All combinations, one in a row."""
    return torch.cartesian_prod(*map(torch.tensor, sides))


def _kernels() -> Any:
    from blockmean.optim.kernels import triton_kernels

    return triton_kernels
