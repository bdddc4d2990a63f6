"""What all optimizers of this package share: groups and their options, the order of a step, checkpoints.

    collect      the gradients of a group, as this process has them, and the states of its parameters
    read         pass 1 over the gradients: small sums, and evidence that they are finite; nothing changes
    reduce       sums over the shards of sharded parameters; all processes raise or skip together
    finite?      bad gradients are noticed here, for all groups, before anything has changed
    write        small arithmetic, then pass 2: state and parameters, written once

A new optimizer implements `init_state`, `read` and `write`, and checks its options and loaded state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # as torch.optim does: torch.compiler.disable imports all of dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from blockmean._checks import require, require_choice, require_number
from blockmean._linalg import MATMULS, PRECISION, exact_products
from blockmean.optim import sharding
from blockmean.optim.sharding import PLAIN, Exchange, Sum, local_gradient

State = dict[str, Any]

NOT_OPTIONS = ("self", "params", "__class__")
"""Among the variables of a constructor; all others are options, under the names of its arguments."""

AS_CONSTRUCTED = ("foreach", "fused", "capturable", "differentiable", "partition")
"""Options that no checkpoint changes: how a step is computed, and what its partition is called here."""

MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "mu_product", "sum", "square_avg", "momentum_buffer"}
"""By what the states of torch's optimizers are told apart."""


@dataclass
class GroupStep:
    """One parameter group during a step. Indices are places in `params`."""

    number: int  # of the group
    group: dict[str, Any]
    params: list[Tensor]  # all parameters of the group, each once
    grads: dict[int, Tensor]  # what this process has of the gradients, by index
    states: dict[int, State]  # of those with a gradient; new ones are stored once all gradients are known as finite
    sums: list[Sum] = field(default_factory=list)  # set by `read`, of the same shapes in every step
    evidence: list[Tensor] = field(default_factory=list)  # set by `read`: finite if the gradients are
    work: Any = None  # what `read` hands on to `write`
    is_sharded: bool = False  # whether other processes may have parts of its parameters
    ok: Tensor | None = None  # capturable=True: 1 on the device if all gradients are finite, else 0


