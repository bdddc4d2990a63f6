"""Why runs of the paper's large model are lost: its first steps, one by one, with Algorithm 1 and what differs from it.

    python benchmarks/lost_runs.py --data-dir FOLDER [--seeds 100 0 1] [--steps 120]

A run is followed with the weights and batches of `blockmean reproduce` until it learns (the mean loss of 20 batches is
below 2.2; guessing is 2.30), or for 120 steps. Beside the loss, each step says how far outputs differ between the
images of the batch, how far parameters move in units of η, how large the correction is beside the diagonal step, the
smallest eigenvalue of A, and which share of the activations is saturated. The arms differ from Algorithm 1 in one thing
each: no correction, ε so small that it does not matter, another variant, smaller steps at first, or other initial
weights: some that let the signal through, and PyTorch's with a little noise, to see how far chance goes. The record is
benchmarks/results/lost_runs.json; a run that is in it is not made again. It has the first four arms with three seeds on
MNIST and one on CIFAR-10, and of the others the runs that docs/results.md speaks of (--datasets, --arms, --seeds).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blockmean.lab.arms import seed_everything
from blockmean.lab.environment import environment, use_threads
from blockmean.lab.paper.protocol import BATCH, DIAGONAL, PAPER
from blockmean.lab.records import store
from blockmean.lab.spec import RunSpec
from blockmean.lab.tasks import load_data, make_model
from blockmean.lab.train import batches_of, make_optimizer

RATE = 0.01
WINDOW = 20
SATURATED = 0.99


class Arm(NamedTuple):
    """An optimizer, and what is done to a run beside it."""

    optimizer: str
    options: dict[str, Any]
    slow_steps: int = 0  # the first steps take a tenth of the rate
    carries_signal: bool = False  # Xavier's initial weights for tanh, without biases, in place of PyTorch's
    noise: float = 0.0  # initial weights are multiplied by 1 + noise × a normal number


def _paper(**changed: Any) -> dict[str, Any]:
    return {"optimizer": PAPER["optimizer"], "options": {**PAPER["options"], **changed}}


ARMS = {
    "diag, √r + ε": Arm(**DIAGONAL),
    "diag, √(r + ε)": Arm(**_paper(correction=False)),
    "BMA": Arm(**PAPER),
    "BMA, ε = 1e-20": Arm(**_paper(eps=1e-20)),
    "BMA consistent": Arm("AdaGradBMA", {"variant": "consistent", "eps": 1e-10}),
    "BMA, 20 slow steps": Arm(**PAPER, slow_steps=20),
    "BMA, Xavier's weights": Arm(**PAPER, carries_signal=True),
    "diag, √r + ε, weights changed by 0.1%": Arm(**DIAGONAL, noise=1e-3),
}


def steps(dataset: str, model_name: str, arm: Arm, seed: int, count: int, data_dir: Path | None) -> Iterator[dict]:
    """What each step finds and does."""
    flip = dataset == "cifar10"
    spec = RunSpec(dataset, model_name, arm.optimizer, RATE, seed, count, arm.options, batch=BATCH, flip=flip)
    data = load_data(spec, data_dir)
    seed_everything(seed)
    model = make_model(spec)
    if arm.carries_signal:
        _carry_signal(model)
    if arm.noise:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + arm.noise * torch.randn_like(param))
    optimizer = make_optimizer(spec, model)
    activations: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, nn.Tanh):
            module.register_forward_hook(lambda module, inputs, output: activations.append(output.detach()))
    for number, (inputs, targets) in enumerate(batches_of(data, spec)):
        rate = RATE / 10 if number < arm.slow_steps else RATE
        optimizer.param_groups[0]["lr"] = rate
        activations.clear()
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        loss.backward()
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
        yield {
            "loss": loss.item(),
            "spread": float(outputs.detach().std(0).norm()),
            "spread of layers": [float(layer.std(0).mean()) for layer in activations[3::4]],
            "saturated": max(float((layer.abs() > SATURATED).float().mean()) for layer in activations),
            **_moves(model, optimizer, before, rate, arm.options["eps"]),
            "smallest eigenvalue": _smallest_eigenvalue(optimizer),
        }


def _carry_signal(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight, nn.init.calculate_gain("tanh"))
            nn.init.zeros_(module.bias)


@torch.no_grad()
def _moves(
    model: nn.Module, optimizer: torch.optim.Optimizer, before: list[Tensor], rate: float, eps: float
) -> dict[str, float]:
    """Moves in units of the rate; the correction is what they differ by from g / √(r + ε), as a share of all moves."""
    params = list(model.parameters())
    grads = torch.cat([param.grad.flatten() for param in params])
    squares = torch.cat([optimizer.state[param]["sum"].flatten() for param in params])
    moves = torch.cat([(old - param).flatten() for old, param in zip(before, params, strict=True)]) / rate
    is_torch = isinstance(optimizer, torch.optim.Adagrad)
    diagonal = grads / (squares.sqrt() + eps if is_torch else (squares + eps).sqrt())
    return {
        "largest move": float(moves.abs().max()),
        "mean move": float(moves.abs().mean()),
        "correction": float((moves - diagonal).norm() / diagonal.norm()),
        "gradients below 1e-5": float((grads.abs() < 1e-5).float().mean()),
    }


def _smallest_eigenvalue(optimizer: torch.optim.Optimizer) -> float | None:
    found = getattr(optimizer, "block_statistics", list)()
    return min(float(each.eigenvalues.min()) for each in found) if found else None


def follow(below: float, *run: Any) -> dict[str, Any]:
    """A run until it learns; `learns` is the step at which it does, or None. One column per finding of `steps`."""
    rows: list[dict] = []
    learns = None
    for row in steps(*run):
        rows.append(row)
        recent = [each["loss"] for each in rows[-WINDOW:]]
        if len(recent) == WINDOW and statistics.mean(recent) < below:
            learns = len(rows)
            break
    return {"learns": learns, "steps": {name: [_short(row[name]) for row in rows] for name in rows[0]}}


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(each) for each in value]
    return value if value is None else float(f"{value:.4g}")


def table(runs: list[dict[str, Any]]) -> str:
    """One row per data set and arm."""
    header = ["data, arm", "runs that learn", "after steps", "mean move, step 1", "spread at step 5", "at the end"]
    header += ["correction, largest of steps 1 to 5", "smallest eigenvalue"]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for dataset, arm, below in dict.fromkeys((run["dataset"], run["arm"], run["below"]) for run in runs):
        own = [run for run in runs if (run["dataset"], run["arm"], run["below"]) == (dataset, arm, below)]
        columns = [run["steps"] for run in own]
        eigenvalues = [value for each in columns for value in each["smallest eigenvalue"] if value is not None]
        cells = [
            f"{sum(run['learns'] is not None for run in own)} of {len(own)}" if below else "not asked",
            ", ".join(f"{run['seed']}: {run['learns'] or '–'}" for run in own),
            ", ".join(f"{each['mean move'][0]:.2g}" for each in columns),
            ", ".join(f"{each['spread'][4]:.1g}" for each in columns),
            ", ".join(f"{each['spread'][-1]:.1g}" for each in columns),
            f"{max(max(each['correction'][:5]) for each in columns):.2g}",
            f"{min(eigenvalues):.2g}" if eigenvalues else "–",
        ]
        lines.append(f"| {dataset}, {arm}{'' if below == 2.2 else ', followed on'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--datasets", nargs="+", default=["mnist", "cifar10"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="large")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 0, 1], help="100 tunes the rate in the study")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--below", type=float, default=2.2, help="a run ends when 20 batches have a smaller mean loss")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "lost_runs.json")
    given = parser.parse_args()
    use_threads(1)
    record = json.loads(given.out.read_text()) if given.out.exists() else {"rate": RATE, "runs": []}
    for dataset in given.datasets:
        for seed in given.seeds:
            for arm in given.arms:
                name = {"dataset": dataset, "model": given.model, "arm": arm, "seed": seed, "at most": given.steps}
                name["below"] = given.below
                if any(name.items() <= run.items() for run in record["runs"]):
                    continue
                run = follow(given.below, dataset, given.model, ARMS[arm], seed, given.steps, given.data_dir)
                record["runs"].append({**name, **run})
                print(name, run["learns"], [run["steps"]["spread"][i] for i in (0, 4, -1)], flush=True)
                store(given.out, {**record, "environment": environment()})
    print(table(record["runs"]))


if __name__ == "__main__":
    main()
