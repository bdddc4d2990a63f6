"""A character GPT in one file: cosine schedule with warm-up, clipping, decay for weights only.

python examples/recipes/char_gpt.py [a text file; without one it learns to add]
"""

import math
import sys
from pathlib import Path

import torch
from torch import nn

from blockmean import Anova, param_groups

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 2, 4, 32, 32
STEPS, WARM_UP, RATE = 120, 10, 3e-3


class GPT(nn.Module):
    """Blocks of causal attention and an MLP, LayerNorm first; the head shares its weights with the embedding."""

    def __init__(self, vocabulary):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x):
        return self.head(self.blocks(self.embed(x) + self.place.weight, self.mask, is_causal=True))


def rate(step):
    """Warm up, then follow half a cosine down to a tenth."""
    return RATE * min((step + 1) / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * step / STEPS))


sums = (f"{a} + {b} = {a + b}\n" for a in range(100) for b in range(100))
text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else "".join(sums)
characters = sorted(set(text))
tokens = torch.tensor([characters.index(c) for c in text])
torch.manual_seed(0)
model = GPT(len(characters))
optimizer = Anova(param_groups(model, weight_decay=0.1), lr=RATE, betas=(0.9, 0.95))
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    rows = tokens[torch.randint(len(tokens) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)]
    loss = nn.functional.cross_entropy(model(rows[:, :-1]).mT, rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 20 == 0 or step == STEPS - 1:
        print(f"step {step}: loss {loss.item():.3f}, rate {rate(step):.5f}")
