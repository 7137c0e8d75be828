"""Run a sweep: submit its trials as jobs, wait for them, and compare what they give."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from control_plane._view import Data
from geofed.sweep._file import MAX_TRIALS, LoadedSweep
from geofed.sweep._search import Search, Values, search_of
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
_VALUES_LABEL = "sweep-values"
_MAX_JOBS = 100 * MAX_TRIALS
"""Jobs of a sweep that are looked for: a trial that was replanned or resumed has several."""


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
    earlier_usd: float = 0.0
    """What earlier jobs of this trial have cost, which were replanned or resumed."""
    reserved_usd: float = 0.0
    """Set aside for all of its jobs until it has ended."""

    @property
    def taken_usd(self) -> float:
        """What it takes of the sweep's budget."""
        return self.usd if self.state else self.reserved_usd

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
    trials: dict[int, _Trial] = field(default_factory=dict)
    """Those that are jobs, or were declined."""
    running: dict[asyncio.Task[None], _Trial] = field(default_factory=dict)
    proposed: _Trial | None = None
    """The next trial, while the money for it is reserved by those that run."""
    stopped: str = ""

    @property
    def spent_usd(self) -> float:
        return sum(trial.usd for trial in self.trials.values())


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
    running = sweep.running
    try:
        await _adopt(sweep)
        while True:
            while (number := _next(sweep)) and await _may_start(sweep) and await _start(sweep, number):
                pass
            if not running:
                break
            done, _ = await asyncio.wait(running, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                trial = running.pop(task)
                task.result()
                _learn(sweep, trial)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return _summary(sweep)


async def _adopt(sweep: _Sweep) -> None:
    """Continue the trials that an earlier run of the sweep has submitted: all of them count before a new one starts."""
    numbers = {str(number): number for number in range(1, sweep.search.trials + 1)}
    found: dict[int, list[TrialJob]] = {}
    for job in await sweep.client.jobs(ended=True, limit=_MAX_JOBS, labels={"sweep": sweep.loaded.id}):
        if (number := numbers.get(job.view["labels"].get("trial", ""))) is not None:
            found.setdefault(number, []).append(job)
    for number, jobs in sorted(found.items()):
        # The newest one, which continues the others if they were replanned or resumed.
        newest = jobs[0]
        values = sweep.search.recall(number, newest.view["labels"].get(_VALUES_LABEL, ""))
        trial = sweep.trials[number] = _Trial(number, values, newest.id)
        trial.earlier_usd = sum(job.view["usd"] for job in jobs[1:])
        if newest.view["finished_at"] is not None and newest.view["successor"] is None:
            await _finish(sweep, trial)
            _learn(sweep, trial)
            continue
        view = await _while_unreachable(newest.refresh)
        trial.reserved_usd = trial.earlier_usd + (view["spec"]["objective"]["budget"] or 0.0)
        sweep.running[awaited(_finish(sweep, trial))] = trial


def _next(sweep: _Sweep) -> int:
    """Return the number of the next trial; 0: there is none, or none before one that runs has ended."""
    numbers = range(1, sweep.search.trials + 1)
    number = next((number for number in numbers if number not in sweep.trials), 0)
    if sweep.stopped or not number:
        return 0
    ended = [trial for trial in sweep.trials.values() if trial.state]
    if len(ended) < _FAILURES or any(trial.value is not None for trial in ended):
        return number
    if not sweep.running:
        sweep.stopped = f"the first {len(ended)} trials gave no {sweep.loaded.metric}: {ended[-1].note}"
    return 0


async def _may_start(sweep: _Sweep) -> bool:
    """Whether another trial can start now, as far as its cost is not concerned."""
    parallel = sweep.loaded.file.parallel
    if parallel != "auto":
        return len(sweep.running) < parallel
    for trial in sweep.running.values():
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


async def _start(sweep: _Sweep, number: int) -> bool:
    """Submit a trial; return False if it has to wait, or if the sweep's budget is spent."""
    trial = sweep.proposed or _Trial(number, sweep.search.propose(number))
    sweep.proposed = None
    overrides: dict[str, Any] = {
        **trial.values, "metadata.labels.sweep": sweep.loaded.id, "metadata.labels.trial": str(number),
    }  # fmt: skip
    if stored := sweep.search.stored(number):
        overrides[f"metadata.labels.{_VALUES_LABEL}"] = stored
    try:
        if sweep.loaded.file.budget is not None:
            if not await _reserve(sweep, trial):
                return False
            overrides["objective.budget"] = trial.reserved_usd
        name = f"{sweep.loaded.file.metadata.name}-{number}"
        request_id = f"sweep-{sweep.loaded.id}-{number}"
        job = await _while_unreachable(
            lambda: sweep.client.submit(sweep.loaded.job_file, set=overrides, name=name, request_id=request_id)
        )
    except GeofedError as error:
        if error.code == "SPEC_INVALID" and not sweep.trials:
            raise
        trial.state, trial.note = "declined", f"{error.code}: {error.message}"
        sweep.trials[number] = trial
        _learn(sweep, trial)
        return True
    trial.job = job.id
    sweep.trials[number] = trial
    sweep.running[awaited(_finish(sweep, trial))] = trial
    return True


async def _reserve(sweep: _Sweep, trial: _Trial) -> bool:
    """Set aside what a trial may cost, if that is left of the sweep's budget; return whether it is.

    What is reserved by trials that run may be left once they have ended: until then the trial waits.
    """
    budget = sweep.loaded.file.budget or 0.0
    if sweep.running and trial.reserved_usd > budget - sum(other.taken_usd for other in sweep.trials.values()):
        # As at the last look: there is no need of another plan.
        sweep.proposed = trial
        return False
    plan = await _while_unreachable(lambda: sweep.client.plan(sweep.loaded.job_file, set=trial.values))
    trial.reserved_usd = _RESERVE * plan["estimate"]["usd"]["high"]
    own = sweep.loaded.spec.objective.budget
    if own is not None:
        trial.reserved_usd = min(trial.reserved_usd, own)
    left = budget - sum(other.taken_usd for other in sweep.trials.values())
    if trial.reserved_usd <= left:
        return True
    if sweep.running:
        sweep.proposed = trial
        return False
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
    view, usd = job.view, trial.earlier_usd + await _usd_before(sweep.client, trial.job, job.id)
    trial.job, trial.usd = view["id"], usd + view["usd"]
    if (result := view["result"]) is not None:
        trial.seconds, trial.usd = result["training_seconds"], usd + result["usd"]
        trial.note = trial.note or result["ended_early"] or ""
        trial.value = _value(sweep.loaded, view)
        if trial.value is None:
            measured = ", ".join(sorted(result["metrics"])) or "nothing"
            trial.note = f"{sweep.loaded.metric} is not measured; the job measured {measured}"
    trial.state = view["state"]


async def _usd_before(client: TrialClient, first: str, last: str) -> float:
    """Return what a job and those that continued it after replans have cost, without the last one. What was deleted
    meanwhile is not counted."""
    usd, at = 0.0, first
    while at != last:
        try:
            job = await _while_unreachable(partial(client.job, at))
        except GeofedError as error:
            if error.code != "JOB_NOT_FOUND":
                raise
            break
        usd, at = usd + job.view["usd"], job.view["successor"] or last
    return usd


def _value(loaded: LoadedSweep, view: Data) -> float | None:
    """Return the best value among the models that the control plane keeps of a trial, and its result."""
    measured = [model["metrics"] for model in view["models"]] + [view["result"]["metrics"]]
    values = [metrics[loaded.metric] for metrics in measured if metrics.get(loaded.metric) is not None]
    return (max if loaded.maximise else min)(values, default=None)


def _learn(sweep: _Sweep, trial: _Trial) -> None:
    sweep.search.learn(trial.number, trial.value)
    sweep.report(trial.row())


def _summary(sweep: _Sweep) -> Data:
    loaded = sweep.loaded
    trials = [trial for _, trial in sorted(sweep.trials.items())]
    measured = [trial for trial in trials if trial.value is not None]
    best = (max if loaded.maximise else min)(measured, key=lambda trial: trial.value or 0.0, default=None)
    return {
        "sweep": loaded.id,
        "metric": loaded.metric,
        "mode": "max" if loaded.maximise else "min",
        "trials": [trial.row() for trial in trials],
        "best": best.row() if best is not None else None,
        "usd": sweep.spent_usd,
        "stopped": sweep.stopped or None,
    }
