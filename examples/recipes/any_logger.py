"""Any logger: a hook that hands one dict of numbers to a function every few steps.

python examples/recipes/any_logger.py [file.csv]

Here the function writes a row of a CSV file. `print` and the `log` of most trackers take the same dict.
"""

import csv
import sys
from pathlib import Path

import torch
from torch import nn

from blockmean import Anova


def log_every(optimizer, every, log):
    """Let `log` have the step, the rates, and the share of the gradient that means hold in every matrix."""

    def after_step(optimizer, *_):
        step = int(max(state["step"] for state in optimizer.state.values()))
        if step % every == 0:
            rates = {f"rate/{i}": float(group["lr"]) for i, group in enumerate(optimizer.param_groups)}
            shares = {f"means/{m.parameter}": 1 - m.shares.remainder for m in optimizer.block_statistics()}
            log({"step": step, **rates, **shares})

    return optimizer.register_step_post_hook(after_step)


def csv_writer(file):
    """A function that writes dicts with equal keys as rows."""
    rows = csv.writer(file)

    def log(numbers):
        if not file.tell():
            rows.writerow(numbers)
        rows.writerow(numbers.values())

    return log


torch.manual_seed(0)
teacher = nn.Linear(32, 10).requires_grad_(False)
model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))
optimizer = Anova(model.named_parameters(), lr=3e-3)
path = Path(sys.argv[1] if len(sys.argv) > 1 else "log.csv")
with path.open("w", newline="") as file:
    handle = log_every(optimizer, 50, csv_writer(file))
    for _ in range(200):
        x = torch.rand(64, 32)
        loss = nn.functional.mse_loss(model(x), teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    handle.remove()
print(path.read_text(), end="")
