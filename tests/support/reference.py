"""Dense, slow, obviously-correct twins of the library in numpy and scipy. They share no code with src/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.fft
import scipy.linalg
import torch
from numpy.typing import NDArray

Array = NDArray[Any]

# Matrices with condition numbers of a few hundred, through different but backward stable algorithms (and scipy's sqrtm
# and logm): 1e-16 · cond · d stays below this in float64, with two digits to spare.
TOLERANCE = 1e-10


def assert_close(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Assert equal shapes, and no error larger than `tolerance` times the largest expected entry."""
    a, b = (x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (actual, expected))
    assert a.shape == b.shape, f"shape {a.shape} where {b.shape} is expected"
    if b.size:
        error, size = np.abs(a - b).max(), np.abs(b).max()
        assert error <= tolerance * (size or 1.0), f"off by {error:.3g} beside {size:.3g}"


# ---------------------------------------------------------------- partitions


def blocks_of(labels: Sequence[int]) -> list[list[int]]:
    """The entries of each block."""
    return [[k for k, label in enumerate(labels) if label == i] for i in range(max(labels) + 1)]


def block_sum(x: Array, blocks: list[list[int]]) -> Array:
    """Σ of the entries of each block, (..., d) → (..., L)."""
    return np.stack([sum(x[..., k] for k in block) for block in blocks], -1)


def expand(y: Array, blocks: list[list[int]]) -> Array:
    """Each block's value at each of its entries, (..., L) → (..., d)."""
    x = np.empty((*y.shape[:-1], sum(map(len, blocks))), y.dtype)
    for i, block in enumerate(blocks):
        for k in block:
            x[..., k] = y[..., i]
    return x


# ---------------------------------------------------------------- the paper's expansion matrices and Proposition 1


def diagonal_expansion(lam: Array, blocks: list[list[int]]) -> Array:
    """Λ̄: λ_i at the diagonal entries of block i."""
    return np.diag(expand(lam, blocks))


def full_expansion(B: Array, blocks: list[list[int]]) -> Array:
    """B̄: b_ij at every entry of block ij."""
    d = sum(map(len, blocks))
    M = np.empty((d, d))
    for i, rows in enumerate(blocks):
        for j, columns in enumerate(blocks):
            for m in rows:
                for n in columns:
                    M[m, n] = B[i, j]
    return M


def block_mean(lam: Array, B: Array, blocks: list[list[int]]) -> Array:
    """Λ̄ + B̄."""
    return diagonal_expansion(lam, blocks) + full_expansion(B, blocks)


def dense(M: Any) -> Array:
    """A BlockMean, or a batch of them, as dense matrices, from λ, B and the label of each entry only."""
    blocks, L = blocks_of(M.partition.labels.tolist()), M.partition.num_blocks
    lam, B = (x.detach().double().numpy() for x in (M.lam, M.B))
    batch = [block_mean(l, b, blocks) for l, b in zip(lam.reshape(-1, L), B.reshape(-1, L, L), strict=True)]
    d = M.partition.num_entries
    return np.array(batch).reshape(*lam.shape[:-1], d, d)


def proposition_1(M: Array, blocks: list[list[int]]) -> tuple[Array, Array]:
    """λ and B of the nearest block-mean matrix, transcribed literally from the paper's equations (b_ij) and (λ_i)."""
    L = len(blocks)
    s = [len(block) for block in blocks]
    lam, B = np.zeros(L), np.zeros((L, L))
    for i in range(L):
        for j in range(L):
            total = sum(M[m, n] for m in blocks[i] for n in blocks[j])
            if i != j:
                B[i, j] = total / (s[i] * s[j])
            elif s[i] == 1:
                B[i, i] = 0
            else:
                B[i, i] = (total - sum(M[m, m] for m in blocks[i])) / (s[i] * (s[i] - 1))
    for i in range(L):
        lam[i] = sum(M[m, m] for m in blocks[i]) / s[i] - B[i, i]
    return lam, B


def canonical(lam: Array, B: Array, blocks: list[list[int]]) -> Array:
    """A = Λ + S^½ B S^½."""
    root_s = np.diag([len(block) ** 0.5 for block in blocks])
    return np.diag(lam) + root_s @ B @ root_s


# ---------------------------------------------------------------- functions of dense matrices


def power(M: Array, p: float) -> Array:
    """M^p of a symmetric positive definite matrix."""
    return np.real(scipy.linalg.fractional_matrix_power(M, p))


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "inverse": scipy.linalg.inv,
    "sqrt": lambda M: np.real(scipy.linalg.sqrtm(M)),
    "inverse_sqrt": lambda M: scipy.linalg.inv(np.real(scipy.linalg.sqrtm(M))),
}
"""The paper's Theorem 1, Lemma 1 and Theorem 2, by the name of the method."""

