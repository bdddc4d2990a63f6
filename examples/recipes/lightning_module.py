"""Lightning with Anova: two groups, a schedule by steps, clipping and accumulation by the Trainer.

python examples/recipes/lightning_module.py       needs lightning

The task is made up: learn the classes that a random network gives to random inputs.
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from blockmean import Anova, diagnose, param_groups


class Classifier(lightning.LightningModule):
    """A small net with the usual three methods."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        self.losses = []

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = Anova(param_groups(self, weight_decay=0.1), lr=3e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


lightning.seed_everything(0, verbose=False)
with torch.no_grad():
    inputs = torch.rand(4096, 32)
    scores = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))(inputs)
    labels = ((scores - scores.mean(0)) / scores.std(0)).argmax(1)
data = DataLoader(TensorDataset(inputs, labels), batch_size=64, shuffle=True)

model = Classifier()
trainer = lightning.Trainer(
    max_epochs=4,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, data)
print(f"loss {model.losses[0]:.3f} in the first batch, {sum(model.losses[-20:]) / 20:.3f} in the last twenty")
print(diagnose(model.optimizers()))
