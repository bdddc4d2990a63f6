"""Both passes in C++: which tensors the kernels serve, and how they are called.

The library is built when the package is installed and is optional; without it every step runs on torch's operations.
It is plain C to the outside and loaded with ctypes, which releases the GIL. It gets addresses only. What they mean is
checked here: nothing but plain, dense tensors on the CPU goes through.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from blockmean.blocks import Geometry, TensorBlocks, geometry
from blockmean.optim.base import arithmetic
from blockmean.optim.passes import SMALLEST_LAMBDA, Run
from blockmean.optim.sharding import PLAIN

RULE = Struct("3q10d")
"""`struct Rule` of passes.hpp: sums, adam, dtype; betas, ε, weight decay, sign, floor, smallest λ, m̂/m, r̂/r, η."""
ANOVA_RULE = Struct("7d")
"""`struct AnovaRule` of anova.hpp: `NUMBERS` in anova.py."""
SQUARES, SUMS = 1, {1: 0, 2: 2, 3: 3, 4: 4, 6: 5}  # `enum Sums`, by the rows of a form
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # `enum Dtype`
CACHED_BYTES = 2**16  # longest block that is solved for itself, in the dtype of the arithmetic

MISSING = "blockmean was installed without its kernels. Install a C++ compiler (gcc or clang), then blockmean again"


def load() -> ctypes.CDLL | None:
    """The library, if it was built; BLOCKMEAN_INSTRUCTIONS chooses its instruction set."""
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("libblockmean.so")))
    except OSError:  # installed without a compiler
        return None
    if library.blockmean_sizes() != RULE.size << 8 | ANOVA_RULE.size:
        raise ImportError("The kernels of blockmean are those of another version. Install blockmean again.")
    address, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    tensors = (address, number, ctypes.c_char_p, threads)
    library.blockmean_sums.argtypes = (*tensors, address, number)
    library.blockmean_apply.argtypes = (*tensors, address, address)
    library.blockmean_solve_and_apply.argtypes = (*tensors, address, address, number)
    matrices = (address, address, number, threads)
    library.blockmean_anova_scratch.argtypes = matrices
    library.blockmean_anova_scratch.restype = ctypes.c_int64
    library.blockmean_anova_read.argtypes = (*matrices, ctypes.c_char_p, address)
    library.blockmean_anova_write.argtypes = (*matrices, ctypes.c_char_p, address)
    library.blockmean_instructions.argtypes = (ctypes.c_char_p,)
    library.blockmean_instructions.restype = ctypes.c_char_p
    wanted = os.environ.get("BLOCKMEAN_INSTRUCTIONS") or None
    if library.blockmean_instructions(wanted and wanted.encode()) is None:
        able = [name for name in ("avx512", "avx2", "plain") if library.blockmean_instructions(name.encode())]
        text = f"BLOCKMEAN_INSTRUCTIONS={wanted} is not among what this machine can run: {', '.join(able)}."
        raise ImportError(text)
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


def addresses(tensors: Iterable[Tensor]) -> Iterator[int]:
    """Where their memory begins; it is theirs, so they must live as long."""
    return map(Tensor.data_ptr, tensors)


# -------------------------------------------------------------------- which tensors


def serve_all(params: list[Tensor], grads: list[Any], moments: list[Any], cuts: list[TensorBlocks]) -> bool:
    """Whether the kernels serve all of these, contiguous each and of one dtype: a short way to ask of a long list."""
    every = [*params, *grads, *moments]
    return (
        _library is not None
        and params[0].dtype in DTYPES
        and PLAIN.issuperset(map(type, every))
        and all(map(attrgetter("is_cpu"), every))
        and all(map(Tensor.is_contiguous, every))
        and set(map(attrgetter("dtype"), [*params, *grads])) == {params[0].dtype}
        and set(map(attrgetter("dtype"), moments)) == {arithmetic(params[0].dtype)}
        and list(map(Tensor.numel, every)) == [cut.entries for cut in cuts] * (len(every) // len(cuts))
        and not any(map(Tensor.is_neg, grads))
        and all(map(Tensor.data_ptr, grads))
        and all(cut.geometry for cut in cuts)
    )


def why_not_native(param: Tensor, grad: Tensor | None, moments: Sequence[Tensor], cut: TensorBlocks) -> str | None:
    """Why the kernels cannot serve a tensor, to complete a sentence about it; None if they can."""
    if _library is None:
        return "has no kernels"
    if param.dtype not in DTYPES:
        return f"is {str(param.dtype).removeprefix('torch.')}"
    gradients = [] if grad is None else [("has a gradient that ", grad, param.dtype)]
    states = [("has state that ", moment, arithmetic(param.dtype)) for moment in moments]
    for what, x, dtype in [("", param, param.dtype), *gradients, *states]:
        if type(x) not in PLAIN or not x.is_cpu:
            return f"{what}is a {type(x).__name__} on {x.device}"
        alike = x.layout == torch.strided and x.dtype == dtype and x.shape == cut.shape
        in_memory = alike and not x.is_neg() and (not x.numel() or x.data_ptr())
        if not in_memory or not same_strides(x.shape, x.stride(), param.stride()):
            return f"{what}has another dtype, shape or layout"
    return None if geometry_of(param, cut) else "has blocks that are not regular in memory"


def same_strides(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two tensors of a shape lie alike in memory; the stride of a dim of size 1 means nothing."""
    return a == b or all(x == y for size, x, y in zip(shape, a, b, strict=True) if size > 1)


