"""The block-mean matrix M = Λ̄ + B̄ and its exact algebra at the cost of L×L matrices.

Everything rests on one change of coordinates. Let R be the d×L matrix whose column i is 1/√s_i on block i and 0
elsewhere, and A = Λ + S^½ B S^½. In an orthonormal basis that starts with the columns of R, M is block diagonal: A, and
λ_i on the s_i − 1 directions inside block i that sum to zero. Hence, for every matrix function f,

    f(M) = expand(f(λ)) + R [ f(A) − diag f(λ) ] Rᵀ

Theorem 1 (1/x), Lemma 1 (√x) and Theorem 2 (1/√x) of the paper are three cases. A block of a single entry has no such
inner direction: only A_ii means anything there, and nothing here ever evaluates f at such a λ_i.

Products with vectors go the same way: λ_i times the deviation from the mean of block i, plus A times the means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from blockmean._checks import DTYPES, as_float, require, require_last
from blockmean._linalg import definite_eigh, is_definite, scaled_inverse, symmetric_function, symmetrised, to_float64
from blockmean.partition import Partition

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

ArrayLike = Tensor | Sequence[float] | Sequence[Sequence[float]]

DENSE_LIMIT = 2**30
"""The largest matrix in bytes that `to_dense` makes without being told to."""

ROUNDING = 8
"""Errors of λ and B in units of ε: twice the largest seen in means over blocks of up to 1,500 entries."""

CACHED = 2**18
"""About how many numbers stay in the cache between two passes."""

SAMPLE = 16
"""The first 1/16 of a block says roughly where its mean is."""


class BlockMean:
    """A d×d matrix Λ̄ + B̄, stored as λ (L numbers) and B (L×L numbers).

    Args:
        partition: which entries form a block.
        lam: λ, (..., L): by how much the diagonal of block ii exceeds its other entries.
        B: (..., L, L): the value of block ij. It need be neither symmetric nor positive definite.

    Its attributes are `partition`, `lam` and `B`. `M @ x`, `M @ N`, `M + N`, `M - N`, `2 * M` and `M / 2` work as for
    tensors. Leading dimensions are a batch of matrices. Methods never change a matrix; they return new ones, and
    gradients flow through all of them. The L×L arithmetic runs in float64 whatever the dtype.

    >>> M = BlockMean(Partition.from_sizes([2, 1]), lam=[2.0, 3.0], B=[[1.0, 0.5], [0.5, 0.0]])
    >>> M.to_dense()
    tensor([[3.0000, 1.0000, 0.5000],
            [1.0000, 3.0000, 0.5000],
            [0.5000, 0.5000, 3.0000]])
    >>> torch.allclose(M.inverse().to_dense(), torch.linalg.inv(M.to_dense()))
    True
    """

    # ---------------------------------------------------------------- construction

    def __init__(self, partition: Partition, lam: ArrayLike, B: ArrayLike) -> None:
        _require_partition(partition, "BlockMean")
        L = partition.num_blocks
        lam, B = as_float(lam, "lam", "BlockMean", like=B), as_float(B, "B", "BlockMean", like=lam)
        require_last(lam, L, "lam", "BlockMean", "block")
        require(B.ndim >= 2 and B.shape[-2:] == (L, L), "B", "BlockMean", f"of shape (..., {L}, {L})", tuple(B.shape))
        for name, value in (("lam", lam), ("B", B)):
            require(bool(value.isfinite().all()), name, "BlockMean", "finite", "NaN or infinity")
        dtype = torch.promote_types(lam.dtype, B.dtype)
        batch = torch.broadcast_shapes(lam.shape[:-1], B.shape[:-2])
        self.partition = partition
        self.lam = lam.to(dtype).expand(*batch, L)
        self.B = B.to(dtype).expand(*batch, L, L)
        self._A: Tensor | None = None  # in float64 if A was computed first, and B from it

    @classmethod
    def _from_A(cls, partition: Partition, inner: Tensor, A: Tensor, dtype: torch.dtype) -> Self:
        """The matrix with canonical coordinates A (L×L) and λ = `inner` on blocks of more than one entry.

        Single entries follow Proposition 1: b_ii = 0, so λ_i = A_ii.
        """
        A = to_float64(A)
        lam = A.diagonal(dim1=-2, dim2=-1).index_copy(-1, partition.nonsingleton.to(A.device), inner.to(A))
        B = (A - torch.diag_embed(lam)) / _root_sizes(partition, A)
        made = cls.__new__(cls)
        made.partition, made.lam, made.B, made._A = partition, lam.to(dtype), B.to(dtype), A
        if not bool(A.to(dtype).isfinite().all() and made.lam.isfinite().all()):
            raise ValueError(f"BlockMean: the result is beyond the range of {dtype}. Scale the matrix first.")
        return made

    def _with(self, lam: Tensor, B: Tensor, A: Tensor | None) -> Self:
        """The same partition with other numbers, which are not checked."""
        made = type(self).__new__(type(self))
        made.partition, made.lam, made.B, made._A = self.partition, lam, B, A
        return made

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
        M = as_float(M, "M", "BlockMean.fit")
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
        # If λ is only the rounding error of a difference of equal numbers, it is 0: M must not look definite.
        noise = lam.abs() <= ROUNDING * torch.finfo(lam.dtype).eps * inside.abs()
        return cls(partition, torch.where(noise, lam - lam.detach(), lam), B)

    @classmethod
    def from_rows(cls, G: Tensor, partition: Partition, weight: float = 1.0) -> BlockMean:
        """`fit(weight · GᵀG)` from the rows of G, (..., N, d), without the d×d matrix. Cost O(N d + N L²).

        With gradients of single samples as rows and weight 1/N this is the empirical Fisher matrix in block-mean form.
        λ_i is the variance inside block i, summed over rows. It is computed as a variance and not as the difference of
        two sums, which would lose its digits if they are nearly equal.

        >>> G, partition = torch.tensor([[1.0, 3.0, 0.0], [2.0, 0.0, 1.0]]), Partition.from_sizes([2, 1])
        >>> M = BlockMean.from_rows(G, partition, weight=1 / 2)
        >>> torch.allclose(M.to_dense(), BlockMean.fit(G.T @ G / 2, partition).to_dense())
        True
        """
        _require_partition(partition, "BlockMean.from_rows")
        G = as_float(G, "G", "BlockMean.from_rows")
        require(G.ndim >= 2, "G", "BlockMean.from_rows", "of shape (..., rows, entries)", tuple(G.shape))
        require_last(G, partition.num_entries, "G", "BlockMean.from_rows", "entry")
        require(math.isfinite(weight), "weight", "BlockMean.from_rows", "finite", weight)
        u = to_float64(partition.block_sum(G)) / to_float64(partition.sizes.to(G.device)).sqrt()  # (N, L)
        require(bool(u.isfinite().all()), "G", "BlockMean.from_rows", "finite", "NaN or infinity")
        inside = partition.block_var(G).sum(-2) * weight
        return cls._from_A(partition, inside[..., partition.nonsingleton], weight * (u.mT @ u), G.dtype)

    # ---------------------------------------------------------------- what it is

    @property
    def shape(self) -> torch.Size:
        """(..., d, d), as if it were dense."""
        d = self.partition.num_entries
        return torch.Size([*self.lam.shape[:-1], d, d])

    @property
    def dtype(self) -> torch.dtype:
        """Of λ, B and products: float32 or float64."""
        return self.lam.dtype

    @property
    def device(self) -> torch.device:
        """Where λ and B are."""
        return self.lam.device

    @property
    def A(self) -> Tensor:
        """The canonical coordinates Λ + S^½ B S^½, (..., L, L). Their eigenvalues are eigenvalues of M."""
        return self._canonical().to(self.dtype)

    @property
    def T(self) -> BlockMean:
        """The transpose of every matrix of the batch."""
        return self._with(self.lam, self.B.mT, None if self._A is None else self._A.mT)

    def __repr__(self) -> str:
        batch = f", batch={list(self.lam.shape[:-1])}" if self.lam.ndim > 1 else ""
        name = str(self.dtype).removeprefix("torch.")
        return f"BlockMean({self.partition!r}, dtype={name}, device='{self.device}'{batch})"

    def to(self, *args: Any, **kwargs: Any) -> BlockMean:
        """Move to a device or a dtype, as `torch.Tensor.to` does."""
        lam, B = self.lam.to(*args, **kwargs), self.B.to(*args, **kwargs)
        require(lam.dtype in DTYPES, "dtype", "BlockMean.to", "float32 or float64", lam.dtype, TypeError)
        if self._A is None:
            return self._with(lam, B, None)
        precision = lam.dtype if lam.device.type == "mps" else self._A.dtype  # MPS has no float64
        return self._with(lam, B, self._A.to(lam.device, precision))

    def detach(self) -> BlockMean:
        """The same matrix, outside the autograd graph."""
        return self._with(self.lam.detach(), self.B.detach(), None if self._A is None else self._A.detach())

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors from which `from_state_dict` makes the same matrix, bit for bit; block names are not saved."""
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
        """The d×d matrix itself, (..., d, d). Raises if it would exceed `max_bytes`; None means no limit."""
        need = self.shape.numel() * self.lam.element_size()
        if max_bytes is not None and need > max_bytes:
            raise ValueError(
                f"A dense {self.shape[-2]} x {self.shape[-1]} matrix needs {need:,} bytes, more than the limit of "
                f"{max_bytes:,}. Pass max_bytes=None to make it anyway."
            )
        columns = self.partition.expand(self.B)  # (L, d)
        return self.partition.expand(columns.mT).mT + torch.diag_embed(self.partition.expand(self.lam))

    def to_scipy(self) -> LinearOperator:
        """This matrix (no batch) as a `scipy.sparse.linalg.LinearOperator` on the CPU."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator

        require(self.lam.ndim == 1, "batch", "BlockMean.to_scipy", "empty", tuple(self.lam.shape[:-1]))
        M = self.detach().to("cpu")

        def times(matrix: BlockMean) -> Callable[[Any], Any]:
            # "same_kind" refuses complex vectors: their imaginary part would be lost.
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
        return ((self.lam + self.B.diagonal(dim1=-2, dim2=-1)) * self.partition.sizes.to(self.lam)).sum(-1)

    def norm(self, ord: str | int = "fro") -> Tensor:
        """Frobenius ("fro"), nuclear ("nuc") or spectral (2) norm. O(L²); O(L³) for the last two."""
        require(ord in ("fro", "nuc", 2), "ord", "BlockMean.norm", "'fro', 'nuc' or 2", ord)
        A, inner, counts = self._canonical(), self._inner(), self._inner_counts()
        if ord == "fro":
            parts = torch.cat([A.flatten(-2), counts.sqrt() * inner], -1)
            size: Tensor = torch.linalg.vector_norm(parts, dim=-1)  # its gradient at 0 is 0, not NaN
            return size.to(self.dtype)
        values: Tensor = torch.linalg.svdvals(A)
        if ord == "nuc":
            return (values.sum(-1) + (counts * inner.abs()).sum(-1)).to(self.dtype)
        return torch.cat([values, inner.abs()], -1).amax(-1).to(self.dtype)

    def cond(self) -> Tensor:
        """Largest over smallest singular value; infinite if the matrix is singular. O(L³)."""
        values = torch.cat([torch.linalg.svdvals(self._canonical()), self._inner().abs()], -1)
        largest, smallest = values.amax(-1), values.amin(-1)
        return torch.where(smallest > 0, largest / smallest, torch.inf).to(self.dtype)

    def eigenvalues(self) -> tuple[Tensor, Tensor]:
        """All eigenvalues and how often each occurs: those of A once, λ_i on s_i − 1 directions. O(L³).

        They are complex if B is not symmetric.

        >>> M = BlockMean(Partition.from_sizes([3]), [2.0], [[1.0]])
        >>> M.eigenvalues()
        (tensor([5., 2.]), tensor([1, 2]))
        """
        A, inner = self._canonical(), self._inner()
        if self._is_symmetric():
            values = torch.cat([torch.linalg.eigvalsh(A), inner], -1).to(self.dtype)
        else:
            values = torch.linalg.eigvals(A)
            values = torch.cat([values, inner.to(values)], -1).to(self.dtype.to_complex())
        return values, torch.cat(
            [torch.ones_like(self.partition.sizes), self.partition.sizes[self.partition.nonsingleton] - 1]
        )

    def logdet(self) -> Tensor:
        """log det M of a symmetric positive definite matrix. O(L³)."""
        self._spectrum("logdet", definite=True)
        inner = self._inner()
        between: Tensor = torch.linalg.slogdet(self._canonical())[1]
        return (between + (self._inner_counts() * inner.log()).sum(-1)).to(self.dtype)

    def is_positive_definite(self) -> bool:
        """Whether M (every matrix of the batch) is symmetric and positive definite beyond rounding errors."""
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
            dtype = torch.promote_types(self.dtype, other.dtype)
            A = self._canonical() @ other._canonical()
            return self._from_A(partition, self._inner() * other._inner(), A, dtype)
        if not isinstance(other, Tensor):
            return NotImplemented
        require(other.ndim > 0, "other", "BlockMean @", "a vector or a matrix", "a scalar")
        return self._times_rows(other) if other.ndim == 1 else self._times_rows(other.mT).mT

    def __rmatmul__(self, other: Any) -> Any:
        """vᵀM, (d,) → (..., d), or X M, (..., k, d)."""
        return self.T._times_rows(other) if isinstance(other, Tensor) else NotImplemented

    def _times_rows(self, x: Tensor) -> Tensor:
        """M times each row of x, (..., k, d), or x itself, (d,): λ_i (x − m_i) + [S^-½ A S^½ m]_i, m the block means.

        The usual λ_i x + Σ_j b_ij u_j is the same on paper. In floating point its two terms cancel if λ_i is large
        beside A, and what they leave of the common direction of a block is noise. Deviations from the mean do not
        cancel, and they may be taken from any point c_i near it:

            λ_i (x − m_i) = λ_i (x − c_i) − λ_i r_i,      r_i = m_i − c_i = the mean of x − c_i

        which is exact to rounding even though c_i has only the digits of x. A sample of 1/16 of a block is near enough:
        it is off by at most 4 standard deviations.
        """
        require_last(x, self.partition.num_entries, "other", "BlockMean @", "entry")
        require(x.dtype == self.dtype, "other", "BlockMean @", f"of dtype {self.dtype}", x.dtype, TypeError)
        rows, lam = (x.unsqueeze(0) if x.ndim == 1 else x), self.lam.unsqueeze(-2)
        deviations, c = _deviations(self.partition, rows, self.lam.shape[:-1])
        r = to_float64(torch.cat([y.sum(-1) for y in deviations], -1)) / self._sizes()
        shift = (self._times_means(to_float64(c) + r) - to_float64(lam) * r).to(self.dtype)
        if self.partition.is_contiguous:
            scaled = zip(deviations, _by_run(self.partition, lam), _by_run(self.partition, shift), strict=True)
            parts = [_scale_shift_(y, scale, by).flatten(-2) for y, scale, by in scaled]
            result = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        else:
            expand = self.partition.expand
            result = torch.addcmul(expand(shift), expand(lam), rows - expand(c))
        return result.squeeze(-2) if x.ndim == 1 else result

    def _times_means(self, m: Tensor) -> Tensor:
        """M times vectors that are constant on each block, given and returned as one number per block, (..., k, L)."""
        if self._A is None:
            return to_float64(self.lam).unsqueeze(-2) * m + (m * self._sizes()) @ to_float64(self.B).mT
        root = self._sizes().sqrt()
        return (m * root) @ to_float64(self._A).mT / root

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, BlockMean):
            return NotImplemented
        made = BlockMean(self._common(other), self.lam + other.lam, self.B + other.B)
        if self._A is not None or other._A is not None:
            made._A = self._canonical() + other._canonical()
        return made

    def __sub__(self, other: Any) -> Any:
        return self + -other if isinstance(other, BlockMean) else NotImplemented

    def __mul__(self, scalar: Any) -> Any:
        """The matrix times a number, or times a tensor with one number per matrix of the batch."""
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
        """M + δI, with one δ or one per matrix of the batch: every eigenvalue grows by δ.

        >>> BlockMean(Partition.from_sizes([2]), [0.0], [[1.0]]).damped(0.5).to_dense()
        tensor([[1.5000, 1.0000],
                [1.0000, 1.5000]])
        """
        c = self._number(damping)
        made = BlockMean(self.partition, self.lam + c.squeeze(-1), self.B)
        if self._A is not None:
            made._A = self._A + c * torch.eye(self.partition.num_blocks).to(self._A)
        return made

    # ---------------------------------------------------------------- functions of the matrix

    def inverse(self) -> BlockMean:
        """M⁻¹ by Theorem 1: λ → 1/λ, A → A⁻¹. B need not be symmetric. O(L³)."""
        inner = self._inner()
        self._refuse_inner("inverse", inner == 0, "is singular")
        A, good, condition = scaled_inverse(self._canonical(), self._error())
        if not good.all():
            raise ValueError(
                f"BlockMean.inverse: the matrix is singular to the precision of its numbers, {self._precision()}. "
                f"A has condition number {condition[~good].max():.3g} after scaling. {self._remedy(~good)}"
            )
        return self._from_A(self.partition, 1 / inner, A, self.dtype)

    def solve(self, b: Tensor) -> Tensor:
        """M⁻¹ b for a vector (d,) or a matrix (..., d, k). O(d + L³).

        >>> M = BlockMean(Partition.from_sizes([2]), [2.0], [[1.0]])  # [[3, 1], [1, 3]]
        >>> M.solve(torch.tensor([4.0, 4.0]))
        tensor([1., 1.])
        """
        result: Tensor = self.inverse() @ b
        return result

    def sqrt(self) -> BlockMean:
        """M^½ of a symmetric positive semi-definite matrix by Lemma 1: λ → λ^½, A → A^½. O(L³)."""
        return self._positive("sqrt", 0.5)

    def inverse_sqrt(self) -> BlockMean:
        """M^-½ of a symmetric positive definite matrix by Theorem 2: λ → λ^-½, A → A^-½. O(L³).

        >>> M = BlockMean(Partition.from_sizes([2, 1]), [2.0, 3.0], [[1.0, 0.5], [0.5, 0.0]])
        >>> root = M.inverse_sqrt()
        >>> torch.allclose((root @ M @ root).to_dense(), torch.eye(3), atol=1e-6)
        True
        """
        return self._positive("inverse_sqrt", -0.5)

    def power(self, p: float) -> BlockMean:
        """M^p. A whole p takes any matrix, others a symmetric positive (semi-)definite one. O(L³)."""
        require(math.isfinite(p), "p", "BlockMean.power", "a finite number", p)
        if float(p).is_integer():
            base = self if p >= 0 else self.inverse()
            n = abs(int(p))
            A = torch.linalg.matrix_power(base._canonical(), n)
            return self._from_A(self.partition, base._inner() ** n, A, self.dtype)
        return self._positive(f"power({p})", p)

    def apply(self, f: Callable[[Tensor], Tensor]) -> BlockMean:
        """f(M) of a symmetric matrix for any function f that acts elementwise on tensors. O(L³).

        >>> M = BlockMean(Partition.from_sizes([2, 1]), [2.0, 3.0], [[1.0, 0.5], [0.5, 0.0]])
        >>> torch.allclose(M.apply(torch.exp).to_dense(), torch.linalg.matrix_exp(M.to_dense()))
        True
        """
        return self._function("apply", f, *self._spectrum("apply"))

    def _positive(self, what: str, p: float) -> BlockMean:
        """M^p through the spectrum, for a p that is not a whole number."""
        w, Q = self._spectrum(what, definite=p < 0, semidefinite=True)
        # Rounding can leave an eigenvalue of a semi-definite A just below 0.
        return self._function(what, lambda x: x.clamp(min=0) ** p, w, Q)

    def _function(self, what: str, f: Callable[[Tensor], Tensor], w: Tensor, Q: Tensor) -> BlockMean:
        values, inner = f(w), f(self._inner())
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

    # ---------------------------------------------------------------- canonical coordinates

    def _sizes(self) -> Tensor:
        """s in float64, (L,)."""
        return to_float64(self.partition.sizes.to(self.device))

    def _inner(self) -> Tensor:
        """λ of the blocks that have more than one entry, in float64."""
        return to_float64(self.lam[..., self.partition.nonsingleton])

    def _inner_counts(self) -> Tensor:
        """How often each of `_inner` is an eigenvalue: s_i − 1."""
        return self._sizes()[self.partition.nonsingleton] - 1

    def _canonical(self) -> Tensor:
        """A in float64."""
        if self._A is not None:
            return to_float64(self._A)
        return torch.diag_embed(to_float64(self.lam)) + to_float64(self.B) * _root_sizes(self.partition, self.lam)

    def _common(self, other: BlockMean) -> Partition:
        if self.partition != other.partition:
            raise ValueError(
                "Two block-mean matrices must have the same partition. "
                f"Got {self.partition!r} and {other.partition!r}, which differ."
            )
        return self.partition

    def _number(self, value: float | Tensor) -> Tensor:
        """A number, or one per matrix of the batch, in this dtype and ready to broadcast against B: (..., 1, 1)."""
        is_complex = isinstance(value, Tensor) and value.is_complex()
        require(not is_complex, "scalar", "BlockMean", "real", "a complex tensor", TypeError)
        return torch.as_tensor(value, dtype=self.dtype, device=self.device)[..., None, None]

    # ---------------------------------------------------------------- what rounding allows

    def _precision(self) -> torch.dtype:
        """The precision of the numbers that A is made of: λ and B as given, or A itself if it was computed first."""
        return self.dtype if self._A is None else self._A.dtype

    def _error(self) -> Tensor:
        """How far rounding may have moved each entry of A, (..., L, L)."""
        if self._A is None:  # λ_i and s_i b_ii may cancel
            parts = torch.diag_embed(to_float64(self.lam).abs())
            parts = parts + to_float64(self.B).abs() * _root_sizes(self.partition, self.lam)
        else:
            parts = self._canonical().abs()
        return ROUNDING * torch.finfo(self._precision()).eps * parts.detach()

    def _remedy(self, bad: Tensor) -> str:
        """How to make the matrices that are singular to rounding invertible."""
        by = self._error().sum(-1).amax(-1)[bad].max()
        exact = "Compute λ and B in float64, or use" if self._precision() == torch.float32 else "Use"
        above = f" with a δ above {by:.1g}, the size of rounding errors," if by > 0 else ""
        return f"{exact} damped(δ){above} to add δ to every eigenvalue."

    def _tolerance(self) -> float:
        """The rounding error of an L×L matrix of this dtype, relative to its size."""
        return 4 * self.partition.num_blocks * torch.finfo(self.dtype).eps

    def _size(self, A: Tensor) -> Tensor:
        """The largest number in A and λ, (...): if block sums cancel, A alone may be just rounding errors of λ."""
        return torch.cat([A.flatten(-2), self._inner().detach()], -1).abs().amax(-1)

    def _is_symmetric(self) -> bool:
        A = self._canonical().detach()
        return bool(((A - A.mT).abs().amax((-2, -1)) <= self._tolerance() * self._size(A)).all())

    def _spectrum(self, what: str, *, definite: bool = False, semidefinite: bool = False) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of A, without a graph; raises unless A is symmetric, and definite if asked."""
        if not self._is_symmetric():
            A = self._canonical().detach()
            raise ValueError(
                f"BlockMean.{what} needs a symmetric matrix. A differs from its transpose by "
                f"{(A - A.mT).abs().max():.3g}. inverse(), solve(), power(n) and @ take any matrix."
            )
        A = symmetrised(self._canonical().detach())
        good = is_definite(A, self._error())
        w, Q = torch.linalg.eigh(A)
        if bool(good.all() and (w[..., 0] < 1e-3 * w[..., -1]).any()):  # eigh would lose more than 3 digits
            w, Q = definite_eigh(A)
        if definite or semidefinite:
            kind = "positive definite" if definite else "positive semi-definite"
            inner = self._inner().detach()
            # λ_i + b_ii and b_ii are entries of M: their difference has an error even if λ_i itself is 0.
            entries = (self.lam.abs() + self.B.diagonal(dim1=-2, dim2=-1).abs())[..., self.partition.nonsingleton]
            floor = -ROUNDING * torch.finfo(self.dtype).eps * to_float64(entries.detach())
            self._refuse_inner(what, ~(inner > 0) if definite else ~(inner >= floor), f"is not {kind}")
            bad = ~good if definite else ~(w[..., 0] >= -self._tolerance() * self._size(A))
            if bad.any():
                smallest, largest = w[..., 0][bad][0], w[..., -1][bad][0]
                to_rounding = f" to the precision of its numbers, {self._precision()}" if smallest > 0 else ""
                remedy = self._remedy(bad) if smallest > 0 else "damped(δ) adds δ to all of them."
                raise ValueError(
                    f"BlockMean.{what}: the matrix is not {kind}{to_rounding}. Its smallest eigenvalue between blocks "
                    f"(of A) is {smallest:.6g}, its largest {largest:.6g}. {remedy}"
                )
        return w, Q

    def _refuse_inner(self, what: str, bad: Tensor, complaint: str) -> None:
        """Raise if a λ is bad, naming the first such block."""
        if bad.any():
            *batch, i = bad.nonzero()[0].tolist()
            block = int(self.partition.nonsingleton[i])
            where = f" (matrix {batch} of the batch)" if batch else ""
            raise ValueError(
                f"BlockMean.{what}: the matrix {complaint}. λ = {self.lam[(*batch, block)]:.6g} of block {block} "
                f"('{self.partition.names[block]}', {int(self.partition.sizes[block])} entries){where}."
            )


