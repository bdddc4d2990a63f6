"""What all optimizers of the package share: torch.optim's contract, and a step in two passes.

    pass 1, read only   block sums of everything a method needs, for all groups; bad gradients are noticed here
    between             one small vector per block sum: the only thing that would have to be reduced over ranks
    pass 2              L×L statistics, their root, and the update of state and parameters

A method is three functions over lists of tensors (see `adagrad.py`); this file knows no arithmetic but the sequence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from blockmean._checks import require
from blockmean.optim._layout import COUPLINGS, MATRIX_LIMIT, Layout, TensorBlocks
from blockmean.statistics import LinAlgError, accumulate_, coefficients, inverse_root_minus_identity, normalised

NONFINITE = ("raise", "skip")


@dataclass
class Member:
    """One parameter that takes part in a step."""

    param: Tensor
    name: str
    blocks: TensorBlocks
    state: dict[str, Any]
    grad: Tensor  # in the dtype of the arithmetic: float32 at least
    moves: bool  # False: no gradient of its own, it only counts in a block that it shares with others


@dataclass
class Work:
    """What one parameter group does in a step: its members, and after pass 1 their block sums, (rows, L)."""

    group: dict[str, Any]
    layout: Layout
    members: list[Member]
    sums: Tensor


class BlockMeanOptimizer(Optimizer):
    """The contract; subclasses say what is summed and how a parameter moves.

    Coupling never crosses parameter groups: groups behave like separate optimizers, as torch promises.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self.skipped_steps = 0  # steps left out because a gradient was not finite (nonfinite="skip")
        self.diagonal_fallbacks = 0  # roots that could not be had, so that the diagonal step was taken
        self._layouts: dict[Tensor, Layout] = {}  # by the first parameter of a group
        self._bound: dict[tuple[Tensor, str], tuple[list[Tensor], list[Tensor | None]]] = {}
        super().__init__(params, defaults)

    # ---------------------------------------------------------------- what a subclass says

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise where an option of a group is out of range."""
        owner = type(self).__name__
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        for name in self._not_negative:
            value = group[name]
            require(isinstance(value, int | float | Tensor), name, owner, "a number", value, TypeError)
            require(bool(value >= 0), name, owner, ">= 0", value)
        for name, allowed in {"coupling": COUPLINGS, "nonfinite": NONFINITE, **self._choices}.items():
            if name in group:
                require(group[name] in allowed, name, owner, f"one of {', '.join(map(repr, allowed))}", group[name])
        if "refresh_every" in group:
            k = group["refresh_every"]
            require(isinstance(k, int) and k >= 1, "refresh_every", owner, "a whole number >= 1", k)

    _not_negative: tuple[str, ...] = ("lr", "weight_decay")
    _choices: ClassVar[dict[str, tuple[str, ...]]] = {}
    _decays_gradient = True  # weight decay is added to the gradient, and seen by all statistics

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter before its first step, without what lies in L×L buffers."""
        raise NotImplementedError

    def _block_sums(self, group: dict[str, Any], members: list[Member], num_blocks: int) -> Tensor:
        """Pass 1: (rows, L) in float64; row 0 holds the block sums of the gradient. Must not change anything."""
        raise NotImplementedError

    def _update(self, work: Work) -> None:
        """Pass 2: move state and parameters."""
        raise NotImplementedError

    # ---------------------------------------------------------------- the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: computes the gradients anew and returns the loss, which is then returned from here.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._advance()
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _advance(self) -> None:
        """Both passes over all groups. Never traced: the check for bad gradients branches on values, and eigh breaks
        a graph anyway, so that compiling costs minutes and gains nothing."""
        works = [work for group in self.param_groups if (work := self._collect(group)) is not None]
        bad = [work for work in works if not work.sums.isfinite().all()]
        if bad:
            for work in bad:
                if work.group["nonfinite"] == "raise":
                    raise ValueError(_describe_nonfinite(work))
            self.skipped_steps += 1
            return
        for work in works:
            for member in work.members:
                if member.moves:
                    self.state[member.param] = member.state
                    member.state["step"] += 1
            self._update(work)

    def _collect(self, group: dict[str, Any]) -> Work | None:
        """Pass 1 of one group; None where no parameter has a gradient."""
        params = list(dict.fromkeys(group["params"]))
        if not params:
            return None
        layout = self._layout_of(group)
        members = []
        for i, (param, blocks) in enumerate(zip(params, layout.tensors, strict=True)):
            if param.grad is not None and blocks is not None:
                grad = self._effective_grad(param, layout.parameters[i], group)
                members.append(self._member(i, param, blocks, group, grad, moves=True))
        if not members:
            return None
        if layout.is_shared:
            touched = {member.blocks.start for member in members}
            for i, (param, blocks) in enumerate(zip(params, layout.tensors, strict=True)):
                if param.grad is None and blocks is not None and blocks.start in touched:
                    zero = torch.zeros_like(param, dtype=arithmetic(param))
                    members.append(self._member(i, param, blocks, group, zero, moves=False))
        devices = sorted({str(member.param.device) for member in members})
        if len(devices) > 1:
            raise RuntimeError(
                f"{type(self).__name__} couples the parameters of a group, which must be on one device. "
                f"Got {' and '.join(devices)}. Put them into separate parameter groups."
            )
        return Work(group, layout, members, self._block_sums(group, members, layout.num_blocks))

    def _member(
        self, i: int, param: Tensor, blocks: TensorBlocks, group: dict[str, Any], grad: Tensor, moves: bool
    ) -> Member:
        # A new state is handed over to self.state only once the gradients of all groups are known to be good.
        state = self.state[param] if self.state.get(param) else self._new_state(param, group)
        return Member(param, self._layout_of(group).parameters[i], blocks, state, grad, moves)

    def _effective_grad(self, param: Tensor, name: str, group: dict[str, Any]) -> Tensor:
        """The gradient that the method sees; `param.grad` itself is never changed."""
        assert param.grad is not None
        if param.grad.layout != torch.strided:
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients. {name} has one.")
        grad = param.grad.to(arithmetic(param))
        if group["maximize"]:
            grad = -grad
        if group["weight_decay"] and self._decays_gradient:
            grad = grad.add(param, alpha=group["weight_decay"])
        return grad

    # ---------------------------------------------------------------- the correction between blocks

    def _correction(
        self, work: Work, n: Tensor, b: Tensor, scale: Tensor, *, keep_diagonal: bool, floor: float
    ) -> Tensor:
        """Update U with the block sums of the gradient and return c, one number per block (see `statistics`)."""
        layout, u = work.layout, work.sums[0]
        U = self._bind(work, "U", self._initial_statistics)
        root = self._bind(work, "root", lambda *_: torch.nan) if work.group.get("refresh_every", 1) > 1 else None
        present = torch.zeros_like(u, dtype=torch.bool)
        for member in work.members:
            present[member.blocks.start : member.blocks.stop] = True
        c = torch.zeros_like(u)
        for i, blocks in enumerate(layout.components):
            accumulate_(U[i], u[blocks])
            A = normalised(U[i], n[blocks], keep_diagonal)
            current = self._root(work, i, A, floor, present[blocks], None if root is None else root[i])
            c[blocks] = coefficients(current, scale[blocks], b[blocks])
        return c

    def _root(
        self, work: Work, component: int, A: Tensor, floor: float, present: Tensor, stored: Tensor | None
    ) -> Tensor:
        """A^-½ − I, fresh or at most `refresh_every` steps old.

        A stored root has NaN on its diagonal where a block sat out; it is made anew when other blocks take part.
        """
        if stored is not None:
            diagonal = stored if stored.ndim == 1 else stored.diagonal()
            every = work.group["refresh_every"]
            due = any(
                (int(member.state["step"]) - 1) % every == 0
                for member in work.members
                if member.moves and member.blocks.component == component
            )
            if not due and torch.equal(~diagonal.isnan(), present):
                return stored.nan_to_num(nan=0.0)
        try:
            root = inverse_root_minus_identity(A, floor)
        except LinAlgError:
            if not self.diagonal_fallbacks:
                warnings.warn(
                    f"{type(self).__name__}: an eigendecomposition of {len(A)} blocks failed twice; the diagonal step "
                    "is taken instead. `diagonal_fallbacks` counts how often. A higher eigenvalue_floor or a smaller "
                    "lr usually helps.",
                    stacklevel=5,
                )
            self.diagonal_fallbacks += 1
            root = self._fallback_root(A, floor)
        if stored is not None:
            stored.copy_(root)
            (stored if stored.ndim == 1 else stored.diagonal()).masked_fill_(~present, torch.nan)
        return root

    def _fallback_root(self, A: Tensor, floor: float) -> Tensor:
        """What stands in for A^-½ − I where it cannot be had: no correction at all."""
        return torch.zeros_like(A)

    def _initial_statistics(self, group: dict[str, Any], sizes: Tensor) -> float | Tensor:
        """The diagonal of U before the first step."""
        return 0.0

    def _bind(self, work: Work, name: str, initial: Callable[[dict[str, Any], Tensor], float | Tensor]) -> list[Tensor]:
        """The L×L buffers of a statistic, one per component, whose rows are `state[param][name]`.

        State lives in `state[param]`, so that every way of saving it works; the rows are views of one buffer, so that
        nothing is put together in a step. After loading or copying they are no longer views, and are bound again.
        """
        layout, params = work.layout, list(dict.fromkeys(work.group["params"]))
        key = (params[0], name)
        buffers, views = self._bound.get(key, ([], []))
        held = [self.state[param].get(name) if self.state.get(param) else None for param in params]
        if not buffers or any(row is not None and row is not view for row, view in zip(held, views, strict=True)):
            device = work.sums.device
            buffers = []
            for blocks in layout.components:
                shape = (len(blocks),) if layout.is_diagonal else (len(blocks), len(blocks))
                buffer = torch.zeros(shape, dtype=work.sums.dtype, device=device)
                diagonal = buffer if layout.is_diagonal else buffer.diagonal()
                diagonal += torch.as_tensor(initial(work.group, layout.sizes[blocks])).to(buffer)
                buffers.append(buffer)
            views = []
            for row, at in zip(held, layout.tensors, strict=True):
                view = None if at is None else buffers[at.component][at.row : at.row + at.stop - at.start]
                if view is not None and row is not None:
                    view.copy_(row)
                views.append(view)
            self._bound[key] = (buffers, views)
        for param, view in zip(params, views, strict=True):
            if view is not None and self.state.get(param):
                self.state[param][name] = view
        return buffers

    # ---------------------------------------------------------------- groups, saving and loading

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with its own partition, coupling and other options if wanted."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            for i, param in enumerate(group["params"]):
                if not param.is_floating_point() or param.layout != torch.strided:
                    kind = "sparse" if param.layout != torch.strided else str(param.dtype).removeprefix("torch.")
                    raise ValueError(f"{type(self).__name__} does not support {kind} parameters. Parameter {i} is one.")
            self._lay_out(group)
        except Exception:
            self.param_groups.pop()
            raise

    def _lay_out(self, group: dict[str, Any]) -> None:
        params = list(dict.fromkeys(group["params"]))
        if not params:
            return
        named = dict(zip(group["params"], group.get("param_names", [""] * len(group["params"])), strict=True))
        # The full matrix is the block mean whose blocks are single entries, all coupled.
        by, coupling = group.get("partition", "element"), group.get("coupling", "all")
        limit = group.get("max_bytes", MATRIX_LIMIT)
        layout = Layout([named[param] for param in params], params, by, coupling, type(self).__name__, limit)
        if callable(by):
            group["partition"] = "custom"  # param_groups hold plain values only, so that they can be saved
        group["blocks"] = layout.fingerprint
        self._layouts[params[0]] = layout

    def _layout_of(self, group: dict[str, Any]) -> Layout:
        layout = self._layouts[group["params"][0]]
        coupling = group.get("coupling", "all")
        if layout.coupling != coupling:  # a loaded checkpoint, or the user, changed it
            layout.couple(coupling)
            for key in [key for key in self._bound if key[0] is group["params"][0]]:
                del self._bound[key]
        return layout

    def __getstate__(self) -> dict[str, Any]:
        own = ("skipped_steps", "diagonal_fallbacks", "_layouts")
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bound = {}
        for group in self.param_groups:
            for key, default in self.defaults.items():
                group.setdefault(key, "custom" if key == "partition" and callable(default) else default)
            for param in group["params"]:
                kept = self.state.get(param, {})
                if "step" in kept and not isinstance(kept["step"], Tensor):
                    kept["step"] = torch.tensor(float(kept["step"]), dtype=torch.float32)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, bit by bit; raises where the checkpoint has another partition.

        torch casts every state tensor but "step" to the dtype of its parameter; here all keep the dtype they were
        saved in, and are copied, so that training on never changes the loaded dict.
        """
        incoming: dict[str, Any] = {}

        def look(_: Optimizer, final: dict[str, Any]) -> None:
            self._check_partition(final)
            incoming.update(final)

        handle = self.register_load_state_dict_pre_hook(look)  # runs after those of the user
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, saved in zip(self.param_groups, incoming["param_groups"], strict=True):
            for param, number in zip(group["params"], saved["params"], strict=True):
                for key, value in incoming["state"].get(number, {}).items():
                    if isinstance(value, Tensor):
                        device = value.device if key == "step" else param.device
                        self.state[param][key] = value.detach().to(device, copy=True)
        self._bound = {}

    def _check_partition(self, state_dict: dict[str, Any]) -> None:
        for i, (group, saved) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=False)):
            if saved.get("blocks", group.get("blocks")) != group.get("blocks"):
                raise ValueError(
                    f"The checkpoint was made with another partition of parameter group {i}: it has {saved['blocks']}, "
                    f"this optimizer {group['blocks']}. Construct {type(self).__name__} with the partition that was "
                    "used then, or start with fresh state."
                )


def arithmetic(param: Tensor) -> torch.dtype:
    """The dtype of state and arithmetic: that of the parameter, but float32 at least."""
    return torch.promote_types(param.dtype, torch.float32)


def decayed_rate(group: dict[str, Any], member: Member) -> float:
    """AdaGrad's learning rate η / (1 + (t − 1) decay)."""
    decay = group["lr_decay"]
    return float(group["lr"]) / (1 + (float(member.state["step"]) - 1) * decay if decay else 1)


def move_(member: Member, delta: Tensor, rate: float) -> None:
    """θ ← θ − rate · δ, rounded once to the parameter's own dtype."""
    if member.param.dtype == delta.dtype:
        member.param.add_(delta, alpha=-rate)
    else:
        member.param.copy_(member.param.to(delta.dtype).add_(delta, alpha=-rate))


def _describe_nonfinite(work: Work) -> str:
    for member in work.members:
        grad = member.param.grad
        if grad is not None and not grad.isfinite().all():
            nan, inf = int(grad.isnan().sum()), int(grad.isinf().sum())
            what = f"The gradient of {member.name} has {nan} NaN and {inf} infinite of {grad.numel()} entries"
            break
    else:
        i = int((~work.sums.isfinite()).any(0).nonzero()[0])
        what = f"The sums over block {work.layout.names[i]} overflow, though every gradient is finite"
    return f"{what}. Nothing was changed. nonfinite='skip' leaves such steps out and counts them."
