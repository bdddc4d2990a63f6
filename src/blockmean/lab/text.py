"""Text: a small transformer that predicts characters, and the characters."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
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


TEXT_MODELS: dict[str, Callable[[tuple[int, int]], nn.Module]] = {
    "transformer-64": lambda shape: CharacterTransformer(shape[0], 64, layers=2, context=shape[1]),
    "transformer-192": lambda shape: CharacterTransformer(shape[0], 192, layers=4, context=shape[1]),
}
"""For a text of (characters in its alphabet, characters in a window)."""

CONTEXT = 64
VOCABULARY = {"shakespeare": 65}  # of the manual it depends on Python
WINDOWS = {"shakespeare": 17_428, "manual": 6_000}
"""Windows of 64 characters; the last tenth is held out. The manual is longer, how much depends on Python."""


def held_out(windows: int) -> int:
    """The windows at the end of a text that no model is trained on."""
    return windows - 9 * windows // 10


def vocabulary(name: str) -> int:
    """The number of different characters, without reading a file."""
    return VOCABULARY.get(name) or read_text(name).vocabulary


@lru_cache(maxsize=2)
def read_text(name: str, data_dir: Path | None = None) -> Text:
    """The windows of "shakespeare", from text/tinyshakespeare.txt in data_dir or $BLOCKMEAN_DATA, or of "manual"."""
    folder = None
    if name == "shakespeare":
        given = data_dir or os.environ.get("BLOCKMEAN_DATA")
        where = "neither --data-dir nor BLOCKMEAN_DATA is given" if given is None else f"{given} does not have it"
        folder = Path(given or "").expanduser()
        if given is None or not (folder / "text" / "tinyshakespeare.txt").is_file():
            raise FileNotFoundError(
                f"text/tinyshakespeare.txt is not here: {where}. Put the 1,115,394 characters of tiny Shakespeare "
                "there, or use the text inside Python itself (with `bench race --profile quick`)."
            )
    text = load_text(CONTEXT, folder)
    if len(text.inputs) < WINDOWS[name]:
        raise ValueError(f"{text.name} has {len(text.inputs)} windows of {CONTEXT} characters, not {WINDOWS[name]}.")
    return text._replace(inputs=text.inputs[: WINDOWS[name]], targets=text.targets[: WINDOWS[name]])
