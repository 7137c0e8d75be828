"""Run a sweep: submit its trials as jobs, wait for them, and compare what they give."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from control_plane._view import Data
from geofed.sweep._file import LoadedSweep
from geofed.sweep._search import Search, Values, search_of, values_in
from geofed_pb.errors import OUTAGE, GeofedError
from geofed_pb.tasks import awaited

_LOOK_SECONDS = 1.0
"""Time between two looks at whether another trial can start."""
_RESERVE = 1.25
"""Part of the upper end of a trial's predicted cost that is set aside for it: a job whose budget is spent ends early,
and what it gives could not be compared."""
_FAILURES = 3
"""Trials that have all failed after which no further one starts: what they have in common is wrong."""
_ENDED_BADLY = ("JOB_FAILED", "JOB_CANCELLED")


class TrialJob(Protocol):
    """What a sweep needs of ``geofed.AsyncJob``."""

    view: Data

    @property
    def id(self) -> str: ...

    @property
    def state(self) -> str: ...

    async def refresh(self) -> Data: ...

    async def wait(self) -> Data: ...


class TrialClient(Protocol):
    """What a sweep needs of ``geofed.AsyncClient``, which has sweeps as a method."""

    async def plan(self, job_file: Path, *, set: Mapping[str, object]) -> Data: ...

    async def submit(self, job_file: Path, *, set: Mapping[str, object], name: str, request_id: str) -> TrialJob: ...

    async def job(self, job: str) -> TrialJob: ...

    async def jobs(self, *, ended: bool, limit: int, labels: Mapping[str, str]) -> Sequence[TrialJob]: ...


@dataclass
class _Trial:
    """A trial that was proposed."""

    number: int
    values: Values
    job: str = ""
    state: str = ""
    value: float | None = None
    seconds: float = 0.0
    usd: float = 0.0
    note: str = ""
    reserved_usd: float = 0.0

    def row(self) -> Data:
        return {
            "trial": self.number,
            "job": self.job or None,
            "state": self.state,
            "parameters": self.values,
            "value": self.value,
            "seconds": self.seconds,
            "usd": self.usd,
            "note": self.note,
        }


@dataclass
class _Sweep:
    """A sweep that runs."""

    client: TrialClient
    loaded: LoadedSweep
    search: Search
    report: Callable[[Data], None]
    trials: list[_Trial] = field(default_factory=list)
    stopped: str = ""

    @property
    def spent_usd(self) -> float:
        return sum(trial.usd for trial in self.trials)


async def planned_sweep(client: TrialClient, loaded: LoadedSweep) -> Data:
    """Return how many trials a sweep has, and the plan of the first one. Nothing is run."""
    search = search_of(loaded.file, loaded.maximise)
    values = search.propose(1)
    plan = await client.plan(loaded.job_file, set=values)
    return {"sweep": loaded.id, "trials": search.trials, "parameters": values, "plan": plan}


async def run_sweep(client: TrialClient, loaded: LoadedSweep, report: Callable[[Data], None] = lambda _: None) -> Data:
    """Run all trials of a sweep, those that the control plane does not have yet.

    Args:
        report: called with each trial's row once it has ended.

    Returns the rows of all trials, the best one's, and what they have cost together.

    Raises ``GeofedError``: SPEC_INVALID if no trial can be submitted; USAGE if Optuna is missing.
    """
    sweep = _Sweep(client, loaded, search_of(loaded.file, loaded.maximise), report)
    earlier = await _earlier(sweep)
    running: dict[asyncio.Task[None], _Trial] = {}
    try:
        while True:
            while (more := _next(sweep)) and await _may_start(sweep, running, more, earlier):
                trial = _proposed(sweep, more, earlier)
                sweep.trials.append(trial)
                if await _started(sweep, trial, running, earlier.get(more)):
                    running[awaited(_finish(sweep, trial))] = trial
                else:
                    _learn(sweep, trial)
            if not running:
                break
            done, _ = await asyncio.wait(running, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                _learn(sweep, running.pop(task))
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return _summary(sweep)


def _next(sweep: _Sweep) -> int:
    """Return the number of the next trial; 0: there is none."""
    number = len(sweep.trials) + 1
    if sweep.stopped or number > sweep.search.trials:
        return 0
    ended = [trial for trial in sweep.trials if trial.state and trial.value is None]
    if len(ended) >= _FAILURES and not any(trial.value is not None for trial in sweep.trials):
        sweep.stopped = f"the first {len(ended)} trials gave no {sweep.loaded.metric}: {ended[-1].note}"
        return 0
    return number


async def _may_start(
    sweep: _Sweep, running: dict[asyncio.Task[None], _Trial], number: int, earlier: dict[int, TrialJob]
) -> bool:
    """Whether another trial can start now, as far as its cost is not concerned."""
    if number in earlier:
        return True
    parallel = sweep.loaded.file.parallel
    if parallel != "auto":
        return len(running) < parallel
    for trial in running.values():
        try:
            job = await sweep.client.job(trial.job)
        except GeofedError as error:
            if error.code not in OUTAGE:
                raise
            return False
        if job.state in ("queued", "planned"):
            # Whether there are workers for another one is known once this one has its own.
            return False
    return True


async def _earlier(sweep: _Sweep) -> dict[int, TrialJob]:
    """Return the trials that an earlier run of the sweep has submitted."""
    found: dict[int, TrialJob] = {}
    for job in await sweep.client.jobs(ended=True, limit=sweep.search.trials * 2, labels={"sweep": sweep.loaded.id}):
        number = job.view["labels"].get("trial", "")
        if number.isdecimal() and job.view["successor"] is None:
            found[int(number)] = job
    return found


def _proposed(sweep: _Sweep, number: int, earlier: dict[int, TrialJob]) -> _Trial:
    if number in earlier:
        job = earlier[number]
        return _Trial(number, {}, job.id)
    return _Trial(number, sweep.search.propose(number))


async def _started(
    sweep: _Sweep, trial: _Trial, running: dict[asyncio.Task[None], _Trial], earlier: TrialJob | None
) -> bool:
    """Submit a trial; return whether it is a job now."""
    if earlier is not None:
        view = await earlier.refresh()
        trial.values = values_in(view["spec"], list(sweep.loaded.file.parameters))
        trial.reserved_usd = view["spec"]["objective"]["budget"] or 0.0
        return True
    overrides: dict[str, Any] = {
        **trial.values, "metadata.labels.sweep": sweep.loaded.id, "metadata.labels.trial": str(trial.number),
    }  # fmt: skip
    try:
        if sweep.loaded.file.budget is not None:
            if not await _reserve(sweep, trial, running):
                sweep.trials.remove(trial)
                return False
            overrides["objective.budget"] = trial.reserved_usd
        name = f"{sweep.loaded.file.metadata.name}-{trial.number}"
        request_id = f"sweep-{sweep.loaded.id}-{trial.number}"
        job = await _while_unreachable(
            lambda: sweep.client.submit(sweep.loaded.job_file, set=overrides, name=name, request_id=request_id)
        )
    except GeofedError as error:
        if error.code == "SPEC_INVALID" and len(sweep.trials) == 1:
            raise
        trial.state, trial.note = "declined", f"{error.code}: {error.message}"
        return False
    trial.job = job.id
    return True


async def _reserve(sweep: _Sweep, trial: _Trial, running: dict[asyncio.Task[None], _Trial]) -> bool:
    """Set aside what a trial may cost; return whether that is left of the sweep's budget."""
    budget = sweep.loaded.file.budget or 0.0
    plan = await _while_unreachable(lambda: sweep.client.plan(sweep.loaded.job_file, set=trial.values))
    trial.reserved_usd = _RESERVE * plan["estimate"]["usd"]["high"]
    own = sweep.loaded.spec.objective.budget
    if own is not None:
        trial.reserved_usd = min(trial.reserved_usd, own)
    taken = sum(max(other.reserved_usd, other.usd) for other in running.values())
    left = budget - taken - sum(other.usd for other in sweep.trials if other.state)
    if trial.reserved_usd <= left:
        return True
    sweep.stopped = (
        f"of the budget of {budget:.4f} USD {max(0.0, left):.4f} are left; trial {trial.number} may cost up to "
        f"{trial.reserved_usd:.4f}"
    )
    return False