ELEMENTWISE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Array], Array]]] = {
    "exp": (torch.exp, scipy.linalg.expm),
    "log": (torch.log, lambda M: np.real(scipy.linalg.logm(M))),
    "cos": (torch.cos, scipy.linalg.cosm),
    "sign": (torch.sign, lambda M: np.real(scipy.linalg.signm(M))),
    "cube": (lambda x: x**3, lambda M: M @ M @ M),
}
"""f on eigenvalues, and f of a dense matrix."""


# -------------------------------------------------------------------- optimizers, with d×d matrices written out
#
# Parameters are one vector. `labels` gives the block of every entry, `modules` the coupling group of every block.


def labels_of(shapes, by, names, leave_plain=False):
    """The block of every entry, by literal loops over indices; −1 if an optimizer leaves the entry uncorrected."""
    numbers, labels = {}, []
    for name, shape in zip(names, shapes, strict=True):
        for index in np.ndindex(*shape):
            key = {
                "tensor": (name,),
                "unit": (name, index[0]) if len(shape) >= 2 else (name, index),
                "kernel": (name, *index[:2]) if len(shape) >= 3 else (name, index[0] if len(shape) >= 2 else index),
                "module": (name.rpartition(".")[0],),
                "all": (),
                "element": (name, index),
            }[by]
            if leave_plain and by in ("unit", "kernel") and len(shape) < 2:
                labels.append(-1)
                continue
            labels.append(numbers.setdefault(key, len(numbers)))
    return np.array(labels)


def modules_of(labels, shapes, names, coupling):
    """The coupling group of every block."""
    blocks = labels.max() + 1
    if coupling == "all":
        return np.zeros(blocks, dtype=int)
    if coupling == "none":
        return np.arange(blocks)
    owner = np.concatenate([[name.rpartition(".")[0]] * int(np.prod(s)) for name, s in zip(names, shapes, strict=True)])
    numbers = {}
    return np.array([numbers.setdefault(owner[labels == i][0], len(numbers)) for i in range(blocks)])


def inverse_root(M, floor):
    w, Q = np.linalg.eigh(M)
    return Q @ np.diag(np.maximum(w, floor) ** -0.5) @ Q.T


class DenseAdaGradBMA:
    """AdaGrad-BMA with the d×d matrix F written out; `floor` must not exceed 1, so that only A is clamped."""

    def __init__(self, theta, labels, modules, *, variant, floor, lr, eps=1e-10, refresh_every=1, initial=0.0):
        self.theta, self.labels, self.modules = theta.copy(), labels, modules
        self.variant, self.floor, self.lr, self.eps, self.every = variant, floor, lr, eps, refresh_every
        d = len(theta)
        self.r = np.full(d, initial)
        self.H = initial * np.eye(d)  # Σ g gᵀ
        self.t = 0
        self.preconditioner = None
        self.coupled = modules[labels][:, None] == modules[labels][None, :]  # entries whose blocks share a matrix
        self.same = labels[:, None] == labels[None, :]

    def step(self, g, has_gradient=None):
        """`has_gradient`: which entries have a gradient; blocks without any sit out."""
        d = len(g)
        present = np.ones(d, bool) if has_gradient is None else has_gradient
        on = np.array([present[self.labels == label].any() and label >= 0 for label in self.labels])
        self.t += 1
        self.r += g * g
        self.H += np.outer(g, g)
        z = np.sqrt(self.r + self.eps)
        delta = np.where(self.labels < 0, g / z, 0.0)
        keep = np.flatnonzero(on)
        delta[keep] = self._direction(keep, g[keep], z[keep])
        self.theta -= self.lr * np.where(present, delta, 0.0)

    def _direction(self, k, g, z):
        coupled, same = self.coupled[np.ix_(k, k)], self.same[np.ix_(k, k)]
        r, labels = self.r[k], self.labels[k]
        refresh = (self.t - 1) % self.every == 0
        s = same.sum(1)
        block_sum = same.astype(float)  # block_sum @ x: the sum over x's own block, at every entry
        if self.variant == "weighted":
            zeta = np.sqrt(r)
            n = np.sqrt(block_sum @ r)
            blocks = np.unique(labels)
            R = np.stack([np.where(labels == i, zeta / np.where(n > 0, n, 1), 0.0) for i in blocks], 1)  # (d, L)
            inverse = np.where(zeta > 0, 1 / np.where(zeta > 0, zeta, 1), 0.0)
            P = inverse[:, None] * self.H[np.ix_(k, k)] * inverse[None, :] * coupled
            if refresh:
                dead = ~(R > 0).any(0)
                A = R.T @ P @ R + np.diag(dead.astype(float))
                self.root = inverse_root(A, self.floor) - np.eye(len(blocks))
            F = np.eye(len(k)) + R @ self.root @ R.T
            self.preconditioner = np.diag(z**-0.5) @ F @ np.diag(z**-0.5)
            return self.preconditioner @ g
        v = block_sum @ z
        U = block_sum @ self.H[np.ix_(k, k)] @ block_sum.T
        B = np.where(same | ~coupled, 0.0, U / np.outer(v, v) / np.sqrt(np.outer(s, s)))
        if refresh:
            self.F = inverse_root(np.eye(len(k)) + B, self.floor)
        if self.variant == "consistent":
            self.preconditioner = np.diag(z**-0.5) @ self.F @ np.diag(z**-0.5)
            return self.preconditioner @ g
        scaled = z**-0.5 * g + (self.F - np.eye(len(k))) @ g  # line 15 with the raw block sums, as printed
        return z**-0.5 * scaled


