"""What the scripts that compare optimizers share: their arguments, a study with a progress bar, and the record."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.progress import Progress

from blockmean.lab.compare import Findings, Study
from blockmean.lab.environment import environment
from blockmean.lab.records import WorkerKilled


def arguments(doc: str, name: str) -> argparse.ArgumentParser:
    """The options of a script, described by the first line of its docstring."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=None, help="has mnist, cifar10 and text")
    parser.add_argument("--records", type=Path, default=Path("out/runs"), help="folder; no run is repeated")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{name}.json")
    return parser


def run(study: Study, options: argparse.Namespace) -> Findings:
    """Make the runs of a study that have no record yet, and read all of them."""
    with Progress() as progress:
        bar = progress.add_task(study.name, total=study.total_steps())
        try:
            study.run(
                options.records, options.data_dir, options.jobs, lambda steps: progress.update(bar, completed=steps)
            )
        except WorkerKilled as error:
            raise SystemExit(str(error)) from None
    return study.findings(options.records)


def save(options: argparse.Namespace, **values: Any) -> None:
    """Write the summary, with the machine that made it."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": environment(), **values}
    options.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
