"""Experiments on top of the library, run by the `blockmean` command. They use only its public names."""
