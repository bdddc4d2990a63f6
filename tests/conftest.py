"""What the tests of all folders share: processes, which are slow to start."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from support.cluster import FORKSERVER, Cluster


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two processes, the same for all tests."""
    cluster = Cluster(2, tmp_path_factory.mktemp("two"))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four processes, the same for all tests."""
    cluster = Cluster(4, tmp_path_factory.mktemp("four"))
    yield cluster
    cluster.close()


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of the lab do not import torch again: they are children of a process that has."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: FORKSERVER)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share processes run in the same worker (`--dist loadgroup`), so that there is one set of them."""
    for item in items:
        if {"two", "four"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("processes"))
