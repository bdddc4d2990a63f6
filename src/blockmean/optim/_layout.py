"""Where the blocks of a parameter group lie: which rows of the L×L statistics belong to which parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from blockmean._checks import require
from blockmean._cut import By, Cut, Origin, cut_tensor, number_blocks
from blockmean.partition import Partition

COUPLINGS = ("all", "module", "none")

MATRIX_LIMIT = 2**30
"""Bytes that one matrix between blocks may need before it is refused."""


NOTHING = Cut(torch.zeros(0, dtype=torch.int64), None, Origin("", (0,), ""), None, is_grid=False)
"""What a parameter without entries is cut into."""


class TensorBlocks:
    """The blocks of one parameter: `start` to `stop` among those of its group.

    Blocks that follow the leading dims of the parameter (its `grid`) are summed and spread by broadcasting, whatever
    the strides; others through a `Partition` of the flattened entries. A parameter without entries has no blocks.
    """

    def __init__(self, cut: Cut, shape: torch.Size, start: int) -> None:
        self.start, self.stop = start, start + len(cut.sizes)
        self.sizes = cut.sizes
        self.component, self.row = 0, start  # the matrix its rows are in, and the first of them there
        self._shape = shape
        self._grid = cut.origin.grid
        self._partition = None if cut.is_grid else Partition(cut.sizes, cut.labels, None)

    def rows(self, buffers: list[Tensor]) -> Tensor:
        """Its rows in the matrices between blocks, as a view."""
        return buffers[self.component][self.row : self.row + self.stop - self.start]

    def sum(self, x: Tensor) -> Tensor:
        """Block sums of a tensor of the parameter's shape, (blocks,)."""
        if self.start == self.stop:
            return x.new_zeros(0)
        if self._partition is not None:
            return self._partition.block_sum(x.flatten())
        inner = tuple(range(len(self._grid), x.ndim))
        return (x.sum(inner) if inner else x).flatten()

    def spread(self, c: Tensor) -> Tensor:
        """One number per block, ready to broadcast against the parameter."""
        if self.start == self.stop:
            return c.new_zeros(self._shape)
        if self._partition is not None:
            return self._partition.expand(c).view(self._shape)
        return c.view((*self._grid, *(1 for _ in self._shape[len(self._grid) :])))  # a tuple: it may be empty


class Layout:
    """The blocks of all parameters of a group, and which of them share a matrix (the coupling)."""

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        by: By,
        coupling: str,
        owner: str,
        max_bytes: int | None = MATRIX_LIMIT,
    ) -> None:
        self._owner, self._max_bytes, self._named = owner, max_bytes, all(names)
        self.parameters = [
            f"'{name}'" if name else f"parameter {i} {list(param.shape)}"
            for i, (name, param) in enumerate(zip(names, params, strict=True))
        ]
        cuts = [
            cut_tensor(name, i, param, by) if param.numel() else NOTHING
            for i, (name, param) in enumerate(zip(names, params, strict=True))
        ]
        starts, self.origins = number_blocks(cuts)
        self.tensors = [
            TensorBlocks(cut, param.shape, start) for cut, param, start in zip(cuts, params, starts, strict=True)
        ]
        self.num_blocks = max((blocks.stop for blocks in self.tensors), default=0)
        self.sizes = torch.zeros(self.num_blocks, dtype=torch.int64)
        for blocks in self.tensors:
            self.sizes[blocks.start : blocks.stop] += blocks.sizes
        self.fingerprint = _fingerprint(cuts, starts)
        owned = [blocks.start for blocks in self.tensors if blocks.stop > blocks.start]
        self.is_shared = len(set(owned)) < len(owned)
        self.couple(coupling)

    def couple(self, coupling: str) -> None:
        """Group blocks into matrices; `components` lists the blocks of each. Raises before anything has changed."""
        matrix_of = self.matrices(coupling)
        self.coupling = coupling
        self.is_diagonal = coupling == "none"
        count = int(matrix_of.max()) + 1 if self.num_blocks else 0
        self.components = [(matrix_of == i).nonzero().squeeze(-1) for i in range(count)]
        for blocks in self.tensors:
            blocks.component = int(matrix_of[blocks.start]) if blocks.stop > blocks.start else 0
            blocks.row = int((matrix_of[: blocks.start] == blocks.component).sum())

    def matrices(self, coupling: str) -> Tensor:
        """The number of the matrix that each block would be in, (L,); raises where it cannot be."""
        require(coupling in COUPLINGS, "coupling", self._owner, f"one of {', '.join(map(repr, COUPLINGS))}", coupling)
        if coupling == "module" and not self._named:
            raise ValueError(f"{self._owner}(coupling='module') needs names. Pass model.named_parameters().")
        matrix_of = torch.zeros(self.num_blocks, dtype=torch.int64)
        if coupling == "module":
            numbers: dict[str, int] = {}
            block = 0
            for origin in self.origins:
                count = math.prod(origin.grid)
                matrix_of[block : block + count] = numbers.setdefault(origin.module, len(numbers))
                block += count
        largest = int(matrix_of.bincount().max()) if self.num_blocks else 0
        need = 8 * largest**2
        if coupling != "none" and self._max_bytes is not None and need > self._max_bytes:
            raise ValueError(
                f"{self._owner} would need {need:,} bytes for one matrix between {largest:,} blocks, more than the "
                f"limit of {self._max_bytes:,}. Take a coarser partition, looser coupling or (AdaGradFull) max_bytes."
            )
        return matrix_of

    def component_name(self, blocks: Tensor) -> str:
        """What to call the matrix between these blocks."""
        if self.coupling != "module":
            return self.coupling
        block = 0
        for origin in self.origins:
            block += math.prod(origin.grid)
            if block > int(blocks[0]):
                return origin.module
        raise IndexError(f"there is no block {int(blocks[0])}")

    def row_shape(self, blocks: TensorBlocks) -> tuple[int, ...]:
        """The shape of what a parameter holds of a matrix between blocks."""
        count = blocks.stop - blocks.start
        return (count,) if self.is_diagonal else (count, len(self.components[blocks.component]))

    @cached_property
    def owners(self) -> list[str]:
        """The parameter, or the merged group of them, that every block comes from."""
        return [origin.name for origin in self.origins for _ in range(math.prod(origin.grid))]

    @cached_property
    def names(self) -> list[str]:
        """The name of every block."""
        return [name for origin in self.origins for name in origin.block_names()]


def _fingerprint(cuts: Sequence[Cut], starts: Sequence[int]) -> str:
    """A short text that is equal for equal partitions, whatever their names: counts and a checksum of the sizes."""
    checksum = 0
    for cut, start in zip(cuts, starts, strict=True):
        for values in (cut.sizes, cut.labels):
            places = 1 if values is None else (_scrambled(len(values)) * values).sum()  # modulo 2⁶⁴
            checksum = (checksum * 1_000_003 + 31 * start + int(places)) % (1 << 61)
    entries = sum(int(cut.sizes.sum()) for cut in cuts)
    blocks = max((start + len(cut.sizes) for cut, start in zip(cuts, starts, strict=True)), default=0)
    return f"{blocks} blocks of {entries} entries, checksum {checksum:x}"


def _scrambled(count: int) -> Tensor:
    """One odd-looking number per place: with 1, 2, 3, ... blocks could trade places without changing a sum."""
    x = torch.arange(1, count + 1)
    for shift in (29, 32):
        x = (x ^ (x >> shift)) * 0x3F58476D1CE4E5B9
    return x ^ (x >> 31)
