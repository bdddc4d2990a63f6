"""The time and memory of the empirical Fisher matrix, compared with its per-sample gradients.

    python benchmarks/curvature.py [--data-dir DIR]   # minutes, writes benchmarks/results/curvature.json
    python benchmarks/curvature.py --quick            # seconds, a smoke test; writes only to --out

One thread, float32, the paper's large net (139,370 parameters, L = 34 tensors) on 1,000 images of MNIST, or on random
images of that shape without --data-dir: the time does not depend on their content. The yardstick is vmap(grad) over the
same images in the same chunks, with the gradients discarded.
"""

from __future__ import annotations

import argparse
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from blockmean import BlockMean, Partition, curvature
from blockmean.lab import data, models
from blockmean.lab.environment import environment, use_threads
from blockmean.lab.timing import interleaved, keep_memory, peak_bytes, ratios, run_alone, summary

RESULTS = Path(__file__).parent / "results" / "curvature.json"
SHAPE = (1, 28, 28)
YARDSTICK = "per-sample gradients"
CHUNK = 100  # samples at a time, for the yardstick too

# (model, partition, N) at which to measure peak memory: against N, L and d
MEMORY = [("large", "tensor", n) for n in (100, 300, 1000)]
MEMORY += [("large", by, 300) for by in ("all", "unit")] + [("small", "tensor", 300), ("mlp", "tensor", 300)]
QUICK_MEMORY = [("small", "tensor", 100), ("small", "tensor", 300)]


def images(count: int, data_dir: Path | None) -> tuple[Tensor, Tensor]:
    if data_dir is not None:
        mnist = data.load("mnist", data_dir=data_dir)
        return mnist.train[:count], mnist.train_labels[:count]
    random = torch.Generator().manual_seed(0)
    return torch.randn(count, *SHAPE, generator=random), torch.randint(10, (count,), generator=random)


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return models.MODELS[name](SHAPE)


def gradients(model: nn.Module, x: Tensor, y: Tensor, chunk_size: int) -> None:
    """The yardstick: compute the gradient of every sample and discard it."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, params, image[None]), label[None])

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))
    for some, labels in zip(x.split(chunk_size), y.split(chunk_size), strict=True):
        per_sample(params, some, labels)


def operations(name: str, x: Tensor, y: Tensor) -> dict[str, Any]:
    model = network(name)
    fisher = partial(curvature.empirical_fisher, model, nn.functional.cross_entropy, (x, y), chunk_size=CHUNK)
    return {
        YARDSTICK: partial(gradients, model, x, y, CHUNK),
        "empirical Fisher, tensor": partial(fisher, "tensor"),
        "empirical Fisher, unit": partial(fisher, "unit"),
        "empirical Fisher, tensor, 4 norm probes": partial(fisher, "tensor", norm_probes=4),
    }


def time(name: str, count: int, repetitions: int, data_dir: Path | None) -> dict[str, Any]:
    """Seconds of each operation over `count` images, and ratios to the yardstick within each repetition."""
    x, y = images(count, data_dir)
    samples = interleaved(operations(name, x, y), repetitions)
    model = network(name)
    return {
        "model": name,
        "d": sum(p.numel() for p in model.parameters()),
        "L": {by: Partition.of(model, by).num_blocks for by in ("tensor", "unit")},
        "samples": count,
        "chunk_size": CHUNK,
        "images": "random" if data_dir is None else "MNIST",
        "repetitions": repetitions,
        "seconds": {key: summary(own) for key, own in samples.items()},
        "ratio_to_gradients": ratios(samples, YARDSTICK),
    }


def beside_full_matrix(count: int, repetitions: int, data_dir: Path | None) -> dict[str, Any] | None:
    """Our time against curvlinops on the small net, where the full matrix is feasible; None without curvlinops.

    curvlinops multiplies by the identity, and its 322×322 matrix is then projected to the block mean. Both use float64.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its dependencies warn about torch.jit on import
        try:
            import curvlinops
        except ImportError:
            return None
    model, (x, y) = network("small").double(), images(count, data_dir)
    x = x.double()
    parameters, loss = list(model.parameters()), nn.CrossEntropyLoss()
    identity = torch.eye(sum(p.numel() for p in parameters), dtype=x.dtype)
    batches = list(zip(x.split(CHUNK), y.split(CHUNK), strict=True))

    def theirs() -> BlockMean:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            operator = curvlinops.EFLinearOperator(model, loss, parameters, batches, check_deterministic=False)
        return BlockMean.fit((operator @ identity).detach(), Partition.of(model, "tensor"))

    ours = partial(curvature.empirical_fisher, model, loss, (x, y), "tensor", chunk_size=CHUNK)
    samples = interleaved(
        {
            YARDSTICK: partial(gradients, model, x, y, CHUNK),
            "empirical Fisher, tensor": ours,
            "curvlinops, full matrix": theirs,
        },
        repetitions,
    )
    a, b = ours(), theirs()
    return {
        "model": "small",
        "d": len(identity),
        "samples": count,
        "seconds": {key: summary(own) for key, own in samples.items()},
        "ratio_to_gradients": ratios(samples, YARDSTICK),
        "relative_difference": {
            "A": float((a.matrix.A - b.A).norm() / b.A.norm()),
            "lam": float((a.matrix.lam - b.lam).norm() / b.lam.norm()),
        },
    }