def _root_sizes(partition: Partition, like: Tensor) -> Tensor:
    """√(s_i s_j), (L, L), with exactly s_i on the diagonal: a λ_i + s_i b_ii that is 0 must come out as 0."""
    sizes = to_float64(partition.sizes.to(like.device))
    return torch.outer(sizes, sizes).sqrt()


def _require_partition(partition: object, owner: str) -> None:
    require(isinstance(partition, Partition), "partition", owner, "a Partition", partition, TypeError)


# ---------------------------------------------------------------- entries in runs of blocks of equal size


def _deviations(partition: Partition, rows: Tensor, batch: torch.Size) -> tuple[list[Tensor], Tensor]:
    """x − c_i in each run of blocks of equal size, (..., k, blocks, entries), and the points c, (..., k, L).

    They are new tensors with the shape of the whole batch, so a product can be finished in place.
    """
    if not partition.is_contiguous:
        rows = rows.index_select(-1, partition._indices_on(rows.device)[1])
    batch = torch.broadcast_shapes(batch, rows.shape[:-2])
    deviations, points = [], []
    lengths = [count * size for _, _, count, size in partition._runs]
    for run, (_, _, count, size) in zip(rows.split(lengths, -1), partition._runs, strict=True):
        blocks = run.unflatten(-1, (count, size))
        sample = blocks.detach().narrow(-1, 0, -(-size // SAMPLE))
        c = to_float64(sample).mean(-1, keepdim=True).to(rows.dtype)  # a block that is constant is c, to the last digit
        if batch != c.shape[:-3]:
            c = c.expand(*batch, *c.shape[-3:])
        deviations.append(blocks - c)
        points.append(c)
    return deviations, torch.cat(points, -2).squeeze(-1)


def _by_run(partition: Partition, y: Tensor) -> tuple[Tensor, ...]:
    """One number per block, (..., L), for each run of blocks, (..., blocks, 1)."""
    return torch.split(y.unsqueeze(-1), [count for _, _, count, _ in partition._runs], -2)


def _scale_shift_(y: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """scale_i y + shift_i on each block of a run, in place; addcmul is three times as slow when it broadcasts."""
    blocks = max(1, CACHED // y.shape[-1])  # so that the second pass finds its numbers in the cache
    # Autograd does not take views of a split in place.
    if y.shape[-2] <= blocks or any(z.requires_grad for z in (y, scale, shift)):
        return y.mul_(scale).add_(shift)
    for part, factor, by in zip(*(z.split(blocks, -2) for z in (y, scale, shift)), strict=True):
        part.mul_(factor).add_(by)
    return y
