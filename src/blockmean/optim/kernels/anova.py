"""Anova's steady step and refresh in C++: which matrices the kernels serve, and how they are called.

The layout of a matrix's state, with O units, I inputs, k columns of U and q of V:

    exp_avg      (O, I)           M
    unit_means   (O, 2k + q + 1)  U | X | M V | v_E
    input_means  (2q + k, I)      Vᵀ | Yᵀ | Uᵀ M
    grand_means                   Uᵀ M V | v_K | v_R | v_L | variance, rest_variance, factor, w₁, w_m, w_E
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blockmean.optim import kernels
from blockmean.optim.base import State
from blockmean.optim.batches import counts
from blockmean.optim.kernels import DTYPES, triton_anova
from blockmean.optim.sharding import PLAIN

STATE = ("exp_avg", "unit_means", "input_means", "grand_means")
NUMBERS = ("beta1", "mean_beta", "beta2", "lr", "weight_decay", "eps", "sign")
SERVED = {torch.float32, torch.bfloat16, torch.float16}


class CMatrices(ctypes.Structure):
    """`struct AnovaMatrices` of anova.hpp: a column per field."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in STATE),
        *((name, ctypes.c_void_p) for name in ("units", "inputs", "k", "q", "dtype", "refresh")),
        ("bound_means", ctypes.c_void_p),
        ("bound_rest", ctypes.c_void_p),
    )


class CAnovaRule(ctypes.Structure):
    """`struct AnovaRule` of anova.hpp."""

    _fields_ = tuple((name, ctypes.c_double) for name in NUMBERS)


def load() -> ctypes.CDLL | None:
    """The library that the kernels of all optimizers are in, if it was built."""
    library = kernels._library
    if library is None:
        return None
    library.blockmean_anova_sizes.restype = ctypes.c_int64
    if library.blockmean_anova_sizes() != ctypes.sizeof(CMatrices) << 16 | ctypes.sizeof(CAnovaRule):
        raise ImportError("The kernels of blockmean are those of another version. Install blockmean again.")
    matrices, rule = ctypes.POINTER(CMatrices), ctypes.POINTER(CAnovaRule)
    library.blockmean_anova_scratch.argtypes = (matrices, ctypes.c_int)
    library.blockmean_anova_scratch.restype = ctypes.c_int64
    for function in (library.blockmean_anova_read, library.blockmean_anova_write):
        function.argtypes = (matrices, rule, ctypes.c_void_p, ctypes.c_int)
    return library


_library = load()


def why_not(param: Tensor, k: int, q: int) -> str | None:
    """Why no kernel can serve a matrix, to complete a sentence about it; None if one can."""
    if param.dtype not in SERVED:
        return f"is {str(param.dtype).removeprefix('torch.')}"
    if not param.is_contiguous():
        return "is not contiguous"
    if not (k and q):
        return "has means of one side only"
    if param.device.type == "cpu":
        return None if _library is not None else f"is on a CPU, and {kernels.MISSING}"
    shape = triton_anova.Shape(param.shape[0], param.shape[1:].numel(), k, q)
    reason = triton_anova.why_not(param.device, [shape])
    return reason and f"is on {param.device}, and {reason}"


def serves(param: Tensor, grad: Tensor, state: State) -> bool:
    """Whether kernels serve a matrix: all of it dense and contiguous, its state in float32."""
    tensors = (param, grad, *(state[name] for name in STATE))
    alike = (
        all(map(Tensor.is_contiguous, tensors))
        and PLAIN.issuperset(map(type, tensors))
        and param.dtype in SERVED
        and grad.dtype == param.dtype
        and state["exp_avg"].dtype == torch.float32
        and param.numel() > 0
    )
    alike = alike and all(counts(state))  # means of one side alone follow other sketches
    if not param.is_cpu:
        return alike and why_not(param, *counts(state)) is None
    return alike and _library is not None and grad.data_ptr() != 0 and not grad.is_neg()


class NativeMatrices:
    """One step of matrices that the kernels serve.

    Args:
        states: of every matrix, in the layout above.
        numbers: β₁, the means' β, β₂, lr, weight decay, ε, and the sign of gradients.
        refreshes: whether U and V of a matrix turn after this step.
        bounds: `adam_bound` of a matrix's means, and of its remainder; read where it is refreshed.
        kept: from step to step: scratch memory, in which nothing lasts beyond a step.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        numbers: Mapping[str, float],
        refreshes: Sequence[bool],
        bounds: Sequence[tuple[float, float]],
        kept: dict[str, Any],
    ) -> None:
        self._kept = params, grads, states  # alive as long as their addresses
        self._rule = CAnovaRule(*(numbers[name] for name in NUMBERS))
        units = [param.shape[0] for param in params]
        means = [counts(state) for state in states]
        self._refresh = array("q", refreshes)
        self._columns: list[array[int] | array[float]] = [
            *map(pointers, (params, grads, *([state[name] for state in states] for name in STATE))),
            array("q", units),
            array("q", [param.numel() // n for param, n in zip(params, units, strict=True)]),
            array("q", [k for k, _ in means]),
            array("q", [q for _, q in means]),
            array("q", [DTYPES[param.dtype] for param in params]),
            self._refresh,
            array("d", [of_means for of_means, _ in bounds]),
            array("d", [of_rest for _, of_rest in bounds]),
        ]
        self._matrices = CMatrices(len(params), *(column.buffer_info()[0] for column in self._columns))
        self._threads = torch.get_num_threads()  # the layout of the scratch depends on it
        assert _library is not None
        self._functions = _library.blockmean_anova_read, _library.blockmean_anova_write
        size = _library.blockmean_anova_scratch(ctypes.byref(self._matrices), self._threads)
        self._scratch: Tensor = kept.setdefault("scratch", torch.empty(0))
        if self._scratch.numel() < size:
            self._scratch.resize_(size)

    def read(self) -> Tensor:
        """Pass 1, which changes nothing. NaN if a gradient is not finite; then there is to be no `write`."""
        return torch.tensor(0.0 if self._call(0) else math.nan)

    def write(self, ok: Tensor | None = None) -> list[int]:
        """Update state and parameters. Returns which matrices are due for a refresh that torch has to do."""
        self._call(1)
        torch.autograd.graph.increment_version(self._kept[0])  # so that a stale graph is noticed
        return [i for i, flag in enumerate(self._refresh) if flag < 0]

    def _call(self, which: int) -> int:
        matrices, rule = ctypes.byref(self._matrices), ctypes.byref(self._rule)
        result: int = self._functions[which](matrices, rule, self._scratch.data_ptr(), self._threads)
        if result < 0:
            raise MemoryError("The kernels of blockmean found no memory for their tasks.")
        return result


def of_device(device: torch.device) -> type[NativeMatrices] | type[triton_anova.TritonStep]:
    """What takes steps there."""
    return NativeMatrices if device.type == "cpu" else triton_anova.TritonStep


def pointers(tensors: Iterable[Tensor]) -> array[int]:
    """Their addresses."""
    return array("q", map(Tensor.data_ptr, tensors))
