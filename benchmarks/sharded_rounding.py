"""How far a run on several processes is from a run on one, beside what a rounding error alone makes of it.

    python benchmarks/sharded_rounding.py [--out benchmarks/results/sharded_rounding.json]

The transformer of examples/fsdp_train.py takes a few steps on one process; on one process with every gradient entry
changed by about one unit in its last place ("rounded"); and on two processes with DDP and with FSDP2, which see the
same batches. Differences are relative to what the parameters have moved.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import blockmean
from blockmean.lab.environment import environment, use_threads
from blockmean.lab.text import CharacterTransformer, read_text

WORLD, BATCH, RATE = 2, 32, 3e-3
KINDS = ("one", "rounded", "DDP", "FSDP2")
Values = dict[str, Tensor]


def train(kind: str, optimizer: str, dtype: torch.dtype, steps: int) -> tuple[Values, Values, float]:
    """Parameters before and after, and the loss of the last step."""
    text = read_text("manual")
    torch.manual_seed(0)
    model = CharacterTransformer(text.vocabulary, width=64, layers=2, context=text.inputs.shape[1]).to(dtype)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    network: torch.nn.Module = model
    if kind == "DDP":
        network = DistributedDataParallel(model)
    elif kind == "FSDP2":
        for layer in model.blocks.layers:
            fully_shard(layer)
        fully_shard(model)
    stepper = getattr(blockmean, optimizer)(model.named_parameters(), lr=RATE)
    shared = kind in ("DDP", "FSDP2")
    loss = torch.zeros(())
    for step in range(1, steps + 1):
        rng = torch.Generator().manual_seed(step)
        rows = torch.randint(len(text.inputs), (BATCH,), generator=rng)
        rows = rows[dist.get_rank() :: WORLD] if shared else rows
        stepper.zero_grad()
        loss = cross_entropy(network(text.inputs[rows]), text.targets[rows])
        loss.backward()
        for param in model.parameters() if kind == "rounded" else ():
            assert param.grad is not None
            noise = torch.randn(param.shape, generator=rng, dtype=dtype)
            param.grad.mul_(1 + torch.finfo(dtype).eps * noise)
        stepper.step()
    total = loss.detach().clone()
    if shared:
        dist.all_reduce(total)
        total /= WORLD
    end = {name: param.detach() for name, param in model.named_parameters()}
    return start, {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in end.items()}, float(total)


def compare(optimizer: str, dtype: torch.dtype, steps: int) -> list[dict[str, Any]]:
    rows = []
    start, expected, loss = train("one", optimizer, dtype, steps)
    for kind in KINDS:
        _, found, own_loss = train(kind, optimizer, dtype, steps) if kind != "one" else (start, expected, loss)
        moved = {name: expected[name] - start[name] for name in start}
        apart = {name: found[name] - expected[name] for name in start}
        squares = [sum(float(x.double().square().sum()) for x in group.values()) for group in (apart, moved)]
        worst = max(float(apart[name].abs().max() / moved[name].abs().max()) for name in start)
        rows.append(
            {
                "optimizer": optimizer,
                "dtype": str(dtype).removeprefix("torch."),
                "kind": kind,
                "rms": (squares[0] / squares[1]) ** 0.5,
                "worst": worst,
                "worst_in_rates": max(float(x.abs().max()) for x in apart.values()) / RATE,
                "loss": own_loss,
            }
        )
    return rows


def work(rank: int, folder: str, steps: int) -> None:
    use_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    store, limit = f"file://{folder}/store", datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=limit)
    rows = []
    for optimizer in ("AdamBMA", "Anova"):
        for dtype in (torch.float64, torch.float32):
            rows += compare(optimizer, dtype, steps)
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sharded_rounding.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, options.steps), nprocs=WORLD)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    print("| optimizer | dtype | run | root mean square | worst entry | in learning rates | last loss |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        numbers = " | ".join(f"{row[key]:.1e}" for key in ("rms", "worst", "worst_in_rates"))
        print(f"| {row['optimizer']} | {row['dtype']} | {row['kind']} | {numbers} | {row['loss']:.5f} |")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": environment(), "steps": options.steps, "rate": RATE, "world": WORLD, "rows": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"Wrote {options.out}")


if __name__ == "__main__":
    main()
