"""accelerate with Anova: mixed precision, accumulation, clipping and a schedule through `prepare`.

python examples/recipes/accelerate_loop.py, or torchrun --nproc-per-node 2 …       needs accelerate
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from blockmean import Anova, diagnose, param_groups

set_seed(0)
inputs = torch.rand(4096, 32)
targets = nn.Linear(32, 10).requires_grad_(False)(inputs)
data = DataLoader(TensorDataset(inputs, targets), batch_size=64, shuffle=True)

accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = Anova(param_groups(model, weight_decay=0.1), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * len(data) // 2)
model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
for epoch in range(4):
    for x, y in data:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.4f}, rate {schedule.get_last_lr()[0]:.5f}")
accelerator.print(diagnose(optimizer))
