"""Newton's method is invariant to all linear changes of coordinates. To which is its block mean invariant?

    python examples/newton_invariance.py

The paper's appendix: let ξ = Tθ with an invertible T, and minimise g(θ) = f(Tθ) instead of f(ξ). The Hessian of g is
TᵀHT and its gradient Tᵀ∇f, so Newton's iterates always satisfy ξ_t = Tθ_t. With a preconditioner C(H) in place of H
this holds if and only if C(TᵀHT) = TᵀC(H)T for every H.

The block mean E(H) is the average of PᵀHP over all permutations P inside blocks. A block-mean matrix T commutes with
every such P, so E(TᵀHT) = TᵀE(H)T: this covers one scale per block, and any mixing of whole blocks. An orthogonal T
that keeps block sums and rotates the zero-sum directions inside each block maps block-mean matrices to themselves, so
it commutes with the orthogonal projection E as well. Products of the two also work, and so does exchanging the zero-sum
directions of blocks of equal size; nothing else does (docs/curvature-examples.md has the argument). In particular, a
separate scale for every entry, which a diagonal preconditioner absorbs, does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blockmean import BlockMean, Partition

PARTITION = Partition.from_sizes([2, 3, 4])
D = PARTITION.num_entries
STEPS = 10

Loss = Callable[[Tensor], Tensor]
Direction = Callable[[Tensor, Tensor], Tensor]  # (Hessian, gradient) → step

METHODS: dict[str, Direction] = {
    "gradient": lambda H, g: 0.05 * g,
    "Newton": lambda H, g: torch.linalg.solve(H, g),
    "diagonal": lambda H, g: 0.5 * g / H.diagonal(),
    "block mean": lambda H, g: 0.5 * BlockMean.fit(H, PARTITION).solve(g),
}


def convex(random: torch.Generator) -> Loss:
    """A smooth, strictly convex function that is far from quadratic: logistic regression on 40 points."""
    points, labels = _normal(random, 40, D), _normal(random, 40).sign()

    def loss(x: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-labels * (points @ x)).sum() + 0.5 * x.square().sum()

    return loss


def reparametrisations(random: torch.Generator) -> dict[str, Tensor]:
    """Matrices T, (d, d), from the most special to the most general."""
    L, s = PARTITION.num_blocks, PARTITION.sizes
    mixing = BlockMean(PARTITION, 1 + torch.rand(L, generator=random).double(), 0.3 * _normal(random, L, L))
    turns = torch.block_diag(*(_turn(int(size), random) for size in s))
    return {
        "permutation inside blocks": torch.block_diag(*(torch.eye(int(n), dtype=torch.float64).flip(0) for n in s)),
        "rotation of what sums to zero": turns,
        "one scale per block": torch.diag(PARTITION.expand(torch.tensor([0.2, 1.0, 3.0]).double())),
        "block-mean matrix": mixing.to_dense(),
        "block-mean matrix × rotation": mixing.to_dense() @ turns,
        "one scale per entry": torch.diag(torch.linspace(0.5, 2, D, dtype=torch.float64)),
        "any matrix": torch.eye(D, dtype=torch.float64) + 0.3 * _normal(random, D, D),
    }


def iterates(loss: Loss, start: Tensor, direction: Direction) -> Tensor:
    """The points that a method visits, (STEPS + 1, d)."""
    points = [start]
    for _ in range(STEPS):
        x = points[-1]
        H = torch.autograd.functional.hessian(loss, x)
        g = torch.autograd.functional.jacobian(loss, x)
        points.append(x - direction(H, g))
    return torch.stack(points)


def table() -> dict[str, dict[str, float]]:
    """The largest ‖ξ_t − Tθ_t‖ over the distance from ξ_0 to the last ξ_t, for every T and every method."""
    random = torch.Generator().manual_seed(0)
    loss, start = convex(random), 0.3 * _normal(random, D)
    before = {method: iterates(loss, start, direction) for method, direction in METHODS.items()}
    rows: dict[str, dict[str, float]] = {}
    for name, T in reparametrisations(random).items():
        rows[name] = {}
        for method, direction in METHODS.items():
            theta = iterates(lambda x, T=T: loss(T @ x), torch.linalg.solve(T, start), direction)
            xi = before[method]
            rows[name][method] = float((xi - theta @ T.mT).norm(dim=-1).max() / (xi[0] - xi[-1]).norm())
    return rows


def _turn(size: int, random: torch.Generator) -> Tensor:
    """A random orthogonal matrix that keeps the vector of ones, (size, size)."""
    ones = torch.full((size, 1), size**-0.5, dtype=torch.float64)
    basis = torch.linalg.qr(torch.cat([ones, _normal(random, size, size - 1)], 1))[0]
    inside = torch.linalg.qr(_normal(random, size - 1, size - 1))[0]
    return basis @ torch.block_diag(torch.ones(1, 1, dtype=torch.float64), inside) @ basis.mT


def _normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random, dtype=torch.float64)


def main() -> None:
    print(f"How far {STEPS} steps after a reparametrisation ξ = Tθ are from those before it; about 1e-15 is rounding\n")
    print(f"{'T':32}" + "".join(f"{method:>12}" for method in METHODS))
    for name, row in table().items():
        print(f"{name:32}" + "".join(f"{value:12.0e}" for value in row.values()))
    print("\nNewton's method is invariant to every T. Its block mean is invariant to block-mean matrices, such as a")
    print("scale per block, and to zero-sum rotations inside a block, but not to a scale per entry; the diagonal is.")


if __name__ == "__main__":
    main()
