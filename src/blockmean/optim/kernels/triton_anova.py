"""Anova's steady step on a GPU: pass 1, the arithmetic between the passes and pass 2 for a list of matrices.

Nine launches take a step of all matrices together, whatever their shapes; two more where some rows are not a multiple
of 16 bytes. `triton_kernels` has the code of the device and is imported when it is first launched. Starts and refreshes
are not here: `decomposition` does them.

Bytes of global memory for a parameter, float32, k = q = 32:

    pass 1    G 4, parts of GV 8q/strip = 1 and of UG 8k/tile = 0.5, which are written and read     5.5
    pass 2    G, M, θ read, M, θ written                                                             20
    means     states, left and right: about 2000/O + 2000/I

25.5 for large matrices and 31 for 768 × 768, where a fused AdamW has 28. Reading G once for each of its two products
would cost 8 instead of 5.5. U, V, left and right are read again for every tile, from the cache.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockmean.optim.batches import counts

LARGEST = 128
"""Most columns of U or V: more do not fit into registers."""

TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of parameters and gradients; everything else is float32."""

STATE = ("exp_avg", "unit_means", "input_means", "grand_means")

COLUMNS = 24
"""Of the table; `triton_kernels` says which."""


class Shape(NamedTuple):
    """A matrix and the columns of U and V."""

    units: int  # O
    inputs: int  # I
    k: int
    q: int


class Numbers(NamedTuple):
    """The numbers of a step, for one matrix."""

    lr: Tensor  # one float32 on the device
    beta1: float
    mean_beta: float
    beta2: float
    weight_decay: float
    eps: float
    sign: float  # −1 to maximize


class Sizes(NamedTuple):
    """Tiles of the launches, so large that memory is read well and so small that registers suffice."""

    tile: int  # rows of a tile in both passes
    strip: int  # columns of a tile in pass 1
    piece: int  # of which a warp has so many
    step: int  # rows at a time, in both passes
    update_strip: int  # columns of a tile in pass 2
    block: int  # rows or columns between the passes
    warps: int  # between the passes


PARTS, WIDTH = 64, 64  # of `gather`
SIZES = {  # by the most columns of U or V, padded
    32: Sizes(512, 256, 32, 16, 128, 32, 4),
    64: Sizes(512, 128, 16, 16, 64, 32, 4),
    128: Sizes(512, 64, 64, 16, 32, 16, 8),
}


def why_not(device: torch.device | str, shapes: Sequence[Shape] = ()) -> str | None:
    """Why a step on this device, of these matrices, cannot take place here; None if it can.

    >>> why_not("cpu")
    'parameters are on cpu, not on a GPU'
    """
    if torch.device(device).type != "cuda":  # torch calls AMD's cuda as well
        return f"parameters are on {torch.device(device).type}, not on a GPU"
    reasons = filter(None, map(_why_not, shapes))
    return next(reasons, None if find_spec("triton") else "triton is not installed")


def _why_not(shape: Shape) -> str | None:
    O, I, k, q = shape
    if not (O and I and 0 <= k <= O and 0 <= q <= I):
        return f"{O} × {I} entries cannot have k = {k} and q = {q}"
    if max(k, q) > LARGEST:
        return f"k = {k}, q = {q}: at most {LARGEST} means of a side"
    if I * LARGEST >= 2**31 or O >= 2**31:
        return f"a matrix of {O} × {I} is too large for offsets of 32 bits"
    return None


def padded(columns: int) -> int:
    """The next power of two that a matrix product of the device takes."""
    return max(16, 1 << (columns - 1).bit_length()) if columns else 16


