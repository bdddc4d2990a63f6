"""The two passes and the solve between them in C++: which tensors the kernels serve, and how they are called.

The extension is built when the package is installed and is optional; without it every step runs on torch's operations.
It gets addresses only. What they mean is checked here: nothing but plain, dense tensors on the CPU goes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockmean.blocks import TensorBlocks
from blockmean.optim.forms import Rule

if TYPE_CHECKING:
    from blockmean.optim.native.solver import Solver
    from blockmean.optim.passes import Tensors

try:
    from blockmean.optim.native import _kernels
except ImportError:  # installed without a compiler
    _kernels = None  # type: ignore[assignment]

MISSING = "blockmean was installed without its kernels. Install a C++ compiler (gcc or clang), then blockmean again"

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}

# Every tensor, as the kernels see it: outer × blocks × inner entries.
Geometry = tuple[int, int, int]


def is_available() -> bool:
    """Whether the kernels were built."""
    return _kernels is not None


def instructions() -> str | None:
    """The instruction set that the kernels use on this machine: "avx512", "avx2" or "plain"; None without kernels."""
    return None if _kernels is None else _kernels.instructions


def refusal(param: Tensor, grad: Tensor | None, moments: Sequence[Tensor], cut: TensorBlocks) -> str | None:
    """Why the kernels cannot serve a tensor, to complete a sentence about it; None if they can."""
    if param.dtype not in DTYPES:
        return f"is {str(param.dtype).removeprefix('torch.')}"
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    gradients = [] if grad is None else [("has a gradient that", grad, param.dtype)]
    for what, tensor, expected in [
        ("", param, param.dtype),
        *gradients,
        *(("has state that", m, dtype) for m in moments),
    ]:
        if type(tensor) not in (Tensor, nn.Parameter):
            found = f"is a {type(tensor).__name__}"
        elif tensor.device.type != "cpu":
            found = f"is on {tensor.device}"
        elif tensor.layout != torch.strided or tensor.dtype != expected or tensor.shape != param.shape:
            found = "has another dtype, shape or layout"
        elif tensor.is_neg() or tensor.is_conj() or (tensor.numel() and not tensor.data_ptr()):
            found = "is not stored as it is"
        elif not same_strides(tensor.shape, tensor.stride(), param.stride()):
            found = "has other strides"
        else:
            continue
        return f"{what} {found}".lstrip()
    if cut.labels is not None:
        return "is cut into blocks by labels"
    if memory_order(param.shape, param.stride()) is None:
        return "has gaps or overlaps in memory"
    if geometry(param.shape, param.stride(), cut) is None:
        return "has blocks that are not regular in memory"
    return None


def same_strides(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two tensors of a shape lie alike in memory; the stride of a dim of size 1 means nothing."""
    return a == b or all(x == y for size, x, y in zip(shape, a, b, strict=True) if size > 1)


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """The dims of a tensor from the outermost to the innermost, without those of size 1; None if it is not dense."""
    order = sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -strides[dim])
    expected = 1
    for dim in reversed(order):
        if strides[dim] != expected:
            return None
        expected *= shape[dim]
    return order


def geometry(shape: Sequence[int], strides: Sequence[int], cut: TensorBlocks) -> Geometry | None:
    """(outer, blocks, inner) of a dense tensor as it lies in memory, channels_last included; None if it is not so."""
    order = memory_order(shape, strides)
    if order is None or cut.labels is not None:
        return None
    dims = [dim for dim in cut.dims if shape[dim] > 1]
    first = order.index(dims[0]) if dims else 0
    if order[first : first + len(dims)] != dims:
        return None
    outer = blocks = inner = 1
    for place, dim in enumerate(order):
        if place < first and dims:
            outer *= shape[dim]
        elif place < first + len(dims):
            blocks *= shape[dim]
        else:
            inner *= shape[dim]
    return outer, blocks, inner


def overlapping(written: Sequence[tuple[int, Tensor]]) -> set[int]:
    """The owners of tensors that share memory with those of another owner; each comes with its owner's number."""
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes, owner) for owner, x in written if x.nbytes)
    found: set[int] = set()
    reach, last = 0, -1
    for start, end, owner in spans:
        if start < reach and owner != last:
            found |= {owner, last}
        if end > reach:
            reach, last = end, owner
    return found


def require_memory(addresses: Sequence[int]) -> None:
    """Raise if a gradient has no memory, the only thing that may be wrong with one that looks like the last one."""
    if 0 in addresses:
        raise RuntimeError("A gradient has no memory of its own. Take fused=False.")