class DenseAdaGradFull:
    """θ ← θ − η H^-½ g."""

    def __init__(self, theta, *, lr, floor=1e-8):
        self.theta, self.lr, self.floor = theta.copy(), lr, floor
        self.H = np.zeros((len(theta), len(theta)))

    def step(self, g):
        self.H += np.outer(g, g)
        self.theta -= self.lr * inverse_root(self.H, self.floor) @ g


class DenseAdamBMA:
    """AdamW with the weighted block mean, F written out as a d×d matrix; `floor` must not exceed 1."""

    def __init__(self, theta, labels, modules, *, lr, betas=(0.9, 0.999), eps=1e-8, decay=0.0, floor=1.0, cap=None):
        self.theta, self.labels, self.modules = theta.copy(), labels, modules
        self.lr, self.betas, self.eps, self.decay, self.floor, self.cap = lr, betas, eps, decay, floor, cap
        d = len(theta)
        self.m, self.H, self.t = np.zeros(d), np.zeros((d, d)), 0

    def step(self, g):
        self.t += 1
        b1, b2 = self.betas
        self.m = b1 * self.m + (1 - b1) * g
        self.H = b2 * self.H + (1 - b2) * np.outer(g, g)
        m = self.m / (1 - b1**self.t)
        H = self.H / (1 - b2**self.t)
        zeta = np.sqrt(np.diag(H))
        z = zeta + self.eps
        L = self.labels.max() + 1
        R = np.zeros((len(g), L))
        for i in range(L):
            inside = self.labels == i
            length = np.linalg.norm(zeta[inside])
            if length > 0:
                R[inside, i] = zeta[inside] / length
        inverse = np.where(zeta > 0, 1 / np.where(zeta > 0, zeta, 1), 0.0)
        coupled = self.modules[:, None] == self.modules[None, :]
        A = coupled * (R.T @ (inverse[:, None] * H * inverse) @ R)
        A += np.diag((R == 0).all(0).astype(float))
        lam = np.ones(L)
        for i in range(L):
            s = (self.labels == i).sum()
            if s > 1 and (R[:, i] != 0).any() and self.cap is None:
                lam[i] = max((s - max(A[i, i], 1.0)) / (s - 1), 0.1)
        w, Q = np.linalg.eigh(A)
        between = Q @ np.diag(np.maximum(w, self.floor)) @ Q.T
        inside = np.array([lam[label] if label >= 0 else 1.0 for label in self.labels])
        # λ_i on everything inside block i that is orthogonal to its mean, the floored A between the means.
        F = np.diag(inside) + R @ (between - np.diag(lam)) @ R.T
        root = inverse_root(F, 0.0)
        diagonal = inside**-0.5 * m / z
        delta = z**-0.5 * (root @ (z**-0.5 * m))
        if self.cap is not None:
            for i in range(L):
                inside = self.labels == i
                correction = delta[inside] - diagonal[inside]
                limit = self.cap * np.linalg.norm((m / z)[inside])
                if np.linalg.norm(correction) > limit:
                    delta[inside] = diagonal[inside] + correction * limit / np.linalg.norm(correction)
        self.theta = self.theta * (1 - self.lr * self.decay) - self.lr * delta


