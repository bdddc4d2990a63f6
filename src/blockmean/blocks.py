"""Cut tensors into blocks: the description that `Partition.of` and the optimizers share."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from blockmean._checks import as_int, require
from blockmean._linalg import in_float64

Params = nn.Module | Tensor | Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
By = str | Callable[[str, Tensor], "str | int | tuple[int, ...] | Tensor"]
"""How to cut tensors into blocks: a name in `BY`, or a callable (name, tensor) → such a name, dims, or labels."""

Box = tuple[tuple[int, int], ...]
"""Some entries of a tensor: start and stop along every dim."""

Geometry = tuple[int, int, int]
"""A tensor as it lies in memory: outer × blocks × inner entries."""

BY = ("tensor", "unit", "kernel", "module", "all", "element")


@dataclass(frozen=True, eq=False)
class TensorBlocks:
    """One named tensor, or some rows of it, cut into blocks.

    Blocks follow the indices of `dims` (one block per index; no dims is a single block), or `labels` for any other
    assignment. Tensors with the same `key` share one block.
    """

    name: str
    shape: tuple[int, ...]
    module: str  # what coupling="module" groups by
    dims: tuple[int, ...] = ()
    labels: Tensor | None = None  # (entries,) int64 on the CPU
    key: tuple[str, str] | None = None  # ("module", its name) or ("all", "all")
    is_plain: bool = False  # single entries: norm gains and biases, for which a block mean makes no sense

    @cached_property
    def count(self) -> int:
        """The number of blocks."""
        if self.labels is not None:
            return int(self.labels.max()) + 1
        return math.prod(self.shape[dim] for dim in self.dims) if self.entries else 0

    @cached_property
    def entries(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)

    @cached_property
    def sizes(self) -> Tensor:
        """Entries of each block, (count,) int64."""
        if self.labels is not None:
            return torch.bincount(self.labels, minlength=self.count)
        return torch.full((self.count,), self.entries // max(self.count, 1))

    @cached_property
    def geometry(self) -> Geometry | None:
        """(outer, blocks, inner) of a contiguous tensor that is cut like this; None if blocks are not regular in it."""
        strides = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        return None if self.labels is not None else geometry(self.shape, strides, self.dims)

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the blocks are contiguous and in order in the flattened tensor."""
        if self.labels is not None:
            return bool((self.labels.diff() >= 0).all())
        return self.dims == tuple(range(len(self.dims)))

    @property
    def parameter(self) -> str:
        """Name and shape, for tables."""
        return f"{self.name} {list(self.shape)}"

    def block_names(self) -> Iterator[str]:
        """One name per block: the tensor's, followed by the index of the unit, kernel or entry."""
        grid = (self.count,) if self.labels is not None else tuple(self.shape[dim] for dim in self.dims)
        for index in itertools.product(*map(range, grid)):
            yield (self.key[1] if self.key else self.name) + (f"[{','.join(map(str, index))}]" if index else "")

    def entry_labels(self) -> Tensor:
        """The block of every entry, flattened, (entries,) int64."""
        if self.labels is not None:
            return self.labels
        return self.spread(torch.arange(self.count)).expand(self.shape).flatten()

    def sum(self, x: Tensor) -> Tensor:
        """Block sums of a tensor of this shape, whatever its strides, (count,)."""
        if self.labels is not None:
            _, order, sizes = self._cached(x.device)
            own = in_float64(x.flatten().index_select(0, order))
            sums = torch.segment_reduce(own, "sum", lengths=sizes.to(own.device))
            return sums if own.device == x.device else sums.to(x)
        inner = [dim for dim in range(x.ndim) if dim not in self.dims]
        return x.sum(inner).flatten() if inner else x.flatten().clone()  # never a view of x

    def spread(self, c: Tensor) -> Tensor:
        """One number per block, (count,), ready to broadcast against the tensor."""
        if self.labels is not None:
            return c.index_select(0, self._cached(c.device)[0]).view(self.shape)
        return c.view([size if dim in self.dims else 1 for dim, size in enumerate(self.shape)])

    def box(self, ranges: Box) -> tuple[TensorBlocks, int]:
        """The blocks of a box of entries, and the index of the first of them in the whole tensor."""
        shape = tuple(stop - start for start, stop in ranges)
        cut = [dim for dim, (size, own) in enumerate(zip(self.shape, shape, strict=True)) if size != own]
        inside = [dim for dim in self.dims if dim in cut]
        if not math.prod(shape) or (self.labels is None and inside in ([], list(self.dims[:1]))):
            later = math.prod(self.shape[dim] for dim in self.dims[1:])
            first = ranges[self.dims[0]][0] * later if inside else 0
            return TensorBlocks(self.name, shape, self.module, self.dims, key=self.key), first
        own = self.entry_labels().view(self.shape)[tuple(slice(*span) for span in ranges)].flatten()
        first = int(own.min())
        return TensorBlocks(self.name, shape, self.module, labels=own - first, key=self.key), first

    def rows(self, start: int, stop: int) -> tuple[TensorBlocks, int]:
        """The blocks of rows start to stop of dim 0, and the index of the first of them in the whole tensor."""
        return self.box(((start, stop), *((0, size) for size in self.shape[1:])))

    @cached_property
    def digest(self) -> int:
        """A 63-bit hash of shape and cut; names do not matter."""
        text = hashlib.sha256(repr((self.shape, self.dims, self.key and self.key[0])).encode())
        if self.labels is not None:
            raw = self.labels.contiguous()
            text.update((ctypes.c_char * raw.nbytes).from_address(raw.data_ptr()))
        return int.from_bytes(text.digest()[:8], "big") >> 1

    @cached_property
    def _by_device(self) -> dict[torch.device, tuple[Tensor, Tensor, Tensor]]:
        return {}

    def _cached(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Labels, the order that sorts entries by block, and sizes, on a device."""
        assert self.labels is not None
        if device not in self._by_device:
            order = self.labels.argsort(stable=True)
            self._by_device[device] = (self.labels.to(device), order.to(device), self.sizes.to(device))
        return self._by_device[device]


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """The dims of a tensor from the outermost to the innermost, without those of size 1; None if it is not dense."""
    order = sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -strides[dim])
    expected = 1
    for dim in reversed(order):
        if strides[dim] != expected:
            return None
        expected *= shape[dim]
    return order


def geometry(shape: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> Geometry | None:
    """(outer, blocks, inner) of a dense tensor as it lies in memory, channels_last included; None if it is not so."""
    order = memory_order(shape, strides)
    if order is None:
        return None
    own = [dim for dim in dims if shape[dim] > 1]
    first = order.index(own[0]) if own else 0
    if order[first : first + len(own)] != own:
        return None
    sizes, last = [shape[dim] for dim in order], first + len(own)
    return math.prod(sizes[:first]), math.prod(sizes[first:last]), math.prod(sizes[last:])


def sum_blocks(cuts: Sequence[TensorBlocks], values: Sequence[Tensor]) -> Tensor:
    """The block sums of all tensors, concatenated."""
    if values and values[0].device.type != "cpu":
        return sum_together(cuts, values)
    return torch.cat([cut.sum(x) for cut, x in zip(cuts, values, strict=True)])


def sum_together(cuts: Sequence[TensorBlocks], values: Sequence[Tensor]) -> Tensor:
    """The same where launches cost more than copies: blocks that are runs of one length are summed at once."""
    sums: list[Tensor | None] = [None] * len(cuts)
    by_length: dict[int, list[int]] = {}
    for i, (cut, x) in enumerate(zip(cuts, values, strict=True)):
        outer, _, inner = (x.is_contiguous() and cut.geometry) or (0, 0, 0)
        if outer == 1:
            by_length.setdefault(inner, []).append(i)
        else:
            sums[i] = cut.sum(x)
    for length, together in by_length.items():
        rows = torch.cat([values[i].reshape(cuts[i].count, length) for i in together]).sum(1)
        for i, own in zip(together, rows.split([cuts[i].count for i in together]), strict=True):
            sums[i] = own
    return torch.cat([own for own in sums if own is not None])


def spread_blocks(cuts: Sequence[TensorBlocks], *values: Tensor) -> list[list[Tensor]]:
    """Numbers per block, those of all tensors concatenated, for every tensor, ready to broadcast against it."""
    if values[0].device.type != "cpu":
        return spread_together(cuts, *values)
    counts = [cut.count for cut in cuts]
    return [[cut.spread(c) for cut, c in zip(cuts, x.split(counts), strict=True)] for x in values]


def spread_together(cuts: Sequence[TensorBlocks], *values: Tensor) -> list[list[Tensor]]:
    """The same where launches cost more than copies: of blocks that are runs, with a number for every entry."""
    by_length: dict[int, list[int]] = {}
    split = [list(x.split([cut.count for cut in cuts])) for x in values]
    spread = [[cut.spread(c) for cut, c in zip(cuts, own, strict=True)] for own in split]
    for i, cut in enumerate(cuts):
        outer, _, inner = cut.geometry or (0, 0, 0)
        if outer == 1:
            by_length.setdefault(inner, []).append(i)
    for length, together in by_length.items():
        every = torch.cat([own[i] for own in split for i in together]).repeat_interleave(length)
        parts = iter(every.split([cuts[i].entries for _ in values for i in together]))
        for own in spread:
            for i in together:
                own[i] = next(parts).view(cuts[i].shape)
    return spread


def cut(name: str, position: int, tensor: Tensor, by: By, output: int | Tensor = 0) -> TensorBlocks:
    """Cut one tensor into blocks. For "unit", `output` is the dim of its outputs, or the output of every entry."""
    shape, module, shown = tuple(tensor.shape), module_of(name), name or f"param{position}"
    answer = by(name, tensor) if callable(by) else by
    if isinstance(answer, Tensor):
        return TensorBlocks(shown, shape, module, labels=_labels(answer, shape, f"{shown} {list(shape)}"))
    if isinstance(answer, tuple) or (isinstance(answer, int) and not isinstance(answer, bool)):
        return TensorBlocks(shown, shape, module, _dims(answer, shape, f"{shown} {list(shape)}"))
    require(answer in BY, "by", "Partition.of", f"a callable or one of {', '.join(map(repr, BY))}", answer)
    if answer == "module" and not name:
        raise ValueError("Cutting tensors by module needs names. Pass model.named_parameters() or the model itself.")
    if answer in ("module", "all"):
        key = ("module", module) if answer == "module" else ("all", "all")
        return TensorBlocks(shown, shape, key[1], key=key)
    if answer == "tensor":
        return TensorBlocks(shown, shape, module)
    if answer == "kernel" and tensor.ndim >= 3:
        return TensorBlocks(shown, shape, module, (0, 1))
    if answer == "element" or tensor.ndim < 2:
        return TensorBlocks(shown, shape, module, tuple(range(tensor.ndim)), is_plain=answer != "element")
    if isinstance(output, Tensor):
        return TensorBlocks(shown, shape, module, labels=_labels(output, shape, f"{shown} {list(shape)}"))
    return TensorBlocks(shown, shape, module, (output,))


def first_blocks(tensors: Sequence[TensorBlocks]) -> list[int]:
    """The index of the first block of every tensor; blocks are numbered in order of first appearance."""
    starts: list[int] = []
    shared: dict[tuple[str, str], int] = {}
    count = 0
    for tensor in tensors:
        start = count if tensor.key is None else shared.setdefault(tensor.key, count)
        starts.append(start)
        count = max(count, start + tensor.count)
    return starts


def named_blocks(tensors: Sequence[TensorBlocks]) -> Iterator[tuple[str, str]]:
    """(name, parameters it comes from) for each block, in the order of `first_blocks`."""
    shared: dict[tuple[str, str], list[str]] = {}
    for tensor in tensors:
        if tensor.key is not None:
            shared.setdefault(tensor.key, []).append(tensor.parameter)
    for tensor in tensors:
        if tensor.key is None:
            yield from ((name, tensor.parameter) for name in tensor.block_names())
        elif parameters := shared.pop(tensor.key, None):
            yield tensor.key[1], ", ".join(parameters)


class NamedParameters(list[tuple[str, Tensor]]):
    """(name, parameter) pairs that know the output dims of their model; for torch's optimizers, a list."""

    def __init__(self, outputs: dict[Tensor, int | Tensor]) -> None:
        super().__init__()
        self.outputs = outputs


def outputs_of(model: nn.Module) -> dict[Tensor, int | Tensor]:
    """The output dim, or the output of every entry, of weights that modules do not store as (out, in, ...).

    Transposed convolutions store (in, out / groups, ...), and Hugging Face's `Conv1D` stores (in, out).
    """
    found: dict[Tensor, int | Tensor] = {}
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        names = {cls.__name__ for cls in type(module).__mro__}  # fully_shard makes a subclass of another name
        if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
            inputs, outputs = module.weight.shape[:2]
            group = torch.arange(inputs) * module.groups // inputs
            labels = (group[:, None] * outputs + torch.arange(outputs)).view(inputs, outputs, *[1] * (weight.ndim - 2))
            found[module.weight] = labels if module.groups > 1 else 1
        elif "Conv1D" in names and isinstance(weight, Tensor) and hasattr(module, "nf"):
            found[weight] = 1
    return found


def module_of(name: str) -> str:
    """The module part of a parameter's name: 'encoder.0.weight' → 'encoder.0', a root parameter → '(root)'."""
    return name.rpartition(".")[0] or "(root)"


def named_tensors(params: Params) -> list[tuple[str, Tensor]]:
    """Convert parameters in any accepted form to (name, tensor) pairs; unnamed ones get the name ''."""
    owner = "Partition.of"
    if isinstance(params, Tensor):
        params = [params]
    if isinstance(params, nn.Module):
        params = params.named_parameters()
    if isinstance(params, Mapping):
        params = params.items()
    named: list[tuple[str, Tensor]] = []
    for item in params:
        pair: Any = item if isinstance(item, tuple) and len(item) == 2 else ("", item)
        good = isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        require(good, "params", owner, "tensors or (name, tensor) pairs", item, TypeError)
        named.append(pair)
    seen: dict[int, int] = {}
    for i, (name, tensor) in enumerate(named):
        if (first := seen.setdefault(id(tensor), i)) != i:
            raise ValueError(
                f"The 'params' parameter of {owner} must not hold the same tensor twice: number {i} {name!r} is "
                f"number {first} {named[first][0]!r}. Leave one of them out."
            )
    return named


def sizes_of_labels(labels: Tensor, owner: str) -> Tensor:
    """The size of every block; raise unless every number from 0 to L − 1 occurs."""
    require(len(labels) > 0, "labels", owner, "a non-empty sequence", [])
    require(int(labels.min()) >= 0, "labels", owner, ">= 0", int(labels.min()))
    # L > d would leave a gap. The clamp keeps a stray huge label from allocating a huge count.
    sizes = torch.bincount(labels.clamp(max=len(labels)))
    if (sizes == 0).any():
        raise ValueError(
            f"The 'labels' parameter of {owner} must use every number from 0 to {int(labels.max())}. "
            f"Missing: {int((sizes == 0).nonzero()[0])}."
        )
    return sizes


def _labels(labels: Tensor, shape: tuple[int, ...], parameter: str) -> Tensor:
    try:
        flat = labels.broadcast_to(shape).flatten()
    except RuntimeError:
        raise ValueError(
            f"The labels that 'by' returns for {parameter} must broadcast to its shape. "
            f"Got shape {tuple(labels.shape)} instead."
        ) from None
    owner = f"the partition of {parameter}"
    flat = as_int(flat, "labels", owner)
    sizes_of_labels(flat, owner)
    return flat


def _dims(dims: int | tuple[int, ...], shape: tuple[int, ...], parameter: str) -> tuple[int, ...]:
    given = dims if isinstance(dims, tuple) else (dims,)
    good = all(isinstance(dim, int) and -len(shape) <= dim < len(shape) for dim in given)
    found = sorted({dim % len(shape) for dim in given}) if good and shape else []
    if len(found) != len(given):
        raise ValueError(
            f"The dims that 'by' returns for {parameter} must be different ones from 0 to {len(shape) - 1}. "
            f"Got {dims!r} instead."
        )
    return tuple(found)
