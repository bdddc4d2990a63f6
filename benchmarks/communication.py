"""What processes that share parameters tell each other in a step: collectives, bytes and time.

    python benchmarks/communication.py [--out benchmarks/results/communication.json]

Processes with gloo on one machine hold rows of a million parameters (FSDP2's placement). `all_reduce` is wrapped to
count calls, bytes and seconds. Steps are averaged over one period of Anova's refreshes, after the first, which also
begins the means. With more processes than cores, seconds are mostly waiting for each other.

Beside it stands what other designs have to move for the same matrices, and both for a model of 70 billion parameters:
these are calculated, by the functions below, from the schemes that their authors publish.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import blockmean
from blockmean.lab.environment import environment, use_threads

MILLION = 2**20
WORLDS = (2, 4)
PERIOD = 2  # Anova's default refresh_every
Shapes = Sequence[tuple[int, int]]


def sweeps() -> list[dict[str, Any]]:
    """What is measured: an optimizer, its options and the shapes of its matrices."""
    blocks = [{"sweep": "L", "optimizer": "AdamBMA", "options": {}, "shapes": [(L, MILLION // L)]} for L in BLOCKS]
    square = [(512, 512)] * 4
    means = [{"sweep": "k", "optimizer": "Anova", "options": {"means": k}, "shapes": square} for k in MEANS]
    others = [{"sweep": "all", "optimizer": name, "options": {}, "shapes": square} for name in OTHERS]
    return blocks + means + others


BLOCKS, MEANS, OTHERS = (64, 256, 1024, 4096), (4, 8, 16, 32), ("AdaGradBMA", "NaturalGradientBMA")


class Count:
    """A stand-in for `all_reduce` that counts."""

    def __init__(self) -> None:
        self.calls, self.bytes, self.seconds, self._all_reduce = 0, 0, 0.0, dist.all_reduce

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = self._all_reduce(tensor, *args, **kwargs)
        self.calls, self.bytes = self.calls + 1, self.bytes + tensor.nbytes
        self.seconds += time.perf_counter() - start
        return result


def measure(point: dict[str, Any], periods: int) -> dict[str, Any]:
    """Steps of sharded matrices on this process, beside steps of whole ones."""
    found: dict[str, Any] = {}
    for sharded in (True, False):
        rng = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=rng) for shape in point["shapes"]]
        if sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            values = [distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None) for value in values]
        params = [torch.nn.Parameter(value) for value in values]
        for param, value in zip(params, values, strict=True):
            param.grad = value.clone()
        optimizer = getattr(blockmean, point["optimizer"])(params, **point["options"])
        for _ in range(PERIOD):
            optimizer.step()
        count = Count()
        dist.all_reduce, original = count, dist.all_reduce
        seconds, waiting = [], []
        for _ in range(periods):
            dist.barrier()
            start, before = time.perf_counter(), count.seconds
            for _ in range(PERIOD):
                optimizer.step()
            seconds.append((time.perf_counter() - start) / PERIOD)
            waiting.append((count.seconds - before) / PERIOD)
        dist.all_reduce = original
        steps = periods * PERIOD
        if sharded:
            found = {"collectives_per_step": count.calls / steps, "bytes_per_step": count.bytes / steps}
            found |= {"seconds": statistics.median(seconds), "seconds_in_collectives": statistics.median(waiting)}
        else:
            assert not count.calls, "steps of whole parameters must not communicate"
            found["seconds_whole"] = statistics.median(seconds)
    return found


def work(rank: int, world: int, folder: str, periods: int) -> None:
    use_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )
    rows = [{"world": world, **point, **measure(point, periods)} for point in sweeps()]
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


# ---------------------------------------------------------------- calculated


def parameters(shapes: Shapes) -> int:
    return sum(units * inputs for units, inputs in shapes)


def adam_bma(shapes: Shapes) -> float:
    """Bytes of the all-reduce: four float64 sums per unit, one number per tensor, five flags."""
    return 8 * (4 * sum(units for units, _ in shapes) + len(shapes) + 5)


def anova(shapes: Shapes, k: int = 32) -> float:
    """Bytes of all all-reduces of a step, rows sharded, averaged over the period of refreshes.

    A step sums UᵀG (k × I), UᵀGV (k × k), the squares of R (k) and of G in float32. A refresh sums in float64: Gram
    matrices of 2k × 2k and k × k, and UᵀM, UᵀMV and ‖M‖² of the average gradient; and in float32: which rows have a
    gradient, which columns of U are in use, and the squares of R_m. Every step has one flag per matrix and five more.
    """
    numbers = 0.0
    for units, inputs in shapes:
        own = min(k, units, inputs)
        numbers += own * inputs + own * own + own + 1
        numbers += (2 * (own * inputs + 6 * own * own + 1) + units + 2 * own) / PERIOD
    return 4 * (numbers + len(shapes) + 5)


def sent(shapes: Shapes, world: int, bytes_per_number: int = 4) -> dict[str, float]:
    """Bytes that a process sends per step beyond what any optimizer under FSDP2 sends, design by design.

    An all-reduce of b bytes sends 2 b (n − 1) / n in a ring, an all-gather b (n − 1) / n. Where every process
    owns some matrices, it sends its rows of the others to their owners, and rows of its own back: b (n − 1) / n² each.
    """
    d, share = bytes_per_number * parameters(shapes), (world - 1) / world
    return {
        "gradient, reduce-scatter": d * share,
        "AdamBMA, per unit": 2 * share * adam_bma(shapes),
        "Anova, 32 means": 2 * share * anova(shapes),
        "whole matrices, gathered everywhere": d * share,
        "whole matrices, one owner each": 2 * d * share / world,
        "search directions, gathered everywhere": d * share,
    }


SCHEMES = {
    "gradient, reduce-scatter": "What FSDP2 itself sends for the gradients. It also gathers the parameters, once in "
    "forward and as a rule once more in backward.",
    "whole matrices, gathered everywhere": "Muon, SOAP and Shampoo need all entries of a matrix: Newton-Schulz "
    "iterations multiply it with its own transpose, SOAP and Shampoo multiply it with square matrices from both sides. "
    "The simplest exact form under FSDP2 gathers every gradient on every process, which repeats the whole work and "
    "keeps its rows of the result.",
    "whole matrices, one owner each": "Every matrix is sent to one process, which computes its update and sends the "
    "rows back, as distributed forms of Muon do. All processes have work only if there are as many matrices, and the "
    "owner holds a whole matrix with its state.",
    "search directions, gathered everywhere": "Distributed Shampoo where every process has all parameters (DDP): the "
    "gradients are there already, every process computes some blocks, and an all-gather brings the search directions "
    "to all.",
}


def llama_70b() -> list[tuple[int, int]]:
    """The matrices of Llama 2 70B: width 8192, 80 layers, MLP 28672, 8 key-value heads of 128, 32,000 tokens."""
    width, hidden, narrow, tokens = 8192, 28672, 1024, 32000
    layer = [(width, width), (narrow, width), (narrow, width), (width, width)]  # q, k, v, o
    layer += [(hidden, width), (hidden, width), (width, hidden)]  # gate, up, down
    return layer * 80 + [(tokens, width)] * 2


def large(shapes: Shapes, world: int, k: int = 32) -> dict[str, float]:
    """Bytes per process of a model in bfloat16 with float32 state, and what its steps send."""
    d = parameters(shapes)
    units, inputs = (sum(min(k, *shape) * shape[side] for shape in shapes) for side in (0, 1))
    return {
        "world": world,
        "parameters": d,
        "units": sum(shape[0] for shape in shapes),
        "Adam's moments": 8 * d / world,
        "AdamBMA, replicated": 8 * 6 * sum(shape[0] for shape in shapes),  # four sums and two averages
        "Anova's average gradient": 4 * d / world,
        "Anova, sharded means": 12 * units / world,  # U, X and MV
        "Anova, replicated means": 12 * inputs,  # V, Y and UᵀM
        "SOAP, factors of all matrices": 8 * sum(a * a + b * b for a, b in shapes),
        **{f"sent: {name}": value for name, value in sent(shapes, world, bytes_per_number=2).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--periods", type=int, default=10, help="of two steps")
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "communication.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for world in options.worlds:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (world, folder, options.periods), nprocs=world)
            rows += json.loads((Path(folder) / "rows.json").read_text())
    print(
        "| processes | optimizer | matrices | collectives | bytes per step | of the gradient | ms: step | collectives |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        shape, share = row["shapes"][0], row["bytes_per_step"] / (4 * parameters(row["shapes"]))
        what = " ".join([row["optimizer"], *(f"{key}={value}" for key, value in row["options"].items())])
        matrices = f"{len(row['shapes'])} of {shape[0]} × {shape[1]}"
        times = " | ".join(f"{1e3 * row[key]:.2f}" for key in ("seconds", "seconds_in_collectives"))
        bytes_, calls = f"{row['bytes_per_step']:,.0f}", f"{row['collectives_per_step']:.1f}"
        print(f"| {row['world']} | {what} | {matrices} | {calls} | {bytes_} | {share:.2%} | {times} |")
    square = [(512, 512)] * 4
    peers = {world: sent(square, world) for world in options.worlds}
    model = [large(llama_70b(), world) for world in (8, 64, 1000)]
    for table in (*peers.values(), *model):
        print(json.dumps({name: round(value / 1e6, 3) for name, value in table.items()}))
    record = {"environment": environment(), "rows": rows, "schemes": SCHEMES, "sent": peers, "llama_70b": model}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