class DenseNaturalGradient:
    """v ← μ v + √τ (F + δτI)⁻¹ g, θ ← θ − η (v + w θ), with F the block mean, by loops, of two averages of g gᵀ."""

    def __init__(self, theta, labels, modules, *, lr, damping, beta, momentum=0.0, decay=0.0):
        self.theta, self.labels, self.modules = theta.copy(), labels, modules
        self.lr, self.damping, self.beta, self.momentum, self.decay = lr, damping, beta, momentum, decay
        self.gradients, self.v = [], np.zeros(len(theta))

    def fisher(self):
        T, d = len(self.gradients), len(self.theta)
        recent = np.array([self.beta ** (T - 1 - t) for t in range(T)])
        H = np.zeros((d, d))
        for g, weight in zip(self.gradients, recent / recent.sum(), strict=True):
            H += (weight / 2 + 1 / (2 * T)) * np.outer(g, g)
        F = np.zeros_like(H)
        blocks = [np.flatnonzero(self.labels == i) for i in range(self.labels.max() + 1)]
        for i, rows in enumerate(blocks):
            for j, columns in enumerate(blocks):
                part = H[np.ix_(rows, columns)]
                if i != j and self.modules[i] == self.modules[j]:
                    F[np.ix_(rows, columns)] = part.mean()
                elif i == j:
                    s = len(rows)
                    off = (part.sum() - np.trace(part)) / (s * (s - 1)) if s > 1 else 0.0
                    F[np.ix_(rows, rows)] = off + np.eye(s) * (np.trace(part) / s - off)
        return F

    def step(self, g):
        self.gradients.append(g.copy())
        F = self.fisher()
        tau = np.trace(F) / len(g)
        direction = np.sqrt(tau) * np.linalg.solve(F + self.damping * tau * np.eye(len(g)), g)
        self.v = self.momentum * self.v + direction
        self.theta -= self.lr * (self.v + self.decay * self.theta)


