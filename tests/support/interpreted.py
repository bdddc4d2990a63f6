"""Anova's Triton kernels in Triton's interpreter, which is chosen when triton is imported: run in a process of its own.

`python -m support.interpreted NAME …` prints as JSON what these cases have found.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

from blockmean.optim.kernels import triton_anova
from blockmean.optim.kernels.triton_anova import SIZES, Numbers, Shape, Sizes, TritonMatrices
from support.anova_reference import Matrix, Rates

SMALL = Sizes(tile=32, strip=64, piece=16, step=32, update_strip=64, block=32, warps=4)
"""Many tiles in small matrices."""


def numbers_of(rates: Rates) -> Numbers:
    return Numbers(
        torch.tensor([rates.lr], dtype=torch.float32),
        rates.beta1,
        rates.mean_beta,
        rates.beta2,
        rates.weight_decay,
        rates.eps,
        rates.sign,
    )


def shapes_of(matrices: Sequence[Matrix]) -> list[Shape]:
    return [Shape(m.units, m.inputs, m.k, m.q) for m in matrices]


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference, of the largest entry."""
    if not wanted.size:
        return 0.0
    scale = np.abs(wanted).max()
    return float(np.abs(found - wanted).max() / (scale if scale > 0 else 1.0))


def compare(
    matrices: Sequence[Matrix],
    rates: Sequence[Rates],
    steps: int = 2,
    param_type: torch.dtype = torch.float32,
    grad_type: torch.dtype = torch.float32,
    sizes: Sizes | None = SMALL,
    transposed: bool = False,
) -> dict[str, float]:
    """Largest errors of a few steps, by what they are of."""
    rng = np.random.default_rng(5)
    states, numbers = [m.tensors() for m in matrices], [numbers_of(r) for r in rates]
    params = [torch.tensor(m.param).to(param_type) for m in matrices]
    run, worst = TritonMatrices(shapes_of(matrices), "cpu", sizes=sizes), defaultdict[str, float](float)
    for _ in range(steps):
        grads = [
            torch.tensor(rng.standard_normal(p.shape) * (not m.zero)).to(grad_type)
            for p, m in zip(params, matrices, strict=True)
        ]
        before = [p.double() for p in params]
        given = [grad.T.contiguous().T for grad in grads] if transposed else grads
        totals = run.read(params, given, states, numbers).tolist()
        run.write(torch.ones(1))
        columns = matrices, rates, params, grads, before, states, totals
        for m, rate, param, grad, old, state, total in zip(*columns, strict=True):
            m.param = old.numpy()
            wanted = m.step(grad.double().numpy(), rate)
            worst["total"] = max(worst["total"], abs(total - wanted) / max(wanted, 1e-30))
            for name, piece in m.pieces(state).items():
                worst[name] = max(worst[name], error(piece, m.state[name]))
            # The step in units of lr, beside the rounding of θ: three in float32, one in 16 bits. The interpreter cuts
            # bfloat16 off; on a GPU it is rounded.
            roundings = {torch.float32: 3, torch.bfloat16: 2, torch.float16: 1}[param_type]
            rounding = roundings * torch.finfo(param_type).eps / 2 * np.abs(m.param)
            beyond = np.abs(param.double().numpy() - m.param) - rounding
            worst["step"] = max(worst["step"], float(beyond.max()) / rate.lr)
    return dict(worst)


def several() -> list[dict[str, float]]:
    """Random shapes, k ≠ q, none of one side, k = O; other numbers for each; one without a gradient."""
    rng, found = np.random.default_rng(0), []
    for seed in range(2):
        matrices = [Matrix(7, 9, 7, 2, rng), Matrix(33, 70, 5, 3, rng), Matrix(20, 24, 0, 4, rng, zero=True)]
        for _ in range(2):
            O, I = (int(n) for n in rng.integers(1, 90, 2))
            matrices.append(
                Matrix(O, I, int(rng.integers(0, min(O, 40) + 1)), int(rng.integers(1, min(I, 40) + 1)), rng)
            )
        matrices.append(Matrix(40, 16, 3, 0, rng))
        rates = [
            Rates(10.0 ** -rng.integers(1, 5), 0.9, 0.97, 0.99, rng.random() * 0.2, 1e-8, (-1.0) ** i)
            for i in range(len(matrices))
        ]
        rates[0].beta1 = 0.0
        found.append(compare(matrices, rates, steps=2 - seed))
    return found


def usual() -> dict[str, float]:
    """The tiles that are used, more than one of them each way."""
    return compare(
        [Matrix(530, 264, 32, 32, np.random.default_rng(1))], [Rates()], steps=1, sizes=SIZES[32]._replace(step=128)
    )


def many() -> dict[str, float]:
    """More than 64 means of a side: a single batch in pass 1."""
    return compare([Matrix(80, 100, 70, 90, np.random.default_rng(2))], [Rates()], steps=1, sizes=SIZES[128])


def types() -> dict[str, dict[str, float]]:
    """Parameters and gradients of 16 bits."""
    found = {}
    for param, grad in ((torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.bfloat16, torch.float32)):
        matrices = [Matrix(33, 40, 4, 6, np.random.default_rng(3)), Matrix(9, 50, 2, 1, np.random.default_rng(4))]
        found[f"{param} {grad}"] = compare(matrices, [Rates(weight_decay=0.1)] * 2, 2, param, grad)
    return found


def transposed() -> dict[str, float]:
    """Gradients that are not contiguous."""
    return compare([Matrix(20, 24, 3, 4, np.random.default_rng(6))], [Rates()], transposed=True)


