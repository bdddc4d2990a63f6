"""Pictures of matrices and of what blocks have to do with each other.

_blocks.py    blocks: a matrix as coloured cells, with the boundaries of its blocks
_coupling.py  coupling: the correlation between blocks as a heat map, beside the scale of each block
_between.py   correlation, and where the numbers between blocks come from
_recorder.py  CouplingRecorder: how an optimizer's matrices change in training, and TensorBoard
_course.py    what a recorder has seen, and its picture

matplotlib comes with the `lab` extra and is imported by the first picture.
"""

from blockmean.plot._axes import LARGEST
from blockmean.plot._between import correlation
from blockmean.plot._blocks import blocks
from blockmean.plot._coupling import coupling
from blockmean.plot._recorder import CouplingRecorder

__all__ = ["LARGEST", "CouplingRecorder", "blocks", "correlation", "coupling"]
