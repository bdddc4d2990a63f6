"""Models, data and losses of the user's own: found as 'module:object', and checked before they are used."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

EXPECTED = {
    "model": "a torch.nn.Module, or a function without arguments that returns one",
    "data": "two tensors, (inputs, targets), or batches of such pairs, as a DataLoader has, or a function without "
    "arguments that returns either",
    "loss": "a function of two arguments, (outputs, targets), that returns the mean loss",
}


def is_own(name: str) -> bool:
    """Whether a name stands for an object of the user's, and not for one that is known here."""
    return ":" in name


def find_object(spec: str, what: str, known: Iterable[str] = ()) -> Any:
    """The object that 'package.module:name' stands for; modules in the current folder are found, too."""
    module_name, _, name = spec.partition(":")
    if not (module_name and name):
        choice = f"one of {', '.join(known)}, module:object" if known else "module:object"
        raise ValueError(f"{what} must be {choice}. Got {spec!r} instead.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        hint = f" Leave out the .py: {module_name[:-3]}:{name}." if module_name.endswith(".py") else ""
        raise ValueError(
            f"{what} {spec!r} cannot be imported: {error} (looked into {Path.cwd()}, too).{hint}"
        ) from error
    if not hasattr(module, name):
        raise ValueError(f"{what} {spec!r}: there is no {name} in {module.__file__ or module_name}.")
    return getattr(module, name)


def require_function(spec: str, what: str, found: Any, arguments: int) -> Callable[..., Any]:
    """ValueError unless the object that a spec stands for can be called with that many arguments."""
    got = short(found)
    if callable(found):
        function: Callable[..., Any] = found
        try:
            signature = inspect.signature(function)
        except (ValueError, TypeError):  # written in C
            return function
        try:
            signature.bind(*[None] * arguments)
        except TypeError:
            got = f"{spec.partition(':')[2]}{signature}"
        else:
            return function
    raise ValueError(f"{what} {spec!r} must be {EXPECTED[what]}. Got {got} instead.")


def own_model(spec: str, known: Iterable[str] = ()) -> nn.Module:
    """A new model from 'module:object', a torch.nn.Module, which is copied, or a function that returns one."""
    found = find_object(spec, "model", known)
    model = copy.deepcopy(found) if isinstance(found, nn.Module) else require_function(spec, "model", found, 0)()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {spec!r} must return a torch.nn.Module. Got {type(model).__name__} instead.")
    return model


def check_fit(
    named_model: tuple[str, nn.Module],
    named_loss: tuple[str, Callable[..., Tensor]],
    data: tuple[Tensor, Tensor],
    any_output: bool = False,
) -> None:
    """Raise ValueError if model, data and loss do not fit together, rather than fail somewhere inside.

    `any_output` allows outputs that are no tensor. The model is in evaluation mode afterwards.
    """
    (name, model), (loss_name, loss_fn), (x, y) = named_model, named_loss, data
    given = f"inputs {list(x.shape[1:])} of {x.dtype}, targets {list(y.shape[1:])} of {y.dtype}"
    problem = f"model {name!r}, loss {loss_name!r} and the data ({given}) do not fit together"
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")  # mse_loss would broadcast
            output = model.eval()(x)
            accepted = any_output or isinstance(output, Tensor)
            loss = loss_fn(output, y) if accepted else None
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, UserWarning) as error:
        raise ValueError(f"{problem}: {error}") from error
    if not accepted:
        keys = f" with the keys {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise ValueError(
            f"model {name!r} must return a tensor. Got {type(output).__name__}{keys} instead: wrap it in a "
            "module that returns one tensor."
        )
    if not isinstance(loss, Tensor) or loss.ndim:
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else short(loss)
        raise ValueError(f"loss {loss_name!r} must return the mean loss as a scalar tensor. Got {got}.")


def short(value: object) -> str:
    """A value in a message of one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}…"
