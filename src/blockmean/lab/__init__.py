"""Experiments on top of the library. They use the public names of `blockmean` only; `blockmean …` runs them."""