async def _while_unreachable(ask: Callable[[], Any]) -> Any:
    """Return the answer; while the control plane is unreachable, ask again."""
    while True:
        try:
            return await ask()
        except GeofedError as error:
            if error.code not in OUTAGE:
                raise
        await asyncio.sleep(_LOOK_SECONDS)


async def _finish(sweep: _Sweep, trial: _Trial) -> None:
    """Wait until a trial has ended; note what it gave."""
    job = await _while_unreachable(lambda: sweep.client.job(trial.job))
    try:
        await job.wait()
    except GeofedError as error:
        if error.code not in _ENDED_BADLY:
            raise
        trial.note = error.message
    view = job.view
    trial.job, trial.usd = view["id"], view["usd"]
    if (result := view["result"]) is not None:
        trial.seconds, trial.usd = result["training_seconds"], result["usd"]
        trial.note = trial.note or result["ended_early"] or ""
        trial.value = _value(sweep.loaded, view)
        if trial.value is None:
            measured = ", ".join(sorted(result["metrics"])) or "nothing"
            trial.note = f"{sweep.loaded.metric} is not measured; the job measured {measured}"
    trial.state = view["state"]


def _value(loaded: LoadedSweep, view: Data) -> float | None:
    """Return the best value among the models that the control plane keeps of a trial, and its result."""
    measured = [model["metrics"] for model in view["models"]] + [view["result"]["metrics"]]
    values = [metrics[loaded.metric] for metrics in measured if metrics.get(loaded.metric) is not None]
    return (max if loaded.maximise else min)(values, default=None)


def _learn(sweep: _Sweep, trial: _Trial) -> None:
    if trial in sweep.trials and trial.state:
        sweep.search.learn(trial.number, trial.values, trial.value)
        sweep.report(trial.row())


def _summary(sweep: _Sweep) -> Data:
    loaded = sweep.loaded
    measured = [trial for trial in sweep.trials if trial.value is not None]
    best = (max if loaded.maximise else min)(measured, key=lambda trial: trial.value or 0.0, default=None)
    return {
        "sweep": loaded.id,
        "metric": loaded.metric,
        "mode": "max" if loaded.maximise else "min",
        "trials": [trial.row() for trial in sweep.trials],
        "best": best.row() if best is not None else None,
        "usd": sweep.spent_usd,
        "stopped": sweep.stopped or None,
    }
