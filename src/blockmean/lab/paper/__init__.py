"""The paper, part by part: one short file per figure or table, each with one function; and what Anova adds to it."""

from collections.abc import Callable

from blockmean.lab.paper.anova import anova
from blockmean.lab.paper.fig1 import fig1
from blockmean.lab.paper.fig2 import fig2
from blockmean.lab.paper.fig3 import fig3
from blockmean.lab.paper.fig4 import fig4
from blockmean.lab.paper.fig5 import fig5
from blockmean.lab.paper.outcome import Claim, Outcome, ReportConfig, Table, Verdict
from blockmean.lab.paper.table1 import table1
from blockmean.lab.paper.table2 import table2
from blockmean.lab.paper.table3 import table3
from blockmean.lab.paper.table4 import table4
from blockmean.lab.paper.theorems import theorems
from blockmean.lab.picture import Picture

PARTS: dict[str, Callable[[ReportConfig], Outcome]] = {
    "theorems": theorems,
    "fig1": fig1,
    "fig2": fig2,
    "fig3": fig3,
    "fig4": fig4,
    "table1": table1,
    "table2": table2,
    "table3": table3,
    "table4": table4,
    "fig5": fig5,
    "anova": anova,
}
"""Every part of the report: the paper's in its order, then Anova."""

__all__ = ["PARTS", "Claim", "Outcome", "Picture", "ReportConfig", "Table", "Verdict"]