def geometry_of(param: Tensor, cut: TensorBlocks) -> Geometry | None:
    """(outer, blocks, inner) of a parameter as it lies in memory; None if blocks are not regular in it."""
    if param.is_contiguous() or cut.labels is not None:
        return cut.geometry
    return geometry(cut.shape, param.stride(), cut.dims)


# -------------------------------------------------------------------- both passes


@dataclass
class Native(Run):
    """Both passes over a run in C++. Its tensors have been examined."""

    def __post_init__(self) -> None:
        rule, betas, count = self.rule, self.rule.betas or (0.0, 0.0), len(self.params)
        sums = SQUARES if self.by_block else SUMS[rule.form.rows]
        self._rule = RULE.pack(
            *(sums, rule.betas is not None, DTYPES[self.params[0].dtype], *betas, rule.eps, rule.weight_decay),
            *(-1.0 if rule.maximize else 1.0, rule.floor, SMALLEST_LAMBDA, *rule.numbers(self.step)),
        )
        first = addresses(self.first) if self.first else [0] * count
        columns = addresses(self.params), addresses(self.grads), first, addresses(self.second)
        self._columns = array("q", [*chain(*columns, *self.shapes)])

    def block_sums(self) -> bool:
        """Pass 1: fill in the sums. Returns whether they are finite."""
        return bool(self._call("sums", self.sums.data_ptr(), self.sums.stride(0)))

    def apply_(self, c: Tensor | None, kappa: Tensor | None) -> None:
        """Pass 2: update moments and parameters. None stands for c = 0 and κ = 1."""
        self._call("apply", None if c is None else c.data_ptr(), None if kappa is None else kappa.data_ptr())
        torch.autograd.graph.increment_version(self.params)  # so that a stale graph is noticed

    def solve_and_apply_(self, U: Sequence[Tensor], energy: Sequence[Tensor]) -> None:
        """The rest of the sums, the solve and pass 2, block by block, while a block is in the cache.

        U and the energy are those of every tensor's blocks. Rows 2 and 3 of the sums become the length of the
        uncorrected step along what a block shares, and its change.
        """
        states = array("q", [*addresses(U), *addresses(energy)])
        self._call("solve_and_apply", states.buffer_info()[0], self.sums.data_ptr(), self.sums.stride(0))
        torch.autograd.graph.increment_version(self.params)

    def _call(self, name: str, *arguments: int | None) -> Any:
        function = getattr(_library, f"blockmean_{name}")
        columns = self._columns.buffer_info()[0]
        return function(columns, len(self.params), self._rule, torch.get_num_threads(), *arguments)
