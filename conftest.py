"""For all tests and doctests: none leaves anything behind for the next one to stumble over."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

os.environ.pop("COLUMNS", None)  # of xdist: a console keeps the width it finds when it is made, whatever a test sets


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)  # runs take one thread, and with another number convolutions round differently
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close("all")
