"""Event simulation of a pipeline's schedule: the time of one iteration.

The search uses closed forms (`_evaluate`), which are only bounds for 1F1B and for stages that share cores. This
simulation computes the time of the chosen pipeline within these bounds. As in the runtime, a stage has three lanes for
computing, puts and gets, each in the order of its schedule. Cores are shared evenly among all tasks that use them
(processor sharing).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.pipeline._evaluate import merge_core_seconds, message_core_seconds, transfers
from scheduler.pipeline._explain import cuts_of
from scheduler.pipeline._model import PipelineOptions, PipelineProblem, PlannedPipeline

__all__ = ["played"]

ROUNDING = 1e-11
"""Rounding error of a sum of parts, relative to the work so far."""
_Name = tuple[str, int, int]
"""Action, stage and micro-batch."""


@dataclass(frozen=True)
class _Task:
    """A task that first uses a core, and then only takes time."""

    lane: tuple[str, int]
    needs: _Name | None
    core_s: float
    """Seconds of computing with the function's whole share of a core."""
    idle_s: float
    """Seconds after computing, in which no core is used."""
    place: int
    cores: float
    """Cores that all replicas together use while the task computes."""


def played(problem: PipelineProblem, plan: PlannedPipeline) -> PlannedPipeline:
    """Return the pipeline with the seconds of its simulated schedule, and the resulting USD.

    All replicas of a stage behave the same, and all micro-batches are equal. Without shared cores the seconds are those
    of `evaluate` for GPipe, and at most those for 1F1B.
    """
    cores = [place.cores or math.inf for place in problem.places]
    seconds = _makespan(_tasks(problem, plan), cores)
    function_usd = plan.function_usd * seconds / plan.seconds if plan.seconds else 0.0
    return replace(plan, seconds=seconds, usd=plan.usd - plan.function_usd + function_usd, function_usd=function_usd)


def _passes(way: PipelineOptions, stage: int, stages: int, count: int) -> Iterator[tuple[str, int]]:
    """Return the passes of one stage in order: "F" (forward) or "B" (backward), and the micro-batch."""
    ahead = count if way.order == "gpipe" else min(count, stages - stage)
    yield from (("F", number) for number in range(ahead))
    for number in range(count):
        yield "B", number
        if ahead + number < count:
            yield "F", ahead + number


def _tasks(problem: PipelineProblem, plan: PlannedPipeline) -> dict[_Name, _Task]:
    """Return all tasks, those of each lane in order.

    Activations: "put" sends, "there" is the way, "get" receives. Gradients: "return", "away" and "back" likewise.
    """
    way, count, end = plan.way, plan.micro_batches, len(plan.stages) - 1
    cuts, tasks = cuts_of(problem, plan), dict[_Name, _Task]()
    for g, (cut, stage) in enumerate(zip(cuts, plan.stages, strict=True)):
        place = problem.places[cut.place]
        cores = way.degree * min(1.0, place.sizes[cut.size].speed)
        takes = transfers(problem, way, cut, cuts[g + 1] if g < end else None)
        entering, leaving = message_core_seconds(problem, way, cut)

        def add(
            name: _Name, lane: str, needs: _Name | None, seconds: float, core_s: float,
            at: int = cut.place, cores: float = cores,
        ) -> None:  # fmt: skip
            tasks[name] = _Task((lane, name[1]), needs, core_s, max(0.0, seconds - core_s), at, cores)

        for kind, m in _passes(way, g, end + 1, count):
            if kind == "F":
                if g > 0:
                    add(("get", g, m), "down", ("there", g - 1, m), takes.get, entering)
                add(("F", g, m), "compute", ("get", g, m) if g else None, stage.forward_s, stage.forward_s)
                if g < end:
                    add(("put", g, m), "up", ("F", g, m), takes.put, leaving)
                    add(("there", g, m), "there", ("put", g, m), takes.there, 0.0)
                continue
            if g < end:
                add(("back", g, m), "down", ("away", g + 1, m), takes.back, leaving)
            needs = ("back", g, m) if g < end else ("F", g, m)
            add(("B", g, m), "compute", needs, stage.backward_s, stage.backward_s)
            if g > 0:
                before = transfers(problem, way, cuts[g - 1], cut)
                add(("return", g, m), "up", ("B", g, m), takes.give, entering)
                add(("away", g, m), "away", ("return", g, m), before.away, 0.0)
        sent = ("return", g, count - 1) if g else ("B", g, count - 1)
        add(("merge", g, 0), "compute", sent, stage.merge_s, min(stage.merge_s, merge_core_seconds(problem, way, cut)))
        add(("update", g, 0), "compute", ("merge", g, 0), stage.update_s, stage.update_s)
    return tasks


def _makespan(tasks: Mapping[_Name, _Task], cores: Sequence[float]) -> float:
    """Return the time at which all tasks are done.

    All tasks that use a core of a place advance at the same rate, so one counter of core seconds per place suffices: a
    task has computed when the counter has grown by the task's core seconds since its start.
    """
    followers: dict[_Name, list[_Name]] = {name: [] for name in tasks}
    missing: dict[_Name, int] = {}
    latest: dict[tuple[str, int], _Name] = {}
    for name, task in tasks.items():
        before = {need for need in (task.needs, latest.get(task.lane)) if need is not None}
        missing[name], latest[task.lane] = len(before), name
        for need in before:
            followers[need].append(name)
    now = 0.0
    worked, wanted = [0.0] * len(cores), [0.0] * len(cores)
    busy: list[list[tuple[float, _Name]]] = [[] for _ in cores]
    idle: list[tuple[float, _Name]] = []

    def begin(name: _Name) -> None:
        task = tasks[name]
        heapq.heappush(busy[task.place], (worked[task.place] + task.core_s, name))
        wanted[task.place] += task.cores

    for name, count in missing.items():
        if not count:
            begin(name)
    while idle or any(busy):
        rates = [min(1.0, has / wants) if wants > 0 else 1.0 for has, wants in zip(cores, wanted, strict=True)]
        due = [now + (some[0][0] - worked[p]) / rates[p] for p, some in enumerate(busy) if some]
        then = min([*due, idle[0][0]] if idle else due)
        for p, rate in enumerate(rates):
            worked[p] += (then - now) * rate
        now = then
        for p, some in enumerate(busy):
            while some and some[0][0] <= worked[p] + ROUNDING * (1.0 + worked[p]):
                _, name = heapq.heappop(some)
                # With no task left the sum is exactly zero, whatever rounding errors it has accumulated.
                wanted[p] = wanted[p] - tasks[name].cores if some else 0.0
                heapq.heappush(idle, (now + tasks[name].idle_s, name))
        while idle and idle[0][0] <= now:
            for follower in followers[heapq.heappop(idle)[1]]:
                missing[follower] -= 1
                if not missing[follower]:
                    begin(follower)
    return now
