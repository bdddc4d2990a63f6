"""The solve between the passes in C++, for groups of which every tensor takes part in the step.

It works on the statistics where they are, in the states of the parameters. Only the roots of matrices are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from blockmean._linalg import LinAlgError, inverse_root_minus_identity, times_inverse_root_minus_identity
from blockmean.optim.forms import SMALLEST_LAMBDA, Rule
from blockmean.optim.layout import Layout
from blockmean.optim.native import _kernels
from blockmean.optim.statistics import State

NATIVE_ROOT = 512
"""Largest matrix whose root is computed here, in half the time of `eigh` (`benchmarks/roots.py`).

Larger ones would need much memory for their rotations: 96 bytes per entry.
"""


def can_solve(layout: Layout, states: Mapping[int, State], names: Iterable[str], kept: Iterable[str]) -> bool:
    """Whether all blocks have statistics, with these names and no others of those `kept`, or none has any yet."""
    names, kept = {"blocks", *names}, set(kept)
    held = [names & states[i].keys() for component in layout.components for i in component.members]
    if all(not own for own in held):
        return not any(kept & state.keys() for state in states.values())
    if not all(own == names for own in held):
        return False
    for component in layout.components:
        width = () if layout.is_diagonal else (component.blocks.stop - component.blocks.start,)
        for i in component.members:
            rows, state = (layout.counts[i],), states[i]
            shapes = {"U": rows + width, "root": rows + width, "energy": rows, "root_of": rows}
            for name in kept & state.keys():
                x, dtype = state[name], torch.bool if name == "root_of" else torch.float64
                good = x.dtype == dtype and x.is_cpu and x.is_contiguous() and x.shape == shapes.get(name)
                if name not in names or not good:
                    return False
    return True


class Solver:
    """`CorrectedOptimizer.solve` on addresses, which are looked up once."""

    def __init__(self, layout: Layout, states: Mapping[int, State], names: list[str], initial: float) -> None:
        numbers: list[int] = []
        origin = 0
        for component in layout.components:
            width = 0 if layout.is_diagonal else component.blocks.stop - component.blocks.start
            for i in component.members:
                start, count, state = layout.starts[i], layout.counts[i], states[i]
                column, size = start - component.blocks.start, layout.shapes[i].numel() // count
                if "blocks" not in state:
                    _begin(state, layout, i, names, (width, column), initial * size)
                addresses = [state[name].data_ptr() if name in names else 0 for name in ("U", "energy")]
                numbers += [*addresses, count, width, start, column, origin, size]
            origin += width * width
        self._solver = _kernels.solver(layout.num_blocks, numbers)
        self._vectors = torch.zeros(4, layout.num_blocks, dtype=torch.float64, device="cpu")
        self.common, self.change, self._c, self._kappa = self._vectors.unbind()
        self._addresses = [x.data_ptr() for x in (self.common, self.change, self._c, self._kappa)]
        self._A = torch.zeros(origin, dtype=torch.float64, device="cpu")
        self._components: list[tuple[slice, Tensor]] = []
        self._roots: list[Root] = []  # if they serve for several steps
        origin = 0
        for component in () if layout.is_diagonal else layout.components:
            width = component.blocks.stop - component.blocks.start
            self._components.append((component.blocks, self._A[origin : origin + width**2].view(width, width)))
            if "root" in names:
                self._roots.append(Root(component.members, states))
            origin += width**2

    def arguments(self, rule: Rule, sums: Tensor) -> tuple[Any, tuple[int | float, ...], tuple[int, ...]]:
        """What the kernels need to know: the statistics, the options of the rule, and the addresses of all vectors."""
        form, keeps_trace = rule.form, rule.form.keeps_trace and rule.cap is None
        options = (
            *(form.is_weighted, form.takes_raw_sums, form.keeps_diagonal, keeps_trace),
            *(-1.0 if rule.betas is None else rule.betas[1], rule.floor, SMALLEST_LAMBDA),
            -1.0 if rule.cap is None else rule.cap,
        )
        common, change, c, kappa = self._addresses
        vectors = (sums.data_ptr(), sums.stride(0), common, change, c, kappa if keeps_trace else 0)
        return self._solver, options, vectors

    def solve(
        self, rule: Rule, sums: Tensor, failed: Callable[[int], None], is_due: Callable[[list[int]], bool]
    ) -> tuple[Tensor, Tensor | None] | None:
        """c and κ, (L,) each; κ is None if it is 1 everywhere. None if all eigendecompositions fail.

        `failed` is told of eigendecompositions that fail, `is_due` whether the tensors of a matrix want a new root.
        """
        arguments = self.arguments(rule, sums)
        _kernels.accumulate(*arguments, self._A.data_ptr())
        common, change, *_ = self._addresses
        bad = []
        for number, (blocks, A) in enumerate(self._components):
            n, start = len(A), 8 * blocks.start
            root = self._roots[number] if self._roots else None
            if (
                root is None
                and n <= NATIVE_ROOT
                and times_root(self._solver, A.data_ptr(), n, rule.floor, common + start, change + start)
            ):
                continue
            try:
                if root is None:
                    self.change[blocks] = times_inverse_root_minus_identity(A, rule.floor, self.common[blocks])
                else:
                    if is_due(root.members) or not root.is_complete:
                        root.renew(A, rule.floor)
                    torch.mv(root.matrix, self.common[blocks], out=self.change[blocks])
            except LinAlgError:
                failed(n)
                self.change[blocks] = 0
                bad.append(blocks)
        _kernels.correct(*arguments)
        if bad and len(bad) == len(self._components):
            return None
        for blocks in bad:  # the diagonal step
            self._c[blocks], self._kappa[blocks] = 0, 1
        return self._c, self._kappa if rule.form.keeps_trace and rule.cap is None else None


class Root:
    """A^-½ − I of a component, which serves for several steps, and its rows in the states of the parameters."""

    def __init__(self, members: list[int], states: Mapping[int, State]) -> None:
        self.members = members
        self._rows, self._known = ([states[i][name] for i in members] for name in ("root", "root_of"))
        self.matrix = torch.cat(self._rows)
        self.is_complete = all(bool(known.all()) for known in self._known)  # whether it is that of all blocks

    def renew(self, A: Tensor, floor: float) -> None:
        """Compute it and store it. If that fails, the next step tries again."""
        self.is_complete = False
        torch._foreach_zero_(self._known)
        self.matrix.copy_(inverse_root_minus_identity(A, floor))
        torch._foreach_copy_(self._rows, list(self.matrix.split([len(rows) for rows in self._rows])))
        for known in self._known:
            known.fill_(True)
        self.is_complete = True


def times_root(solver: Any, A: int, n: int, floor: float, b: int, out: int) -> bool:
    """out = (A^-½ − I) b on addresses; False if the eigenvalues of A did not converge, and torch's should be tried."""
    return _kernels.times_root(solver, A, n, floor, b, out)


def _begin(state: State, layout: Layout, i: int, names: list[str], place: tuple[int, int], diagonal: float) -> None:
    """New statistics of a tensor. U and the energy have what H = aI gives."""
    count, (width, column) = layout.counts[i], place
    state["blocks"] = layout.place(i)
    for name in names:
        wide = width if name in ("U", "root") else 0
        dtype = torch.bool if name == "root_of" else torch.float64
        state[name] = rows = torch.zeros((count, wide) if wide else count, dtype=dtype, device="cpu")
        if name in ("U", "energy"):
            (rows[:, column : column + count].diagonal() if wide else rows).fill_(diagonal)