class DenseAnova:
    """The four parts of a gradient matrix, projectors written out, QR by Householder reflections, no linearity used."""

    def __init__(self, theta, units, inputs, *, lr, betas, mean_beta, every, eps=1e-8, decay=0.0):
        self.theta, self.k, self.q = theta.copy(), min(units, theta.shape[0]), min(inputs, theta.shape[1])
        self.lr, self.betas, self.mean_beta, self.every, self.eps, self.decay = lr, betas, mean_beta, every, eps, decay
        self.m, self.t, self.variance, self.rest_variance, self.c = np.zeros_like(theta), 0, 0.0, 0.0, 0.0

    @staticmethod
    def start(A, k):
        """Cosines over the rows of A that are not zero, then two subspace iterations."""
        alive = np.flatnonzero((A != 0).any(1))
        W = np.zeros((len(A), k))
        for j in range(min(k, len(alive))):
            unit = np.zeros(len(alive))
            unit[j] = 1.0
            W[alive, j] = scipy.fft.idct(unit, norm="ortho")
        for _ in range(2):
            W = DenseAnova.orthonormal(A @ A.T @ W, W)
        return W

    @staticmethod
    def orthonormal(Y, old):
        if Y.shape[1] == 0:
            return old
        lengths = np.linalg.norm(Y, axis=0)
        noise = 2.0**-19 * lengths.max()
        Z = (
            np.stack([y / size if size > noise else 0 * y for y, size in zip(Y.T, lengths, strict=True)], 1)
            + 1e-3 * old
        )
        Q, R = np.linalg.qr(Z)
        signs = np.sign(np.diag(R))
        return Q * signs if np.abs(np.diag(R)).min() > 1e-5 else old

    def split(self, G):
        """The four parts, each as a matrix of the shape of G."""
        PU, PV = self.U @ self.U.T, self.V @ self.V.T
        QU, QV = np.eye(len(PU)) - PU, np.eye(len(PV)) - PV
        return PU @ G @ PV, QU @ G @ PV, PU @ G @ QV, QU @ G @ QV

    def coordinates(self, A):
        """K, R, L and E of a matrix."""
        K, R, L, E = self.split(A)
        return [self.U.T @ K @ self.V, R @ self.V, self.U.T @ L, E]

    def mean_squares(self, A):
        """Of every block: entries of K, columns of R, rows of L and of E; the latter as if E_i·(UL)_i were zero."""
        K, R, L, E = (part**2 for part in self.coordinates(A))
        beside_V = ((A - A @ self.V @ self.V.T) ** 2).mean(1, keepdims=True)
        of_L = (self.split(A)[2] ** 2).mean(1, keepdims=True)
        share = E.mean() / (beside_V.mean() or 1)
        rows = np.maximum(abs(beside_V - of_L), share * beside_V)
        rows = np.maximum(rows, 2.0**-18 * (A**2).mean(1, keepdims=True))
        return [K, R.mean(0, keepdims=True), L.mean(1, keepdims=True), rows]

    def roots(self):
        decays = (self.mean_beta, self.mean_beta, self.mean_beta, self.betas[1])
        return [np.sqrt(v / (1 - beta**self.t)) + self.eps for v, beta in zip(self.v, decays, strict=True)]

    def factor(self, A):
        """What one second moment promises to gain along A, over what the second moments of blocks do."""
        *means, E = self.coordinates(A)
        ours = sum((part**2 / root).sum() for part, root in zip(means, self.roots(), strict=False))
        sigma, rest = (np.sqrt(v / (1 - self.betas[1] ** self.t)) for v in (self.variance, self.rest_variance))
        ours += max((E**2).sum() - 2.0**-18 * (A**2).sum(), 0) / (rest or 1)
        return np.clip((A**2).sum() / sigma / ours, 0.7, 20.0)

    def step(self, G):
        O, I = G.shape
        if self.t == 0:
            self.U, self.V = self.start(G, self.k), self.start(G.T, self.q)
            self.X, self.Y = np.zeros_like(self.U), np.zeros_like(self.V)
            self.v = [np.zeros((self.k, self.q)), np.zeros((1, self.q)), np.zeros((self.k, 1)), np.zeros((O, 1))]
        self.t += 1
        U, V = self.U, self.V
        beta1, beta2 = self.betas
        decays = (self.mean_beta, self.mean_beta, self.mean_beta, beta2)
        self.m = beta1 * self.m + (1 - beta1) * G
        average = self.m / (1 - beta1**self.t)
        known = (G**2).sum() + self.v[0].sum() + O * self.v[1].sum() + I * self.v[2].sum()
        for i, (square, beta) in enumerate(zip(self.mean_squares(G), decays, strict=True)):
            self.v[i] = beta * self.v[i] + (1 - beta) * square
        self.variance = beta2 * self.variance + (1 - beta2) * (G**2).mean()
        self.rest_variance = beta2 * self.rest_variance + (1 - beta2) * (self.coordinates(G)[-1] ** 2).mean()
        size = known**0.5 * 2.0**-19
        noise = [size, size / O**0.5, size / I**0.5, size / (O * I) ** 0.5]
        K, R, L, E = (
            part / (root + floor)
            for part, root, floor in zip(self.coordinates(average), self.roots(), noise, strict=True)
        )
        c = max(min(self.c, (3e-2 / self.lr) ** 0.5, 7e-3 / self.lr), 0.7)
        # A grand mean that agrees over steps moves as with one second moment for all entries, but no less than others.
        root_K, sigma = self.roots()[0] + noise[0], np.sqrt(self.variance / (1 - beta2**self.t)) + self.eps
        lifted = np.maximum(c, np.minimum(K**2, 1) * root_K / sigma)
        delta = U @ (lifted * K) @ V.T + c * (R @ V.T + U @ L + E)
        self.theta = self.theta * (1 - self.lr * self.decay) - self.lr * delta
        self.X = 0.95 * self.X + 0.05 * (G @ V @ (U.T @ G @ V).T if self.q else G @ G.T @ U)
        self.Y = 0.95 * self.Y + 0.05 * (G.T @ U @ (U.T @ G @ V) if self.k else G.T @ G @ V)
        if self.t % self.every == 0:
            self.U, self.V = self.orthonormal(self.X, U), self.orthonormal(self.Y, V)
            by_U, by_V = (U.T @ self.U) ** 2, (V.T @ self.V) ** 2
            self.v[0] = by_U.T @ self.v[0] @ by_V
            self.v[1] = self.v[1] @ by_V
            self.v[2] = by_U.T @ self.v[2]
            self.X, self.Y = self.U @ self.U.T @ self.X, self.V @ self.V.T @ self.Y
            for i, (square, beta) in enumerate(zip(self.mean_squares(average), decays, strict=True)):
                w = np.array([(1 - beta1) * beta1**j for j in range(self.t)]) / (1 - beta1**self.t)
                u = np.array([(1 - beta) * beta**j for j in range(self.t)]) / (1 - beta**self.t)
                bound = (w**2 / u).sum()  # (Σ w g)² ≤ (Σ w²/u) (Σ u g²)
                self.v[i] = np.maximum(self.v[i], (1 - beta**self.t) * square / bound)
            self.c = 0.8 * self.c + 0.2 * self.factor(average)