def bad() -> dict[str, Any]:
    """Totals of gradients with an infinity or a NaN; what is left of everything after ok = 0."""
    rng = np.random.default_rng(7)
    matrices, found = [Matrix(20, 24, 3, 4, rng), Matrix(33, 70, 5, 3, rng), Matrix(8, 8, 1, 1, rng)], {}
    states = [m.tensors() for m in matrices]
    params = [torch.tensor(m.param, dtype=torch.float32) for m in matrices]
    grads = [torch.randn(p.shape) for p in params]
    grads[0][3, 5], grads[1][30, 60] = float("nan"), float("inf")
    tensors = [*params, *grads, *(x for state in states for x in state.values())]
    before = [x.numpy().tobytes() for x in tensors]
    run = TritonMatrices(shapes_of(matrices), "cpu", sizes=SMALL)
    found["finite"] = run.read(params, grads, states, [numbers_of(Rates())] * 3).isfinite().tolist()
    found["read only"] = before == [x.numpy().tobytes() for x in tensors]
    run.write(torch.zeros(1))
    found["untouched"] = before == [x.numpy().tobytes() for x in tensors]
    return found


def alone() -> bool:
    """Whether a matrix takes the same step, to the bit, whatever else is in the list."""
    results = []
    for others in ((), (Matrix(33, 70, 5, 3, np.random.default_rng(8)),)):
        matrices = [*others, Matrix(40, 50, 6, 4, np.random.default_rng(9))]
        run, states = TritonMatrices(shapes_of(matrices), "cpu", sizes=SMALL), [m.tensors() for m in matrices]
        params = [torch.tensor(m.param, dtype=torch.float32) for m in matrices]
        for seed in range(2):
            grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) for p in params]
            run.read(params, grads, states, [numbers_of(Rates())] * len(matrices))
            run.write(torch.ones(1))
        results.append([params[-1].numpy().tobytes(), *(x.numpy().tobytes() for x in states[-1].values())])
    return results[0] == results[1]


def whole_steps() -> dict[str, Any]:
    """Anova with these kernels, where a CPU would have others, and with torch's operations."""
    from blockmean import Anova
    from blockmean.optim import anova

    launched = []

    class Step(triton_anova.TritonStep):
        def write(self, ok: torch.Tensor | None = None) -> list[int]:
            launched.append(len(self._given[0]))
            return super().write(ok)

    anova.of_device = lambda device: Step  # type: ignore[assignment, return-value]
    anova.serves = lambda param, grad, state: True  # type: ignore[assignment]
    ends = []
    for fused in (None, False):
        rng = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(shape, generator=rng)) for shape in ((24, 40), (33, 18), (7,), (24, 40))
        ]
        optimizer = Anova(params, lr=0.01, weight_decay=0.1, means=(5, 4), refresh_every=4, fused=fused)
        for _ in range(12):
            for param in params:
                param.grad = torch.randn(param.shape, generator=rng) + 0.3 * param.detach()
            optimizer.step()
        ends.append(params)
    errors = [float((a - b).detach().abs().max()) for a, b in zip(*ends, strict=True)]
    return {"launched": launched == [3] * 11, "error": max(errors)}


class Traffic:
    """Counts what kernels load and store, in place of the module that has them."""

    def __init__(self, kernels: ModuleType) -> None:
        self.kernels = kernels
        self.names: list[str] = []
        self.asked = Counter[str]()  # bytes
        self.touched = defaultdict[tuple[int, str, int], list[np.ndarray]](list)  # (launch, what, bytes): addresses
        for kind, mask_at in (("load", 0), ("store", 1)):
            self._watch(kind, mask_at)

    def __getattr__(self, name: str) -> Any:
        """A kernel, which is about to be launched."""
        if name != "tl":
            self.names.append(name)
        return getattr(self.kernels, name)

    def _watch(self, kind: str, mask_at: int) -> None:
        create = getattr(InterpreterBuilder, f"create_masked_{kind}")

        def watched(builder: Any, pointers: Any, *args: Any) -> Any:
            at, size = np.ravel(pointers.data), pointers.get_element_ty().primitive_bitwidth // 8
            at = at[np.ravel(args[mask_at].data).astype(bool)]
            self.asked[self.names[-1]] += at.size * size
            self.touched[len(self.names), kind, size].append(at)
            return create(builder, pointers, *args)

        setattr(InterpreterBuilder, f"create_masked_{kind}", watched)

    def distinct(self) -> Counter[str]:
        """Bytes, each counted once in a launch: what is left with a perfect cache."""
        found = Counter[str]()
        for (launch, _, size), parts in self.touched.items():
            found[self.names[launch - 1]] += np.unique(np.concatenate(parts)).size * size
        return found


def traffic() -> dict[str, dict[str, float]]:
    """Bytes for a parameter by kernel, for a matrix of 768 × 768 and the tiles that are used."""
    O, I = 768, 768
    matrix, param = Matrix(O, I, 32, 32, np.random.default_rng(0)), torch.zeros(O, I)
    run = TritonMatrices(shapes_of([matrix]), "cpu", sizes=SIZES[32]._replace(step=128))  # does not change what is read
    count = Traffic(triton_anova._kernels())
    triton_anova._kernels = lambda: count
    run.read([param], [torch.randn(O, I)], [matrix.tensors()], [numbers_of(Rates())])
    run.write(torch.ones(1))
    counts = {"asked": count.asked, "distinct": count.distinct()}
    return {kind: {name: n / (O * I) for name, n in by_kernel.items()} for kind, by_kernel in counts.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for name in sys.argv[1:]:  # `traffic` last: it leaves its counters behind
        found[name] = globals()[name]()
    print(json.dumps(found))