class TritonMatrices:
    """Matrices of given shapes on one device, which take their steps together.

    `read` takes pass 1 and gives ‖G‖² of every matrix; `write` takes the rest of the step. Neither waits for the
    device. Between the two the caller decides whether the gradients are good:

        totals = matrices.read(params, grads, states, numbers)
        matrices.write(ok=totals.isfinite().all().float())

    A step may also end with `read`. Shapes, and with them the maps of tiles, stay. Addresses are looked up at every
    step, and the table is copied to the device, once, if one of them or a number has changed. All parameters have one
    dtype and all gradients one; numbers may differ, so that all groups of an optimizer fit into one list.

    Args:
        shapes: of the matrices, in order.
        device: of all tensors.
        precision: of products, "tf32x3" or "ieee"; None for tf32x3 where it exists.
        sizes: of tiles; None for those of `SIZES`.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        device: torch.device | str,
        precision: str | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self.shapes, self.device = [Shape(*shape) for shape in shapes], torch.device(device)
        if reason := next(filter(None, map(_why_not, self.shapes)), None if self.shapes else "there are no matrices"):
            raise ValueError(reason)
        if precision not in (None, "ieee", "tf32x3"):
            raise ValueError(f"precision must be 'ieee' or 'tf32x3', not {precision!r}")
        self.precision = precision or ("tf32x3" if _has_tf32(self.device) else "ieee")
        self.k_pad = max(padded(shape.k) for shape in self.shapes)
        self.q_pad = max(padded(shape.q) for shape in self.shapes)
        most = max(32, self.k_pad, self.q_pad)
        self.sizes = sizes or SIZES[most]
        # Three products of 128 columns do not fit into the registers of pass 1.
        self.read_precision = "ieee" if most == LARGEST else self.precision
        self._lay_out()
        self._rows: list[int] = []
        self._table = torch.empty(len(self.shapes) * COLUMNS, dtype=torch.int64, device=self.device)
        self._scratch = torch.empty(0, device=self.device)
        self._kept: tuple[Any, ...] = ()

    def _lay_out(self) -> None:
        """Offsets into scratch, and the maps from programs to matrices and tiles: one copy to the device."""
        sizes, end = self.sizes, -len(self.shapes) % 4 + len(self.shapes)  # totals come first
        self.offsets: list[tuple[int, ...]] = []
        sums: tuple[list[int], list[int]] = [], []  # after pass 1, and between the passes
        units: list[int] = []
        inputs: list[int] = []
        projected: tuple[list[int], list[int]] = [], []  # rows of a multiple of 16 bytes, and others
        updated: tuple[list[int], list[int]] = [], []
        for i, (O, I, k, q) in enumerate(self.shapes):
            strips, tiles = -(-I // sizes.strip), -(-O // sizes.tile)
            of_units, of_inputs = -(-O // sizes.block), -(-I // sizes.block)
            lengths = [
                max(strips * q, q + k) * O, strips * O, tiles * k * I, k * I, 3 * O, tiles * strips,
                of_inputs * k * q, of_units * q, of_inputs * k * k, 2 * k * q + 2 * q + k + 2 + k * k,
            ]  # fmt: skip
            at = []
            for length in lengths:
                at.append(end)
                end += length + -length % 4
            self.offsets.append(tuple(at))
            totals, K_parts, R_parts, L_parts, small = at[5:]
            for source, parts, width, target, into in (
                (totals, tiles * strips, 1, i, sums[0]),
                (K_parts, of_inputs, k * q, small, sums[0]),
                (R_parts, of_units, q, small + 2 * k * q, sums[1]),
                (L_parts, of_inputs, k * k, small + 2 * k * q + 2 * q + k + 2, sums[1]),
            ):
                for first in range(0, width, WIDTH):
                    into += source, width, parts, width, target, first
            for block in range(of_units):
                units += i, block
            for block in range(of_inputs):
                inputs += i, block
            for strip_width, into in ((sizes.strip, projected[I % 8 != 0]), (sizes.update_strip, updated[I % 8 != 0])):
                for tile in range(tiles):
                    for strip in range(-(-I // strip_width)):
                        into += i, tile, strip
        self.scratch_size = end
        odd = [0] * (len(projected[0] + projected[1]) % 2)  # a map at another alignment would be another kernel
        maps = [*sums, units, inputs, projected[0] + projected[1] + odd, updated[0] + updated[1]]
        flat = self._on_host(list(chain.from_iterable(maps))).to(self.device, non_blocking=True)
        self.sums_read, self.sums_write, self.units, self.inputs, self.projected, self.updated = flat.split(
            [len(one) for one in maps]
        )
        # (whether rows are aligned, first tile, number of tiles)
        self.project_spans = _spans(len(projected[0]) // 3, len(projected[1]) // 3)
        self.update_spans = _spans(len(updated[0]) // 3, len(updated[1]) // 3)

    def _on_host(self, values: list[int]) -> Tensor:
        """In pinned memory for a GPU, which torch does not reuse before it has been copied."""
        host = torch.tensor(values, dtype=torch.int64)
        return host.pin_memory() if self.device.type == "cuda" else host

    def read(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        numbers: Sequence[Numbers],
    ) -> Tensor:
        """Pass 1: reads only. ‖G‖² of every matrix, on the device.

        Gradients that are not contiguous are copied; parameters and states must be.
        """
        grads = [grad.contiguous() for grad in grads]
        rows = [
            value
            for param, grad, state, shape, number, offsets in zip(
                params, grads, states, self.shapes, numbers, self.offsets, strict=True
            )
            for value in self._row(param, grad, state, shape, number, offsets)
        ]
        if rows != self._rows:
            self._check(params, grads, states, numbers)
            self._rows = rows
            self._table.copy_(self._on_host(rows), non_blocking=True)  # in place: a captured graph has its address
        self._types = params[0].dtype, grads[0].dtype
        # What may be loaded 16 bytes at a time
        self._aligned = not any(address % 16 for column in range(3) for address in rows[column::COLUMNS])
        self._kept = params, grads, states, numbers  # until `write`
        self._scratch = torch.empty(self.scratch_size, dtype=torch.float32, device=self.device)
        kernels, sizes = _kernels(), self.sizes
        pads = {"K_PAD": self.k_pad, "Q_PAD": self.q_pad}
        with self._here():
            for aligned, first, count in self.project_spans:
                kernels.project[(count,)](
                    self._table, self.projected, self._scratch, first, GRAD_TYPE=_type(grads[0].dtype),
                    ALIGNED=aligned and self._aligned, **pads, TILE=sizes.tile, STRIP=sizes.strip, STEP=sizes.step,
                    PIECE=sizes.piece, PRECISION=self.read_precision, num_warps=8, num_stages=1,
                )  # fmt: skip
            kernels.collect[(len(self.inputs) // 2,)](
                self._table, self.inputs, self._scratch, **pads, BLOCK=sizes.block, TILE=sizes.tile,
                PRECISION="ieee", num_warps=sizes.warps, num_stages=1,
            )  # fmt: skip
            self._gather(self.sums_read)
        return self._scratch[: len(self.shapes)]

    def write(self, ok: Tensor) -> None:
        """The rest of the step; nothing at all happens if `ok`, one float32 on the device, is 0."""
        if not self._kept:
            raise RuntimeError("write() without read(): a step is read(), then write()")
        if ok.dtype != torch.float32 or ok.numel() != 1 or ok.device != self._scratch.device:
            raise ValueError(f"ok must be one float32 on {self.device}, not {ok.numel()} {ok.dtype} on {ok.device}")
        kernels, sizes, param_type, grad_type = _kernels(), self.sizes, *map(_type, self._types)
        pads: dict[str, Any] = {"K_PAD": self.k_pad, "Q_PAD": self.q_pad}
        sides = {**pads, "BLOCK": sizes.block, "PRECISION": "ieee", "num_warps": sizes.warps, "num_stages": 1}
        table, scratch, units, inputs = self._table, self._scratch, self.units, self.inputs
        with self._here():
            kernels.unit_side[(len(units) // 2,)](ok, table, units, scratch, STRIP=sizes.strip, **sides)
            kernels.input_side[(len(inputs) // 2,)](ok, table, inputs, scratch, **sides)
            self._gather(self.sums_write)
            kernels.grand[(len(self.shapes),)](ok, table, scratch, **pads, STEP=8, num_warps=4)
            kernels.direct[(len(units) // 2,)](ok, table, units, scratch, **sides)
            for aligned, first, count in self.update_spans:
                kernels.update[(count,)](
                    ok, table, self.updated, scratch, first, PARAM_TYPE=param_type, GRAD_TYPE=grad_type,
                    ALIGNED=aligned and self._aligned, **pads, TILE=sizes.tile, STRIP=sizes.update_strip,
                    STEP=sizes.step, PRECISION=self.precision, num_warps=8, num_stages=1,
                )  # fmt: skip
        # Memory that is freed here is reused by what comes later on the same stream.
        self._kept, self._scratch = (), torch.empty(0, device=self.device)

    def _gather(self, sums: Tensor) -> None:
        if len(sums):
            _kernels().gather[(len(sums) // 6,)](sums, self._scratch, PARTS=PARTS, WIDTH=WIDTH, num_warps=4)

    def _here(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _row(
        self,
        param: Tensor,
        grad: Tensor,
        state: dict[str, Tensor],
        shape: Shape,
        numbers: Numbers,
        offsets: tuple[int, ...],
    ) -> tuple[int, ...]:
        """A row of the table."""
        weights = 1 - numbers.beta1, 1 - numbers.mean_beta, 1 - numbers.beta2
        return (
            param.data_ptr(), grad.data_ptr(), *(state[name].data_ptr() for name in STATE), numbers.lr.data_ptr(),
            *shape, *offsets,
            *struct.unpack("3q", struct.pack("6f", *weights, numbers.weight_decay, numbers.eps, numbers.sign)),
        )  # fmt: skip

    def _check(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        numbers: Sequence[Numbers],
    ) -> None:
        """The device gets addresses: what stands there is checked here."""
        device = self.projected.device
        columns = zip(params, grads, states, self.shapes, numbers, strict=True)
        for i, (param, grad, state, (O, I, k, q), number) in enumerate(columns):
            lengths = (O * I, O * (2 * k + q + 1), (2 * q + k) * I, 2 * k * q + q + k + 6)
            tensors = [(name, state[name], torch.float32, n) for name, n in zip(STATE, lengths, strict=True)]
            tensors += ("param", param, params[0].dtype, O * I), ("grad", grad, grads[0].dtype, O * I)
            tensors += (("lr", number.lr, torch.float32, 1),)
            for name, tensor, dtype, length in tensors:
                if (tensor.dtype, tensor.numel(), tensor.device) != (dtype, length, device):
                    raise ValueError(
                        f"{name} of matrix {i}: {length} entries of {dtype} on {device} expected, "
                        f"not {tensor.numel()} of {tensor.dtype} on {tensor.device}"
                    )
                if not tensor.is_contiguous():
                    raise ValueError(f"{name} of matrix {i} is not contiguous")
        for name, dtype in (("parameters", params[0].dtype), ("gradients", grads[0].dtype)):
            if dtype not in TYPES:
                raise ValueError(f"{name} must be float32, bfloat16 or float16, not {dtype}")


class TritonStep:
    """One step of matrices, as `NativeMatrices` takes it on a CPU; what it keeps are their tables."""

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        numbers: Mapping[str, Any],
        refreshes: Sequence[bool],
        bounds: object,
        kept: dict[str, Any],
    ) -> None:
        device = params[0].device
        pairs = zip(params, states, strict=True)
        shapes = [Shape(len(param), param.shape[1:].numel(), *counts(state)) for param, state in pairs]
        if "matrices" not in kept or (kept["matrices"].shapes, kept["matrices"].device) != (shapes, device):
            kept.update(matrices=TritonMatrices(shapes, device), lr=torch.empty(1, device=device))
        self._matrices: TritonMatrices = kept["matrices"]
        lr = kept["lr"].fill_(numbers["lr"])  # a tensor on the device is copied there
        one = Numbers(lr, *(numbers[name] for name in Numbers._fields[1:]))
        self._given, self._refreshes = (params, grads, states, [one] * len(params)), refreshes

    def read(self) -> Tensor:
        """Pass 1. ‖G‖² of every matrix."""
        return self._matrices.read(*self._given)

    def write(self, ok: Tensor | None = None) -> list[int]:
        """Update state and parameters. Returns which matrices are due for a refresh, which torch does."""
        self._matrices.write(torch.ones(1, device=self._matrices.device) if ok is None else ok)
        torch.autograd.graph.increment_version(self._given[0])
        return [i for i, due in enumerate(self._refreshes) if due]


def _spans(aligned: int, others: int) -> list[tuple[bool, int, int]]:
    return [span for span in ((True, 0, aligned), (False, aligned, others)) if span[2]]


def _has_tf32(device: torch.device) -> bool:
    """Tensor cores of Ampere or later; AMD's multiply float32 as it is."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _kernels() -> Any:
    from blockmean.optim.kernels import triton_kernels

    return triton_kernels


def _type(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype."""
    return getattr(_kernels().tl, str(dtype).removeprefix("torch."))