class BaseOptimizer(Optimizer):
    """A `torch.optim.Optimizer` whose steps change nothing if a gradient is not finite.

    Attributes:
        skipped_steps: how many steps were skipped because a gradient was not finite (nonfinite="skip"). A tensor on the
            device with capturable=True.
    """

    counters: ClassVar[tuple[str, ...]] = ("step",)
    """State that counts steps: float32 on the CPU, as in torch."""
    entry_state: ClassVar[tuple[str, ...]] = ()
    """Moments: state with one number per entry of a parameter."""
    optional_state: ClassVar[tuple[str, ...]] = ()
    """Moments that a parameter may lack, as they are switched on later."""

    def __init__(self, params: ParamsT | nn.Module, defaults: dict[str, Any]) -> None:
        self.skipped_steps: int | Tensor = 0
        self._exchange = Exchange()
        super().__init__([{"params": params}] if isinstance(params, nn.Module) else params, defaults)

    # ---------------------------------------------------------------- what an optimizer implements

    def init_state(self, param: Tensor, group: dict[str, Any]) -> State:
        """The state of a parameter before its first step."""
        raise NotImplementedError

    def read(self, step: GroupStep) -> None:
        """Pass 1: set `sums` and `evidence`. Changes nothing. Called without gradients if parameters are sharded."""
        raise NotImplementedError

    def write(self, steps: list[GroupStep]) -> None:
        """Small arithmetic and pass 2: update state, step counts included, and parameters."""
        raise NotImplementedError

    def check_options(self, group: dict[str, Any], *, ranges: bool) -> None:
        """Raise if no step can use an option; with `ranges` also if it is out of range, as schedules may leave it."""
        owner = type(self).__name__
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        rate = float(lr) if isinstance(lr, Tensor) else lr
        if ranges:
            require_number(rate, "lr", owner)
            require_number(group["weight_decay"], "weight_decay", owner)
        require(isinstance(rate, int | float) and rate == rate, "lr", owner, "a number", lr)
        require_choice(group["nonfinite"], ("raise", "skip"), "nonfinite", owner)
        require(isinstance(group["maximize"], bool), "maximize", owner, "True or False", group["maximize"], TypeError)
        for name in ("foreach", "fused"):
            good = group.get(name) is None or isinstance(group[name], bool)
            require(good, name, owner, "True, False or None", group.get(name), TypeError)
        if group.get("fused") and group.get("foreach"):
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")

    def check_state(self, number: int, group: dict[str, Any], states: Mapping[int, State]) -> None:
        """Raise if the states of a checkpoint, by index, do not fit a group with these options."""

    def adopt(self, param: Tensor, name: str, value: Tensor) -> Tensor:
        """A copy of a loaded tensor, with the dtype, device and placement that a step expects."""
        if name in self.counters:
            return value.detach().to("cpu", torch.float32, copy=True)
        value = sharding.placed_like(param, value.detach(), range(value.ndim))
        return value.to(param.device, arithmetic(param.dtype), copy=True)

    # ---------------------------------------------------------------- the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: recomputes the gradients and returns the loss, which `step` then returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with ExitStack() as stack:
            for device in {group["params"][0].device.type for group in self.param_groups if group["params"]}:
                if torch.amp.is_autocast_available(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            if any(getattr(one, PRECISION, "none") not in ("none", "ieee") for one in MATMULS):
                stack.enter_context(exact_products())
            self._step()
        return loss

    @_disable_dynamo
    def _step(self) -> None:
        """Both passes over all groups. Not traced by torch.compile: the check for bad gradients branches on values."""
        steps: list[GroupStep] = []
        failure: Exception | None = None
        processes: list[Any] = []
        try:
            found = [collect(self, number) for number in range(len(self.param_groups))]
            steps = [step for step in found if step is not None]
            processes = process_groups(self) if any(step.is_sharded for step in steps) else []
            for step in steps:
                self.read(step)
        except Exception as error:
            processes = process_groups(self)
            if not processes:
                raise
            steps, failure = [], error  # the other processes are waiting
        bad_elsewhere = bool(processes) and self._reduce(steps, failure, processes)
        if steps and all(step.group.get("capturable") for step in steps):
            mask_on_device(self, steps)
        elif bad_elsewhere or not bool(finite_flag(steps)):  # only here does a step wait for an accelerator
            for step in steps:
                if step.group["nonfinite"] == "raise" and not bool(finite_flag([step])):
                    raise ValueError(describe_nonfinite(step))
            self.skipped_steps += 1
            return
        for step in steps:
            self.state.update((step.params[i], state) for i, state in step.states.items())
        self.write(steps)

    def _reduce(self, steps: list[GroupStep], failure: Exception | None, processes: list[Any]) -> bool:
        """Complete the sums of all groups over processes. Returns whether one of them has a bad gradient to skip.

        Raises on all processes if one has failed, or lacks a gradient that others have.
        """
        bad = [step.group["nonfinite"] for step in steps if not bool(finite_flag([step]))]
        present = [
            i in step.grads
            for step in steps
            for i, param in enumerate(step.params)
            if sharding.is_distributed(param) and param.numel()
        ]
        sums = [one for step in steps for one in step.sums]
        flags = ["raise" in bad, "skip" in bad, *present]
        raises, skips, *present_share = self._exchange.reduce(
            sums, flags, failure, processes, lambda: fingerprint(self)
        )
        if any(0 < share < 1 for share in present_share):
            raise RuntimeError(
                f"{type(self).__name__}: a sharded parameter has a gradient on some of the processes only. Let all "
                "have one (of zeros, if need be), or none. Nothing was changed."
            )
        if raises and "raise" not in bad:
            raise ValueError("A gradient on another process is not finite. Nothing was changed.")
        return skips > 0

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, or a module, optionally with options of its own."""
        params = param_group.get("params") if isinstance(param_group, dict) else None
        if isinstance(params, nn.Module):
            param_group = {**param_group, "params": list(params.named_parameters())}
        super().add_param_group(param_group)
        try:
            self.check_options(self.param_groups[-1], ranges=True)
            check_parameters(self.param_groups[-1], type(self).__name__)
        except Exception:
            self.param_groups.pop()
            raise

    # ---------------------------------------------------------------- saving and loading

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "skipped_steps": self.skipped_steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_exchange", Exchange()).invalidate()
        for param, kept in list(self.state.items()):
            self.state[param] = kept = without_gaps(kept)
            if "step" in kept and not isinstance(kept["step"], Tensor):
                kept["step"] = torch.tensor(float(kept["step"]), dtype=torch.float32)

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` bit by bit; raise, with nothing changed, if it does not fit.

        torch casts every state tensor but "step" to the dtype of its parameter. Here moments get the dtype of the
        arithmetic, and float64 stays float64. Everything is copied, so training never changes the loaded dict. Options
        missing from the dict keep their current values.
        """
        incoming: dict[str, Any] = {}

        def complete(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            groups = final["param_groups"]
            if [len(group["params"]) for group in groups] == [len(group["params"]) for group in self.param_groups]:
                groups = [completed(self, *pair) for pair in zip(self.param_groups, groups, strict=True)]
                for number, group in enumerate(groups):
                    places = {key: i for i, key in enumerate(dict.fromkeys(group["params"]))}
                    saved = {i: without_gaps(final["state"].get(key, {})) for key, i in places.items()}
                    self.check_state(number, group, {i: state for i, state in saved.items() if state})
            incoming.update(final)  # else torch raises
            return {**final, "param_groups": groups}

        def adopt(_: Optimizer) -> None:
            for group, saved in zip(self.param_groups, incoming["param_groups"], strict=True):
                for param, key in zip(group["params"], saved["params"], strict=True):
                    for name, value in incoming["state"].get(key, {}).items():
                        if isinstance(value, Tensor):
                            self.state[param][name] = self.adopt(param, name, value)

        # After the user's hooks that modify the dict, and before those that inspect the result.
        handles = [
            self.register_load_state_dict_pre_hook(complete),
            self.register_load_state_dict_post_hook(adopt, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()


# -------------------------------------------------------------------- helpers of a step


def collect(optimizer: BaseOptimizer, number: int) -> GroupStep | None:
    """The gradients and states of a group; None if it has no gradient, and no other process can have one."""
    group = optimizer.param_groups[number]
    params = distinct(group)
    is_sharded = not PLAIN.issuperset(map(type, params)) and any(map(sharding.is_distributed, params))
    found = [local_gradient(param) if is_sharded else param.grad for param in params]
    grads = {i: grad for i, grad in enumerate(found) if grad is not None}
    if not grads and not is_sharded:
        return None
    owner = type(optimizer).__name__
    if sparse := [i for i, grad in grads.items() if grad.layout is not torch.strided]:
        raise RuntimeError(
            f"{owner} does not support sparse gradients. {shown_names(group)[sparse[0]]} has one. Make its layer with "
            "sparse=False."
        )
    devices = {grad.device for grad in grads.values()}
    if len(devices) > 1:
        raise RuntimeError(
            f"{owner} processes the parameters of a group together: they must be on one device. "
            f"Got {' and '.join(sorted(map(str, devices)))}. Put them into separate parameter groups."
        )
    states = {i: state_of(optimizer, params[i], group) for i in grads}
    return GroupStep(number, group, params, grads, states, is_sharded=is_sharded)


def state_of(optimizer: BaseOptimizer, param: Tensor, group: dict[str, Any]) -> State:
    """The state of a parameter, or a new one, in the dtype of the arithmetic: the model may have changed its own."""
    state: State = optimizer.state.get(param, {})
    if "step" not in state:
        return {**state, **optimizer.init_state(param, group)}
    dtype = arithmetic(param.dtype)
    for name in optimizer.entry_state:
        if name not in state:
            if name not in optimizer.optional_state:
                raise ValueError(incomplete(optimizer, state, {name}))
        elif state[name].dtype is not dtype:
            return {key: optimizer.adopt(param, key, x) if isinstance(x, Tensor) else x for key, x in state.items()}
    return state


def incomplete(optimizer: BaseOptimizer, state: State, needed: Set[str]) -> str:
    """What to say of a state from which somebody has taken something."""
    lost = ", ".join(sorted(needed - state.keys()))
    return f"{type(optimizer).__name__} has lost {lost} of a parameter. Construct the optimizer anew."


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype of state and arithmetic: that of the parameter, but at least float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def finite_flag(steps: Sequence[GroupStep]) -> Tensor:
    """Whether the evidence of every group is finite, on the device, where nobody waits for it."""
    evidence = [x.flatten() for step in steps for x in step.evidence]
    if not evidence:
        return torch.ones((), dtype=torch.bool, device="cpu")
    if len({(x.device, x.dtype) for x in evidence}) > 1:
        evidence = [x.isfinite().all()[None].to(evidence[0].device) for x in evidence]
    return torch.cat(evidence).isfinite().all()


def mask_on_device(optimizer: BaseOptimizer, steps: Sequence[GroupStep]) -> None:
    """Let `write` know on the device whether anything may change, and count there if not."""
    ok = finite_flag(steps).to(torch.float32)
    for step in steps:
        step.ok = ok
    if not isinstance(optimizer.skipped_steps, Tensor):
        optimizer.skipped_steps = torch.full_like(ok, optimizer.skipped_steps)
    optimizer.skipped_steps.add_(1 - ok)


def describe_nonfinite(step: GroupStep) -> str:
    """Which gradient, or parameter, is to blame."""
    names = shown_names(step.group)
    things = [(f"gradient of {names[i]}", grad) for i, grad in step.grads.items()]
    things += [(f"parameter {names[i]}", sharding.local(step.params[i])) for i in step.grads]
    for what, tensor in things:
        if not tensor.isfinite().all():
            nan, inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
            found = f"The {what} has {nan} NaN and {inf} infinite of {tensor.numel()} entries"
            break
    else:
        found = "The gradients here are finite, but sums over them overflow, or one on another process is not finite"
    return f"{found}. Nothing was changed. nonfinite='skip' skips such steps and counts them."


def process_groups(optimizer: Optimizer) -> list[Any]:
    """The process groups over which any parameter is sharded."""
    params = [param for group in optimizer.param_groups for param in group["params"] if sharding.is_distributed(param)]
    return list(dict.fromkeys(one for param in params for one in sharding.sides_of(param).both))


def fingerprint(optimizer: BaseOptimizer) -> list[Any]:
    """What has to be the same on all processes: names, options and steps taken of groups with sharded parameters."""
    found = []
    for group in optimizer.param_groups:
        if any(map(sharding.is_distributed, group["params"])):
            names = sorted(group.keys() - {"params", "foreach", "fused"})
            options = [(name, float(v) if isinstance(v := group[name], Tensor) else v) for name in names]
            states = [optimizer.state.get(param, {}) for param in distinct(group)]
            found.append((options, [[int(s[name]) for name in optimizer.counters if name in s] for s in states]))
    return found


def count_steps(states: Iterable[State]) -> None:
    """Add one to step counts on the host. A tensor with alpha=1.0 makes it one operation, a number one for each."""
    torch._foreach_add_([state["step"] for state in states], torch.tensor(1.0, device="cpu"), alpha=1.0)


# -------------------------------------------------------------------- helpers of groups and checkpoints


def distinct(group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a group, each once: torch only warns about duplicates."""
    return list(dict.fromkeys(group["params"]))


def given_names(group: dict[str, Any]) -> list[str]:
    """The names of the distinct parameters of a group, '' if unnamed."""
    return list(dict(zip(group["params"], group.get("param_names", [""] * len(group["params"])), strict=True)).values())


def shown_names(group: dict[str, Any]) -> list[str]:
    """What to call the parameters of a group in messages."""
    return [
        f"'{name}'" if name else f"parameter {i} {list(param.shape)}"
        for i, (name, param) in enumerate(zip(given_names(group), distinct(group), strict=True))
    ]


def check_parameters(group: dict[str, Any], owner: str) -> None:
    """Raise if a parameter is of a kind that no optimizer of ours takes."""
    for i, param in enumerate(group["params"]):
        if not param.is_floating_point() or param.layout != torch.strided:
            kind = "sparse" if param.layout != torch.strided else str(param.dtype).removeprefix("torch.")
            raise ValueError(f"{owner} does not support {kind} parameters. Parameter {i} is one.")
        if getattr(param, "_fsdp_flattened", False):
            raise ValueError(
                f"{owner} cannot see the blocks of parameters that FullyShardedDataParallel has flattened: "
                f"parameter {i} is one. Use fully_shard, which shards them one by one, or DistributedDataParallel."
            )
        if sharding.is_distributed(param) and any(placement.is_partial() for placement in param.placements):
            raise ValueError(f"{owner} does not take a parameter that is a sum over processes. Parameter {i} is one.")


def completed(optimizer: BaseOptimizer, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """A saved group with missing options filled in; raise if a step cannot use it."""
    full = {**{key: value for key, value in group.items() if key != "params"}, **saved}
    full.update({key: group[key] for key in AS_CONSTRUCTED if key in group})
    optimizer.check_options(full, ranges=False)
    return full


def require_state(
    group: dict[str, Any], i: int, state: State, owner: str, moments: Sequence[str], others: Sequence[str] = ()
) -> None:
    """Raise unless a saved state has these names, moments have their parameter's shape, and it is not another method's.

    Names that no optimizer of torch has are the user's own, and pass.
    """
    shape = distinct(group)[i].shape
    missing = [name for name in ("step", *moments, *others) if name not in state]
    foreign = sorted(MOMENTS.intersection(state).difference(moments))
    if missing or foreign:
        found = f"lacks {', '.join(missing)}; it has {', '.join(sorted(state))}" if missing else ""
        found = found or f"has {', '.join(foreign)}, which {owner} does not use"
        raise ValueError(f"The checkpoint is not one of {owner}: the state of parameter {i} {found}.")
    for name in moments:
        if isinstance(state.get(name), Tensor) and state[name].shape != shape:
            raise ValueError(
                f"The checkpoint has {name} of shape {tuple(state[name].shape)} for {shown_names(group)[i]}, whose "
                f"shape is {tuple(shape)}. Load it with the same model, its parameters in the same order."
            )


def without_gaps(state: State) -> State:
    """A state without the empty dicts that torch.distributed.checkpoint inserts for missing values."""
    return {key: value for key, value in state.items() if not (isinstance(value, dict) and not value)}
