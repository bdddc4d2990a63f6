"""Table 3: the number of parameters of both models."""

from blockmean.lab.models import MODELS
from blockmean.lab.paper.architecture import SHAPES
from blockmean.lab.paper.outcome import Claim, Outcome, ReportConfig, Table, Verdict

PRINTED = {"small": {"MNIST": 322, "CIFAR-10": 466}, "large": {"MNIST": 139_370, "CIFAR-10": 140_906}}


def table3(config: ReportConfig) -> Outcome:
    """The numbers of parameters of both models on both data sets, counted."""
    counted = {
        name: {data: sum(param.numel() for param in MODELS[name](shape).parameters()) for data, shape in SHAPES.items()}
        for name in PRINTED
    }
    claims = [
        Claim(
            f"Table 3: the {name} model has {printed:,} parameters on {data}",
            f"{counted[name][data]:,}",
            Verdict.of(counted[name][data] == printed),
            exact=True,
        )
        for name, row in PRINTED.items()
        for data, printed in row.items()
    ]
    rows = [
        [f"{name} model", *(f"{count[name][data]:,}" for data in SHAPES for count in (counted, PRINTED))]
        for name in PRINTED
    ]
    header = ["", *(f"{data}{whose}" for data in SHAPES for whose in ("", ", the paper"))]
    return Outcome(claims, tables=[Table("Table 3: model parameters", header, rows)])
