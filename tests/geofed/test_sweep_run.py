"""How a sweep runs: its budget, an earlier run that it continues, and trials without a value; over a control plane
in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.running import TEMPLATES

from control_plane._view import Data
from geofed.sweep import LoadedSweep, _run, load_sweep, run_sweep
from geofed.sweep.cli import _trials_text
from geofed_pb.errors import GeofedError

SECONDS = 0.02
"""Time that a trial runs."""


@dataclass
class Job:
    """A job that runs for a time, and then has cost something and has a loss, or has failed."""

    plane: Plane
    id: str
    labels: dict[str, str]
    budget: float | None
    seconds: float = SECONDS
    loss: float | None = 1.0
    usd: float = 0.1
    state: str = "running"
    successor: Job | None = None

    @property
    def view(self) -> Data:
        ended = self.state != "running"
        result = {"training_seconds": 1.0, "usd": self.usd, "ended_early": None, "metrics": {"loss": self.loss}}
        return {
            "id": self.id, "labels": self.labels, "state": self.state, "models": [],
            "successor": self.successor.id if self.successor else None, "usd": self.usd if ended else 0.0,
            "finished_at": "2026-11-28T00:00:00Z" if ended else None,
            "spec": {"objective": {"budget": self.budget}}, "result": result if self.state == "succeeded" else None,
        }  # fmt: skip

    async def end(self) -> None:
        """Run; also one that nobody waits for ends."""
        await asyncio.sleep(self.seconds)
        self.state = "failed" if self.loss is None else "succeeded"
        if self.successor is not None:
            self.plane.run(self.successor)


@dataclass
class Handle:
    """A job as a client has it: after a replan that of the job that continues it."""

    job: Job
    view: Data

    @property
    def id(self) -> str:
        return str(self.view["id"])

    @property
    def state(self) -> str:
        return str(self.view["state"])

    async def refresh(self) -> Data:
        self.view = self.job.view
        return self.view

    async def wait(self) -> Data:
        while self.job.state == "running" or self.job.successor is not None:
            if self.job.state != "running" and self.job.successor is not None:
                self.job = self.job.successor
            await asyncio.sleep(0.001)
        if (await self.refresh())["state"] == "failed":
            raise GeofedError("JOB_FAILED", "the loss is not finite")
        return dict(self.view["result"])


@dataclass
class Plane:
    """A control plane whose jobs run at once."""

    high: float = 0.2
    """Upper end of what it predicts for each job."""
    changes: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Fields of jobs, by the number of the trial."""
    declined: set[int] = field(default_factory=set)
    plan_seconds: float = 0.0
    stored: list[Job] = field(default_factory=list)
    """The oldest first."""
    at_once: int = 0
    plans: int = 0
    given: dict[int, Mapping[str, object]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def run(self, job: Job) -> None:
        self.stored.append(job)
        self._tasks.add(asyncio.create_task(job.end()))
        self.at_once = max(self.at_once, sum(job.state == "running" for job in self.stored))

    def add(self, loaded: LoadedSweep, trial: int | str, **fields: Any) -> Job:
        """A job of an earlier run."""
        labels = {"sweep": loaded.id, "trial": str(trial), **fields.pop("labels", {})}
        job = Job(self, f"old-{len(self.stored)}", labels, **{"budget": None, **fields})
        self.stored.append(job)
        if job.state == "running":
            self._tasks.add(asyncio.create_task(job.end()))
        return job

    async def plan(self, job_file: Path, *, set: Mapping[str, object]) -> Data:
        self.plans += 1
        await asyncio.sleep(self.plan_seconds)
        return {"estimate": {"usd": {"high": self.high}}}

    async def submit(self, job_file: Path, *, set: Mapping[str, object], name: str, request_id: str) -> Handle:
        number = int(name.rpartition("-")[2])
        assert number not in self.given, "no trial is submitted twice"
        self.given[number] = set
        if number in self.declined:
            raise GeofedError("INADMISSIBLE", "no region has the data")
        labels = {key.removeprefix("metadata.labels."): str(set[key]) for key in set if key.startswith("metadata.")}
        budget = set.get("objective.budget")
        assert budget is None or isinstance(budget, float)
        job = Job(self, f"job-{number}", labels, budget, **self.changes.get(number, {}))
        if job.successor is not None:
            job.successor.labels = labels
        self.run(job)
        return Handle(job, job.view)

    async def job(self, job: str) -> Handle:
        found = next(one for one in self.stored if one.id == job)
        return Handle(found, found.view)

    async def jobs(self, *, ended: bool, limit: int, labels: Mapping[str, str]) -> Sequence[Handle]:
        found = [job for job in reversed(self.stored) if labels.items() <= job.labels.items()]
        return [Handle(job, {**job.view, "spec": None, "result": None}) for job in found[:limit]]


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_run, "_LOOK_SECONDS", 0.005)


