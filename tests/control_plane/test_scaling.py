"""Jobs whose workers follow a tuner: what it is told, what it wants, and what the regions are then told."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import Charge, Evaluation, Goal, JobState, MeterTotals, Partition, Report
from control_plane.service.measuring._task_history import TaskHistory
from control_plane.service.planning._allocation import Allocation
from control_plane.service.planning._gangs import assigned_regions, planned_workers
from control_plane.service.planning._planning import goal_of, plan_json, snapshot_of, workers_now
from control_plane.service.planning._scaling import Tuning, begins_with, pool_of, tuned_paces
from control_plane.service.state._certificates import unseen_region
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry, RegionEntry
from control_plane.spec import JobSpec, load, to_demand
from control_plane.store import EventRow, JobRow
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from scheduler import Plan, plan
from scheduler.deadline import Gang
from scheduler.scaling import ScalingTuner
from tests.control_plane.fake_agent import catalogue

JOB = """\
apiVersion: geofed/v1
kind: TrainingJob
metadata: {name: clicks}
task: {module: task.py}
data: {dataset: digits}
train:
  batch: 32
  workers: {a: 8, b: 4}
  scaling: tuned
  end: {steps: 100000, goal: {metric: loss, atMost: 0.45}}
  evaluateEvery: 1
advanced: {wan: {interval: 10}}
"""
NOISE, LENGTH, ROUND_SECONDS = 1.0, 900.0, 2.0
"""Of the job's law, the one that our tuner supposes: noise in batches of one worker, and progress to the goal."""


def _live(name: str, server_usd: float) -> RegionEntry:
    entry, known = unseen_region(name), catalogue(name, samples=4000, workers=8)
    assert known.prices is not None
    known = replace(known, prices=replace(known.prices, server_usd_per_hour=server_usd))
    return replace(entry, state=replace(entry.state, phase="live"), catalogue=known)


@dataclass
class Obeyed:
    """What a region does now."""

    workers: int
    batch: int
    rate: float = 1.0
    samples: int = 0


class Life:
    """A job over two regions that obey at once, and the clock."""

    def __init__(self, folder: Path, *overrides: str, server_usd: float = 0.001) -> None:
        (folder / "job.yaml").write_text(JOB)
        (folder / "task.py").write_text("")
        self.spec: JobSpec = load(folder / "job.yaml", overrides).spec
        self.regions = {name: _live(name, server_usd) for name in ("a", "b")}
        snapshot = snapshot_of(self.regions.values(), (), TaskHistory())
        chosen = plan(snapshot, to_demand(self.spec, "j", datetime.fromtimestamp(0.0, UTC)))
        assert isinstance(chosen, Plan), chosen
        self.plan = chosen
        parts = tuple(Partition(part.region, state="training") for part in chosen.partitions)
        goal = goal_of(self.spec)
        self.state = JobState("j", 600.0, 0.0, phase="running", partitions=parts, goal=goal, started_at=1.0)
        self.allocation = Allocation()
        self.at, self.round, self.progress = 1.0, 0, 0.0
        self.doing = {
            part.region: Obeyed(part.workers, part.workers * part.batch) for part in chosen.partitions
        }  # fmt: skip
        self.told: list[EventRow] = []
        self.history: list[int] = [sum(one.workers for one in self.doing.values())]

    @property
    def entry(self) -> JobEntry:
        row = JobRow("j", "clicks", "r", "", "", "", self.spec.to_json(), plan_json(self.plan), "", "running", 0.0)
        return JobEntry(row, self.state, self.spec, self.plan)

    @property
    def loss(self) -> float:
        return 0.3 + 1 / (1.5 + 5.17 * self.progress / LENGTH)

    def goes_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.at, self.round = self.at + ROUND_SECONDS, self.round + 1
            self.progress += 10 / (1 + NOISE / sum(one.batch / 32 for one in self.doing.values()))
            for region, one in self.doing.items():
                steps = next(part.steps_per_round for part in self.plan.partitions if part.region == region)
                one.samples += one.batch * steps
                self._reports(region, one)
            draft = Draft(self.at, {"j": self.entry}, dict(self.regions))
            self.allocation.review(draft)
            self._obey(draft)

    def _reports(self, region: str, one: Obeyed) -> None:
        report = Report(
            1,
            "training",
            round=self.round,
            samples=one.samples,
            loss=9.0,
            workers=one.workers,
            evaluation=Evaluation(metrics={"loss": self.loss}, samples=10, round=self.round),
        )
        parts = (replace(p, report=report) if p.region == region else p for p in self.state.partitions)
        self.state = replace(self.state, partitions=tuple(parts))
        draft = Draft(self.at, {"j": self.entry}, dict(self.regions))
        self.allocation.reported(draft, "j")
        self.told += draft.events

    def _obey(self, draft: Draft) -> None:
        self.told += draft.events
        if (changed := draft.changed_jobs.get("j")) is not None:
            self.state = changed.state
        for row in draft.commands:
            wanted = agent_pb2.ToAgent.FromString(row.payload).scale
            self.doing[row.region] = replace(
                self.doing[row.region], workers=wanted.workers, batch=wanted.batch, rate=wanted.learning_rate
            )
        if draft.commands:
            self.history.append(sum(one.workers for one in self.doing.values()))

    def events(self, kind: str) -> list[EventRow]:
        return [event for event in self.told if event.kind == kind]