class Table:
    """Both passes over one list of tensors, whose addresses are looked up once.

    Valid as long as the tensors stay where they are; only gradients may move. `out` receives the sums, (rows, L).
    """

    def __init__(self, tensors: Tensors, out: Tensor | None = None) -> None:
        numbers: list[int] = []
        self.counts = [cut.count for cut in tensors.cuts]
        self._params = tensors.params
        first: Sequence[Tensor | None] = tensors.first or [None] * len(tensors.params)
        for param, m, r, cut in zip(tensors.params, first, tensors.second, tensors.cuts, strict=True):
            found = geometry(param.shape, param.stride(), cut)
            assert found is not None  # `refusal` has checked
            moments = 0 if m is None else m.data_ptr(), r.data_ptr()
            numbers += [param.data_ptr(), *moments, *found, DTYPES[param.dtype]]
        self._table = _kernels.table(numbers)
        self._out = out
        self._dtypes = {param.dtype for param in tensors.params}
        self._grads: list[int] = []  # addresses, between the passes
        self.is_finite = False  # whether the last sums were
        self.is_local = False  # whether they stopped short of what `solve_and_apply_` can do in its turn

    def block_sums(self, rule: Rule, tensors: Tensors, local: bool = False) -> Tensor:
        """Pass 1: the rows of passes.py for the blocks of all tensors in order, in float64.

        With `local`, only u and Σ g² of most blocks: enough to know that all gradients are finite. The last step must
        have been taken with this table. If a sum might overflow, all rows are computed, and `is_local` is False.
        """
        rows = rows_of(rule)
        if self._out is None:
            self._out = torch.zeros(6, sum(self.counts), dtype=torch.float64, device="cpu")
        out = self._out[:rows] if len(self._out) > rows else self._out
        grads = self._grads = [grad.data_ptr() for grad in tensors.grads if grad is not None]
        require_memory(grads)
        self.is_finite, self.is_local = _kernels.block_sums(
            self._table,
            self._rule(rule),
            grads,
            tensors.steps,
            out.data_ptr(),
            out.stride(0),
            local,
            torch.get_num_threads(),
        )
        return out

    def apply_(self, rule: Rule, tensors: Tensors, c: Any, kappa: Any) -> None:
        """Pass 2: update moments and parameters. Empty c and kappa stand for 0 and 1."""
        _kernels.apply_(
            self._table,
            self._rule(rule),
            self._grads or [grad.data_ptr() for grad in tensors.grads if grad is not None],
            tensors.steps,
            c.data_ptr() if len(c) else 0,
            kappa.data_ptr() if len(kappa) else 0,
            torch.get_num_threads(),
        )
        self._mark_written()

    def solve_and_apply_(self, rule: Rule, solver: Solver, sums: Tensor) -> bool:
        """The rest of the sums, the solve and pass 2, block by block, while a block is in the cache.

        False if a sum is not finite, which moments that somebody has changed can do. The parameters of that block stay.
        """
        arguments = solver.arguments(rule, sums)
        good = _kernels.solve_and_apply_(self._table, self._rule(rule), *arguments, torch.get_num_threads())
        self._mark_written()
        return good

    def _mark_written(self) -> None:
        """Tell autograd, so that a stale graph is noticed, as after torch's steps. No graph knows the moments."""
        self._grads = []
        torch.autograd.graph.increment_version(self._params)

    def _rule(self, rule: Rule) -> tuple[int | float, ...]:
        form, betas = rule.form, rule.betas or (0.0, 0.0)
        if not form.corrects:
            sums = 0
        elif form.is_weighted:
            sums = 4 if rule.cap is None else 5
        else:
            sums = 2 if form.takes_raw_sums else 3
        careful = any(rule.eps < _TINY[dtype] for dtype in self._dtypes)
        sign = -1.0 if rule.maximize else 1.0
        decays = (rule.weight_decay, sign, rule.lr, rule.lr_decay)
        return (sums, rule.betas is not None, careful, *betas, rule.eps, *decays)


_TINY = {dtype: torch.finfo(torch.promote_types(dtype, torch.float32)).tiny for dtype in DTYPES}


def rows_of(rule: Rule) -> int:
    """The number of rows of sums that a rule needs."""
    form = rule.form
    if not form.corrects:
        return 1
    if form.is_weighted:
        return 4 if rule.cap is None else 6
    return 2 if form.takes_raw_sums else 3


def read_steps(addresses: list[int]) -> list[int]:
    """The step counts, float32 each, at these addresses."""
    return _kernels.read_steps(addresses)


def advance(addresses: list[int]) -> None:
    """Add one to each of these step counts."""
    _kernels.advance(addresses)


def unchanged(*seen: Any) -> list[Tensor] | None:
    """What `watch.unchanged` returns."""
    return _kernels.unchanged(*seen)
