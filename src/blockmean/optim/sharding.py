"""Parameters that are sharded over processes (DTensor): what is local of them, and sums over all shards.

Everything that a step knows of a sharded tensor as a whole is a sum over its shards. So it adds up small arrays, one
collective per process group for all of them, and moves no parameter, gradient or moment. Along mesh dims that replicate
a tensor nothing is added. Where no tensor is sharded, nothing here communicates, and no process group is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from blockmean.blocks import Box

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


def is_distributed(x: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor. Its module is not imported for those who have none."""
    return hasattr(x, "device_mesh")


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
    spread: dict[bool, list[ProcessGroup]] = {True: [], False: []}
    for mesh_dim, placement in enumerate(param.placements):
        dim = cut_dim(placement)
        if dim is not None and param.device_mesh.size(mesh_dim) > 1:
            spread[dim == 0].append(param.device_mesh.get_group(mesh_dim))
    return Sides(tuple(spread[True]), tuple(spread[False]))


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


class Request(NamedTuple):
    """A tensor that is to be replaced by its sum over process groups."""

    value: Tensor
    groups: tuple[ProcessGroup, ...]


def add_up(requests: Sequence[Request], dtype: torch.dtype | None = None) -> None:
    """Replace tensors by their sums over processes, in place: one collective per process group for all of them.

    All processes of a group must ask for the same, in the same order. Without a dtype, the widest of them is taken.
    """
    import torch.distributed as dist

    for group in groups_in(requests):
        own = [request.value for request in requests if group in request.groups]
        device = device_of(group, own[0].device)
        common = dtype or reduce(torch.promote_types, [value.dtype for value in own])
        buffer = torch.cat([value.flatten().to(device, common) for value in own])
        dist.all_reduce(buffer, group=group)
        for value, part in zip(own, buffer.split([value.numel() for value in own]), strict=True):
            value.copy_(part.view_as(value))


def groups_in(requests: Iterable[Request]) -> list[ProcessGroup]:
    """The process groups of all requests, each once."""
    return list(dict.fromkeys(group for request in requests for group in request.groups))


def device_of(group: ProcessGroup, preferred: torch.device) -> torch.device:
    """Where a process group can add up: on the device of the numbers, or on its own (parameters may be offloaded)."""
    able = group._device_types
    return preferred if any(device.type == preferred.type for device in able) else able[0]


class Question(NamedTuple):
    """What a process wants to know in a step."""

    requests: Sequence[Request] = ()
    about: Any = None  # what processes have to agree on besides the sizes of their requests
    dtype: torch.dtype = torch.float64
    votes: Sequence[bool] = ()  # of which each wants to know how many processes have cast it
    at_first: Callable[[], Any] = lambda: None  # what they compare besides, only when they meet


class Exchange:
    """What processes tell each other in a step: one collective per process group, in which errors are noticed, too.

    Buffers must have the same size everywhere. So processes first compare what they are going to exchange, in a
    collective of its own; whoever later has something else to exchange, or failed, says so in a buffer of the size that
    was agreed on. If all have something else (a new parameter group, loaded state), they compare again.
    """

    def __init__(self) -> None:
        self._agreed: Agreement | None = None
        self._doubts = False

    def doubt(self) -> None:
        """Compare again in the next step, for something has changed that is not compared in every one."""
        self._doubts = True

    def add_up(
        self, question: Question, failure: Exception | None, find_groups: Callable[[], list[ProcessGroup]]
    ) -> list[float]:
        """Add up the requests, or raise on all processes. Returns for every vote the share of those who have cast it.

        Args:
            failure: why this process cannot take part.
            find_groups: returns the process groups of all parameters.
        """
        shapes = [(request.value.shape, request.groups) for request in question.requests]
        groups = groups_in(question.requests)
        wanted = Agreement(question.about, shapes, question.dtype, groups, len(question.votes))
        while True:
            if self._agreed is None:
                self._meet(wanted, question.at_first, failure, find_groups)
            agreed = self._agreed
            assert agreed is not None
            changed = failure is None and (self._doubts or wanted != agreed)
            if failure is None and not changed:
                asked, votes = list(question.requests), question.votes
            else:
                asked = [Request(torch.zeros(shape, device="cpu"), over) for shape, over in agreed.asked]
                votes = [False] * agreed.num_votes
            flags = torch.tensor([failure is not None, changed, True, *votes], dtype=agreed.dtype, device="cpu")
            add_up([Request(flags, tuple(agreed.groups)), *asked], agreed.dtype)
            failed, others, everyone, *cast = flags.tolist()
            if failed:
                raise failure or RuntimeError(FAILED)
            if not others:
                return [count / everyone for count in cast]
            if others != everyone:
                raise RuntimeError(DISAGREE)
            self._agreed = None

    def _meet(
        self,
        wanted: Agreement,
        at_first: Callable[[], Any],
        failure: Exception | None,
        find_groups: Callable[[], list[ProcessGroup]],
    ) -> None:
        """Compare with the other processes what is going to be exchanged, and what is compared only now."""
        same = failure is None
        known = (wanted.about, wanted.dtype, wanted.num_votes, at_first() if wanted.groups else None)
        for group in wanted.groups if failure is None else find_groups():
            shapes = [tuple(shape) for shape, over in wanted.asked if group in over]
            same = _agrees(number_of(repr((known, shapes))), same, group)
        if not same:
            raise failure or RuntimeError(DISAGREE)
        self._agreed, self._doubts = wanted, False


class Agreement(NamedTuple):
    """What all processes exchange in a step."""

    about: Any
    asked: list[tuple[torch.Size, tuple[ProcessGroup, ...]]]
    dtype: torch.dtype
    groups: list[ProcessGroup]
    num_votes: int


FAILED = "Another process failed in this step; its own error says why. Nothing was changed here."
DISAGREE = (
    "The processes disagree about the sharded parameters of their optimizers. All of them need the same parameters in "
    "the same order, with the same options, and either all or none have loaded a state. Nothing was changed."
)


def number_of(description: str) -> float:
    """A number that float64 holds exactly, and that differs for different texts."""
    return float(int.from_bytes(hashlib.sha256(description.encode()).digest()[:6], "big"))


def _agrees(number: float, same: bool, group: ProcessGroup) -> bool:
    """Whether all processes of a group have the same number, and none knows already of others that differ."""
    import torch.distributed as dist

    numbers = torch.zeros(dist.get_world_size(group), dtype=torch.float64, device="cpu")
    numbers[dist.get_rank(group)] = number if same else torch.nan
    add_up([Request(numbers, (group,))], torch.float64)
    return bool((numbers == numbers[0]).all())
