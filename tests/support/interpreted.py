"""Anova's Triton kernels in Triton's interpreter, which is chosen when triton is imported: run in a process of its own.

`python -m support.interpreted NAME …` prints as JSON what these cases have found.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from blockmean.optim.kernels import triton_anova
from blockmean.optim.kernels.triton_anova import TritonStep
from support.anova_reference import Matrix, Rates

# Triton prepares its language again for every call of a function from a kernel, one layer upon the other. Once will do.
for function in (tl.zeros, triton_anova._kernels().add):
    interpreter._patch_lang(function.fn)
interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

USUAL = {name: getattr(triton_anova, name) for name in ("TILE", "STRIP", "PIECE", "STEP", "UPDATE_TILE", "WIDTH")}
SMALL = {"TILE": 64, "STRIP": 64, "PIECE": 16, "STEP": 64, "UPDATE_TILE": 64, "WIDTH": 16}
"""Many tiles in small matrices."""


def tiles(sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        setattr(triton_anova, name, size)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference, of the largest entry."""
    scale = np.abs(wanted).max()
    return float(np.abs(found - wanted).max() / (scale if scale > 0 else 1.0))


def step_of(
    matrices: Sequence[Matrix], params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], rates: Rates, kept: Any
) -> tuple[list[dict[str, torch.Tensor]], TritonStep]:
    states = [m.tensors() for m in matrices]
    return states, TritonStep(params, grads, states, asdict(rates), [False] * len(states), None, kept)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """A copy that does not start at a multiple of 16 bytes, as in the middle of a bucket of gradients."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def compare(
    matrices: Sequence[Matrix], rates: Rates, dtypes: Sequence[torch.dtype] = (torch.float32,), is_shifted: bool = False
) -> dict[str, float]:
    """Largest errors of one step, by what they are of. Matrices have these dtypes in turn."""
    rng, worst = np.random.default_rng(5), defaultdict[str, float](float)
    params, grads = [], []
    for m, dtype in zip(matrices, cycle(dtypes), strict=False):
        params.append(torch.tensor(m.param).to(dtype))
        grads.append(torch.tensor(rng.standard_normal(m.param.shape) * (not m.zero)).to(dtype))
    if is_shifted:
        grads = list(map(shifted, grads))
    before = [param.double().numpy() for param in params]
    states, run = step_of(matrices, params, grads, rates, {})
    totals = sorted(run.read().tolist())
    run.write()
    wanted = []
    for m, param, grad, old, state in zip(matrices, params, grads, before, states, strict=True):
        m.param = old
        wanted.append(m.step(grad.double().numpy(), rates))
        for name, piece in m.pieces(state).items():
            worst[name] = max(worst[name], error(piece, m.state[name]))
        # The step in units of lr, beside the rounding of θ: three in float32, one in 16 bits. The interpreter cuts
        # bfloat16 off; on a GPU it is rounded.
        roundings = {torch.float32: 3, torch.bfloat16: 2, torch.float16: 1}[param.dtype]
        rounding = roundings * torch.finfo(param.dtype).eps / 2 * np.abs(m.param)
        beyond = np.abs(param.double().numpy() - m.param) - rounding
        worst["step"] = max(worst["step"], float(beyond.max()) / rates.lr)
    worst["total"] = error(np.array(totals), np.array(sorted(wanted)))  # by dtype and alignment first
    return dict(worst)


def several() -> list[dict[str, float]]:
    """Random shapes, with one mean to as many as there are rows, several tiles, and rows of any length."""
    rng, found = np.random.default_rng(0), []
    for sign, beta1 in ((1.0, 0.9), (-1.0, 0.0)):
        matrices = [Matrix(7, 9, 7, 2, rng), Matrix(150, 72, 5, 3, rng), Matrix(20, 24, 1, 4, rng, zero=True)]
        for _ in range(3):
            O, I = (int(n) for n in rng.integers(1, 90, 2))
            matrices.append(Matrix(O, I, *(int(rng.integers(1, min(n, 40) + 1)) for n in (O, I)), rng))
        lr = 10.0 ** -rng.integers(1, 5)
        found.append(compare(matrices, Rates(lr, beta1, 0.97, 0.99, rng.random() * 0.2, 1e-8, sign)))
    return found


def usual() -> dict[str, float]:
    """The tiles that are used, more than one of them each way."""
    tiles({**USUAL, "STEP": 256, "UPDATE_TILE": 256})
    return compare([Matrix(1030, 136, 32, 32, np.random.default_rng(1))], Rates())


def many() -> dict[str, float]:
    """More than 64 means of a side."""
    return compare([Matrix(80, 100, 70, 90, np.random.default_rng(2))], Rates())


def dtypes() -> dict[str, float]:
    """Parameters and gradients of several dtypes and alignments in one list."""
    matrices = [Matrix(33, 40, 4, 6, np.random.default_rng(seed)) for seed in range(3)]
    matrices += [Matrix(9, 50, 2, 1, np.random.default_rng(4)) for seed in range(3)]
    return compare(matrices, Rates(weight_decay=0.1), (torch.bfloat16, torch.float16, torch.float32))


def unaligned() -> dict[str, float]:
    """Gradients that start anywhere."""
    return compare([Matrix(20, 24, 3, 4, np.random.default_rng(6))], Rates(), is_shifted=True)


def bad() -> dict[str, Any]:
    """Totals of gradients with an infinity or a NaN; what is left of everything after ok = 0."""
    rng = np.random.default_rng(7)
    matrices, found = [Matrix(20, 24, 3, 4, rng), Matrix(33, 72, 5, 3, rng), Matrix(8, 8, 1, 1, rng)], {}
    params = [torch.tensor(m.param, dtype=torch.float32) for m in matrices]
    grads = [torch.randn(p.shape) for p in params]
    grads[0][3, 5], grads[1][30, 60] = float("nan"), float("inf")
    states, run = step_of(matrices, params, grads, Rates(), {})
    tensors = [*params, *grads, *(x for state in states for x in state.values())]
    before = [x.numpy().tobytes() for x in tensors]
    found["finite"] = run.read().isfinite().tolist()
    found["read only"] = before == [x.numpy().tobytes() for x in tensors]
    run.write(torch.zeros(1))
    found["untouched"] = before == [x.numpy().tobytes() for x in tensors]
    return found


def alone() -> bool:
    """Whether a matrix takes the same step, to the bit, whatever else is in the list."""
    results = []
    for others in ((), (Matrix(33, 72, 5, 3, np.random.default_rng(8)),)):
        matrices = [*others, Matrix(40, 80, 6, 4, np.random.default_rng(9))]
        params = [torch.tensor(m.param, dtype=torch.float32) for m in matrices]
        grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) for p in params]
        states, run = step_of(matrices, params, grads, Rates(), {})
        run.read()
        run.write()
        results.append([params[-1].numpy().tobytes(), *(x.numpy().tobytes() for x in states[-1].values())])
    return results[0] == results[1]


def whole_steps() -> dict[str, Any]:
    """Anova with these kernels, where a CPU would have others, and with torch's operations."""
    from blockmean import Anova
    from blockmean.optim import anova

    launched = []

    class Step(TritonStep):
        def write(self, ok: torch.Tensor | None = None) -> list[int]:
            launched.append(len(self._params))
            return super().write(ok)

    anova.of_device = lambda device: Step  # type: ignore[assignment, return-value]
    anova.serves = lambda param, grad, state: True  # type: ignore[assignment]
    ends = []
    for fused in (None, False):
        rng = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(shape, generator=rng)) for shape in ((24, 40), (33, 18), (7,), (24, 40))
        ]
        optimizer = Anova(params, lr=0.01, weight_decay=0.1, means=(5, 4), refresh_every=3, fused=fused)
        for _ in range(8):
            for param in params:
                param.grad = torch.randn(param.shape, generator=rng) + 0.3 * param.detach()
            optimizer.step()
        ends.append(params)
    errors = [float((a - b).detach().abs().max()) for a, b in zip(*ends, strict=True)]
    return {"launched": launched == [3] * 7, "error": max(errors)}


