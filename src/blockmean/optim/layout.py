"""The blocks of a parameter group: which ones share a matrix, where each tensor's start, pieces of large tensors."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockmean._checks import require_choice
from blockmean.blocks import Box, TensorBlocks, first_blocks, named_blocks

COUPLINGS = ("all", "module", "none")

MATRIX_LIMIT = 2**30
"""Largest matrix between blocks that is accepted, in bytes."""

SLOW_MATRIX = 1500
"""Number of blocks at which one eigendecomposition takes about a second (float64, one core)."""

PIECE = 2**17
"""Entries per piece of a large tensor: small enough that the temporaries of a step stay in the cache."""


class Component(NamedTuple):
    """Tensors whose blocks share one matrix of statistics, or its diagonal with coupling "none"."""

    name: str  # "all", "none", or the name of the module
    members: list[int]  # tensors, by their index in the group
    blocks: slice  # among the blocks of the group


class Piece(NamedTuple):
    """A tensor, or some rows of a large one; of a sharded tensor, what this process has of it."""

    tensor: int
    rows: tuple[int, int] | None  # None: all of it
    cut: TensorBlocks
    blocks: slice  # among the blocks of the group


class Pieces(list[Piece]):
    """The pieces that a step processes, in order."""

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the blocks of all pieces, concatenated, are those of the group in order."""
        starts = [piece.blocks.start for piece in self]
        return starts == [0, *(piece.blocks.stop for piece in self[:-1])]


