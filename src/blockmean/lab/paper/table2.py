"""Table 2: the large model."""

from blockmean.lab.paper.architecture import architecture
from blockmean.lab.paper.outcome import Outcome, ReportConfig

PRINTED = [*([*(["Conv 3x3, 32"] * 4), "Max Pooling 2x2"] * 4), "Fully Connected, 10", "Softmax, 10"]


def table2(config: ReportConfig) -> Outcome:
    """The large model layer by layer, with output shapes and parameters."""
    return architecture(2, "large", PRINTED)
