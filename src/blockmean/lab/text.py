"""Text: a small transformer that predicts characters, and the characters."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockmean.lab.sources import SHAKESPEARE, DamagedData, find, read


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
        hidden = self.embed(characters) + self.place(torch.arange(characters.shape[1], device=characters.device))
        hidden = self.blocks(hidden, mask=self.mask, is_causal=True)
        outputs: Tensor = self.head(self.norm(hidden)).mT
        return outputs


class Text(NamedTuple):
    """A text as windows of characters; targets are the inputs, one character later."""

    vocabulary: int
    inputs: Tensor  # (n, context)
    targets: Tensor  # (n, context)


TEXT_MODELS: dict[str, Callable[[tuple[int, int]], nn.Module]] = {
    "transformer-64": lambda shape: CharacterTransformer(shape[0], 64, layers=2, context=shape[1]),
    "transformer-192": lambda shape: CharacterTransformer(shape[0], 192, layers=4, context=shape[1]),
}
"""For a text of (characters in its alphabet, characters in a window)."""

CONTEXT = 64
VOCABULARY = {"shakespeare": 65}  # of the manual it depends on Python
WINDOWS = {"shakespeare": 17_428, "manual": 6_000}
"""Windows of 64 characters. The manual is longer, how much depends on Python."""


def vocabulary(name: str) -> int:
    """The number of different characters, without reading a file."""
    return VOCABULARY.get(name) or read_text(name).vocabulary


@lru_cache(maxsize=2)
def read_text(name: str, data_dir: Path | None = None, context: int = CONTEXT) -> Text:
    """The windows of "shakespeare", from text/tinyshakespeare.txt in data_dir or $BLOCKMEAN_DATA, or of "manual"."""
    characters = shakespeare(data_dir) if name == "shakespeare" else torch.tensor(list(map(ord, manual())))
    alphabet, codes = characters.unique(return_inverse=True)  # in the order of the characters
    count = WINDOWS[name] * CONTEXT // context * context
    if len(codes) <= count:
        raise ValueError(f"The manual inside this Python has {len(codes)} characters; {count + 1} are needed.")
    inputs, targets = (codes[start : start + count].view(-1, context) for start in (0, 1))
    return Text(len(alphabet), inputs, targets)


def shakespeare(data_dir: Path | None) -> Tensor:
    """The characters of tiny Shakespeare, which are plain ASCII, one byte each."""
    advice = (
        "Put the 1,115,394 characters of tiny Shakespeare there (`input.txt` of karpathy/char-rnn on GitHub), or use "
        "the text inside Python itself (--profile quick)."
    )
    given = data_dir or os.environ.get("BLOCKMEAN_DATA")
    where = "neither --data-dir nor BLOCKMEAN_DATA is given" if given is None else f"{given} does not have it"
    paths, absent = ([], ["all"]) if given is None else find(SHAKESPEARE, Path(given).expanduser())
    if absent:
        raise FileNotFoundError(f"text/tinyshakespeare.txt was not found: {where}. {advice}")
    try:
        (characters,) = read(SHAKESPEARE, paths).values()
    except DamagedData as error:
        raise ValueError(f"{error.args[0]}. {advice}") from error
    return characters


def manual() -> str:
    """The manual inside Python itself."""
    from pydoc_data.topics import topics

    return "\n".join(topics[key] for key in sorted(topics))
