"""timm with Anova: register it under a name, which timm's factory then knows.

python examples/recipes/timm_registry.py       needs timm

In a copy of timm's train.py, register it before the parser reads `--opt anova`.
"""

import timm
import torch
from timm.optim import OptimInfo, create_optimizer_v2
from timm.optim._optim_factory import default_registry
from timm.scheduler import create_scheduler_v2
from torch import nn

from blockmean import Anova, diagnose

default_registry.register(
    OptimInfo("anova", Anova, "AdamW with separate step sizes for the low-rank part of a gradient", has_betas=True)
)

torch.manual_seed(0)
model = timm.create_model("test_vit", num_classes=4, img_size=32)
optimizer = create_optimizer_v2(model, "anova", lr=3e-3, weight_decay=0.05, layer_decay=0.9)
schedule, _ = create_scheduler_v2(optimizer, num_epochs=8, warmup_epochs=1, warmup_lr=1e-4)
labels = torch.randint(4, (512,))
images = 0.3 * torch.randn(512, 3, 32, 32)
for quarter in range(4):  # of which the brightest one is the label
    images[labels == quarter, :, 8 * quarter : 8 * quarter + 8] += 0.5
for epoch in range(8):
    for rows in torch.randperm(512).split(64):
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    schedule.step(epoch + 1)
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}, rate {optimizer.param_groups[-1]['lr']:.5f}")
print(diagnose(optimizer))
