"""Parameters that are sharded over processes (DTensor): what is local of them, and sums over all shards.

Everything that a step knows of a sharded tensor as a whole is a sum over its shards. So `reduce` adds up small arrays,
in one collective per process group for all of them, and no parameter, gradient or moment ever moves. Mesh dims that
replicate a tensor are left alone. Where no tensor is sharded, nothing here communicates or needs a process group.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockmean.blocks import Box

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


PLAIN = frozenset({Tensor, nn.Parameter})


def is_distributed(x: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor. Its module is not imported for those who have none."""
    return type(x) not in PLAIN and hasattr(x, "device_mesh")


def local(x: Tensor) -> Tensor:
    """What this process has of a tensor, without a copy."""
    return x._local_tensor if is_distributed(x) else x


def local_gradient(param: Tensor) -> Tensor | None:
    """What this process has of a gradient, sharded like its parameter."""
    grad = param.grad
    if grad is None or not is_distributed(param):
        return grad
    if not is_distributed(grad):
        raise TypeError("The gradient of a sharded parameter (DTensor) must be a DTensor, too. Got a plain tensor.")
    if grad.placements != param.placements:  # tensor parallelism leaves sums of replicated parameters to whoever asks
        grad = grad.redistribute(param.device_mesh, param.placements)
    own: Tensor = grad._local_tensor
    if hasattr(own, "wait"):  # a collective that is still under way
        own = own.wait()
    return own


def placement_of(param: Tensor) -> Any:
    """What tells whether a parameter is sharded as before; None for a plain tensor."""
    return (tuple(param.device_mesh.shape), str(param.placements)) if is_distributed(param) else None


def box_of(param: Tensor) -> Box | None:
    """Which entries of a sharded parameter are local; None for a plain tensor."""
    if not is_distributed(param):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    # Beyond the last shard the offset means nothing.
    spans = zip(offset, shape, param.shape, strict=True)
    return tuple((min(start, size), min(start, size) + own) for start, own, size in spans)


def cut_dim(placement: Any) -> int | None:
    """The dim of a tensor that a mesh dim cuts; None if it replicates. Asks for no class: FSDP on top of tensor
    parallelism has a placement of its own, which is no `Shard`."""
    return None if placement.is_partial() else getattr(placement, "dim", None)


class Sides(NamedTuple):
    """The process groups that the shards of a tensor are spread over: along its first dim, and along others."""

    units: tuple[ProcessGroup, ...] = ()
    inputs: tuple[ProcessGroup, ...] = ()

    @property
    def both(self) -> tuple[ProcessGroup, ...]:
        return self.units + self.inputs


WHOLE = Sides()


def groups_of(param: Tensor) -> list[ProcessGroup]:
    """The process groups of all mesh dims of a parameter, also of those that replicate it."""
    if not is_distributed(param):
        return []
    mesh = param.device_mesh
    return [mesh.get_group(mesh_dim) for mesh_dim in range(mesh.ndim) if mesh.size(mesh_dim) > 1]


def sides_of(param: Tensor) -> Sides:
    """The process groups of a parameter; none if it is not sharded."""
    if not is_distributed(param):
        return WHOLE
    mesh, dims = param.device_mesh, [cut_dim(placement) for placement in param.placements]
    cut = {i: mesh.get_group(i) for i, dim in enumerate(dims) if dim is not None and mesh.size(i) > 1}
    first = tuple(group for i, group in cut.items() if dims[i] == 0)
    return Sides(first, tuple(group for i, group in cut.items() if dims[i] != 0))


def like(param: Tensor, value: Tensor, dims: Iterable[int]) -> Tensor:
    """A local tensor as a DTensor that is sharded like a parameter along these dims, and replicated along others.

    A plain parameter has plain state.
    """
    if not is_distributed(param):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    kept = set(dims)
    placements = [placement if cut_dim(placement) in kept else Replicate() for placement in param.placements]
    shape = [param.shape[dim] if dim in kept else size for dim, size in enumerate(value.shape)]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value, param.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def placed_like(param: Tensor, value: Tensor, dims: Sequence[int]) -> Tensor:
    """A loaded tensor, sharded as the state of a parameter is: a whole one is cut, one sharded otherwise moves."""
    box = box_of(param)
    if box is None:
        return value.full_tensor() if is_distributed(value) else value
    if is_distributed(value):
        wanted = like(param, local(value), dims).placements  # type: ignore[attr-defined]
        return value if value.placements == wanted else value.redistribute(param.device_mesh, wanted)  # type: ignore[attr-defined]
    own = [slice(*box[dim]) if dim in dims else slice(None) for dim in range(value.ndim)]
    return like(param, value[tuple(own)].contiguous(), dims)


