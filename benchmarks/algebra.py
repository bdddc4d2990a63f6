"""The cost of the algebra: time and memory against d and L, compared with dense linear algebra and plain passes.

    python benchmarks/algebra.py            # a few minutes, writes benchmarks/results/algebra.json
    python benchmarks/algebra.py --quick    # seconds, a smoke test

One thread, float32. The yardsticks are one read of v (`v.sum()`) and one read and write (`v * 2`). malloc keeps freed
memory during timing: page faults for a fresh result can cost several times the pass itself, for the yardstick as well,
and would make every ratio look better than it is.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockmean import BlockMean, Partition
from blockmean.lab.environment import environment, use_threads
from blockmean.lab.timing import interleaved, keep_memory, peak_bytes, ratios, run_alone, summary

RESULTS = Path(__file__).parent / "results" / "algebra.json"
DENSE_LIMIT = 2000  # rows; a dense eigendecomposition takes seconds there and grows as d³
ROWS = 4  # for from_rows

# (sweep, d, L)
FULL = [("d", d, 64) for d in (1000, 2000, 10**4, 10**5, 10**6, 10**7)]
FULL += [("L", 10**6, L) for L in (1, 4, 16, 64, 256, 1024)]
QUICK = [("d", 600, 8), ("d", 3000, 8), ("L", 3000, 1), ("L", 3000, 16)]


class Problem:
    """A vector and positive definite block-mean matrices of d entries and L blocks, in three layouts."""

    def __init__(self, d: int, L: int) -> None:
        self.d, self.L = d, L
        self.random = torch.Generator().manual_seed(0)
        self.v = torch.randn(d, generator=self.random)

    def matrix(self, partition: Partition) -> BlockMean:
        W = torch.randn(self.L, 2 * self.L, generator=self.random)
        root = partition.sizes.sqrt()
        B = W @ W.mT / (2 * self.L) / torch.outer(root, root)
        return BlockMean(partition, 0.5 + torch.rand(self.L, generator=self.random), B)

    @cached_property
    def M(self) -> BlockMean:
        """Blocks whose sizes differ by at most one."""
        return self.matrix(Partition.from_sizes([self.d // self.L + (i < self.d % self.L) for i in range(self.L)]))

    @cached_property
    def uneven(self) -> BlockMean:
        """Blocks of different sizes, as far as d allows: the largest is a few hundred times the smallest."""
        weights = torch.randn(self.L, generator=self.random).exp()
        sizes = 1 + ((self.d - self.L) * weights / weights.sum()).long()
        sizes[0] += self.d - sizes.sum()
        return self.matrix(Partition.from_sizes(sizes))

    @cached_property
    def mixed(self) -> BlockMean:
        """Equal blocks whose entries interleave at random."""
        return self.matrix(Partition.from_labels(torch.randperm(self.d, generator=self.random) % self.L))

    @cached_property
    def rows(self) -> Tensor:
        return torch.randn(ROWS, self.d, generator=self.random)

    @cached_property
    def dense(self) -> Tensor:
        return self.M.to_dense()

    @cached_property
    def root(self) -> BlockMean:
        return self.M.inverse_sqrt()


def dense_torch(M: Tensor, v: Tensor) -> Tensor:
    """M^-½ v by torch."""
    w, Q = torch.linalg.eigh(M)
    return (Q * w.rsqrt()) @ Q.mT @ v


def dense_scipy(M: Tensor, v: Tensor) -> Tensor:
    """M^-½ v by SciPy."""
    import scipy.linalg  # after use_threads, which sets the number of threads

    w, Q = scipy.linalg.eigh(M.numpy())
    return torch.from_numpy((Q * w**-0.5) @ Q.T @ v.numpy())


def dense_scipy_solve(M: Tensor, v: Tensor) -> Tensor:
    """M⁻¹ v by SciPy's solver for positive definite matrices."""
    import scipy.linalg

    return torch.from_numpy(scipy.linalg.solve(M.numpy(), v.numpy(), assume_a="pos"))


