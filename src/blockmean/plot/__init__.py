"""Pictures of matrices, of the coupling between blocks, and of the means in gradients.

_blocks.py        blocks: a matrix as coloured cells, with the boundaries of its blocks
_coupling.py      coupling: the correlation between blocks as a heat map, next to the scale of each block
_block_matrix.py  correlation, and the matrix A of any source
_shares.py        shares: how much of every gradient is means, for Anova
_recorder.py      CouplingRecorder: how an optimizer's matrices change in training, and TensorBoard
_history.py       the records of one matrix, and their picture

matplotlib comes with the `lab` extra; the first picture imports it.
"""

from blockmean.plot._axes import LARGEST
from blockmean.plot._block_matrix import correlation
from blockmean.plot._blocks import blocks
from blockmean.plot._coupling import coupling
from blockmean.plot._recorder import CouplingRecorder
from blockmean.plot._shares import shares

__all__ = ["LARGEST", "CouplingRecorder", "blocks", "correlation", "coupling", "shares"]
