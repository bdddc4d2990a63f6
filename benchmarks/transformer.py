"""AdamBMA against AdamW on a transformer, whose LayerNorm leaves little to correct: it must do no harm.

    python benchmarks/transformer.py --data-dir FOLDER [--steps 400] [--out benchmarks/results/transformer.json]

Both run at their defaults and the same learning rates, with five paired seeds: the same initial weights and batches.
The loss is on held-out text, the last tenth. Finished runs are kept in the file and not repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import blockmean
from blockmean.lab.environment import environment, use_threads
from blockmean.lab.study import interval
from blockmean.lab.text import CharacterTransformer, Text, load_text

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SEEDS = (0, 1, 2, 3, 4)
ARMS: dict[str, Callable[..., torch.optim.Optimizer]] = {"AdamW": torch.optim.AdamW, "AdamBMA": blockmean.AdamBMA}
CONTEXT, WIDTH, BATCH = 64, 64, 32


def run(arm: str, lr: float, seed: int, steps: int, text: Text) -> dict[str, float]:
    """Train once; return the mean training loss of the last tenth of the steps, and the loss on held-out text."""
    torch.manual_seed(seed)
    model = CharacterTransformer(text.vocabulary, WIDTH, context=CONTEXT)
    optimizer = ARMS[arm](model.named_parameters(), lr=lr)
    rng = torch.Generator().manual_seed(1000 + seed)
    count = 9 * len(text.inputs) // 10
    losses = []
    for _ in range(steps):
        chosen = torch.randint(count, (BATCH,), generator=rng)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(text.inputs[chosen]), text.targets[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        held_out = nn.functional.cross_entropy(model(text.inputs[count:]), text.targets[count:]).item()
    last = losses[-(steps // 10) :]
    return {"train": sum(last) / len(last), "held_out": held_out}


def differences(runs: dict[str, dict[str, float]]) -> dict[str, Any]:
    """AdamBMA − AdamW over paired seeds for every rate: mean and half-width of its 95% interval."""
    found = {}
    for lr in RATES:
        pairs = [(runs[f"AdamBMA {lr:g} {seed}"], runs[f"AdamW {lr:g} {seed}"]) for seed in SEEDS]
        for what in ("held_out", "train"):
            estimate = interval([ours[what] - theirs[what] for ours, theirs in pairs])
            assert estimate is not None
            found[f"{what} at {lr:g}"] = estimate._asdict()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=None, help="has text/tinyshakespeare.txt")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "transformer.json")
    options = parser.parse_args()
    use_threads(1)
    text = load_text(CONTEXT, options.data_dir)
    setting = {"text": text.name, "steps": options.steps, "width": WIDTH, "context": CONTEXT, "batch": BATCH}
    record: dict[str, Any] = {"environment": environment(), "setting": setting, "runs": {}}
    if options.out.exists():
        before = json.loads(options.out.read_text())
        record["runs"] = before["runs"] if before["setting"] == setting else {}
    for lr in RATES:
        for seed in SEEDS:
            for arm in ARMS:
                key = f"{arm} {lr:g} {seed}"
                if key not in record["runs"]:
                    record["runs"][key] = run(arm, lr, seed, options.steps, text)
                    options.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
                    print(key, record["runs"][key], flush=True)
    record["differences"] = differences(record["runs"])
    options.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    for name, found in record["differences"].items():
        print(f"AdamBMA - AdamW, {name}: {found['mean']:+.4f} ± {found['half_width']:.4f}")


if __name__ == "__main__":
    main()
