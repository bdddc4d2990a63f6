"""(A^-½ − I) b with a floor under the eigenvalues, the problem between coupled blocks: ways to compute it, by size.

    python benchmarks/roots.py [--sizes 10 30 …] [--out benchmarks/results/roots.json]

A is U / (n nᵀ) of random gradients, whose eigenvalues are all above the floor: Newton's iteration knows no floor, and
only stands here for what a method without eigenvalues would cost. One thread, float64, one interleaved run per size.
The second part takes several matrices of one size, as coupling "module" has them, the third one matrices near I, as
blocks with many entries have them: there the kernel takes a series.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import scipy.linalg
import torch
from torch import Tensor

from blockmean._linalg import inverse_root_minus_identity
from blockmean.lab.environment import environment, use_threads
from blockmean.lab.timing import interleaved, ratios, summary
from blockmean.optim import native

FLOOR = 0.1
YARDSTICK = "eigh, root formed"
SIZES = (10, 30, 100, 200, 256, 300, 400, 512, 1000, 2000)
BATCHES = ((16, 8), (16, 34), (16, 128), (8, 300))
NATIVE_UP_TO = 512
NEAR = 0.3
"""How far the rows of a matrix near I are from those of I, summed over their entries: 0.37 for 50M in 150 tensors."""


def problem(size: int, seed: int = 0, near: bool = False) -> tuple[Tensor, Tensor]:
    """A matrix with ones on its diagonal, and b."""
    generator = torch.Generator().manual_seed(seed)
    G = torch.randn(size, 4 * size, generator=generator, dtype=torch.float64)
    G /= G.norm(dim=1, keepdim=True)
    A, b = G @ G.T, torch.randn(size, generator=generator, dtype=torch.float64)
    if near:
        C = A - torch.eye(size, dtype=A.dtype)
        A = torch.eye(size, dtype=A.dtype) + C * (NEAR / C.abs().sum(1).max())
    return A, b


def factor(w: Tensor) -> Tensor:
    """What an eigenvalue becomes."""
    return w.clamp(min=FLOOR).rsqrt() - 1


def formed(A: Tensor, b: Tensor) -> Tensor:
    return inverse_root_minus_identity(A, FLOOR) @ b


def applied(A: Tensor, b: Tensor) -> Tensor:
    w, Q = torch.linalg.eigh(A)
    return Q @ (factor(w) * (Q.T @ b))


def by_scipy(driver: str, A: Tensor, b: Tensor) -> Tensor:
    w, Q = (torch.from_numpy(x) for x in scipy.linalg.eigh(A.numpy(), driver=driver, check_finite=False))
    return Q @ (factor(w) * (Q.T @ b))


def by_newton(A: Tensor, b: Tensor) -> Tensor:
    """Denman and Beavers' iteration in the form of products (Newton and Schulz), to rounding."""
    size = A.norm()
    Y, Z, identity = A / size, torch.eye(len(A), dtype=A.dtype), torch.eye(len(A), dtype=A.dtype)
    for _ in range(60):
        T = (3 * identity - Z @ Y) / 2
        Y, Z = Y @ T, T @ Z
        if (T - identity).abs().max() < 1e-12:
            break
    return Z @ b / size.sqrt() - b


def by_kernel(A: Tensor, b: Tensor) -> Tensor:
    out = torch.empty_like(b)
    made = native._kernels.solver(len(A), [])
    assert native._kernels.times_root(made, A.data_ptr(), len(A), FLOOR, b.data_ptr(), out.data_ptr())
    return out


def ways(size: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Every way that is not hopeless at this size."""
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {YARDSTICK: formed, "eigh, applied": applied}
    if native.is_available() and size <= NATIVE_UP_TO:
        found["native, no eigenvectors"] = by_kernel
    found |= {f"scipy {driver}, applied": partial(by_scipy, driver) for driver in ("evd", "evr")}
    return {**found, "Newton-Schulz, no floor": by_newton}


def measure(size: int, repetitions: int, near: bool = False) -> list[dict[str, object]]:
    A, b = problem(size, near=near)
    expected = formed(A, b)
    calls = {name: partial(way, A, b) for name, way in ways(size).items()}
    samples = interleaved(calls, repetitions)
    rows: list[dict[str, object]] = []
    for name, ratio in ratios(samples, YARDSTICK).items():
        apart = float((calls[name]() - expected).norm() / expected.norm())
        about = {"blocks": size, "how": name, "relative_difference": apart}
        rows.append({**about, "ratio": ratio, "seconds": summary(samples[name])})
        print(f"{size:5} {name:24} {rows[-1]['seconds']['median'] * 1e3:10.3f} ms {ratio['median']:6.2f} x", flush=True)
    return rows


def measure_batch(count: int, size: int, repetitions: int) -> list[dict[str, object]]:
    problems = [problem(size, seed) for seed in range(count)]
    A, b = (torch.stack(column) for column in zip(*problems, strict=True))

    def batched() -> Tensor:
        w, Q = torch.linalg.eigh(A)
        return (Q @ (factor(w)[..., None] * (Q.mT @ b[..., None])))[..., 0]

    calls = {"one by one": lambda: [applied(*one) for one in problems], "batched": batched}
    if native.is_available():
        calls["native, one by one"] = lambda: [by_kernel(*one) for one in problems]
    samples = interleaved(calls, repetitions)
    rows: list[dict[str, object]] = []
    for name, ratio in ratios(samples, "one by one").items():
        about = {"matrices": count, "blocks": size, "how": name}
        rows.append({**about, "ratio": ratio, "seconds": summary(samples[name])})
        print(f"{count} x {size:4} {name:20} {ratio['median']:6.2f} x", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--repetitions", type=int, default=7, help="three for more than 600 blocks")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "roots.json")
    given = parser.parse_args()
    use_threads(1)
    rows = [row for size in given.sizes for row in measure(size, given.repetitions if size <= 600 else 3)]
    batches = [row for batch in BATCHES for row in measure_batch(*batch, given.repetitions)]
    near = [row for size in given.sizes if size <= NATIVE_UP_TO for row in measure(size, given.repetitions, near=True)]
    record = {"environment": environment(), "floor": FLOOR, "rows": rows, "batches": batches, "near": near}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
