"""Argument checks with uniform wording: every message says what was expected and what was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64)
"""The precisions that the algebra accepts."""


def require(
    condition: bool, name: str, owner: str, expected: str, got: object, error: type[Exception] = ValueError
) -> None:
    """Raise `error` unless `condition` holds. Write conditions so that NaN fails: `lr >= 0`, not `not lr < 0`.

    >>> require(-1.0 >= 0, "lr", "AdaGradBMA", ">= 0", -1.0)
    Traceback (most recent call last):
    ValueError: The 'lr' parameter of AdaGradBMA must be >= 0. Got -1.0 instead.
    """
    if not condition:
        raise error(f"The {name!r} parameter of {owner} must be {expected}. Got {got!r} instead.")


def require_number(value: object, name: str, owner: str, *, positive: bool = False, optional: bool = False) -> None:
    """Raise unless `value` is a number ≥ 0, or > 0 if `positive`; None passes if `optional`."""
    if optional and value is None:
        return
    expected = (">" if positive else ">=") + " 0" + (" or None" if optional else "")
    if not isinstance(value, Real):
        require(False, name, owner, f"a number {expected}", value, TypeError)
    else:
        number = float(value)
        require(number > 0 if positive else number >= 0, name, owner, expected, value)


def require_choice(value: object, allowed: Sequence[str], name: str, owner: str) -> None:
    """Raise unless `value` is one of the allowed words."""
    require(value in allowed, name, owner, f"one of {', '.join(map(repr, allowed))}", value)


def require_betas(betas: object, owner: str) -> None:
    """Raise unless these are the two decays of Adam."""
    values = betas if isinstance(betas, tuple | list) else (None,)
    expected = "two numbers in [0, 1)"
    require(all(isinstance(beta, int | float) for beta in values), "betas", owner, expected, betas, TypeError)
    require(len(values) == 2 and all(0 <= beta < 1 for beta in values), "betas", owner, expected, betas)


def require_adamw(group: Mapping[str, Any], owner: str) -> None:
    """Raise if a group, perhaps one of torch's Adam, has an option that AdamW's decoupled step cannot follow."""
    for name in ("amsgrad", "differentiable"):
        require(not group.get(name), name, owner, "False: it has no such form", group.get(name))
    if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
        raise ValueError(
            f"The checkpoint is one of Adam with coupled weight decay, and {owner} has only the decoupled one of "
            "AdamW. Set its 'weight_decay' to 0, or train on with Adam."
        )


def require_last(x: Tensor, length: int, name: str, owner: str, what: str) -> None:
    """Raise unless the last dimension of x has the given length."""
    got = tuple(x.shape)
    require(x.ndim > 0 and got[-1] == length, name, owner, f"of shape (..., {length}), one value per {what}", got)


def as_float(values: Any, name: str, owner: str, like: Any = None) -> Tensor:
    """A float32 or float64 tensor; Python numbers take the dtype of `like` if that is a tensor, else the default."""
    is_plain = not hasattr(values, "dtype")
    dtype = like.dtype if is_plain and isinstance(like, Tensor) and like.is_floating_point() else None
    x: Tensor = torch.as_tensor(values, dtype=dtype)
    if not (x.is_floating_point() or x.is_complex()):
        x = x.to(torch.get_default_dtype())
    require(x.dtype in DTYPES, name, owner, "float32 or float64", x.dtype, TypeError)
    return x


def as_int(values: Sequence[int] | Tensor, name: str, owner: str) -> Tensor:
    """A copy as a one-dimensional int64 tensor on the CPU; refuse anything but whole numbers."""
    x = torch.as_tensor(values).detach().cpu()
    is_whole = x.numel() == 0 or not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    require(is_whole, name, owner, "whole numbers", x.dtype, TypeError)
    require(x.ndim == 1, name, owner, "one-dimensional", f"shape {tuple(x.shape)}")
    return x.to(torch.int64, copy=True)
