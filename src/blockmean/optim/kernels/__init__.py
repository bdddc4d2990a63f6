"""Both passes in C++: which tensors the kernels serve, and how they are called.

The library is built when the package is installed and is optional; without it every step runs on torch's operations.
It is plain C to the outside and loaded with ctypes, which releases the GIL. It gets addresses only. What they mean is
checked here: nothing but plain, dense tensors on the CPU goes through.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from blockmean.blocks import TensorBlocks
from blockmean.optim.forms import SMALLEST_LAMBDA, Rule
from blockmean.optim.passes import Tensors, debiased, rate_of

TENSOR = struct.Struct("8q3d")
"""`struct Tensor` of passes.hpp: param, grad, first, second, outer, blocks, inner, dtype, gain, gain_r, rate."""


class CRule(ctypes.Structure):
    """`struct Rule` of passes.hpp."""

    _fields_ = (
        ("sums", ctypes.c_int64),
        ("adam", ctypes.c_int64),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("sign", ctypes.c_double),
        ("floor", ctypes.c_double),
        ("smallest_lambda", ctypes.c_double),
    )


GRADIENT, SQUARES, PAPER, CONSISTENT, WEIGHTED, CAPPED = range(6)  # `enum Sums`
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # `enum Dtype`
ARITHMETIC = {dtype: torch.promote_types(dtype, torch.float32) for dtype in DTYPES}
CACHED_ENTRIES = {torch.float32: 2**14, torch.float64: 2**13}  # CACHED_BYTES
PLAIN = (Tensor, nn.Parameter)
WHAT = ("", "has a gradient that ", "has state that ", "has state that ")

MISSING = "blockmean was installed without its kernels. Install a C++ compiler (gcc or clang), then blockmean again"

Geometry = tuple[int, int, int]
"""A tensor as the kernels see it: outer × blocks × inner entries."""


def load() -> ctypes.CDLL | None:
    """The library, if it was built; BLOCKMEAN_INSTRUCTIONS chooses its instruction set."""
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("libblockmean.so")))
    except OSError:  # installed without a compiler
        return None
    if library.blockmean_sizes() != TENSOR.size << 16 | ctypes.sizeof(CRule):
        raise ImportError("The kernels of blockmean are those of another version. Install blockmean again.")
    pointer, count, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    tensors = (ctypes.c_char_p, count, ctypes.POINTER(CRule))
    library.blockmean_sums.argtypes = (*tensors, pointer, count, threads)
    library.blockmean_apply.argtypes = (*tensors, pointer, pointer, threads)
    library.blockmean_solve_and_apply.argtypes = (*tensors, ctypes.c_char_p, pointer, count, threads)
    library.blockmean_instructions.argtypes = (ctypes.c_char_p,)
    library.blockmean_instructions.restype = ctypes.c_char_p
    wanted = os.environ.get("BLOCKMEAN_INSTRUCTIONS") or None
    if library.blockmean_instructions(wanted and wanted.encode()) is None:
        raise ImportError(f"BLOCKMEAN_INSTRUCTIONS={wanted} is not among what this machine can run.")
    return library


_library = load()


def is_available() -> bool:
    """Whether the kernels were built."""
    return _library is not None


def instructions(wanted: str | None = None) -> str | None:
    """The instruction set in use: "avx512", "avx2" or "plain"; None without kernels. Another one if `wanted`."""
    if _library is None:
        return None
    found: bytes | None = _library.blockmean_instructions(wanted and wanted.encode())
    if found is None:
        raise ValueError(f"This machine cannot run kernels with {wanted}.")
    return found.decode()


# -------------------------------------------------------------------- which tensors


def why_not_native(param: Tensor, grad: Tensor | None, moments: Sequence[Tensor], cut: TensorBlocks) -> str | None:
    """Why the kernels cannot serve a tensor, to complete a sentence about it; None if they can."""
    if param.dtype not in ARITHMETIC:
        return f"is {str(param.dtype).removeprefix('torch.')}"
    dtype, shape, is_contiguous = param.dtype, cut.shape, None
    for what, x in zip(WHAT, (param, grad, *moments), strict=False):
        if x is None:
            continue
        if type(x) not in PLAIN:
            return f"{what}is a {type(x).__name__}"
        if not x.is_cpu:
            return f"{what}is on {x.device}"
        if x.dtype != dtype or x.shape != shape or x.layout != torch.strided:
            return f"{what}has another dtype, shape or layout"
        if x.is_neg() or not (x.data_ptr() or cut.count == 0):
            return f"{what}is not stored as it is"
        if x is param:
            is_contiguous = x.is_contiguous()
        elif not (is_contiguous and x.is_contiguous()) and not same_strides(shape, x.stride(), param.stride()):
            return f"{what}has other strides"
        if x is grad:
            dtype = ARITHMETIC[dtype]
    if cut.labels is not None:
        return "is cut into blocks by labels"
    if geometry(shape, param.stride(), cut.dims) is not None:
        return None
    regular = memory_order(shape, param.stride()) is not None
    return "has blocks that are not regular in memory" if regular else "has gaps or overlaps in memory"


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


@functools.lru_cache(4096)
def geometry(shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...]) -> Geometry | None:
    """(outer, blocks, inner) of a dense tensor as it lies in memory, channels_last included; None if it is not so."""
    order = memory_order(shape, strides)
    if order is None:
        return None
    dims = tuple(dim for dim in dims if shape[dim] > 1)
    first = order.index(dims[0]) if dims else 0
    if tuple(order[first : first + len(dims)]) != dims:
        return None
    sizes = [shape[dim] for dim in order]
    before, own, after = sizes[:first], sizes[first : first + len(dims)], sizes[first + len(dims) :]
    return math.prod(before), math.prod(own), math.prod(after)


# -------------------------------------------------------------------- both passes


class Native:
    """Both passes over one list of tensors, which `why_not_native` has examined.

    Args:
        by_block: whether pass 2 takes the solve with it, each block for itself; then pass 1 stops at u and Σ g².
    """

    def __init__(self, rule: Rule, tensors: Tensors, *, by_block: bool = False) -> None:
        betas = rule.betas or (0.0, 0.0)
        if not rule.form.corrects:
            sums = GRADIENT
        elif rule.form.is_weighted:
            sums = SQUARES if by_block else WEIGHTED if rule.cap is None else CAPPED
        else:
            sums = PAPER if rule.form.takes_raw_sums else CONSISTENT
        sign = -1.0 if rule.maximize else 1.0
        adam = rule.betas is not None
        self._rule = CRule(sums, adam, *betas, rule.eps, rule.weight_decay, sign, rule.floor, SMALLEST_LAMBDA)
        self._params, self._count = tensors.params, len(tensors.params)
        numbers = {step: (*debiased(rule, step), rate_of(rule, step)) for step in set(tensors.steps)}
        first = [0] * self._count if rule.betas is None else [m.data_ptr() for m in tensors.first]
        self._tensors = b"".join(
            [
                TENSOR.pack(
                    param.data_ptr(),
                    grad.data_ptr(),
                    m,
                    r.data_ptr(),
                    *geometry(cut.shape, param.stride(), cut.dims),
                    DTYPES[param.dtype],
                    *numbers[step],
                )
                for param, grad, m, r, step, cut in zip(
                    tensors.params, tensors.grads, first, tensors.second, tensors.steps, tensors.cuts, strict=True
                )
            ]
        )

    def block_sums(self, out: Tensor) -> bool:
        """Pass 1: the rows of passes.py for the blocks of all tensors in order, in float64. Whether they are finite."""
        return self._call("sums", out.data_ptr(), out.stride(0))

    def apply_(self, c: Tensor | None, kappa: Tensor | None) -> None:
        """Pass 2: update moments and parameters. None stands for c = 0 and κ = 1."""
        self._call("apply", None if c is None else c.data_ptr(), None if kappa is None else kappa.data_ptr())
        torch.autograd.graph.increment_version(self._params)  # so that a stale graph is noticed

    def solve_and_apply_(self, statistics: Sequence[tuple[Tensor, Tensor]], out: Tensor) -> bool:
        """The rest of the sums, the solve and pass 2, block by block, while a block is in the cache.

        `statistics` are U and the energy of every tensor's blocks; `out` is that of pass 1, and gets two more rows.
        False if a sum is not finite, which moments that somebody has changed can do. The parameters of that block stay.
        """
        pointers = [x.data_ptr() for pair in statistics for x in pair]
        good = self._call("solve_and_apply", struct.pack(f"{len(pointers)}q", *pointers), out.data_ptr(), out.stride(0))
        torch.autograd.graph.increment_version(self._params)
        return good

    def _call(self, name: str, *arguments: object) -> bool:
        function = getattr(_library, f"blockmean_{name}")
        rule = ctypes.byref(self._rule)
        result: int = function(self._tensors, self._count, rule, *arguments, torch.get_num_threads())
        if result < 0:
            raise MemoryError("The kernels of blockmean found no memory for their tasks.")
        return bool(result)
