"""Any logger: a hook that hands one dict of numbers to a function every few steps.

python examples/recipes/any_logger.py

Here the function is `print`. The `log` of a tracker or the `writerow` of a csv.DictWriter takes the same dict.
"""

import torch
from torch import nn

from blockmean import Anova


def log_every(optimizer, every, log):
    """Give `log` the step, the rates, and the share of the gradient that means hold in every matrix."""

    def after_step(optimizer, *_):
        step = int(max(state["step"] for state in optimizer.state.values()))
        if step % every == 0:
            rates = {f"rate/{i}": float(group["lr"]) for i, group in enumerate(optimizer.param_groups)}
            shares = {f"means/{m.parameter}": 1 - m.shares.remainder for m in optimizer.block_statistics()}
            log({"step": step, **rates, **shares})

    return optimizer.register_step_post_hook(after_step)


torch.manual_seed(0)
teacher = nn.Linear(32, 10).requires_grad_(False)
model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))
optimizer = Anova(model.named_parameters(), lr=3e-3)
handle = log_every(optimizer, 50, print)
for x in torch.rand(200, 64, 32):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), teacher(x)).backward()
    optimizer.step()
handle.remove()  # when it is no longer wanted