MAIN, READ, WRITE = "inverse_sqrt @ v", "read v", "read and write v"
OPERATIONS: dict[str, Callable[[Problem], object]] = {
    READ: lambda p: p.v.sum(),
    WRITE: lambda p: p.v * 2,
    MAIN: lambda p: p.M.inverse_sqrt() @ p.v,
    MAIN + ", uneven blocks": lambda p: p.uneven.inverse_sqrt() @ p.v,
    MAIN + ", interleaved blocks": lambda p: p.mixed.inverse_sqrt() @ p.v,
    "inverse_sqrt alone": lambda p: p.M.inverse_sqrt(),
    "@ v alone": lambda p: p.root @ p.v,
    "solve": lambda p: p.M.solve(p.v),
    f"from_rows, {ROWS} rows": lambda p: BlockMean.from_rows(p.rows, p.M.partition),
}
DENSE: dict[str, Callable[[Problem], object]] = {
    "fit": lambda p: BlockMean.fit(p.dense, p.M.partition),
    "dense torch, eigh @ v": lambda p: dense_torch(p.dense, p.v),
    "dense SciPy, eigh @ v": lambda p: dense_scipy(p.dense, p.v),
    "dense torch, solve": lambda p: torch.linalg.solve(p.dense, p.v),
    "dense SciPy, solve": lambda p: dense_scipy_solve(p.dense, p.v),
}
IN_MEMORY = (WRITE, MAIN, MAIN + ", uneven blocks", MAIN + ", interleaved blocks", "dense torch, eigh @ v")


def measure(sweep: str, d: int, L: int, repetitions: int, with_memory: bool) -> dict[str, Any]:
    """Times, their ratios within each repetition, and peak memory at one point."""
    # First, while this process is small, and so that the other process does not compete with the timing.
    peak = json.loads(run_alone([__file__, "--peak", str(d), str(L)])) if with_memory else None
    problem = Problem(d, L)
    operations = {name: partial(f, problem) for name, f in chosen(d).items()}
    samples = interleaved(operations, repetitions)
    return {
        "sweep": sweep,
        "d": d,
        "L": L,
        "repetitions": repetitions,
        "seconds": {name: summary(own) for name, own in samples.items()},
        "ratio_to_read": ratios(samples, READ),
        "ratio_to_read_and_write": ratios(samples, WRITE),
        "ratio_to_block_mean": ratios(samples, MAIN),
        "peak_bytes": peak,
        "bytes_of_v": 4 * d,
        "relative_error": relative_error(problem) if d <= DENSE_LIMIT else None,
    }


def chosen(d: int) -> dict[str, Callable[[Problem], object]]:
    """The operations that are affordable at this size."""
    return OPERATIONS | (DENSE if d <= DENSE_LIMIT else {})


def relative_error(problem: Problem) -> float:
    """Error of the timed result against the dense one in float64: both must compute the same thing."""
    truth = dense_torch(problem.dense.double(), problem.v.double())
    found = problem.M.inverse_sqrt() @ problem.v
    return float((found - truth).norm() / truth.norm())


def peaks(d: int, L: int) -> dict[str, int | None]:
    """Peak memory of one call of some operations; run it in a process that does nothing else."""
    found = {}
    for name in IN_MEMORY:
        if name in chosen(d):
            operation = partial(chosen(d)[name], Problem(d, L))
            operation()  # the first call makes inputs and loads libraries, which must not count
            found[name] = peak_bytes(operation)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few repetitions")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the record")
    parser.add_argument("--peak", nargs=2, type=int, metavar=("D", "L"), help="print the peak memory at one point")
    arguments = parser.parse_args()
    use_threads(1)
    if arguments.peak:
        print(json.dumps(peaks(*arguments.peak)))
        return
    record: dict[str, Any] = {"benchmark": "algebra", "dtype": "float32", "quick": arguments.quick}
    record |= {"memory_kept": keep_memory(), "environment": environment(), "points": []}
    start = time.perf_counter()
    for i, (sweep, d, L) in enumerate(QUICK if arguments.quick else FULL):
        repetitions = 3 if arguments.quick else 5 if d <= DENSE_LIMIT or L > 256 else 15
        point = measure(sweep, d, L, repetitions, with_memory=i == 0 or not arguments.quick)
        record["points"].append(point)
        milliseconds, ratio = 1e3 * point["seconds"][MAIN]["median"], point["ratio_to_read_and_write"][MAIN]["median"]
        print(f"d = {d:>10,}  L = {L:>5,}  {MAIN}: {milliseconds:9.3f} ms, {ratio:7.2f} times v * 2")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {arguments.out} after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
