"""The paper, part by part: one short file per figure or table, each with one function."""

from collections.abc import Callable
from pathlib import Path

from blockmean.lab.paper.fig2 import fig2
from blockmean.lab.paper.fig3 import fig3
from blockmean.lab.paper.outcome import Claim, Outcome
from blockmean.lab.paper.theorems import theorems

PARTS: dict[str, Callable[[Path], Outcome]] = {"theorems": theorems, "fig2": fig2, "fig3": fig3}
"""Every part that can be reproduced: it takes the folder for its pictures and gives what it found."""

__all__ = ["PARTS", "Claim", "Outcome"]
