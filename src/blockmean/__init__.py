"""Exact algebra of block-mean matrices, and optimizers that account for the dependency between groups of parameters.

    partition.py   which entries form a block; block sums and expansion
    matrix.py      BlockMean: Λ̄ + B̄, its inverse, roots and any other function at the cost of an L×L matrix
    optim/         Anova, AdamBMA, AdaGradBMA, AdaGradFull, NaturalGradientBMA: drop-in for torch.optim, one per file
                   diagnose: will the correction matter here? param_groups: weight decay for weights only
    curvature/     Fisher, Gauss-Newton and Hessian matrices of a model on data, as BlockMean, never d×d
    plot/          pictures of matrices, their blocks, and the means in gradients (needs the `lab` extra)

After Lu, Harandi, Hartley and Pascanu, "Block Mean Approximation for Efficient Second Order Optimization".
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockmean import curvature, plot
    from blockmean.matrix import BlockMean
    from blockmean.optim import AdaGradBMA, AdaGradFull, AdamBMA, Anova, NaturalGradientBMA, diagnose, param_groups
    from blockmean.partition import Partition

__all__ = [
    "AdaGradBMA",
    "AdaGradFull",
    "AdamBMA",
    "Anova",
    "BlockMean",
    "NaturalGradientBMA",
    "Partition",
    "__version__",
    "curvature",
    "diagnose",
    "param_groups",
    "plot",
]
__version__ = "0.1.0"
"""The version of the package."""

_OPTIM = ("AdaGradBMA", "AdaGradFull", "AdamBMA", "Anova", "NaturalGradientBMA", "diagnose", "param_groups")
_HOMES = {"BlockMean": "matrix", "Partition": "partition", **dict.fromkeys(_OPTIM, "optim")}
_MODULES = ("blocks", "curvature", "matrix", "optim", "partition", "plot")

if not TYPE_CHECKING:  # a type checker would believe that every name exists

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used: torch takes seconds, and `blockmean --help` needs none of it."""
        if name in _MODULES:
            return import_module(f"blockmean.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'blockmean' has no attribute {name!r}")
        globals()[name] = getattr(import_module(f"blockmean.{_HOMES[name]}"), name)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
