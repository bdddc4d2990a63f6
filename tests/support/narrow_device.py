"""A device without float64, as MPS: tensors that compute on the CPU and refuse float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

REFUSED = "This device does not support float64."


class NarrowTensor(Tensor):
    """Claims to be on "meta", which torch knows wherever it was built. Operations run on the CPU, on what it wraps."""

    data_on_cpu: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> NarrowTensor:
        if data.dtype == torch.float64:
            raise TypeError(REFUSED)
        made = Tensor._make_wrapper_subclass(cls, data.shape, strides=data.stride(), dtype=data.dtype, device="meta")
        made.data_on_cpu = data.detach()
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class NarrowDevice(TorchDispatchMode):
    """While it lasts, tensors can be made on, and moved to, the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    narrow = [x for x in leaves if isinstance(x, NarrowTensor)]
    device = kwargs.get("device")
    target = None if device is None else torch.device(device).type
    if not narrow and target != "meta":
        return func(*args, **kwargs)
    name = func.overloadpacket.__name__
    copies = name in ("_to_copy", "copy_", "_foreach_copy_")
    if narrow and not copies and any(x.ndim and not isinstance(x, NarrowTensor) for x in leaves):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found meta and cpu")
    if target == "meta":
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain_args, plain_kwargs = pytree.tree_map_only(NarrowTensor, lambda x: x.data_on_cpu, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if target == "cpu":
        return result.clone() if name == "_to_copy" and result is plain_args[0] else result
    own = {id(x.data_on_cpu): x for x in narrow}  # results of operations in place
    stays = {id(x) for x in leaves if not isinstance(x, NarrowTensor)}

    def wrapped(x: Tensor) -> Tensor:
        return x if id(x) in stays else own[id(x)] if id(x) in own else NarrowTensor(x)

    return pytree.tree_map_only(Tensor, wrapped, result)
