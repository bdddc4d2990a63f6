"""Parameter groups: their options and layouts, saving and loading. What torch.optim promises, without arithmetic."""

from __future__ import annotations

from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # as torch.optim does: torch.compiler.disable imports all of dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from blockmean._checks import require
from blockmean._cut import BY
from blockmean.optim._layout import COUPLINGS, MATRIX_LIMIT, Layout

NONFINITE = ("raise", "skip")


class GroupedOptimizer(Optimizer):
    """Groups of parameters, each with its own options and blocks, and their state in `state[param]`."""

    _not_negative: tuple[str, ...] = ("lr", "weight_decay")
    _switches: tuple[str, ...] = ("maximize",)
    _state_keys: tuple[str, ...] = ("step",)  # what the state of a parameter has at least
    _choices: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self.skipped_steps = 0  # steps left out because a gradient was not finite (nonfinite="skip")
        self.diagonal_fallbacks = 0  # roots that could not be had, so that the diagonal step was taken
        self._layouts: dict[Tensor, Layout] = {}  # by the first parameter of a group
        self._bound: dict[tuple[Tensor, str], tuple[list[Tensor], list[Tensor | None]]] = {}
        self._last: dict[Tensor, tuple[Tensor, Tensor]] = {}  # what the last step did along the blocks of a group
        super().__init__(params, defaults)

    # ---------------------------------------------------------------- options

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise where an option of a group is out of range."""
        owner = type(self).__name__
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        for name in self._not_negative:
            value = float(lr) if name == "lr" and isinstance(lr, Tensor) else group[name]
            require_number(value, name, owner)
        for name in self._switches:
            require(isinstance(group[name], bool), name, owner, "True or False", group[name], TypeError)
        for name, allowed in {"coupling": COUPLINGS, "nonfinite": NONFINITE, **self._choices}.items():
            if name in group:
                require(group[name] in allowed, name, owner, f"one of {', '.join(map(repr, allowed))}", group[name])
        if "refresh_every" in group:
            k = group["refresh_every"]
            whole = isinstance(k, int) and not isinstance(k, bool)
            require(whole and k >= 1, "refresh_every", owner, "a whole number >= 1", k)

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

    # ---------------------------------------------------------------- layouts

    def _lay_out(self, group: dict[str, Any]) -> None:
        params = distinct(group)
        if not params:
            return
        named = dict(zip(group["params"], group.get("param_names", [""] * len(group["params"])), strict=True))
        # The full matrix is the block mean whose blocks are single entries, all coupled.
        by, coupling = group.get("partition", "element"), group.get("coupling", "all")
        known = callable(by) or by in BY
        require(known, "partition", type(self).__name__, f"a callable or one of {', '.join(map(repr, BY))}", by)
        limit = group.get("max_bytes", MATRIX_LIMIT)
        with torch.device("cpu"):  # whatever the default device is: a layout is looked up, never computed with
            layout = Layout([named[param] for param in params], params, by, coupling, type(self).__name__, limit)
        if callable(by):
            group["partition"] = "custom"  # param_groups hold plain values only, so that they can be saved
        group["blocks"] = layout.fingerprint
        self._layouts[params[0]] = layout

    def _layout_of(self, group: dict[str, Any]) -> Layout:
        params = distinct(group)
        if params[0] not in self._layouts:  # a wrapper put other tensors in the place of the parameters
            self._lay_out(group)
        layout, coupling = self._layouts[params[0]], group.get("coupling", "all")
        if len(layout.tensors) != len(params):
            raise ValueError(
                f"A parameter group of {type(self).__name__} had {len(layout.tensors)} parameters when added, and "
                f"has {len(params)} now. Add further ones with add_param_group."
            )
        if layout.coupling != coupling:  # a loaded checkpoint, or the user, changed it
            before = layout.coupling
            with torch.device("cpu"):
                layout.couple(coupling)
            for param, blocks in zip(params, layout.tensors, strict=True):
                row = self.state.get(param, {}).get("U")
                if row is not None and row.shape != layout.row_shape(blocks):
                    layout.couple(before)
                    raise ValueError(
                        f"The 'coupling' parameter of {type(self).__name__} cannot change from {before!r} to "
                        f"{coupling!r} where blocks have statistics. Delete 'U' from the state of the parameters of "
                        "the group to begin them anew."
                    )
            for key in [key for key in self._bound if key[0] is params[0]]:
                del self._bound[key]
        return layout

    # ---------------------------------------------------------------- saving and loading

    def __getstate__(self) -> dict[str, Any]:
        own = ("skipped_steps", "diagonal_fallbacks", "_layouts")
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch puts it there; it is no option of ours
        self._bound = {}
        self._last = {}
        for param in (param for group in self.param_groups for param in group["params"]):
            kept = self.state.get(param, {})
            for key in [key for key, value in kept.items() if isinstance(value, dict) and not value]:
                del kept[key]  # how torch.distributed.checkpoint unflattens what was never saved
            if "step" in kept and not isinstance(kept["step"], Tensor):
                kept["step"] = torch.tensor(float(kept["step"]), dtype=torch.float32)

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, bit by bit; raises where the checkpoint has another partition.

        torch casts every state tensor but "step" to the dtype of its parameter; here all keep the dtype they were
        saved in, and are copied, so that training on never changes the loaded dict. Options that the dict lacks stay
        as they are.
        """
        incoming: dict[str, Any] = {}

        def complete(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            groups = final["param_groups"]
            if len(groups) == len(self.param_groups):  # else torch raises
                groups = [self._completed(i, group, saved) for i, (group, saved) in enumerate(self._pairs(groups))]
                self._check_states(final)
            incoming.update(final)
            return {**final, "param_groups": groups}

        def uncast(_: Optimizer) -> None:
            for group, saved in self._pairs(incoming["param_groups"]):
                for param, number in zip(group["params"], saved["params"], strict=True):
                    for key, value in incoming["state"].get(number, {}).items():
                        if isinstance(value, Tensor):
                            device = value.device if key == "step" else param.device
                            self.state[param][key] = value.detach().to(device, copy=True)

        # After the user's hooks that change the dict, and before those that look at the result.
        handles = [
            self.register_load_state_dict_pre_hook(complete),
            self.register_load_state_dict_post_hook(uncast, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _check_states(self, state_dict: dict[str, Any]) -> None:
        for number, state in state_dict["state"].items():
            missing = [key for key in self._state_keys if key not in state] if "step" in state else []
            if missing:
                raise ValueError(
                    f"The checkpoint is not one of {type(self).__name__}: the state of parameter {number} lacks "
                    f"{', '.join(missing)}; it has {', '.join(sorted(state))}."
                )

    def _pairs(self, saved_groups: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return list(zip(self.param_groups, saved_groups, strict=True))

    def _completed(self, i: int, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """A saved group with all options, once it is known to fit."""
        full = {**{key: value for key, value in group.items() if key != "params"}, **saved}
        if full.get("blocks") != group.get("blocks"):
            raise ValueError(
                f"The checkpoint was made with another partition of parameter group {i}: it has {full['blocks']}, "
                f"this optimizer {group.get('blocks')}. Construct {type(self).__name__} with the partition that was "
                "used then, or start with fresh state."
            )
        self._check_group(full)
        layout = self._layouts.get(group["params"][0]) if group["params"] else None
        if layout is not None:
            layout.matrices(full.get("coupling", "all"))
        return full


def distinct(group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a group, each once: torch only warns about duplicates."""
    return list(dict.fromkeys(group["params"]))


def require_number(value: object, name: str, owner: str, *, positive: bool = False, optional: bool = False) -> None:
    """Raise unless `value` is a plain number ≥ 0, or > 0 where `positive`; None may be one where `optional`."""
    if optional and value is None:
        return
    expected = (">" if positive else ">=") + " 0" + (" or None" if optional else "")
    if not isinstance(value, Real):
        require(False, name, owner, f"a number {expected}", value, TypeError)
    else:
        number = float(value)
        require(number > 0 if positive else number >= 0, name, owner, expected, value)