def test_workers_leave_where_that_is_cheaper_and_the_batch_goes_with_them(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.goes_on(40)
    assert life.history[0] == 12
    assert life.history[-1] < 12
    for region, most in (("a", 8), ("b", 4)):
        one = life.doing[region]
        assert one.batch == 32 * one.workers
        # The rate of a region goes with its own batch.
        assert one.rate == pytest.approx(math.sqrt(one.workers / most))
    first = life.events("job.tuning")[0]
    assert "12 → " in first.text
    assert '"loss": ' in first.data_json
    reasons = {event.text.partition(": ")[2] for event in life.events("partition.scaling")}
    assert reasons <= {event.text.partition(": ")[2] for event in life.events("job.tuning")}


def test_one_decision_is_told_once(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.goes_on(40)
    texts = [event.text.partition(" after")[0] for event in life.events("job.tuning")]
    assert all(one != other for one, other in pairwise(texts))


def test_where_servers_cost_most_everybody_stays(tmp_path: Path) -> None:
    life = Life(tmp_path, server_usd=50.0)
    life.goes_on(40)
    assert life.history == [12]


@pytest.mark.slow
def test_mlless_lets_them_leave_one_by_one_down_to_one_for_each_region(tmp_path: Path) -> None:
    life = Life(tmp_path, "train.scaling=mlless", "train.workers={a: 3, b: 1}")
    life.goes_on(400)
    assert life.history[0] == 4
    assert [before - after for before, after in pairwise(life.history)] == [1] * (len(life.history) - 1)
    assert life.history[-1] >= 2
    assert len(life.history) > 1, "nobody left"


def test_what_a_user_asks_for_by_hand_stays_until_the_tuner_says_otherwise(tmp_path: Path) -> None:
    life = Life(tmp_path, server_usd=50.0)
    life.goes_on(3)
    hand = {"a": 2, "b": 1}
    life.allocation.scaled_by_hand(life.entry, hand, life.at)
    life.goes_on(2)
    assert workers_now(life.entry) == hand


def test_another_tuner_begins_after_a_restart_with_the_workers_that_there_are(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.goes_on(12)
    held = workers_now(life.entry)
    life.allocation = Allocation()
    life.goes_on(2)
    assert workers_now(life.entry) == held


@pytest.mark.slow
@pytest.mark.parametrize("follows", ["tuned", "mlless"])
@pytest.mark.parametrize("size", [50, 70, 160, 300])
def test_no_finite_metric_breaks_the_session_of_an_agent(tmp_path: Path, follows: str, size: int) -> None:
    life = Wild(tmp_path, f"train.scaling={follows}")
    life.size = size
    life.goes_on(60)
    assert not [event for event in life.events("job.tuning") if "failed" in event.text]


@pytest.mark.slow
def test_a_tuner_that_fails_is_told_once_and_not_asked_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path)

    def breaks(*_: object) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr(ScalingTuner, "observe", breaks)
    life.goes_on(40)
    assert [event.text for event in life.events("job.tuning")] == [
        "12 → 12 workers after round 1: the tuner has failed (OverflowError) and is not asked any more"
    ]
    assert life.history == [12]


class Wild(Life):
    """Its metric is of other sizes in each round."""

    size = 0
    """As a power of ten, at most."""

    @property
    def loss(self) -> float:
        return float(10.0 ** random.Random(self.round).randint(self.size - 40, self.size))


# What the tuner is told


def _tuning(every: int = 1) -> Tuning:
    from scheduler.scaling import ScalingGoal as ScalingGoal
    from scheduler.scaling import StepCosts

    terms = StepCosts((1.0,) * 12, 1e-5, 1e-6, 3.0, least=2)
    goal = Goal("loss", 0.45, at_least=False, every=every)
    tuner = ScalingTuner(terms, ScalingGoal(0.45, None))
    return Tuning({"a": 8, "b": 4}, {"a": 320, "b": 160}, goal, terms, tuner)


def _state(**reports: Report) -> JobState:
    parts = tuple(Partition(region, report=report) for region, report in reports.items())
    return JobState("j", 600.0, 0.0, phase="running", partitions=parts, started_at=10.0)


def _report(round_: int, samples: int, loss: float = 0.6, evaluated: int | None = None) -> Report:
    measured = round_ if evaluated is None else evaluated
    money = (Charge("function-seconds", 1.0, "GB-s", 0.5, "test"),)
    return Report(
        1,
        "training",
        round=round_,
        samples=samples,
        evaluation=Evaluation(metrics={"loss": loss}, samples=10, round=measured),
        totals=MeterTotals(money=money),
    )


def test_workers_are_those_who_made_the_samples() -> None:
    tuning = _tuning()
    told = tuning.observation(_state(a=_report(1, 8 * 320), b=_report(1, 4 * 160, 0.4)), 12.0)
    assert told is not None
    assert (told.step, told.workers, told.at_seconds) == (1, 12, 12.0)
    assert told.loss == pytest.approx(0.5)
    assert told.usd == pytest.approx(2.0 * (12 * 1e-5 + 1e-6))
    # Two rounds at once, with half of the workers in one region.
    told = tuning.observation(_state(a=_report(3, 16 * 320), b=_report(3, 12 * 160)), 16.0)
    assert told is not None
    assert (told.step, told.workers) == (3, 8)


def test_nothing_is_told_twice_nor_of_rounds_that_are_far_apart() -> None:
    tuning = _tuning()
    both = _state(a=_report(1, 8 * 320), b=_report(1, 4 * 160))
    assert tuning.observation(_state(a=_report(1, 8 * 320)), 1.0) is None
    assert tuning.observation(_state(a=_report(4, 32 * 320), b=_report(1, 4 * 160)), 1.0) is None
    assert tuning.observation(both, 12.0) is not None
    assert tuning.observation(both, 13.0) is None


def test_a_clock_that_is_set_back_and_a_loss_that_is_none_do_no_harm() -> None:
    tuning = _tuning()
    seen = []
    for round_, at, loss in ((1, 12.0, 0.6), (2, 11.0, 0.59), (3, 13.0, math.nan), (4, 14.0, 0.58)):
        both = _state(a=_report(round_, round_ * 8 * 320, loss), b=_report(round_, round_ * 4 * 160, loss))
        if (answer := tuning.observe(both, at)) is not None:
            seen.append((answer[0].step, answer[0].at_seconds, answer[0].workers))
    assert seen == [(1, 12.0, 12), (2, 12.0, 12), (4, 14.0, 12)]


# What it means for all


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 8), st.integers(0, 4), st.booleans())
def test_its_paces_ascend_and_what_it_has_is_among_them(
    a: int, b: int, held_a: int, held_b: int, promised: bool
) -> None:
    chosen, assigned = _planned(a, b)
    held = {"a": min(held_a, a), "b": min(held_b, b)}
    ways = tuned_paces(chosen, assigned, held, promised=promised)
    Gang("j", ways, 100.0)  # raises where they do not ascend
    assert dict(ways[-1].workers) == {"a": a, "b": b} or all(held.values())
    if all(held.values()):
        assert held in [dict(way.workers) for way in ways]