def loaded_sweep(folder: Path, **changes: Any) -> LoadedSweep:
    for name in ("job.yaml", "task.py"):
        (folder / name).write_text((TEMPLATES / "image-classification" / name).read_text())
    file = {
        "apiVersion": "geofed/v1", "kind": "Sweep", "metadata": {"name": "rates"}, "job": "job.yaml", "metric": "loss",
        "mode": "min", "parameters": {"train.seed": list(range(10))}, **changes,
    }  # fmt: skip
    (folder / "sweep.yaml").write_text(json.dumps(file))
    return load_sweep(folder / "sweep.yaml")


def run(plane: Plane, loaded: LoadedSweep) -> Data:
    return asyncio.run(asyncio.wait_for(run_sweep(plane, loaded), 10))


def test_money_that_running_trials_reserve_is_waited_for(tmp_path: Path) -> None:
    plane = Plane(changes={number: {"seconds": 0.2} for number in range(1, 11)})
    told = run(plane, loaded_sweep(tmp_path, budget=1.0))
    # Each reserves 0.25 and costs 0.10: after 8 trials 0.20 are left.
    assert len(told["trials"]) == 8
    assert told["usd"] == pytest.approx(0.8)
    assert told["stopped"] == "of the budget of 1.0000 USD 0.2000 are left; trial 9 may cost up to 0.2500"
    assert plane.at_once == 4
    assert plane.plans < 30, "a trial that waits is not planned at every look"


def test_a_trial_that_ends_while_another_is_planned_counts_once(tmp_path: Path) -> None:
    # The first one ends while the second one is planned; 0.125 and 0.125 are the whole budget.
    plane = Plane(high=0.1, plan_seconds=2 * SECONDS, changes={1: {"usd": 0.125}})
    told = run(plane, loaded_sweep(tmp_path, budget=0.25, parallel=2, parameters={"train.seed": [1, 2]}))
    assert [row["state"] for row in told["trials"]] == ["succeeded"] * 2
    assert told["stopped"] is None


def test_an_interrupted_sweep_has_the_budget_that_is_left(tmp_path: Path) -> None:
    loaded, plane = loaded_sweep(tmp_path, budget=1.0), Plane()

    async def continued() -> Data:
        # Trial 3 was declined; 6 still runs.
        for number in (1, 2, 4, 5):
            plane.add(loaded, number, budget=0.25, state="succeeded")
        plane.add(loaded, 6, budget=0.25, usd=0.25)
        for other in ("0", "11", "04", "x" * 5000, "9" * 5000):
            plane.add(loaded, other, state="succeeded")
        return await run_sweep(plane, loaded)

    told = asyncio.run(asyncio.wait_for(continued(), 10))
    # 0.40 and at most 0.25 are taken: 0.35 are left for one at a time, and 0.25 once trial 3 has ended.
    assert [row["trial"] for row in told["trials"]] == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(plane.given) == [3, 7]
    assert told["usd"] == pytest.approx(0.85)
    assert told["stopped"].startswith("of the budget of 1.0000 USD 0.1500 are left; trial 8 ")


def test_a_sweep_counts_the_cost_before_a_replan(tmp_path: Path) -> None:
    loaded, plane = loaded_sweep(tmp_path, parameters={"train.seed": [1, 2]}), Plane()
    last = Job(plane, "job-1c", {}, None, usd=0.01, loss=0.5)
    plane.changes[1] = {"usd": 0.3, "successor": Job(plane, "job-1b", {}, None, usd=0.2, successor=last)}
    told = run(plane, loaded)
    assert told["trials"][0]["job"] == "job-1c"
    assert [row["usd"] for row in told["trials"]] == pytest.approx([0.51, 0.1])
    assert told["usd"] == pytest.approx(0.61)
    last.labels = {"sweep": loaded.id, "trial": "1"}
    plane.stored[1].successor = None  # as if it had been resumed and not replanned
    again = run(plane, loaded)
    assert [row["usd"] for row in again["trials"]] == pytest.approx([0.51, 0.1]), "also when it is continued"


