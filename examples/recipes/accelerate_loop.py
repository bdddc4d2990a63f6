"""accelerate with Anova: the optimizer goes through `prepare` like any other.

python examples/recipes/accelerate_loop.py, or torchrun --nproc_per_node 2 …       needs accelerate

The task is made up: learn the classes that a random network gives to random inputs.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from blockmean import Anova, diagnose, param_groups

set_seed(0)
with torch.no_grad():
    inputs = torch.rand(4096, 32)
    scores = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))(inputs)
    labels = ((scores - scores.mean(0)) / scores.std(0)).argmax(1)
data = DataLoader(TensorDataset(inputs, labels), batch_size=64, shuffle=True)

accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = Anova(param_groups(model, weight_decay=0.1), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * len(data) // 2)
model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)

for epoch in range(4):
    total = 0.0
    for x, y in data:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total += loss.item()
    accelerator.print(f"epoch {epoch + 1}: loss {total / len(data):.3f}, rate {schedule.get_last_lr()[0]:.5f}")
accelerator.print(diagnose(optimizer))
