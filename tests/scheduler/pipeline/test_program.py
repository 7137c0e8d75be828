"""That a solver which knows nothing of cut points and labels finds no better plan, and none that is missing."""

from __future__ import annotations

import pytest

from scheduler.pipeline import NothingFitsError, front
from scheduler.pipeline._planner import pipeline_options

from .problems import problem
from .program import least_usd

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(1000, 1020))
def test_the_solver_agrees_all_along_the_front(seed: int) -> None:
    asked = problem(seed, layers=4, sizes=2)
    ways = pipeline_options(asked)
    try:
        plans = front(asked)
    except NothingFitsError:
        assert all(least_usd(asked, way, 1e6) is None for way in ways)
        return
    # Between two points nothing else: within a hair less than the time of the next, the last point is the cheapest.
    limits = [plan.seconds * (1 - 1e-6) for plan in plans] + [1e6]
    checked = [0, len(plans) // 2, len(plans)]
    for number in dict.fromkeys(checked):
        found = [usd for way in ways if (usd := least_usd(asked, way, limits[number])) is not None]
        if number == 0:
            assert not found
        else:
            assert min(found) == pytest.approx(plans[number - 1].usd, rel=1e-5)