def test_of_a_trial_that_was_resumed_the_newest_job_counts(tmp_path: Path) -> None:
    loaded, plane = loaded_sweep(tmp_path, parameters={"train.seed": [1]}), Plane()
    plane.add(loaded, 1, state="failed", loss=None, usd=0.3)
    plane.add(loaded, 1, state="succeeded", loss=0.25)
    told = run(plane, loaded)
    assert (told["best"]["job"], told["best"]["value"]) == ("old-1", 0.25)
    assert told["usd"] == pytest.approx(0.4)


@pytest.mark.parametrize("search", ["grid", "random", "optuna"])
def test_values_of_earlier_trials_are_those_of_the_file(tmp_path: Path, search: str) -> None:
    if search == "optuna":
        pytest.importorskip("optuna", reason="Optuna is not installed")
    # The stored job has other spellings of them: 1.0 and "1h".
    parameters: dict[str, Any] = {"train.end.epochs": [1, 2], "limits.lostRegion": ["60m", "2h"]}
    trials = None if search == "grid" else 4
    if search != "grid":
        parameters["train.seed"] = {"min": 1, "max": 10**6, "integer": True}
    loaded, plane = loaded_sweep(tmp_path, parameters=parameters, search=search, trials=trials), Plane()
    first = run(plane, loaded)
    again = run(plane, loaded)
    assert [row["parameters"] for row in again["trials"]] == [row["parameters"] for row in first["trials"]]
    assert [row["job"] for row in again["trials"]] == [f"job-{number}" for number in range(1, 5)]
    for number, row in enumerate(first["trials"], start=1):
        assert row["parameters"].items() <= plane.given[number].items()
    assert len({str(row["parameters"]) for row in first["trials"]}) == 4

    # Half of them are lost: what comes instead differs from the other half.
    del plane.stored[2:]
    for number in (3, 4):
        del plane.given[number]
    mended = run(plane, loaded)
    assert [row["parameters"] for row in mended["trials"][:2]] == [row["parameters"] for row in first["trials"][:2]]
    assert len({str(row["parameters"]) for row in mended["trials"]}) == 4


@pytest.mark.parametrize(
    "label",
    ["", "x", "{}", "[]", "[0]", "[2, 0.5]", "[-1, 0.5]", "[true, 0.5]", "[0.0, 0.5]", "[0, 1.5]", "[0, NaN]",
     '[0, "0.5"]', "[" * 100_000],
)  # fmt: skip
def test_an_earlier_trial_of_unknown_values_is_still_compared(tmp_path: Path, label: str) -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed")
    parameters = {"train.batch": [16, 32], "task.config.lr": {"min": 0.1, "max": 1}}
    loaded, plane = loaded_sweep(tmp_path, parameters=parameters, search="optuna", trials=2), Plane()
    plane.add(loaded, 1, state="succeeded", loss=0.25, labels={"sweep-values": label})
    told = run(plane, loaded)
    assert [row["state"] for row in told["trials"]] == ["succeeded"] * 2
    assert (told["best"]["trial"], told["best"]["parameters"]) == (1, {})
    assert "BATCH" in _trials_text(told).upper()


def test_a_sweep_stops_for_trials_without_a_value_only_once_none_runs(tmp_path: Path) -> None:
    failed = {"loss": None}
    slow = Plane(changes={1: failed, 2: {"seconds": 10 * SECONDS}, 3: failed, 4: failed})
    told = run(slow, loaded_sweep(tmp_path, parallel=2))
    assert told["stopped"] is None
    assert [row["state"] for row in told["trials"]].count("succeeded") == 7
    assert told["trials"][-1]["trial"] == 10

    bad = Plane(changes=dict.fromkeys(range(1, 11), failed), declined={1})
    told = run(bad, loaded_sweep(tmp_path, parallel=2))
    assert 3 <= len(told["trials"]) <= 4, "and none starts until it is known"
    assert told["stopped"].startswith(f"the first {len(told['trials'])} trials gave no loss: ")
