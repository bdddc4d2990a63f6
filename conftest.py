"""For all tests and doctests: none leaves a picture open for the next one to stumble over."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def close_pictures() -> Iterator[None]:
    yield
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close("all")
