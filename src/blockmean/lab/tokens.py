"""Text as byte pairs, and a GPT that predicts the next one."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockmean.lab.download import cache_folder
from blockmean.lab.environment import package_version
from blockmean.lab.text import manual, shakespeare

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 2_048
CONTEXT = 256
HELD_OUT = 20
"""One part in this many of a text is held out."""
PIECE = 10_000
"""Characters: of longer texts every twentieth piece is held out. The end of a manual is its index."""
PYTHON_DOCS = "python-docs.txt.gz"


class Tokens(NamedTuple):
    """Codes below `VOCABULARY`, for training and held out."""

    train: Tensor  # (n,)
    test: Tensor  # (m,)


def windows(codes: Tensor) -> tuple[Tensor, Tensor]:
    """All windows of a text one after another, and their targets, which are the inputs one token later."""
    count = (len(codes) - 1) // CONTEXT * CONTEXT
    inputs, targets = (codes[start : start + count].view(-1, CONTEXT) for start in (0, 1))
    return inputs, targets


@lru_cache(maxsize=2)
def read_tokens(name: str, tokenizer: str, data_dir: Path | None = None, split: str = "pieces") -> Tokens:
    """The tokens of a text; those of `tokenizer`, the name of a text, are what its training part has most often.

    Kept in the cache folder: every process of a study needs them.
    """
    text, source = read_bytes(name, data_dir), read_bytes(tokenizer, data_dir)
    sizes = f"{VOCABULARY} {HELD_OUT} {PIECE} {split} {len(text)} "
    identity = f"{package_version('tokenizers')} {sizes}".encode() + text + source
    path = cache_folder() / "tokens" / f"{hashlib.blake2b(identity, digest_size=12).hexdigest()}.pt"
    if path.exists():
        return Tokens(**torch.load(path, weights_only=True, mmap=False))
    coder = train_tokenizer(parts_of(source, split)[0])
    found = Tokens(*(encode(coder, part) for part in parts_of(text, split)))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    torch.save(found._asdict(), unfinished)
    unfinished.replace(path)
    return found


def read_bytes(name: str, data_dir: Path | None = None) -> bytes:
    """The text of that name, or in a file of the user's own, plain or compressed."""
    if name == "manual":
        return manual().encode()
    if name == "shakespeare":
        return bytes(shakespeare(data_dir).tolist())
    path = _python_docs(data_dir) if name == "python-docs" else Path(name).expanduser()
    raw = path.read_bytes()
    return gzip.decompress(raw) if path.suffix == ".gz" else raw


def _python_docs(data_dir: Path | None) -> Path:
    given = data_dir or os.environ.get("BLOCKMEAN_DATA")
    found = [p for p in (Path(given or ".") / "text" / PYTHON_DOCS, Path(given or ".") / PYTHON_DOCS) if p.is_file()]
    if not given or not found:
        where = f"{given} does not have it" if given else "neither --data-dir nor BLOCKMEAN_DATA is given"
        raise FileNotFoundError(
            f"text/{PYTHON_DOCS} was not found: {where}. Put Python's documentation as plain text there, give a text "
            "of your own (--text), or use the text inside Python itself (--profile quick)."
        )
    return found[0]


def parts_of(text: bytes, split: str) -> tuple[str, str]:
    """What is for training, and what is held out: every 20th piece of the text, or its end.

    For validation the pieces before those are held out, and neither are for training.
    """
    if split == "end":
        cut = len(text) - len(text) // HELD_OUT
        first, last = (part.decode("utf-8", errors="replace") for part in (text[:cut], text[cut:]))
        return first, last
    whole = text.decode("utf-8", errors="replace")
    size = max(1, min(PIECE, len(whole) // HELD_OUT**2))
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    out = {HELD_OUT - 1, HELD_OUT - 2} if split == "validation" else {HELD_OUT - 1}
    train = "".join(piece for i, piece in enumerate(pieces) if i % HELD_OUT not in out)
    return train, "".join(pieces[min(out) :: HELD_OUT])


def train_tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE: any text can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    coder = Tokenizer(models.BPE())
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    coder.train_from_iterator(_pieces(text), trainer)
    return coder


def encode(coder: Tokenizer, text: str) -> Tensor:
    """The codes of a text."""
    return torch.tensor([code for piece in _pieces(text) for code in coder.encode(piece).ids], dtype=torch.int32)


def _pieces(text: str, lines: int = 1_000) -> Iterator[str]:
    """A text in pieces of whole lines: one long string would take much memory."""
    every = text.splitlines(keepends=True)
    return ("".join(every[start : start + lines]) for start in range(0, len(every), lines))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, context, width) → the same."""
        # Query, key and value of a head are side by side, as Adam-mini expects them.
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, context, width) → the same."""
        x = x + self.attn(self.norm(x))
        result: Tensor = x + self.mlp(x)
        return result


class GPT(nn.Module):
    """A decoder with weights drawn as GPT-2's are: normal with deviation .02, smaller at the residuals.

    Embeddings and output layer are two matrices. The names of the modules are those by which Adam-mini knows them.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, context: int, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.position_embed = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                residual = name.endswith(("out.weight", "mlp.3.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, codes: Tensor) -> Tensor:
        """(n, context) → (n, context, vocabulary)."""
        hidden = self.embed(codes) + self.position_embed.weight[: codes.shape[1]]
        outputs: Tensor = self.lm_head(self.norm(self.blocks(hidden)))
        return outputs


GPTS: dict[str, Callable[[tuple[int, int]], nn.Module]] = {
    "gpt-16": lambda shape: GPT(shape[0], 16, layers=1, context=shape[1]),
    "gpt-64": lambda shape: GPT(shape[0], 64, layers=2, context=shape[1]),
    "gpt-96": lambda shape: GPT(shape[0], 96, layers=3, context=shape[1]),
    "gpt-160": lambda shape: GPT(shape[0], 160, layers=4, context=shape[1]),
}
"""For (tokens, tokens in a window). Without embeddings and output: 3 thousand, .1, .34 and 1.24 million parameters."""
