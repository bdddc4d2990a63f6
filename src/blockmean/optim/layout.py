"""The blocks of a parameter group: which ones share a matrix, where each tensor's start, what is local of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from blockmean._linalg import float64_device
from blockmean.blocks import TensorBlocks, first_blocks
from blockmean.optim.sharding import box_of, is_distributed

COUPLINGS = ("all", "module", "none")


class Component(NamedTuple):
    """Tensors whose blocks share one matrix of statistics, or its diagonal with coupling "none"."""

    name: str  # "all", "none", or the name of the module
    members: list[int]  # tensors, by their index in the group
    blocks: slice  # among the blocks of the group


class LocalBlocks(NamedTuple):
    """What this process has of a tensor, cut into blocks."""

    tensor: int
    cut: TensorBlocks
    blocks: slice  # among the blocks of the group
    is_corrected: bool  # belongs to a component


class Layout:
    """The blocks of all tensors of a group, numbered component by component.

    With `leave_plain`, tensors that "unit" and "kernel" cut into single entries belong to no component. Each becomes
    one block after all others, and its sum serves only to check that the gradient is finite.
    """

    def __init__(
        self,
        group: int,  # its number in the optimizer
        tensors: Sequence[TensorBlocks],
        params: Sequence[Tensor],
        partition: str,
        coupling: str,
        leave_plain: bool,
    ) -> None:
        self.group, self.tensors, self.partition, self.coupling = group, list(tensors), partition, coupling
        self.params = list(params)  # that it was last used for
        self.placed = params[0].device if params else torch.device("cpu")
        self.device = float64_device(self.placed)  # of sums and statistics
        self.is_diagonal = coupling == "none"
        self.cuts = [
            TensorBlocks(tensor.name, tensor.shape, tensor.module) if leave_plain and tensor.is_plain else tensor
            for tensor in tensors
        ]
        self.counts = [cut.count for cut in self.cuts]
        grouped = self._grouped()
        order = [i for members in grouped.values() for i in members]
        order += [i for i in range(len(tensors)) if i not in order]
        starts = dict(zip(order, first_blocks([self.cuts[i] for i in order]), strict=True))
        self.starts = [starts[i] for i in range(len(tensors))]
        self.num_blocks = max((s + n for s, n in zip(self.starts, self.counts, strict=True)), default=0)
        self.components = []
        for (name, *_), members in grouped.items():
            blocks = slice(self.starts[members[0]], max(self.starts[i] + self.counts[i] for i in members))
            self.components.append(Component(name, members, blocks))
        self.component_of = {i: c for c, component in enumerate(self.components) for i in component.members}
        self.order = [i for i in order if self.counts[i]]  # tensors, as their blocks are numbered; not those without
        self.is_shared = len({self.starts[i] for i in self.order}) < len(self.order)
        self.is_sharded = any(is_distributed(params[i]) for i in self.order)
        self.largest = max((c.blocks.stop - c.blocks.start for c in self.components), default=0)  # blocks of a matrix

    def _grouped(self) -> dict[tuple[str, object], list[int]]:
        """The tensors of each component. Empty tensors have no blocks and belong to none."""
        grouped: dict[tuple[str, object], list[int]] = {}
        for i, tensor in enumerate(self.tensors):
            if tensor.count and self.cuts[i] is tensor:
                merged = tensor.key == ("all", "all")  # which a module may be called, too
                key = {"all": ("all", ""), "module": (tensor.module, merged), "none": ("none", tensor.key or i)}
                grouped.setdefault(key[self.coupling], []).append(i)
        return grouped

    @cached_property
    def local(self) -> list[LocalBlocks]:
        """What this process has of every tensor, in the order of blocks; nothing of those that are empty here."""
        found = []
        for i in self.order:
            box = box_of(self.params[i])
            cut, first = (self.cuts[i], 0) if box is None else self.cuts[i].box(box)
            start = self.starts[i] + first
            if cut.count:
                found.append(LocalBlocks(i, cut, slice(start, start + cut.count), i in self.component_of))
        return found

    def place(self, i: int) -> Tensor:
        """How a tensor is cut, the number of its matrix in the optimizer, and its first row there."""
        number = self.component_of[i]
        row = self.starts[i] - self.components[number].blocks.start
        return torch.tensor([self.tensors[i].digest, self.group << 32 | number, row], dtype=torch.int64, device="cpu")

    @cached_property
    def sizes(self) -> Tensor:
        """Entries of each block, (L,)."""
        sizes = torch.zeros(self.num_blocks, dtype=torch.int64, device="cpu")
        for start, tensor in zip(self.starts, self.cuts, strict=True):
            sizes[start : start + tensor.count] += tensor.sizes
        return sizes

    @cached_property
    def names(self) -> list[tuple[str, str]]:
        """The name of every block, and that of its parameter, or of the group of parameters that were merged."""
        found = {}
        for i in self.order:
            tensor = self.cuts[i]
            owner = tensor.key[1] if tensor.key else tensor.name
            found.update({self.starts[i] + n: (name, owner) for n, name in enumerate(tensor.block_names())})
        return [found[i] for i in range(self.num_blocks)]
