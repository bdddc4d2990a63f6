"""Table 1: the small model."""

from blockmean.lab.paper.architecture import architecture
from blockmean.lab.paper.outcome import Outcome, ReportConfig

PRINTED = [*(["Conv 3x3, 3", "Max Pooling 2x2"] * 4), "Fully Connected, 10", "Softmax, 10"]


def table1(config: ReportConfig) -> Outcome:
    """The small model layer by layer, with output shapes and parameters."""
    return architecture(1, "small", PRINTED)
