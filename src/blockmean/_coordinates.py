"""How a block-mean matrix is kept, in which coordinates it is computed with, and what is refused.

`BlockMean` (matrix.py) has the operations; this file has what they all rest on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from blockmean._checks import require, require_last
from blockmean._spectral import definite_eigh, definite_when_scaled, symmetrised
from blockmean.partition import Partition

ArrayLike = Tensor | Sequence[float] | Sequence[Sequence[float]]

DTYPES = (torch.float32, torch.float64)
ROUNDING = 8  # times ε: twice what means over blocks of up to 1,500 entries were seen to err


class Coordinates:
    """λ and B of a block-mean matrix, its canonical coordinates A, and its spectrum."""

    def __init__(self, partition: Partition, lam: ArrayLike, B: ArrayLike) -> None:
        require(isinstance(partition, Partition), "partition", "BlockMean", "a Partition", partition, TypeError)
        L = partition.num_blocks
        lam, B = floating(lam, "lam", beside=B), floating(B, "B", beside=lam)
        require_last(lam, L, "lam", "BlockMean", "block")
        require(B.ndim >= 2 and B.shape[-2:] == (L, L), "B", "BlockMean", f"of shape (..., {L}, {L})", tuple(B.shape))
        for name, value in (("lam", lam), ("B", B)):
            require(bool(value.isfinite().all()), name, "BlockMean", "finite", "NaN or infinity")
        dtype = torch.promote_types(lam.dtype, B.dtype)
        batch = torch.broadcast_shapes(lam.shape[:-1], B.shape[:-2])
        self.partition = partition
        self.lam = lam.to(dtype).expand(*batch, L)
        self.B = B.to(dtype).expand(*batch, L, L)
        self._A: Tensor | None = None  # kept where A was computed first and B from it

    @classmethod
    def _from_A(cls, partition: Partition, inner: Tensor, A: Tensor, dtype: torch.dtype) -> Self:
        """The matrix with canonical coordinates A (L×L) and λ = `inner` on blocks of more than one entry.

        Single entries follow Proposition 1: b_ii = 0, so λ_i = A_ii.
        """
        A = working(A)
        diagonal = A.diagonal(dim1=-2, dim2=-1)
        lam = diagonal.index_copy(-1, partition.multiple.to(A.device), inner.to(A))
        made = cls.__new__(cls)
        made.partition, made.lam, made._A = partition, lam.to(dtype), A.to(dtype)
        made.B = ((A - torch.diag_embed(lam)) / _mean_sizes(partition, A)).to(dtype)
        if not bool(made._A.isfinite().all() and made.lam.isfinite().all()):
            raise ValueError(f"BlockMean: the result is beyond the range of {dtype}. Scale the matrix first.")
        return made

    @property
    def shape(self) -> torch.Size:
        d = self.partition.num_entries
        return torch.Size([*self.lam.shape[:-1], d, d])

    @property
    def dtype(self) -> torch.dtype:
        return self.lam.dtype

    @property
    def device(self) -> torch.device:
        return self.lam.device

    def _with(self, lam: Tensor, B: Tensor, A: Tensor | None) -> Self:
        """The same partition with other numbers that are known to be good."""
        made = type(self).__new__(type(self))
        made.partition, made.lam, made.B, made._A = self.partition, lam, B, A
        return made

    def _sizes(self) -> Tensor:
        return self.partition.sizes.to(self.lam)

    def _multiple(self) -> Tensor:
        return self.partition.multiple

    def _inner(self) -> Tensor:
        """λ of the blocks that have more than one entry."""
        return self.lam[..., self._multiple()]

    def _times(self) -> Tensor:
        """How often each of `_inner` is an eigenvalue: s_i − 1."""
        return (self.partition.sizes[self._multiple()] - 1).to(working(self.lam))

    def _canonical(self) -> Tensor:
        """A in working precision."""
        if self._A is not None:
            return working(self._A)
        return torch.diag_embed(working(self.lam)) + working(self.B) * _mean_sizes(self.partition, self.lam)

    def _common(self, other: Coordinates) -> Partition:
        if self.partition != other.partition:
            raise ValueError(
                "Two block-mean matrices must have the same partition. "
                f"Got {self.partition!r} and {other.partition!r}, which differ."
            )
        return self.partition

    def _tolerance(self) -> float:
        """Rounding of an L×L matrix of this dtype, relative to its size."""
        return 4 * self.partition.num_blocks * torch.finfo(self.dtype).eps

    def _size(self) -> Tensor:
        """How large M is, (...): A alone may be nothing but rounding errors of λ, where block sums cancel."""
        A, inner = self._canonical().detach(), working(self._inner()).detach()
        return torch.cat([A.flatten(-2), inner], -1).abs().amax(-1)

    def _rounding(self) -> Tensor:
        """How far rounding may have moved λ_i and A_ii that were computed from the entries of block ii, (..., L)."""
        entries = self.lam.abs() + self.B.diagonal(dim1=-2, dim2=-1).abs()
        return working(ROUNDING * torch.finfo(self.dtype).eps * entries.detach())

    def _exceeds_rounding(self) -> Tensor:
        """Whether no row of A is just what is left of λ_i + s_i b_ii cancelling, (...)."""
        rows = self._canonical().detach().abs().amax(-1)
        return (rows > (self._rounding() if self._A is None else 0)).all(-1)

    def _number(self, value: float | Tensor) -> Tensor:
        """A number, or one per matrix of the batch, in this dtype and ready to broadcast against B: (..., 1, 1)."""
        is_complex = isinstance(value, Tensor) and value.is_complex()
        require(not is_complex, "scalar", "BlockMean", "real", "a complex tensor", TypeError)
        return torch.as_tensor(value, dtype=self.dtype, device=self.device)[..., None, None]

    def _is_symmetric(self) -> bool:
        A = self._canonical().detach()
        return bool(((A - A.mT).abs().amax((-2, -1)) <= self._tolerance() * self._size()).all())

    def _spectrum(self, what: str, *, definite: bool = False, semidefinite: bool = False) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of a symmetric A, outside of autograd, having refused what is asked to be."""
        if not self._is_symmetric():
            A = self._canonical().detach()
            raise ValueError(
                f"BlockMean.{what} needs a symmetric matrix. A differs from its transpose by "
                f"{(A - A.mT).abs().max():.3g}. inverse(), solve(), power(n) and @ take any matrix."
            )
        A = symmetrised(self._canonical().detach())
        good = definite_when_scaled(A, self._tolerance()) & self._exceeds_rounding()
        w, Q = torch.linalg.eigh(A)
        if bool(good.all() and (w[..., 0] < 1e-3 * w[..., -1]).any()):  # where eigh would lose more than 3 digits
            w, Q = definite_eigh(A)
        if definite or semidefinite:
            kind = "positive definite" if definite else "positive semi-definite"
            inner, floor = self._inner().detach(), -self._rounding()[..., self._multiple()]
            self._refuse_inner(what, ~(inner > 0) if definite else ~(inner >= floor), f"is not {kind}")
            bad = ~good if definite else ~(w[..., 0] >= -self._tolerance() * self._size())
            if bad.any():
                raise ValueError(
                    f"BlockMean.{what}: the matrix is not {kind}. Its smallest eigenvalue between blocks (of A) is "
                    f"{w[..., 0][bad][0]:.6g}, its largest {w[..., -1][bad][0]:.6g}. damped(δ) adds δ to all of them."
                )
        return w, Q

    def _refuse_inner(self, what: str, bad: Tensor, complaint: str) -> None:
        """Raise naming the first block whose λ is bad."""
        if bad.any():
            *batch, i = bad.nonzero()[0].tolist()
            block = int(self._multiple()[i])
            where = f" (matrix {batch} of the batch)" if batch else ""
            raise ValueError(
                f"BlockMean.{what}: the matrix {complaint}. λ = {self.lam[(*batch, block)]:.6g} of block {block} "
                f"('{self.partition.names[block]}', {int(self.partition.sizes[block])} entries){where}."
            )


def working(x: Tensor) -> Tensor:
    """float64, where the device has it."""
    return x if x.device.type == "mps" else x.double()


def _mean_sizes(partition: Partition, like: Tensor) -> Tensor:
    """√(s_i s_j), (L, L), with exactly s_i on the diagonal: a λ_i + s_i b_ii that is 0 must come out as 0."""
    sizes = working(partition.sizes.to(like.device))
    return torch.outer(sizes, sizes).sqrt()


def floating(values: Any, name: str, owner: str = "BlockMean", beside: Any = None) -> Tensor:
    """A float32 or float64 tensor; Python numbers take the dtype of the tensor beside them, or the default."""
    takes = not hasattr(values, "dtype") and isinstance(beside, Tensor) and beside.is_floating_point()
    x: Tensor = torch.as_tensor(values, dtype=beside.dtype if takes else None)
    if not (x.is_floating_point() or x.is_complex()):
        x = x.to(torch.get_default_dtype())
    require(x.dtype in DTYPES, name, owner, "float32 or float64", x.dtype, TypeError)
    return x
