"""A container as torchtitan has one: an Anova for each part of a model, and one checkpoint of them all.

python examples/recipes/torchtitan_container.py       In torchtitan itself, where it builds its optimizers, return
`OptimizersContainer(model_parts, Anova, {"lr": 3e-3, "fused": True, "foreach": False})`.
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from blockmean import Anova

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by name, whatever the parts: what DCP saves


class Container:
    def __init__(self, parts, **options):
        self.pairs = [(part, Anova(part.named_parameters(), **options)) for part in parts]

    def state_dict(self):
        return {key: x for pair in self.pairs for key, x in get_optimizer_state_dict(*pair, options=FLAT).items()}

    def load_state_dict(self, state_dict):
        for pair in self.pairs:
            set_optimizer_state_dict(*pair, state_dict, options=FLAT)


if __name__ == "__main__":
    torch.manual_seed(0)
    body, head = nn.ModuleDict({"body": nn.Linear(32, 64)}), nn.ModuleDict({"head": nn.Linear(64, 10)})
    container = Container([body, head], lr=3e-3, fused=True, foreach=False)
    for step, x in enumerate(torch.rand(100, 64, 32)):
        loss = nn.functional.mse_loss(head["head"](body["body"](x).relu()), x[:, :10].cumsum(1))
        loss.backward()
        for _, optimizer in container.pairs:
            optimizer.step()
            optimizer.zero_grad()
        if step % 25 == 24:
            print(f"step {step}: loss {loss.item():.4f}")
