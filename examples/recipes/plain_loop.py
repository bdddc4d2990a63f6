"""A plain training loop: warm-up and cosine by torch's schedulers, clipping, accumulation, a checkpoint.

python examples/recipes/plain_loop.py
"""

import tempfile

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from blockmean import Anova, param_groups

STEPS, WARM_UP, ACCUMULATE = 300, 20, 2

torch.manual_seed(0)
teacher = nn.Linear(32, 10).requires_grad_(False)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = Anova(param_groups(model, weight_decay=0.1), lr=3e-3)
warm_up, cosine = LinearLR(optimizer, 0.05, total_iters=WARM_UP), CosineAnnealingLR(optimizer, STEPS - WARM_UP)
schedule = SequentialLR(optimizer, [warm_up, cosine], milestones=[WARM_UP])
for step in range(STEPS):
    optimizer.zero_grad()
    for x in torch.rand(128, 32).chunk(ACCUMULATE):  # as one batch of 128
        loss = nn.functional.mse_loss(model(x), teacher(x))
        (loss / ACCUMULATE).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % 50 == 0 or step == STEPS - 1:
        print(f"step {step}: loss {loss.item():.5f}, rate {schedule.get_last_lr()[0]:.5f}")

things = model, optimizer, schedule
with tempfile.TemporaryFile() as file:  # or a path
    torch.save([thing.state_dict() for thing in things], file)
    file.seek(0)
    for thing, state in zip(things, torch.load(file), strict=True):  # made as above, in another process
        thing.load_state_dict(state)
