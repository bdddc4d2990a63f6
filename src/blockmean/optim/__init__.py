"""Optimizers, one per file: thin classes over plain functions that take lists of tensors."""

from blockmean.optim.adagrad import AdaGradBMA
from blockmean.optim.adagrad_full import AdaGradFull
from blockmean.optim.adam import AdamBMA
from blockmean.optim.anova import Anova
from blockmean.optim.groups import param_groups
from blockmean.optim.inspection import BlockStatistics, Diagnosis, MeanStatistics, diagnose
from blockmean.optim.natural import NaturalGradientBMA

__all__ = [
    "AdaGradBMA",
    "AdaGradFull",
    "AdamBMA",
    "Anova",
    "BlockStatistics",
    "Diagnosis",
    "MeanStatistics",
    "NaturalGradientBMA",
    "diagnose",
    "param_groups",
]
