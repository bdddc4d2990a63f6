"""The command line, one command per file: `blockmean reproduce`, `report`, `train`, `inspect`, `bench`."""

from blockmean.cli._app import app, main
from blockmean.cli.bench import bench, race
from blockmean.cli.inspect import inspect
from blockmean.cli.reproduce import report, reproduce
from blockmean.cli.train import train

__all__ = ["app", "bench", "inspect", "main", "race", "report", "reproduce", "train"]