def memory(name: str, by: str, count: int) -> dict[str, Any]:
    """Peak memory of one call, measured in a separate process."""
    found = json.loads(run_alone([__file__, "--peak", name, by, str(count)]))
    d, L = found["d"], found["L"]
    rows = {"bytes_of_chunk_rows": 4 * d * min(count, CHUNK), "bytes_of_all_rows": 4 * d * count}
    return {"model": name, "partition": by, "d": d, "L": L, "samples": count, "chunk_size": CHUNK, **rows, **found}


def peak(name: str, by: str, count: int) -> dict[str, Any]:
    """Run this in a process that does nothing else."""
    model, (x, y) = network(name), images(count, None)
    call = partial(curvature.empirical_fisher, model, nn.functional.cross_entropy, chunk_size=CHUNK)
    call((x[:2], y[:2]), by)  # the first call loads libraries, which must not count
    partition = Partition.of(model, by)
    return {
        "d": partition.num_entries,
        "L": partition.num_blocks,
        "peak_bytes": peak_bytes(lambda: call((x, y), by)),
        "peak_bytes_of_gradients": peak_bytes(lambda: gradients(model, x, y, CHUNK)),
    }


def show(timing: dict[str, Any]) -> None:
    for key, ratio in timing["ratio_to_gradients"].items():
        seconds = timing["seconds"][key]["median"]
        print(f"{key:42} {seconds:8.3f} s  {ratio['median']:.3f} × the gradients ({ratio['lower']}–{ratio['upper']})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small net, few images, few repetitions")
    parser.add_argument("--data-dir", type=Path, help="where MNIST is; random images otherwise")
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument("--peak", nargs=3, metavar=("MODEL", "BY", "N"), help="print the peak memory at one point")
    arguments = parser.parse_args()
    use_threads(1)
    if arguments.peak:
        name, by, count = arguments.peak
        print(json.dumps(peak(name, by, int(count))))
        return
    points = [memory(*point) for point in (QUICK_MEMORY if arguments.quick else MEMORY)]
    kept = keep_memory()
    settings = ("small", 200, 3) if arguments.quick else ("large", 1000, 5)
    timing = time(*settings, arguments.data_dir)
    full = beside_full_matrix(*((20, 2) if arguments.quick else (200, 3)), arguments.data_dir)
    record = {
        "environment": environment(),
        "keeps_memory": kept,
        "time": timing,
        "beside_full_matrix": full,
        "memory": points,
    }
    for table in (timing, full):
        if table is not None:
            print(f"{table['model']} net, {table['samples']:,} samples")
            show(table)
    if full is not None:
        print(f"relative difference from curvlinops: {full['relative_difference']}")
    for point in points:
        told = "unknown" if point["peak_bytes"] is None else f"{point['peak_bytes'] / 2**20:7.1f} MB"
        gradients_alone = point["peak_bytes_of_gradients"]
        beside = "" if gradients_alone is None else f" (gradients alone {gradients_alone / 2**20:.1f} MB)"
        print(f"{point['model']} d={point['d']:,} L={point['L']:,} N={point['samples']:,}: {told}{beside}")
    out = arguments.out or (None if arguments.quick else RESULTS)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
