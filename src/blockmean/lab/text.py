"""Text: a small transformer that predicts characters, and the characters."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn


class CharacterTransformer(nn.Module):
    """Layers that predict every character from those before it; LayerNorm comes before attention and MLP."""

    def __init__(self, vocabulary: int, width: int = 48, layers: int = 2, context: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        self.mask: Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, characters: Tensor) -> Tensor:
        """(n, context) → (n, vocabulary, context), as `cross_entropy` takes it."""
        hidden = self.embed(characters) + self.place(torch.arange(characters.shape[1]))
        hidden = self.blocks(hidden, mask=self.mask, is_causal=True)
        outputs: Tensor = self.head(self.norm(hidden)).mT
        return outputs


class Text(NamedTuple):
    """A text as windows of characters; targets are the inputs, one character later."""

    name: str
    vocabulary: int
    inputs: Tensor  # (n, context)
    targets: Tensor  # (n, context)


def load_text(context: int, data_dir: str | Path | None = None) -> Text:
    """Tiny Shakespeare from data_dir/text/tinyshakespeare.txt, or the manual inside Python itself without it."""
    file = Path(data_dir or "") / "text" / "tinyshakespeare.txt"
    if data_dir is not None and file.is_file():
        name, found = "tinyshakespeare", file.read_text()
    else:
        from pydoc_data.topics import topics

        name, found = "the Python manual", "\n".join(topics[key] for key in sorted(topics))
    alphabet = {character: i for i, character in enumerate(sorted(set(found)))}
    codes = torch.tensor([alphabet[character] for character in found])
    count = (len(codes) - 1) // context * context
    return Text(name, len(alphabet), codes[:count].view(-1, context), codes[1 : count + 1].view(-1, context))
