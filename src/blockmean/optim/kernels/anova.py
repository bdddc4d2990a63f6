"""Anova's steady step and refresh in C++: which matrices the kernels serve, and how they are called.

The layout of a matrix's state, with O units, I inputs, k columns of U and q of V:

    exp_avg      (O, I)           M
    unit_means   (O, 2k + q + 1)  U | X | M V | v_E
    input_means  (2q + k, I)      Vᵀ | Yᵀ | Uᵀ M
    grand_means                   Uᵀ M V | v_K | v_R | v_L | variance, rest_variance, factor, w₁, w_m, w_E
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from blockmean.optim import kernels
from blockmean.optim.base import State
from blockmean.optim.batches import counts
from blockmean.optim.kernels import ANOVA_RULE, DTYPES, addresses, triton_anova
from blockmean.optim.sharding import PLAIN

STATE = ("exp_avg", "unit_means", "input_means", "grand_means")
NUMBERS = ("beta1", "mean_beta", "beta2", "lr", "weight_decay", "eps", "sign")
SERVED = {torch.float32, torch.bfloat16, torch.float16}


def why_not(param: Tensor, k: int, q: int) -> str | None:
    """Why no kernel can serve a matrix, to complete a sentence about it; None if one can."""
    if param.dtype not in SERVED:
        return f"is {str(param.dtype).removeprefix('torch.')}"
    if not (k and q):
        return "has means of one side only"
    if param.device.type == "cpu":
        return None if kernels._library is not None else f"is on a CPU, and {kernels.MISSING}"
    if not param.is_contiguous():
        return "is not contiguous"
    shape = triton_anova.Shape(param.shape[0], param.shape[1:].numel(), k, q)
    reason = triton_anova.why_not(param.device, shape)
    return reason and f"is on {param.device}, and {reason}"


def serves(param: Tensor, grad: Tensor, state: State) -> bool:
    """Whether kernels serve a matrix: dense, its state contiguous and in float32."""
    kept = [state[name] for name in STATE]
    alike = (
        all(map(Tensor.is_contiguous, kept))
        and PLAIN.issuperset(map(type, (param, grad, *kept)))
        and param.dtype in SERVED
        and grad.dtype == param.dtype
        and grad.layout == torch.strided
        and state["exp_avg"].dtype == torch.float32
        and param.numel() > 0
        and not grad.is_neg()
        and all(counts(state))  # means of one side alone follow other sketches
    )
    if not param.is_cpu:
        return alike and grad.is_contiguous() and why_not(param, *counts(state)) is None
    return alike and kernels._library is not None and grad.data_ptr() != 0


class NativeMatrices:
    """One step of matrices that the kernels serve. Those that are not contiguous (channels_last) are copied.

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
        self._params = params
        self._tensors = [  # alive as long as their addresses
            *(list(map(Tensor.contiguous, column)) for column in (params, grads)),
            *([state[name] for state in states] for name in STATE),
        ]
        self._rule = ANOVA_RULE.pack(*(numbers[name] for name in NUMBERS))
        units, means = [len(param) for param in params], [counts(state) for state in states]
        self._columns = array(
            "q",
            [
                *chain.from_iterable(map(addresses, self._tensors)),
                *units,
                *(param.numel() // n for param, n in zip(params, units, strict=True)),
                *(k for k, _ in means),
                *(q for _, q in means),
                *(DTYPES[param.dtype] for param in params),
                *refreshes,
            ],
        )
        self._bounds = array("d", [bound for pair in bounds for bound in pair])
        threads = torch.get_num_threads()  # the layout of the scratch depends on it
        self._list = self._columns.buffer_info()[0], self._bounds.buffer_info()[0], len(params), threads
        assert kernels._library is not None
        self._library = kernels._library
        self._scratch: Tensor = kept.setdefault("scratch", torch.empty(0, dtype=torch.float32, device="cpu"))
        if self._scratch.numel() < (size := self._library.blockmean_anova_scratch(*self._list)):
            self._scratch.resize_(size)

    def read(self) -> Tensor:
        """Pass 1, which changes nothing. NaN if a gradient is not finite; then there is to be no `write`."""
        is_finite = self._library.blockmean_anova_read(*self._list, self._rule, self._scratch.data_ptr())
        return torch.tensor(0.0 if is_finite else math.nan)

    def write(self, ok: Tensor | None = None) -> list[int]:
        """Update state and parameters. Returns which matrices are due for a refresh that torch has to do."""
        self._library.blockmean_anova_write(*self._list, self._rule, self._scratch.data_ptr())
        for param, dense in zip(self._params, self._tensors[0], strict=True):
            if dense is not param:
                param.copy_(dense)
        torch.autograd.graph.increment_version(self._params)  # so that a stale graph is noticed
        return [i for i, due in enumerate(self._columns[-len(self._params) :]) if due < 0]


def of_device(device: torch.device) -> type[NativeMatrices] | type[triton_anova.TritonStep]:
    """What takes steps there."""
    return NativeMatrices if device.type == "cpu" else triton_anova.TritonStep
