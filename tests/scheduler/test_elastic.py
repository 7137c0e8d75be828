"""Possible numbers of workers of regions, and which one is taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler._rescaling import MOST_PACES, EvaluatedOption, Option, WorkerLimits, options, taken

regions = st.lists(st.builds(WorkerLimits, st.floats(0.01, 1e6), st.integers(1, 64)), min_size=1, max_size=12)


def _time(held: list[WorkerLimits], option: Option) -> float:
    return max(region.load_seconds / workers for region, workers in zip(held, option.workers, strict=True))


@given(regions)
def test_the_first_is_load_power_matching(held: list[WorkerLimits]) -> None:
    first = options(held)[0]
    slowest = max(region.load_seconds / region.free for region in held)
    assert _time(held, first) <= slowest * (1 + 1e-6)
    for region, workers in zip(held, first.workers, strict=True):
        assert workers == 1 or region.load_seconds / (workers - 1) > slowest * (1 - 1e-6), "no worker too many"


@given(regions)
def test_paces_only_slow_down_and_use_what_is_free(held: list[WorkerLimits]) -> None:
    found = options(held)
    assert len(set(found)) == len(found) <= MOST_PACES + 2
    for option in found:
        assert all(1 <= workers <= region.free for region, workers in zip(held, option.workers, strict=True))
    paced = [option for option in found if option.name != "greedy"]
    times = [_time(held, option) for option in paced]
    assert times == sorted(times)
    totals = [sum(option.workers) for option in paced]
    assert totals == sorted(totals, reverse=True)
    greedy = tuple(region.free for region in held)
    assert greedy in {option.workers for option in found}
    assert (1,) * len(held) in {option.workers for option in found}


ways = st.lists(
    st.tuples(st.floats(1, 1e4), st.floats(0.01, 100)).map(
        lambda w: EvaluatedOption(Option("", (1,)), w[0], w[1], w[0] * 2, w[1] * 2)
    ),
    min_size=1,
    max_size=20,
)
limits = st.one_of(st.none(), st.floats(1, 1e4))


@given(ways, st.sampled_from(["cost", "time"]), limits, limits)
def test_what_is_taken_keeps_its_limits_where_anything_does(
    held: list[EvaluatedOption], minimise: str, deadline: float | None, budget: float | None
) -> None:
    def kept(way: EvaluatedOption) -> bool:
        in_time = deadline is None or way.most_seconds <= deadline
        return in_time and (budget is None or way.most_usd <= budget)

    best = taken(held, minimise=minimise, deadline_seconds=deadline, budget_usd=budget)
    possible = [way for way in held if kept(way)]
    if possible:
        assert kept(best)
        least = min(way.usd if minimise == "cost" else way.seconds for way in possible)
        assert (best.usd if minimise == "cost" else best.seconds) <= least * 1.05 * (1 + 1e-9)
