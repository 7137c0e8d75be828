"""When running jobs are looked at again, and how often they may be changed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from control_plane.core import JobState, Partition, Report, Speed
from control_plane.service.measuring._speeds import FIRST_REST_SECONDS
from control_plane.service.measuring._task_history import TaskHistory
from control_plane.service.planning._allocation import Allocation
from control_plane.service.planning._gangs import assigned_regions, planned_workers
from control_plane.service.planning._planning import plan_json, snapshot_of, workers_now
from control_plane.service.state._certificates import unseen_region
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry, RegionEntry
from control_plane.spec import JobSpec, load, to_demand
from control_plane.store import EventRow, JobRow
from geofed_pb.v1 import agent_pb2
from scheduler import Plan, paces, plan
from tests.control_plane.fake_agent import catalogue

JOB = """\
apiVersion: geofed/v1
kind: TrainingJob
metadata: {name: digits}
task: {module: task.py}
data: {dataset: digits}
train: {batch: 32, end: {epochs: 500}, workers: WORKERS}
"""


class Watch:
    """A job over two regions, and the clock."""

    def __init__(self, folder: Path, workers: str = "auto") -> None:
        (folder / "job.yaml").write_text(JOB.replace("WORKERS", workers))
        (folder / "task.py").write_text("")
        self.spec: JobSpec = load(folder / "job.yaml", []).spec
        self.regions = {name: _live(name) for name in ("a", "b")}
        chosen = plan(
            snapshot_of(self.regions.values(), (), TaskHistory()),
            replace(to_demand(self.spec, "j", datetime.fromtimestamp(0.0, UTC)), minimise="time", interval=20),
        )
        assert isinstance(chosen, Plan)
        self.plan = chosen
        parts = tuple(Partition(part.region, state="training") for part in chosen.partitions)
        self.state = JobState("j", 600.0, 0.0, phase="running", partitions=parts)
        self.allocation = Allocation()
        self.at, self.round = 0.0, 0
        self.sent: list[tuple[float, dict[str, int]]] = []
        self.told: list[EventRow] = []

    @property
    def entry(self) -> JobEntry:
        row = JobRow("j", "digits", "r", "", "", "", self.spec.to_json(), plan_json(self.plan), "", "running", 0.0)
        return JobEntry(row, self.state, self.spec, self.plan)

    def goes_on(self, seconds: float, **speeds: float) -> None:
        """Both regions make a round a second, at these speeds."""
        for _ in range(int(seconds)):
            self.at, self.round = self.at + 1.0, self.round + 1
            parts = tuple(
                replace(
                    p,
                    report=Report(
                        1, "training", round=self.round, speed=Speed(round_samples_per_second=speeds[p.region])
                    ),
                )
                for p in self.state.partitions
            )
            self.state = replace(self.state, partitions=parts)
            draft = Draft(self.at, {"j": self.entry}, dict(self.regions))
            self.allocation.review(draft)
            self.told += draft.events
            if (changed := draft.changed_jobs.get("j")) is not None:
                self.state = changed.state
                commands = [(row.region, agent_pb2.ToAgent.FromString(row.payload)) for row in draft.commands]
                self.sent.append((self.at, {region: message.scale.workers for region, message in commands}))


def _live(name: str, workers: int = 8) -> RegionEntry:
    entry = unseen_region(name)
    state = replace(entry.state, phase="live")
    return replace(entry, state=state, catalogue=catalogue(name, samples=4000, workers=workers))


@pytest.mark.parametrize("speed", [450.0, 550.0])
def test_what_turns_out_about_as_planned_stays(tmp_path: Path, speed: float) -> None:
    watch = Watch(tmp_path)
    watch.goes_on(60, a=speed, b=500.0)
    assert not watch.sent


@pytest.mark.slow
def test_a_change_takes_rounds_and_two_looks_and_then_a_rest(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.goes_on(60, a=100.0, b=500.0)
    ((first, _),) = watch.sent
    assert 8.0 <= first <= 15.0
    before = workers_now(watch.entry)
    assert before["b"] < 8
    # Now the other one is slow; the change is taken back only after twice the rest, as it is the second one.
    watch.goes_on(30, a=500.0, b=500.0)
    assert len(watch.sent) == 2
    assert workers_now(watch.entry)["b"] > before["b"]
    assert watch.sent[1][0] - 60.0 >= FIRST_REST_SECONDS / 2
    swings = len(watch.sent)
    for _ in range(10):
        watch.goes_on(15, a=100.0, b=500.0)
        watch.goes_on(15, a=500.0, b=500.0)
    assert len(watch.sent) - swings <= 5, "it goes to and fro less and less"


def test_workers_that_the_job_file_states_stay(tmp_path: Path) -> None:
    watch = Watch(tmp_path, workers="4")
    watch.goes_on(60, a=50.0, b=500.0)
    assert not watch.sent


def test_a_job_that_is_held_up_is_left_alone(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    a, b = watch.state.partitions
    watch.state = replace(watch.state, partitions=(replace(a, link="unreachable"), b))
    watch.goes_on(60, a=50.0, b=500.0)
    assert not watch.sent


def test_what_a_user_asks_for_by_hand_stays(tmp_path: Path) -> None:
    for asked in (2, 12):
        watch = Watch(tmp_path, workers="auto")
        watch.regions = {name: _live(name, workers=16) for name in ("a", "b")}
        by_hand = {"a": asked, "b": asked}
        watch.allocation.scaled_by_hand(watch.entry, by_hand, watch.at)
        watch.state = replace(
            watch.state, partitions=tuple(replace(part, workers=asked) for part in watch.state.partitions)
        )
        watch.goes_on(9, a=500.0, b=500.0)
        assert not watch.sent


def test_a_promise_that_is_broken_is_told_once_also_where_a_job_waits_and_not_taken_back(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.state = replace(watch.state, deadline_at=20.0)
    watch.goes_on(30, a=500.0, b=500.0)
    assert [event.text for event in watch.told if event.kind == "job.promise"], "nobody was told"
    assert sum(event.kind == "job.promise" for event in watch.told) == 1
    watch.state = replace(watch.state, phase="finishing")
    watch.goes_on(5, a=500.0, b=500.0)
    assert sum(event.kind == "job.promise" for event in watch.told) == 1
    waiting = Watch(tmp_path)
    waiting.state = replace(
        waiting.state,
        deadline_at=20.0,
        phase="queued",
        partitions=tuple(replace(part, state="pending") for part in waiting.state.partitions),
    )
    waiting.regions = {"b": _live("b")}
    waiting.goes_on(5, a=500.0, b=500.0)
    assert sum(event.kind == "job.promise" for event in waiting.told) == 1


def test_a_promise_in_danger_survives_that_a_region_is_cut_off(tmp_path: Path) -> None:
    """Its workers cannot change meanwhile, so that it has one pace where its course is of many."""
    watch = Watch(tmp_path)
    watch.state = replace(watch.state, deadline_at=120.0)
    watch.goes_on(20, a=500.0, b=500.0)
    assert any(event.kind == "job.promise" for event in watch.told), "400 rounds and more take longer"
    a, b = watch.state.partitions
    workers = workers_now(watch.entry)
    watch.state = replace(watch.state, partitions=(replace(a, link="unreachable"), b))
    told = len(watch.told)
    watch.goes_on(30, a=500.0, b=500.0)
    a, b = watch.state.partitions
    watch.state = replace(watch.state, partitions=(replace(a, link="live"), b))
    watch.goes_on(10, a=500.0, b=500.0)
    assert len(watch.told) == told, "the promise is as late as before"
    assert not watch.sent
    assert workers_now(watch.entry) == workers


def test_workers_with_unequal_parts_are_as_slow_as_the_largest(tmp_path: Path) -> None:
    watch = Watch(tmp_path, "1")
    chosen = replace(watch.plan, partitions=tuple(replace(part, largest_share=1.25) for part in watch.plan.partitions))
    equal, unequal = (
        assigned_regions(one, planned_workers(one), watch.regions, {"a": 500.0}) for one in (watch.plan, chosen)
    )
    assert [one.samples_per_second for one in unequal] == [one.samples_per_second / 1.25 for one in equal]


def test_no_region_gets_more_workers_than_clients_of_a_round(tmp_path: Path) -> None:
    watch = Watch(tmp_path, "1")
    parts = [
        replace(part, batch=60, clients=30, clients_per_round=3, clients_samples=60.0) for part in watch.plan.partitions
    ]
    chosen = replace(watch.plan, partitions=tuple(parts))
    assigned = assigned_regions(chosen, planned_workers(chosen), watch.regions, {})
    assert [(one.free, one.batch) for one in assigned] == [(3, 60), (3, 60)]
    most = [dict(workers) for workers, _ in paces(assigned, 0.0, background=False)][-1]
    assert max(most.values()) <= 3
