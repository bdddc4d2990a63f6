"""Lightning with Anova: a LightningModule, gradient clipping, accumulation, a schedule with warm-up.

python examples/recipes/lightning_module.py       needs lightning
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from blockmean import Anova, param_groups


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        if self.trainer.is_last_batch:
            print(f"epoch {self.current_epoch + 1}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        optimizer = Anova(param_groups(self, weight_decay=0.1), lr=3e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


lightning.seed_everything(0, verbose=False)
inputs = torch.rand(4096, 32)
targets = nn.Linear(32, 10).requires_grad_(False)(inputs)
quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
trainer = lightning.Trainer(max_epochs=4, accumulate_grad_batches=2, gradient_clip_val=1.0, accelerator="cpu", **quiet)
trainer.fit(Regression(), DataLoader(TensorDataset(inputs, targets), batch_size=64, shuffle=True))
