"""A plain training loop: warm-up and cosine, clipping, accumulation, decay for weights only, a checkpoint.

python examples/recipes/plain_loop.py

The task is made up: learn the classes that a random network gives to random inputs.
"""

import math
import tempfile
from pathlib import Path

import torch
from torch import nn

from blockmean import Anova, diagnose, param_groups

STEPS, WARM_UP, ACCUMULATE = 300, 20, 2

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
with torch.no_grad():
    inputs = torch.rand(4096, 32)
    scores = teacher(inputs)
    labels = ((scores - scores.mean(0)) / scores.std(0)).argmax(1)


def make():
    """A model, its optimizer and its schedule."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = Anova(param_groups(model, weight_decay=0.1), lr=3e-3)

    def factor(step):
        return min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))

    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


model, optimizer, schedule = make()
for step in range(STEPS):
    optimizer.zero_grad()
    for batch in torch.randint(len(inputs), (128,)).chunk(ACCUMULATE):  # as one batch of 128
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        (loss / ACCUMULATE).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % 50 == 0 or step == STEPS - 1:
        print(f"step {step}: loss {loss.item():.3f}, rate {schedule.get_last_lr()[0]:.5f}")
print(diagnose(optimizer))

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "checkpoint.pt"
    torch.save([thing.state_dict() for thing in (model, optimizer, schedule)], file)
    again = make()
    for thing, state in zip(again, torch.load(file), strict=True):
        thing.load_state_dict(state)
print("loaded a checkpoint after", int(next(iter(again[1].state.values()))["step"]), "steps")