class Traffic:
    """Counts what kernels load and store, in place of the module that has them."""

    def __init__(self, kernels: ModuleType) -> None:
        self.kernels = kernels
        self.names: list[str] = []
        self.touched = defaultdict[tuple[int, str, int], list[np.ndarray]](list)  # (launch, what, bytes): addresses
        for kind, mask_at in (("load", 0), ("store", 1)):
            self._watch(kind, mask_at)

    def __getattr__(self, name: str) -> Any:
        """A kernel, which is about to be launched."""
        if name != "tl":
            self.names.append(name)
        return getattr(self.kernels, name)

    def _watch(self, kind: str, mask_at: int) -> None:
        create = getattr(interpreter.InterpreterBuilder, f"create_masked_{kind}")

        def watched(builder: Any, pointers: Any, *args: Any) -> Any:
            at, size = np.ravel(pointers.data), pointers.get_element_ty().primitive_bitwidth // 8
            at = at[np.ravel(args[mask_at].data).astype(bool)]
            self.touched[len(self.names), kind, size].append(at)
            return create(builder, pointers, *args)

        setattr(interpreter.InterpreterBuilder, f"create_masked_{kind}", watched)

    def distinct(self) -> Counter[str]:
        """Bytes, each counted once in a launch: what is left with a perfect cache."""
        found = Counter[str]()
        for (launch, _, size), parts in self.touched.items():
            found[self.names[launch - 1]] += np.unique(np.concatenate(parts)).size * size
        return found


def traffic() -> dict[str, dict[str, float]]:
    """Bytes for a parameter by kernel, for a matrix of 768 × 768 and the tiles that are used."""
    O, I = 768, 768
    tiles({**USUAL, "STEP": 256})  # which does not change what is read
    matrix, param = Matrix(O, I, 32, 32, np.random.default_rng(0)), torch.zeros(O, I)
    count = Traffic(triton_anova._kernels())
    triton_anova._kernels = lambda: count
    _, run = step_of([matrix], [param], [torch.randn(O, I)], Rates(), {})
    run.read()
    run.write()
    return {name: n / (O * I) for name, n in count.distinct().items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for name in sys.argv[1:]:  # `traffic` last: it leaves its counters behind
        tiles(SMALL)
        found[name] = globals()[name]()
    print(json.dumps(found))
