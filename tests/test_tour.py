"""The notebook: its cells run in order, and what is committed is the outcome of such a run."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

TOUR = Path(__file__).parent.parent / "examples" / "tour.ipynb"


def cells(kind: str) -> list[dict]:
    return [cell for cell in json.loads(TOUR.read_text())["cells"] if cell["cell_type"] == kind]


def test_the_committed_notebook_was_run_from_top_to_bottom_and_is_small():
    code = cells("code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    assert TOUR.stat().st_size < 300_000


def test_its_links_lead_somewhere():
    text = "".join("".join(cell["source"]) for cell in cells("markdown"))
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert all((TOUR.parent / link).exists() for link in links)


@pytest.mark.study
@pytest.mark.filterwarnings("ignore:.*non-interactive, and thus cannot be shown:UserWarning")
def test_its_cells_run_and_print_what_the_text_promises():
    """As plain Python in one namespace, which is all that a kernel does with these cells but show pictures."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    plt.rcdefaults()
    namespace: dict[str, object] = {}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            for number, cell in enumerate(cells("code")):
                exec(compile("".join(cell["source"]), f"cell {number + 1}", "exec"), namespace)
    finally:
        plt.rcdefaults()
    text = printed.getvalue()
    (error,) = re.findall(r"dense linear algebra (\S+)", text)
    assert float(error) < 1e-12  # float64, condition about 10³
    (residual,) = re.findall(r"relative residual (\S+)", text)
    assert float(residual) < 1e-5  # products in float32
    tuned = re.findall(r"(AdamW|Anova) at (\S+): training loss", text)
    assert [name for name, _ in tuned] == ["AdamW", "Anova"]
    final, runs = namespace["final"], namespace["runs"]
    losses = {name: [final(values) for values, *_ in results] for name, results in runs.items()}
    assert all(ours < theirs for ours, theirs in zip(losses["Anova"], losses["AdamW"], strict=True))
    rates = {name: float(rate) for name, rate in tuned}
    first, last = sorted(rates, key=rates.get, reverse=True)
    begin = {name: sum(values[19] for values, *_ in results) for name, results in runs.items()}
    assert rates[first] == rates[last] or begin[first] < begin[last]  # "leads at first"
