"""What a training run depends on, in plain values, and the key under which its record is kept."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any

ORIGINAL_FIELDS = ("dataset", "model", "optimizer", "lr", "seed", "steps", "options", "inputs", "batch", "flip")
"""The fields that every key hashes. Do not add to them: the published records have keys of exactly these."""


@dataclass(frozen=True)
class RunSpec:
    """Everything that a run depends on, in plain values; equal specs give equal runs.

    A field added here needs a default, and that default must never change: records made before the field was added are
    read as if they had it.
    """

    dataset: str
    model: str
    optimizer: str
    lr: float
    seed: int
    steps: int
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of the optimizer
    inputs: str = "normalised"
    batch: int = 128
    flip: bool = False  # mirror each image with probability ½, drawn again in every epoch
    loss: str = "cross_entropy"
    curve: bool = False  # keep the loss of every step and the time it took in the record
    points: int = 0  # keep the training loss as means over this many parts of the run, and the time after every epoch
    warm_up: float = 0.0  # part of the steps in which the rate rises to lr
    decay: str = "none"  # of the rate after that: none, or linear to zero
    clip: float | None = None  # largest norm of the whole gradient
    crop: int = 0  # pixels around each image, black, from which a piece of its size is cut, drawn in every epoch
    tokenizer: str = ""  # the text that byte pairs are taken from; without it a text is made of characters
    start: dict[str, Any] = field(default_factory=dict)  # the spec of the run that this one continues from
    split: str = "end"  # what is held out; see tasks.SPLITS

    @property
    def key(self) -> str:
        """The name of the record's file, without its suffix."""
        model = file_name(self.model)
        return f"{file_name(self.dataset)}-{model}-{self.optimizer}-{digest(self.identity(asdict(self)))}"

    @classmethod
    def identity(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that tell runs apart, as JSON reads them back: a later field counts only away from its default."""
        later = {f.name: _default(f) for f in fields(cls) if f.name not in ORIGINAL_FIELDS}
        plain = json.loads(json.dumps(dict(values)))
        return {name: value for name, value in plain.items() if name not in later or value != later[name]}

    def describes(self, stored: object) -> bool:
        """Whether the spec inside a record is this one, even if the record is older than some of the fields."""
        return isinstance(stored, Mapping) and self.identity(stored) == self.identity(asdict(self))

    def __hash__(self) -> int:
        return hash(self.key)  # the options are a dict


def file_name(text: str) -> str:
    """A text without the characters that a file name should not have, such as the colon of 'module:object'."""
    return re.sub(r"[^\w.]+", "-", text)


def digest(values: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that differ where the values do."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=6).hexdigest()


def _default(later: Field[Any]) -> Any:
    """The default of a field, as JSON reads it back."""
    value = later.default_factory() if later.default_factory is not MISSING else later.default
    return json.loads(json.dumps(value))
