"""The block-mean matrix M = Λ̄ + B̄ and its exact algebra at the cost of L×L matrices.

Everything rests on one change of coordinates. Let R be the d×L matrix whose column i is 1/√s_i on block i and 0
elsewhere, and A = Λ + S^½ B S^½. In an orthonormal basis that starts with the columns of R, M is block diagonal: A, and
λ_i on the s_i − 1 directions inside block i that sum to zero. Hence, for every matrix function f,

    f(M) = expand(f(λ)) + R [ f(A) − diag f(λ) ] Rᵀ

Theorem 1 (1/x), Lemma 1 (√x) and Theorem 2 (1/√x) of the paper are three cases. A block of a single entry has no such
inner direction: its λ_i does not exist on its own, only A_ii does, and nothing here ever evaluates f at it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockmean._checks import require, require_last
from blockmean._coordinates import DTYPES, ROUNDING, Coordinates, floating, working
from blockmean._spectral import scaled_inverse, symmetric_function, symmetrised
from blockmean.partition import Partition

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

DENSE_LIMIT = 2**30
"""Bytes above which `to_dense` wants to be told that it is meant."""


class BlockMean(Coordinates):
    """A d×d matrix Λ̄ + B̄ that is stored as λ (L numbers) and B (L×L numbers).

    Args:
        partition: which entries form a block.
        lam: λ, (..., L): what the diagonal of block ii has above its other entries.
        B: (..., L, L): the value of block ij. It need not be symmetric, nor positive definite.

    Leading dimensions are a batch of matrices. Methods never change a matrix; they return new ones, and gradients flow
    through all of them. The L×L arithmetic runs in float64 whatever the dtype.

    >>> M = BlockMean(Partition.from_sizes([2, 1]), lam=[2.0, 3.0], B=[[1.0, 0.5], [0.5, 0.0]])
    >>> M.to_dense()
    tensor([[3.0000, 1.0000, 0.5000],
            [1.0000, 3.0000, 0.5000],
            [0.5000, 0.5000, 3.0000]])
    >>> torch.allclose(M.inverse().to_dense(), torch.linalg.inv(M.to_dense()))
    True
    """

    # ---------------------------------------------------------------- construction

    @classmethod
    def fit(cls, M: Tensor, partition: Partition) -> BlockMean:
        """The block-mean matrix nearest to M in the Frobenius norm (Proposition 1), (..., d, d).

        It is the average of M over all permutations inside blocks: linear, idempotent, trace-preserving, and positive
        definite where M is. Cost O(d²), one read of M.

        >>> M = torch.tensor([[4.0, 1.0, 2.0], [3.0, 6.0, 2.0], [1.0, 1.0, 5.0]])
        >>> BlockMean.fit(M, Partition.from_sizes([2, 1])).to_dense()
        tensor([[5., 2., 2.],
                [2., 5., 2.],
                [1., 1., 5.]])
        """
        _require_partition(partition, "BlockMean.fit")
        d = partition.num_entries
        M = floating(M, "M", "BlockMean.fit")
        require(M.ndim >= 2 and M.shape[-1] == M.shape[-2], "M", "BlockMean.fit", "square", f"shape {tuple(M.shape)}")
        require(M.shape[-1] == d, "M", "BlockMean.fit", f"{d} x {d}, as {partition} asks", f"shape {tuple(M.shape)}")
        sums = partition.block_sum(partition.block_sum(M).mT).mT  # (L, L)
        traces = partition.block_sum(M.diagonal(dim1=-2, dim2=-1))  # (L,)
        # A sum shows whether its terms are finite, without another pass over M.
        finite = bool(sums.isfinite().all() and traces.isfinite().all())
        require(finite, "M", "BlockMean.fit", "finite", "NaN or infinity")
        s = partition.sizes.to(M)
        inside = (sums.diagonal(dim1=-2, dim2=-1) - traces) / (s * (s - 1)).clamp(min=1)  # b_ii, 0 where s_i = 1
        off = sums / torch.outer(s, s)
        B = off - torch.diag_embed(off.diagonal(dim1=-2, dim2=-1)) + torch.diag_embed(inside)
        lam = traces / s - inside
        # The rounding error of a difference of equal numbers is no λ: it would make a singular M look definite.
        noise = lam.abs() <= ROUNDING * torch.finfo(lam.dtype).eps * inside.abs()
        return cls(partition, torch.where(noise, lam - lam.detach(), lam), B)

    @classmethod
    def from_rows(cls, G: Tensor, partition: Partition, weight: float = 1.0) -> BlockMean:
        """`fit(weight · GᵀG)` from the rows of G, (..., N, d), without the d×d matrix. Cost O(N d + N L²).

        With gradients of single samples as rows and weight 1/N this is the empirical Fisher matrix in block-mean form.
        λ_i is the variance inside block i, summed over rows, and computed as such: it keeps its digits where the
        difference of two nearly equal sums would lose them.
        """
        _require_partition(partition, "BlockMean.from_rows")
        G = floating(G, "G", "BlockMean.from_rows")
        require(G.ndim >= 2, "G", "BlockMean.from_rows", "of shape (..., rows, entries)", tuple(G.shape))
        require_last(G, partition.num_entries, "G", "BlockMean.from_rows", "entry")
        require(math.isfinite(weight), "weight", "BlockMean.from_rows", "finite", weight)
        u = working(partition.block_sum(G)) / working(partition.sizes.to(G.device)).sqrt()  # (N, L)
        require(bool(u.isfinite().all()), "G", "BlockMean.from_rows", "finite", "NaN or infinity")
        inside = partition.block_var(G).sum(-2) * weight
        return cls._from_A(partition, inside[..., partition.multiple], weight * (u.mT @ u), G.dtype)

    # ---------------------------------------------------------------- what it is

    @property
    def A(self) -> Tensor:
        """The canonical coordinates Λ + S^½ B S^½, (..., L, L). Their eigenvalues are eigenvalues of M."""
        return self._A if self._A is not None else self._canonical().to(self.dtype)

    @property
    def T(self) -> BlockMean:
        """The transpose of every matrix of the batch."""
        return self._with(self.lam, self.B.mT, self._A if self._A is None else self._A.mT)

    def __repr__(self) -> str:
        batch = f", batch={list(self.lam.shape[:-1])}" if self.lam.ndim > 1 else ""
        name = str(self.dtype).removeprefix("torch.")
        return f"BlockMean({self.partition!r}, dtype={name}, device='{self.device}'{batch})"

    def to(self, *args: Any, **kwargs: Any) -> BlockMean:
        """Move to a device or a dtype, as `torch.Tensor.to` does."""
        lam, B = self.lam.to(*args, **kwargs), self.B.to(*args, **kwargs)
        require(lam.dtype in DTYPES, "dtype", "BlockMean.to", "float32 or float64", lam.dtype, TypeError)
        return self._with(lam, B, None if self._A is None else self._A.to(*args, **kwargs))

    def detach(self) -> BlockMean:
        """The same matrix outside of the autograd graph."""
        return self._with(self.lam.detach(), self.B.detach(), None if self._A is None else self._A.detach())

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors from which `from_state_dict` makes the same matrix, bit by bit; block names are not kept."""
        state = {"sizes": self.partition.sizes, "lam": self.lam, "B": self.B}
        if not self.partition.is_contiguous:
            state["labels"] = self.partition.labels
        if self._A is not None:
            state["A"] = self._A
        return {key: value.detach() for key, value in state.items()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> BlockMean:
        """The matrix that `state_dict` was taken from."""
        if not {"sizes", "lam", "B"} <= set(state) <= {"sizes", "labels", "lam", "B", "A"}:
            raise ValueError(f"Not the state of a BlockMean: it has the keys {sorted(state)}.")
        partition = (
            Partition.from_labels(state["labels"]) if "labels" in state else Partition.from_sizes(state["sizes"])
        )
        return cls(partition, state["lam"], state["B"])._with(state["lam"], state["B"], state.get("A"))

    def to_dense(self, *, max_bytes: int | None = DENSE_LIMIT) -> Tensor:
        """The d×d matrix itself, (..., d, d). Above `max_bytes` it raises; None means no limit."""
        need = self.shape.numel() * self.lam.element_size()
        if max_bytes is not None and need > max_bytes:
            raise ValueError(
                f"A dense {self.shape[-2]} x {self.shape[-1]} matrix needs {need:,} bytes, more than the limit of "
                f"{max_bytes:,}. Pass max_bytes=None if it is meant."
            )
        columns = self.partition.expand(self.B)  # (L, d)
        return self.partition.expand(columns.mT).mT + torch.diag_embed(self.partition.expand(self.lam))

    def to_scipy(self) -> LinearOperator:
        """A `scipy.sparse.linalg.LinearOperator` that shares nothing but the numbers; for CPU matrices, no batch."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator

        require(self.lam.ndim == 1, "batch", "BlockMean.to_scipy", "empty", tuple(self.lam.shape[:-1]))
        M = self.detach().to("cpu")

        def times(matrix: BlockMean) -> Callable[[Any], Any]:
            # "same_kind" refuses complex vectors, whose imaginary part would be lost.
            return lambda x: (matrix @ torch.from_numpy(np.array(x).astype(dtype, casting="same_kind"))).numpy()

        dtype = np.dtype(str(M.dtype).removeprefix("torch."))
        return LinearOperator(
            tuple(M.shape), matvec=times(M), rmatvec=times(M.T), matmat=times(M), rmatmat=times(M.T), dtype=dtype
        )

    # ---------------------------------------------------------------- numbers of the matrix

    def diagonal(self) -> Tensor:
        """The diagonal, (..., d)."""
        return self.partition.expand(self.lam + self.B.diagonal(dim1=-2, dim2=-1))

    def trace(self) -> Tensor:
        """The sum of the diagonal. O(L)."""
        return ((self.lam + self.B.diagonal(dim1=-2, dim2=-1)) * self._sizes()).sum(-1)

    def norm(self, ord: str | int = "fro") -> Tensor:
        """Frobenius ("fro"), nuclear ("nuc") or spectral (2) norm. O(L²), O(L³) for the last two."""
        require(ord in ("fro", "nuc", 2), "ord", "BlockMean.norm", "'fro', 'nuc' or 2", ord)
        A, inner, times = self._canonical(), working(self._inner()), self._times()
        if ord == "fro":
            parts = torch.cat([A.flatten(-2), times.sqrt() * inner], -1)
            size: Tensor = torch.linalg.vector_norm(parts, dim=-1)  # its gradient at 0 is 0, not NaN
            return size.to(self.dtype)
        values: Tensor = torch.linalg.svdvals(A)
        if ord == "nuc":
            return (values.sum(-1) + (times * inner.abs()).sum(-1)).to(self.dtype)
        return torch.cat([values, inner.abs()], -1).amax(-1).to(self.dtype)

    def cond(self) -> Tensor:
        """Largest over smallest singular value; infinite where the matrix is singular. O(L³)."""
        values = torch.cat([torch.linalg.svdvals(self._canonical()), working(self._inner()).abs()], -1)
        largest, smallest = values.amax(-1), values.amin(-1)
        return torch.where(smallest > 0, largest / smallest, torch.inf).to(self.dtype)

    def eigenvalues(self) -> tuple[Tensor, Tensor]:
        """All eigenvalues and how often each occurs: those of A once, λ_i on s_i − 1 directions. O(L³).

        They are complex where B is not symmetric.

        >>> M = BlockMean(Partition.from_sizes([3]), [2.0], [[1.0]])
        >>> M.eigenvalues()
        (tensor([5., 2.]), tensor([1, 2]))
        """
        A, inner = self._canonical(), working(self._inner())
        if self._is_symmetric():
            values = torch.cat([torch.linalg.eigvalsh(A), inner], -1).to(self.dtype)
        else:
            values = torch.linalg.eigvals(A)
            values = torch.cat([values, inner.to(values)], -1).to(self.dtype.to_complex())
        return values, torch.cat([torch.ones_like(self.partition.sizes), self.partition.sizes[self._multiple()] - 1])

    def logdet(self) -> Tensor:
        """log det M of a symmetric positive definite matrix. O(L³)."""
        self._spectrum("logdet", definite=True)
        inner = working(self._inner())
        between: Tensor = torch.linalg.slogdet(self._canonical())[1]
        return (between + (self._times() * inner.log()).sum(-1)).to(self.dtype)

    def is_positive_definite(self) -> bool:
        """Whether M (every matrix of the batch) is symmetric and positive definite to working precision."""
        try:
            self._spectrum("is_positive_definite", definite=True)
        except ValueError:
            return False
        return True

    # ---------------------------------------------------------------- arithmetic

    def __matmul__(self, other: Any) -> Any:
        """M v, (d,) → (..., d); M X, (..., d, k); or the product with another BlockMean. O(d + L²) per column."""
        if isinstance(other, BlockMean):
            partition = self._common(other)
            inner = working(self._inner()) * working(other._inner())
            dtype = torch.promote_types(self.dtype, other.dtype)
            return self._from_A(partition, inner, self._canonical() @ other._canonical(), dtype)
        if not isinstance(other, Tensor):
            return NotImplemented
        if other.ndim == 1:
            return self._times_row(other, self.lam, self.B)
        require(other.ndim > 0, "other", "BlockMean @", "a vector or a matrix", "a scalar")
        return self._times_row(other.mT, self.lam.unsqueeze(-2), self.B).mT

    def __rmatmul__(self, other: Any) -> Any:
        """vᵀM, (d,) → (..., d), or X M, (..., k, d)."""
        if not isinstance(other, Tensor):
            return NotImplemented
        lam = self.lam if other.ndim == 1 else self.lam.unsqueeze(-2)
        return self._times_row(other, lam, self.B.mT)

    def _times_row(self, x: Tensor, lam: Tensor, B: Tensor) -> Tensor:
        """(Λ̄ + B̄) times each row of x: λ_i x + Σ_j b_ij u_j on block i, u the block sums of x."""
        require_last(x, self.partition.num_entries, "other", "BlockMean @", "entry")
        require(x.dtype == self.dtype, "other", "BlockMean @", f"of dtype {self.dtype}", x.dtype, TypeError)
        u = self.partition.block_sum(x)  # (..., L)
        shift = (B @ u.unsqueeze(-1)).squeeze(-1) if x.ndim == 1 else u @ B.mT
        return self.partition.scale_shift(x, lam, shift)

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, BlockMean):
            return NotImplemented
        made = BlockMean(self._common(other), self.lam + other.lam, self.B + other.B)
        if self._A is not None or other._A is not None:
            made._A = (self._canonical() + other._canonical()).to(made.dtype)
        return made

    def __sub__(self, other: Any) -> Any:
        return self + -other if isinstance(other, BlockMean) else NotImplemented

    def __mul__(self, scalar: Any) -> Any:
        """The matrix times a number (or a tensor with one number per matrix of the batch)."""
        if not isinstance(scalar, int | float | Tensor):
            return NotImplemented
        c = self._number(scalar)
        made = BlockMean(self.partition, self.lam * c.squeeze(-1), self.B * c)
        made._A = None if self._A is None else self._A * c
        return made

    __rmul__ = __mul__

    def __truediv__(self, scalar: Any) -> Any:
        return self * (1 / scalar) if isinstance(scalar, int | float | Tensor) else NotImplemented

    def __neg__(self) -> BlockMean:
        return self._with(-self.lam, -self.B, None if self._A is None else -self._A)

    def damped(self, damping: float | Tensor) -> BlockMean:
        """M + δI, with one δ or one per matrix of the batch."""
        c = self._number(damping)
        made = BlockMean(self.partition, self.lam + c.squeeze(-1), self.B)
        if self._A is not None:
            made._A = self._A + c * torch.eye(self.partition.num_blocks).to(self._A)
        return made

    # ---------------------------------------------------------------- functions of the matrix

    def inverse(self) -> BlockMean:
        """M⁻¹ by Theorem 1: λ → 1/λ, A → A⁻¹. B need not be symmetric. O(L³)."""
        inner = working(self._inner())
        self._refuse_inner("inverse", inner == 0, "is singular")
        A, condition = scaled_inverse(self._canonical())
        if not ((condition < 1 / self._tolerance()) & self._exceeds_rounding()).all():
            raise ValueError(
                "BlockMean.inverse: the matrix is singular to working precision: A has condition number "
                f"{condition.max():.3g} after scaling. damped(δ) adds δ to every eigenvalue."
            )
        return self._from_A(self.partition, 1 / inner, A, self.dtype)

    def solve(self, b: Tensor) -> Tensor:
        """M⁻¹ b for a vector (d,) or a matrix (..., d, k). O(d + L³)."""
        result: Tensor = self.inverse() @ b
        return result

    def sqrt(self) -> BlockMean:
        """M^½ of a symmetric positive semi-definite matrix by Lemma 1. O(L³)."""
        return self._positive("sqrt", 0.5)

    def inverse_sqrt(self) -> BlockMean:
        """M^-½ of a symmetric positive definite matrix by Theorem 2. O(L³)."""
        return self._positive("inverse_sqrt", -0.5)

    def power(self, p: float) -> BlockMean:
        """M^p; a whole p also for matrices that are not symmetric or not positive definite. O(L³)."""
        require(math.isfinite(p), "p", "BlockMean.power", "a finite number", p)
        if float(p).is_integer():
            base = self if p >= 0 else self.inverse()
            n = abs(int(p))
            A = torch.linalg.matrix_power(base._canonical(), n)
            return self._from_A(self.partition, working(base._inner()) ** n, A, self.dtype)
        return self._positive(f"power({p})", p)

    def apply(self, f: Callable[[Tensor], Tensor]) -> BlockMean:
        """f(M) of a symmetric matrix for any function f that acts elementwise on tensors. O(L³).

        >>> M = BlockMean(Partition.from_sizes([2, 1]), [2.0, 3.0], [[1.0, 0.5], [0.5, 0.0]])
        >>> torch.allclose(M.apply(torch.exp).to_dense(), torch.linalg.matrix_exp(M.to_dense()))
        True
        """
        return self._function("apply", f, *self._spectrum("apply"))

    def _positive(self, what: str, p: float) -> BlockMean:
        """M^p through the spectrum, p not a whole number."""
        w, Q = self._spectrum(what, definite=p < 0, semidefinite=True)
        # Rounding can leave an eigenvalue of a semi-definite A just below 0.
        return self._function(what, lambda x: x.clamp(min=0) ** p, w, Q)

    def _function(self, what: str, f: Callable[[Tensor], Tensor], w: Tensor, Q: Tensor) -> BlockMean:
        values, inner = f(w), f(working(self._inner()))
        if not isinstance(values, Tensor) or values.shape != w.shape or values.is_complex():
            raise ValueError(f"BlockMean.{what}: f must take a tensor to a real tensor of the same shape.")
        if values.requires_grad:
            raise ValueError(f"BlockMean.{what}: f must not itself depend on tensors that require gradients.")
        bad = ~values.isfinite()
        if bad.any():
            raise ValueError(f"BlockMean.{what}: f is not finite at the eigenvalue {w[bad][0]:.6g} of A.")
        self._refuse_inner(what, ~inner.isfinite(), "makes f not finite")
        A = symmetric_function(symmetrised(self._canonical()), lambda x: f(x).to(x.dtype), w, Q)
        return self._from_A(self.partition, inner, A, self.dtype)


def _require_partition(partition: object, owner: str) -> None:
    require(isinstance(partition, Partition), "partition", owner, "a Partition", partition, TypeError)