def test_a_promise_of_rounds_is_kept_by_few_as_well() -> None:
    chosen, assigned = _planned(8, 4)
    ways = tuned_paces(chosen, assigned, {}, promised=True)
    assert ways[-1].rate == pytest.approx(ways[0].rate, rel=1e-3)
    free = tuned_paces(chosen, assigned, {}, promised=False)
    assert free[-1].rate > 2 * free[0].rate


def _planned(a: int, b: int) -> tuple[Plan, list]:  # type: ignore[type-arg]
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        life = Life(Path(folder), f"train.workers={{a: {a}, b: {b}}}")
    return life.plan, assigned_regions(life.plan, planned_workers(life.plan), life.regions, {})


def test_nobody_has_more_workers_than_a_batch_of_one_has_samples(tmp_path: Path) -> None:
    """The round in which the batch is about to grow is ended by all of them with the batch of before."""
    life = Life(tmp_path, "train.batch=3")
    assert pool_of(life.plan) == {"a": 3, "b": 3}


def test_it_begins_with_what_the_user_says_and_with_fewer_where_the_plan_may_choose(tmp_path: Path) -> None:
    end = "train.end={epochs: 500, goal: {metric: loss, atMost: 0.45}}"
    fixed, free = Life(tmp_path, end), Life(tmp_path, end, "train.workers=auto")
    for life in (fixed, free):
        assigned = assigned_regions(life.plan, planned_workers(life.plan), life.regions, {})
        begins = begins_with(life.spec, life.plan, assigned)
        planned = planned_workers(life.plan)
        assert (begins == planned) == (life is fixed)
        assert all(begins[region] <= planned[region] for region in begins)


