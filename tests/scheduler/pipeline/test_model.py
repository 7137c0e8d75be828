"""The closed forms against what they stand for: a schedule played event by event, and the collective as it is sent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler.pipeline import Cut, NothingFitsError, PipelineOptions, PipelineProblem, evaluate, front, played
from scheduler.pipeline._evaluate import _lanes, merge_seconds
from scheduler.pipeline._explain import cuts_of
from sync.collective import ChannelCosts, Merge, estimate

from .problems import problem

QUICK = settings(max_examples=budget(40), deadline=None)


@QUICK
@given(st.integers(0, 100_000))
def test_seconds_are_those_of_the_schedule(seed: int) -> None:
    """GPipe exactly; 1F1B never less than the schedule takes, since it counts transfers as not hidden."""
    asked = problem(seed)
    asked = replace(asked, places=tuple(replace(place, cores=0.0) for place in asked.places))
    try:
        plans = front(asked)
    except NothingFitsError:
        return
    for plan in plans[:: max(1, len(plans) // 4)]:
        cuts = cuts_of(asked, plan)
        for order in ("gpipe", "1f1b"):
            way = PipelineOptions(plan.way.degree, plan.way.micro_batch, order)
            own = evaluate(asked, way, cuts)
            if own is None:
                continue
            schedule = _play(asked, way, cuts)
            assert played(asked, own).seconds == pytest.approx(schedule, rel=1e-9)
            if order == "gpipe":
                assert own.seconds == pytest.approx(schedule, rel=1e-9)
            else:
                assert own.seconds >= schedule * (1 - 1e-9)


@QUICK
@given(st.integers(0, 100_000), st.sampled_from([1.0, 2.0, 3.0]))
def test_on_shared_cores_the_schedule_takes_no_less(seed: int, cores: float) -> None:
    """And no more than the cores' work and the whole schedule, one after the other (Graham 1966)."""
    asked = problem(seed)
    layers = tuple(replace(layer, update_s=0.0) for layer in asked.profile.layers)
    own = tuple(
        replace(
            place,
            sizes=tuple(replace(size, speed=1.0) for size in place.sizes),
            channel=replace(place.channel, request_core_s=0.0, byte_core_s=0.0),
            cores=0.0,
        )
        for place in asked.places
    )
    asked = replace(asked, profile=replace(asked.profile, layers=layers), places=own, degrees=(1,))
    shared = replace(asked, places=tuple(replace(place, cores=cores) for place in own))
    try:
        plans = front(shared)
    except NothingFitsError:
        return
    for plan in plans[:: max(1, len(plans) // 3)]:
        cuts, way = cuts_of(asked, plan), replace(plan.way, order="gpipe")
        ours, alone = evaluate(shared, way, cuts), evaluate(asked, way, cuts)
        if ours is None or alone is None:
            continue
        took, order, needs = _tasks(asked, way, cuts)
        done = _run(took, order, needs, cores)
        last = max(when for (kind, g, _), when in done.items() if kind == ("gput" if g else "R"))
        if len(asked.places) == 1:
            # Merges and optimisers take nothing here, and each place's cores are its own.
            assert played(shared, ours).seconds == pytest.approx(last, rel=1e-9)
        work = sum(seconds for (kind, _, _), seconds in took.items() if kind in ("F", "R"))
        assert ours.seconds <= last * (1 + 1e-9)
        assert last <= (work / cores + alone.seconds) * (1 + 1e-9)


def _play(asked: PipelineProblem, way: PipelineOptions, cuts: tuple[Cut, ...]) -> float:
    """Seconds of one iteration, every task as soon as its lane is free, in each lane's order."""
    plan, count = evaluate(asked, way, cuts), way.micro_batches(asked.batch)
    assert plan is not None
    done = _run(*_tasks(asked, way, cuts))
    ends = []
    for g, stage in enumerate(plan.stages):
        sent = ("R", g, count - 1) if g == 0 else ("gput", g, count - 1)
        ends.append(done[sent] + stage.merge_s + stage.update_s)
    return max(ends)


Task = tuple[str, int, int]
"""What is done, in which stage, with which micro-batch."""


def _tasks(
    asked: PipelineProblem, way: PipelineOptions, cuts: tuple[Cut, ...]
) -> tuple[dict[Task, float], dict[tuple[str, int], list[Task]], dict[Task, Task | None]]:
    """Seconds of each, the order in each lane, and what each needs besides."""
    plan = evaluate(asked, way, cuts)
    assert plan is not None
    count, stages = way.micro_batches(asked.batch), len(cuts)
    after = [*cuts[1:], None]
    lanes = [_lanes(asked, way, c, a, s) for c, a, s in zip(cuts, after, plan.stages, strict=True)]
    took: dict[Task, float] = {}
    order: dict[tuple[str, int], list[Task]] = {}
    needs: dict[Task, Task | None] = {}
    for g, (forward, backward) in enumerate(lanes):
        first, last = g == 0, g == stages - 1
        for m in range(count):
            took["F", g, m], took["R", g, m] = forward[0], backward[0]
            needs["F", g, m] = None if first else ("get", g, m)
            needs["R", g, m] = ("F", g, m) if last else ("back", g, m)
            if not first:
                took["get", g, m], took["gput", g, m] = forward[1], backward[1]
                needs["get", g, m], needs["gput", g, m] = ("put", g - 1, m), ("R", g, m)
            if not last:
                took["put", g, m], took["back", g, m] = forward[-1], backward[-1]
                needs["put", g, m], needs["back", g, m] = ("F", g, m), ("gput", g + 1, m)
        order["compute", g] = _sequence(way, g, stages, count)
        puts = {"F": "put", "R": "gput"}
        gets = {"F": "get", "R": "back"}
        order["up", g] = [(puts[k], g, m) for k, _, m in order["compute", g] if (puts[k], g, m) in took]
        order["down", g] = [(gets[k], g, m) for k, _, m in order["compute", g] if (gets[k], g, m) in took]
    return took, order, needs


def _sequence(way: PipelineOptions, g: int, stages: int, count: int) -> list[tuple[str, int, int]]:
    if way.order == "gpipe":
        return [("F", g, m) for m in range(count)] + [("R", g, m) for m in range(count)]
    ahead = min(count, stages - g)
    tasks = [("F", g, m) for m in range(ahead)]
    for m in range(count):
        tasks.append(("R", g, m))
        if m + ahead < count:
            tasks.append(("F", g, m + ahead))
    return tasks


def _run(
    took: dict[Task, float],
    order: dict[tuple[str, int], list[Task]],
    needs: dict[Task, Task | None],
    cores: float = math.inf,
) -> dict[Task, float]:
    """When each task is done: after the one before it in its lane, and after what it needs. What computes shares the
    cores evenly."""
    before: dict[Task, list[Task]] = {}
    for tasks in order.values():
        for earlier, task in zip([None, *tasks], tasks, strict=False):
            before[task] = [need for need in (earlier, needs[task]) if need is not None]
    done: dict[Task, float] = {}
    left, now = dict(took), 0.0
    while left:
        running = [task for task in left if all(need in done for need in before[task])]
        computing = sum(task[0] in ("F", "R") for task in running)
        rate = min(1.0, cores / computing) if computing else 1.0
        rates = {task: rate if task[0] in ("F", "R") else 1.0 for task in running}
        passes = min(left[task] / rates[task] for task in running)
        now += passes
        for task in running:
            left[task] -= passes * rates[task]
            if left[task] <= 1e-12:
                done[task] = now
                del left[task]
    assert len(done) == len(took)
    return done


@pytest.mark.parametrize("workers", [2, 3, 5, 12])
@pytest.mark.parametrize("parallel", [1, 8])
def test_merging_takes_what_the_collective_takes(workers: int, parallel: int) -> None:
    place = problem(7).places[0]
    channel = type(place.channel)(0.01, 0.02, 3e7, 5e7, parallel, 0.0, 0.0)
    own = merge_seconds(8e6, workers, type(place)("p", place.sizes, channel), 0.5)
    costs = ChannelCosts(0.01, 0.02, 1.5e7, 2.5e7, parallel=parallel)
    assert own == pytest.approx(estimate(Merge("pipelined-scatter-reduce", workers, 8e6), costs).seconds)
