"""`python -m blockmean` is the `blockmean` command."""

from blockmean.cli import main

main()