@pytest.mark.parametrize("phase", ["starting", "running"])
def test_until_its_tuner_has_spoken_it_keeps_what_it_begins_with(tmp_path: Path, phase: str) -> None:
    life, begins = _begun(tmp_path, phase, paused=False)
    for second in range(3):
        draft = Draft(life.at + second, {"j": life.entry}, dict(life.regions))
        life.allocation.review(draft)
        assert draft.commands == []
    assert workers_now(life.entry) == begins


def test_a_job_that_begins_with_too_few_gets_the_rest_of_what_it_begins_with_once_there_is_room(
    tmp_path: Path,
) -> None:
    life, begins = _begun(tmp_path, "starting", paused=False)
    less = tuple(replace(part, workers=1) for part in life.state.partitions)
    life.state = replace(life.state, partitions=less)
    draft = Draft(life.at, {"j": life.entry}, dict(life.regions))
    life.allocation.review(draft)
    life._obey(draft)
    assert workers_now(life.entry) == begins


def test_a_paused_job_goes_on_after_a_restart_with_what_it_begins_with(tmp_path: Path) -> None:
    life, begins = _begun(tmp_path, "running", paused=True)
    for second in range(3):
        draft = Draft(life.at + second, {"j": life.entry}, dict(life.regions))
        life.allocation.review(draft)
        life._obey(draft)
        assert workers_now(life.entry) == begins


def _begun(folder: Path, phase: str, *, paused: bool) -> tuple[Life, dict[str, int]]:
    """A job that begins with fewer workers than were planned; nobody has seen it before. What it begins with."""
    end = "train.end={epochs: 500, goal: {metric: loss, atMost: 0.45}}"
    life = Life(folder, end, "train.workers=auto", "train.batch=256", "wan.interval=50", server_usd=0.02)
    assigned = assigned_regions(life.plan, planned_workers(life.plan), life.regions, {})
    begins = begins_with(life.spec, life.plan, assigned)
    assert begins != planned_workers(life.plan)
    assert max(begins.values()) > 1, "else it could not begin with too few"
    state = "preparing" if phase == "starting" else "training"
    parts = tuple(
        replace(part, workers=0 if paused else begins[part.region], state=state) for part in life.state.partitions
    )
    life.state = replace(life.state, phase=phase, partitions=parts, gave_way=paused)
    return life, begins


# The job file


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.end.goal.atMost=null", "give exactly one of"),
        ("train.end.goal=null", "requires a loss to reach"),
        ("train.end.goal={metric: accuracy, atLeast: 0.9}", "requires a loss to reach"),
        ("wan.exchange=background", "requires `advanced.wan.exchange: synchronous`"),
        ("wan={policy: asgd}", "requires `advanced.wan.exchange: synchronous`"),
        ("parallelism={pipeline: {stages: 2}}", "cannot be used with a pipeline"),
        ("train.scaling=auto", "must be 'fixed', 'tuned' or 'mlless'"),
    ],
)
def test_what_cannot_be_tuned_is_refused(tmp_path: Path, override: str, told: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    with pytest.raises(GeofedError, match=told) as caught:
        load(tmp_path / "job.yaml", [override])
    assert caught.value.code == "SPEC_INVALID"


def test_its_regions_wait_for_each_other_and_hold_whole_models(tmp_path: Path) -> None:
    life = Life(tmp_path)
    assert not life.plan.background
    assert to_demand(life.spec, "j", datetime.fromtimestamp(0.0, UTC)).parallelism == "whole"