class Sum(NamedTuple):
    """What this process has of a sum over process groups."""

    value: Tensor
    groups: tuple[ProcessGroup, ...]


def reduce(sums: Sequence[Sum], dtype: torch.dtype | None = None) -> None:
    """Complete sums over processes, in place: one collective per process group for all of them.

    All processes of a group must ask for the same, in the same order. Without a dtype, the widest of them is taken.
    """
    for group in dict.fromkeys(group for one in sums for group in one.groups):
        own = [one.value for one in sums if group in one.groups]
        common = dtype or functools.reduce(torch.promote_types, [value.dtype for value in own])
        # On the device of the numbers if the group can, else on its own: parameters may be offloaded.
        able = group._device_types
        device = own[0].device if any(one.type == own[0].device.type for one in able) else able[0]
        buffer = torch.cat([value.flatten().to(device, common) for value in own])
        dist.all_reduce(buffer, group=group)
        for value, part in zip(own, buffer.split([value.numel() for value in own]), strict=True):
            value.copy_(part.view_as(value))


FAILED = "Another process failed in this step; its own error says why. Nothing was changed here."
DISAGREE = (
    "The processes disagree about the sharded parameters of their optimizers. All of them need the same parameters in "
    "the same order, with the same options, and either all or none have loaded a state. Nothing was changed."
)


class Contract(NamedTuple):
    """What processes have agreed to exchange in every step: buffers must have the same sizes everywhere."""

    shapes: list[tuple[torch.Size, tuple[ProcessGroup, ...]]]
    dtype: torch.dtype
    num_flags: int
    version: int  # counts changes that are not compared in every step


class Exchange:
    """The sums between the passes of a step, with flags beside them by which all processes raise or skip together.

    Before the first step processes compare what they are going to exchange (a handshake). After that, one that fails,
    or has something else to exchange, says so in a buffer of the agreed size. If all have something else (loaded state,
    a new parameter group), they shake hands again.
    """

    def __init__(self) -> None:
        self._agreed: Contract | None = None
        self._version = 0

    def invalidate(self) -> None:
        """Shake hands again in the next step."""
        self._version += 1

    def reduce(
        self,
        sums: Sequence[Sum],
        flags: Sequence[bool],
        failure: Exception | None,
        groups: list[ProcessGroup],
        fingerprint: Callable[[], object],
    ) -> list[float]:
        """Complete the sums, or raise on all processes. Returns for every flag the share of those who have raised it.

        Args:
            failure: why this process cannot take part.
            groups: the process groups of all parameters.
            fingerprint: returns what has to be the same everywhere; asked for in a handshake only.
        """
        dtype = functools.reduce(torch.promote_types, [one.value.dtype for one in sums], torch.float32)
        wanted = Contract([(one.value.shape, one.groups) for one in sums], dtype, len(flags), self._version)
        if self._agreed is None:
            handshake(wanted, failure, groups, fingerprint)
            self._agreed = wanted
        shapes, dtype, num_flags, _ = self._agreed
        own, raised, changed = sums, flags, failure is None and wanted != self._agreed
        if failure is not None or changed:
            own = [Sum(torch.zeros(shape, device="cpu"), over) for shape, over in shapes]
            raised = [False] * num_flags
        control = torch.tensor([failure is not None, changed, True, *raised], dtype=dtype, device="cpu")
        reduce([Sum(control, tuple(groups)), *own], dtype)
        failed, others, everyone, *counts = control.tolist()
        if failed:
            raise failure or RuntimeError(FAILED)
        if not others:
            return [count / everyone for count in counts]
        if others != everyone:
            raise RuntimeError(DISAGREE)
        self._agreed = None
        return self.reduce(sums, flags, failure, groups, fingerprint)


def handshake(
    wanted: Contract, failure: Exception | None, groups: list[ProcessGroup], fingerprint: Callable[[], object]
) -> None:
    """Raise on all processes unless all of them want to exchange the same."""
    known = fingerprint() if failure is None else None
    same, failed = failure is None, failure is not None
    for group in groups:
        shapes = [tuple(shape) for shape, over in wanted.shapes if group in over]
        digest = hashlib.sha256(repr((known, wanted.dtype, wanted.num_flags, shapes)).encode()).digest()[:6]
        numbers = torch.zeros(dist.get_world_size(group), dtype=torch.float64, device="cpu")
        number = float(int.from_bytes(digest, "big")) if same else torch.nan
        numbers[dist.get_rank(group)] = -1 if failed else number
        reduce([Sum(numbers, (group,))])
        same, failed = bool((numbers == numbers[0]).all()), bool((numbers == -1).any())
    if not same or failed:
        raise failure or RuntimeError(FAILED if failed else DISAGREE)