class Layout:
    """The blocks of all tensors of a group, numbered component by component.

    With `leave_plain`, tensors that "unit" and "kernel" cut into single entries belong to no component. Each becomes
    one block after all others, and its sum serves only to check that the gradient is finite.
    """

    def __init__(
        self,
        tensors: Sequence[TensorBlocks],
        partition: str,
        coupling: str,
        owner: str,
        *,
        named: bool,
        leave_plain: bool = False,
        outputs: Sequence[int | Tensor] = (),
        boxes: Sequence[Box | None] = (),
        decompositions: float = 0.0,
        max_bytes: int | None = MATRIX_LIMIT,
    ) -> None:
        require_choice(coupling, COUPLINGS, "coupling", owner)
        if coupling == "module" and not named:
            raise ValueError(f"{owner}(coupling='module') needs names. Pass model.named_parameters().")
        self.tensors, self.partition, self.coupling = list(tensors), partition, coupling
        self.leave_plain = leave_plain
        self.ids: list[int] = []  # of the parameters it was last used for
        self.placements: list[Any] = []  # how they were sharded
        self.group = 0  # number of the parameter group in its optimizer
        self.cuts = [
            TensorBlocks(tensor.name, tensor.shape, tensor.module) if leave_plain and tensor.is_plain else tensor
            for tensor in tensors
        ]
        self.shapes = [torch.Size(tensor.shape) for tensor in tensors]
        self.is_diagonal = coupling == "none"
        self.named = named
        self.outputs = list(outputs) or [0] * len(tensors)  # output dim of every tensor, 0 by default
        self.boxes = list(boxes) or [None] * len(tensors)  # what is local of every tensor; None: all of it
        grouped = self._grouped()
        order = [i for members in grouped.values() for i in members]
        order += [i for i in range(len(tensors)) if i not in order]
        starts = dict(zip(order, first_blocks([self.cuts[i] for i in order]), strict=True))
        self.starts = [starts[i] for i in range(len(tensors))]
        self.counts = [cut.count for cut in self.cuts]
        self.num_blocks = max((s + t.count for s, t in zip(self.starts, self.cuts, strict=True)), default=0)
        self.components = [
            Component(
                name,
                members,
                slice(self.starts[members[0]], max(self.starts[i] + tensors[i].count for i in members)),
            )
            for (name, *_), members in grouped.items()
        ]
        self.num_coupled = max((component.blocks.stop for component in self.components), default=0)
        self.component_of = {i: c for c, component in enumerate(self.components) for i in component.members}
        self._order = [i for i in order if tensors[i].count]
        self.is_shared = len({self.starts[i] for i in self._order}) < len(self._order)
        self._refuse_large(owner, decompositions, max_bytes)

    def _grouped(self) -> dict[tuple[str, object], list[int]]:
        """The tensors of each component. Empty tensors have no blocks and belong to none."""
        grouped: dict[tuple[str, object], list[int]] = {}
        for i, tensor in enumerate(self.tensors):
            if tensor.count and self.cuts[i] is tensor:
                merged = tensor.key == ("all", "all")  # which a module may be called, too
                key = {"all": ("all", ""), "module": (tensor.module, merged), "none": ("none", tensor.key or i)}
                grouped.setdefault(key[self.coupling], []).append(i)
        return grouped

    def _refuse_large(self, owner: str, decompositions: float, max_bytes: int | None) -> None:
        largest = max((c.blocks.stop - c.blocks.start for c in self.components), default=0)
        if self.is_diagonal:
            return
        if max_bytes is not None and 8 * largest**2 > max_bytes:
            raise ValueError(
                f"{owner} would need {8 * largest**2:,} bytes for one matrix between {largest:,} blocks, more than the "
                f"limit of {max_bytes:,}. Take a coarser partition, or coupling='module' or 'none'."
            )
        seconds = (largest / SLOW_MATRIX) ** 3 * decompositions
        if seconds >= 1:
            warnings.warn(
                f"{owner} decomposes a matrix between {largest:,} blocks: about {seconds:.0f} seconds per step. "
                "coupling='none' or 'module' avoids large matrices; refresh_every=k decomposes once in k steps.",
                stacklevel=5,
            )

    def coupled(self, coupling: str, owner: str, decompositions: float = 0.0) -> Layout:
        """The same blocks, coupled in another way."""
        made = Layout(
            self.tensors,
            self.partition,
            coupling,
            owner,
            named=self.named,
            leave_plain=self.leave_plain,
            outputs=self.outputs,
            boxes=self.boxes,
            decompositions=decompositions,
        )
        made.group, made.placements = self.group, self.placements
        return made

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
    def sharded(self) -> list[int]:
        """Tensors of which this process may have only some entries, by their index in the group."""
        return [i for i, box in enumerate(self.boxes) if box is not None and self.counts[i]]

    @property
    def is_sharded(self) -> bool:
        return bool(self.sharded)

    @cached_property
    def whole(self) -> Pieces:
        """One piece per tensor, in the order of blocks; none for a tensor that is sharded and empty here."""
        pieces = Pieces()
        for i in self._order:
            box = self.boxes[i]
            cut, first = (self.cuts[i], 0) if box is None else self.cuts[i].box(box)
            start = self.starts[i] + first
            if cut.count:
                pieces.append(Piece(i, None, cut, slice(start, start + cut.count)))
        return pieces

    @cached_property
    def split(self) -> Pieces:
        """The same with large tensors split into pieces that fit into the processor's cache."""
        return self.split_except(())

    def split_except(self, whole: Collection[int]) -> Pieces:
        """The same, but for tensors that are to stay whole."""
        pieces = []
        for piece in self.whole:
            if piece.tensor in whole:
                pieces.append(piece)
                continue
            shape = torch.Size(piece.cut.shape)
            entries, rows = shape.numel(), shape[:1].numel()
            count = min(rows, -(-entries // PIECE))
            if count == 1:
                pieces.append(piece)
                continue
            for k in range(count):
                a, b = rows * k // count, rows * (k + 1) // count
                cut, first = piece.cut.rows(a, b)
                start = piece.blocks.start + first
                pieces.append(Piece(piece.tensor, (a, b), cut, slice(start, start + cut.count)))
        return Pieces(pieces)

    @cached_property
    def fingerprint(self) -> str:
        """A short text that depends only on the partition, not on names or the order of tensors."""
        together: dict[int, list[int]] = {}
        for i in self._order:
            together.setdefault(self.starts[i], []).append(self.tensors[i].digest)
        digest = hashlib.sha256(repr(sorted(sorted(group) for group in together.values())).encode()).hexdigest()
        entries = sum(shape.numel() for shape in self.shapes)
        return f"{self.num_blocks} blocks of {entries} entries, sha256 {digest[:16]}"

    @cached_property
    def names(self) -> list[str]:
        """The name of every block."""
        return [name for name, _ in self._named]

    @cached_property
    def owners(self) -> list[str]:
        """The parameter, or the merged group of parameters, of every block."""
        owners = [""] * self.num_blocks
        for i in self._order:
            tensor, start = self.cuts[i], self.starts[i]
            for block in range(start, start + tensor.count):
                owners[block] = tensor.key[1] if tensor.key else tensor.name
        return owners

    @cached_property
    def _named(self) -> list[tuple[str, str]]:
        return list(named_blocks([self.cuts[i] for i in self._order]))
