"""Coordinate descent on losses that are known in closed form."""

import math

import pytest

from blockmean.lab.study_search import Axis, at_edge, descend

RATES = Axis("lr", tuple(2.0**k for k in range(-10, 11)))
DECAYS = Axis("decay", (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0))
AXES = (RATES, DECAYS)
START = (1.0, 0.1)


def bowl(rate, decay):
    """A loss with its smallest value on the grid at (rate, decay), and a little coupling."""

    def loss(point):
        x, y = math.log2(point[0] / rate), DECAYS.values.index(point[1]) - DECAYS.values.index(decay)
        return x * x + y * y + 0.5 * x * y

    return loss


@pytest.mark.parametrize("best", [(1.0, 0.1), (16.0, 0.5), (2.0**-7, 0.0), (0.5, 2.0)])
def test_the_optimum_is_found_and_bracketed_wherever_it_is(best):
    found = descend(START, AXES, 100, bowl(*best))
    assert found.best == best
    assert found.converged and found.wanted is None
    i = RATES.values.index(best[0])
    assert {(RATES.values[i + side], best[1]) for side in (-1, 1)} <= found.tried.keys()  # it went beyond
    assert found.loss == min(found.tried.values()) == 0


def test_a_budget_ends_the_search_with_the_best_so_far():
    found = descend(START, AXES, 5, bowl(16.0, 0.5))
    assert len(found.tried) == 5
    assert not found.converged and found.wanted is None
    assert found.loss == min(found.tried.values())


def test_the_next_run_follows_from_those_that_are_known():
    loss, known, order = bowl(8.0, 0.5), {}, []
    while (wanted := descend(START, AXES, 100, known.get).wanted) is not None:
        assert wanted not in known  # nothing twice
        known[wanted] = loss(wanted)
        order.append(wanted)
    whole = descend(START, AXES, 100, loss)
    assert order == list(whole.tried)
    assert order[:5] == [(1.0, 0.1), (2.0, 0.1), (4.0, 0.1), (8.0, 0.1), (16.0, 0.1)]  # the rate first
    assert descend(START, AXES, 100, known.get) == whole


def test_settings_that_diverge_are_left():
    def loss(point):
        return math.inf if point[0] > 1 else bowl(0.25, 0.1)(point)

    assert descend(START, AXES, 100, loss).best == (0.25, 0.1)
    assert descend(START, AXES, 100, lambda point: math.inf).loss == math.inf


def test_an_axis_with_one_value_does_not_move_and_has_no_edge():
    axes = (RATES, Axis("decay", (0.1,)))
    found = descend(START, axes, 100, lambda point: abs(math.log2(point[0]) - 10))
    assert found.best == (2.0**10, 0.1)
    assert at_edge(found.best, axes) == ["lr"]
    assert at_edge((1.0, 2.0), AXES) == ["decay"]
