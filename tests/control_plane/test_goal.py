"""A job that may end before its plan: when its metric is good enough, and when its money is spent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.core import (
    Charge,
    Evaluation,
    FinishRequested,
    Goal,
    JobAction,
    JobMachine,
    JobState,
    MeterTotals,
    Partition,
    Planned,
    Record,
    RegionLive,
    Report,
    Reported,
    SendPeers,
    StartAllowed,
    condition_of,
)
from control_plane.service.planning._planning import goal_of
from control_plane.spec import load
from geofed_pb.errors import GeofedError

ACCURATE = Goal("accuracy", 0.9, at_least=True, every=2)
SMALL_LOSS = Goal("loss", 0.2, at_least=False, every=2)


def running(goal: Goal | None, budget_usd: float | None = None) -> JobMachine:
    machine = JobMachine(
        JobState("j", 100.0, 0.0, partitions=(Partition("a"), Partition("b")), goal=goal, budget_usd=budget_usd)
    )
    machine.handle(Planned(0.0))
    machine.handle(StartAllowed(0.0))
    for region in "ab":
        machine.handle(Reported(1.0, region, Report(1, "training", ps_address=f"{region}:1")))
    return machine


def measured(machine: JobMachine, region: str, at_round: int, samples: int = 10, **metrics: float) -> list[JobAction]:
    report = Report(
        1,
        "training",
        round=at_round,
        ps_address=f"{region}:1",
        evaluation=Evaluation(metrics=metrics, round=at_round, samples=samples),
    )
    return machine.handle(Reported(2.0, region, report))


def finishing(actions: list[JobAction]) -> list[str]:
    return [action.region for action in actions if isinstance(action, SendPeers) and action.finish]


def told(actions: list[JobAction]) -> list[dict[str, Any]]:
    return [action.data for action in actions if isinstance(action, Record) and action.kind == "job.goal"]


def test_all_regions_are_told_once_the_mean_of_all_is_good_enough() -> None:
    machine = running(ACCURATE)
    assert finishing(measured(machine, "a", 2, accuracy=0.99)) == []  # b has measured nothing yet
    # 0.99 of 10 samples and 0.8 of 30: not enough.
    assert finishing(measured(machine, "b", 2, 30, accuracy=0.8)) == []
    actions = measured(machine, "b", 4, 30, accuracy=0.9)
    assert finishing(actions) == ["a", "b"]
    assert told(actions) == [
        {"reached": True, "metric": "accuracy", "value": pytest.approx(0.9225), "bound": 0.9, "round": 4}
    ]
    assert condition_of(machine.state).startswith("ending early: accuracy is 0.9225")
    again = measured(machine, "a", 4, accuracy=0.99)
    assert (finishing(again), told(again)) == ([], [])


def test_at_most_is_the_other_way_round() -> None:
    machine = running(SMALL_LOSS)
    measured(machine, "a", 2, loss=0.3)
    assert finishing(measured(machine, "b", 2, loss=0.31)) == []
    assert finishing(measured(machine, "b", 4, loss=0.29)) == []
    assert finishing(measured(machine, "a", 4, loss=0.1)) == ["a", "b"]


def test_evaluations_that_lie_far_apart_are_not_put_together() -> None:
    machine = running(ACCURATE)
    measured(machine, "a", 2, accuracy=0.95)
    assert finishing(measured(machine, "b", 20, accuracy=0.95)) == []
    assert finishing(measured(machine, "a", 4, accuracy=0.95)) == ["a", "b"]


def test_evaluations_that_are_seldom_may_be_one_apart() -> None:
    machine = running(replace(ACCURATE, every=50))
    measured(machine, "a", 50, accuracy=0.95)
    assert finishing(measured(machine, "b", 150, accuracy=0.95)) == []
    assert finishing(measured(machine, "a", 100, accuracy=0.95)) == ["a", "b"]


def test_regions_that_stay_a_few_rounds_apart_reach_their_goal() -> None:
    """As with background exchange, where nobody waits for one that is a little late."""
    machine = running(ACCURATE)
    for at_round, accuracy in ((6, 0.7), (8, 0.8)):
        assert finishing(measured(machine, "a", at_round, accuracy=accuracy)) == []
        assert finishing(measured(machine, "b", at_round - 4, accuracy=accuracy)) == []
    measured(machine, "a", 10, accuracy=0.95)
    assert finishing(measured(machine, "b", 6, accuracy=0.9)) == ["a", "b"]


def test_a_metric_that_nobody_measures_is_told_once() -> None:
    machine = running(replace(ACCURATE, metric="acuracy"))
    measured(machine, "a", 2, accuracy=0.95)
    assert told(measured(machine, "b", 2, accuracy=0.95)) == [{"reached": False, "measured": ["accuracy"]}]
    actions = measured(machine, "b", 4, accuracy=0.95)
    assert (told(actions), finishing(actions)) == ([], [])


def test_a_job_ends_when_its_money_is_spent() -> None:
    machine = running(None, budget_usd=1.0)
    half = Report(
        1, "training", ps_address="a:1", totals=MeterTotals(money=(Charge("function-seconds", 1.0, "s", 0.5, "file"),))
    )
    assert finishing(machine.handle(Reported(2.0, "a", half))) == []
    actions = machine.handle(Reported(3.0, "b", replace(half, ps_address="b:1")))
    assert finishing(actions) == ["a", "b"]
    assert told(actions) == [{"reached": True, "usd": 1.0, "round_usd": 0.0, "budget_usd": 1.0}]


@pytest.mark.parametrize("round_usd", [0.001, 0.03, 0.17, 0.4])
def test_a_budget_is_exceeded_by_one_round_at_most(round_usd: float) -> None:
    """Regions report each round, and end with the one that is open when they are told."""
    machine = running(None, budget_usd=1.0)
    for at_round in range(1, 2000):
        calls = Charge("function-seconds", 1.0, "s", at_round * round_usd / 2, "file")
        ends = []
        for region in "ab":
            report = Report(1, "training", round=at_round, ps_address=f"{region}:1", totals=MeterTotals(money=(calls,)))
            ends += finishing(machine.handle(Reported(float(at_round), region, report)))
        if ends:
            break
    spent = (at_round + 1) * round_usd
    assert 1.0 - round_usd <= spent <= 1.0 + round_usd


def test_a_goal_that_is_reached_by_the_last_evaluation_ends_nothing_early() -> None:
    machine = running(SMALL_LOSS)
    done = Report(1, "finished", round=50, evaluation=Evaluation(metrics={"loss": 0.1}, round=50, samples=1))
    for region in "ab":
        actions = machine.handle(Reported(3.0, region, replace(done, ps_address=f"{region}:1")))
        assert (told(actions), finishing(actions)) == ([], [])
    assert machine.state.ends_early == ""


def test_what_an_agent_has_counted_is_not_forgotten_with_its_disk() -> None:
    machine = running(None, budget_usd=1.0)

    def spent(meter: int, usd: float, seconds: float) -> list[JobAction]:
        calls = Charge("function-seconds", seconds, "GB-s", usd, "file")
        report = Report(
            1, "training", meter=meter, ps_address="a:1", totals=MeterTotals(money=(calls,), sent_bytes={"b": 10})
        )
        return machine.handle(Reported(2.0, "a", report))

    spent(7, 0.6, 6.0)
    assert finishing(spent(8, 0.1, 1.0)) == []
    part = machine.state.partition("a")
    assert part is not None
    assert part.report is not None
    (charge,) = part.report.totals.money
    assert (charge.usd, charge.quantity) == (pytest.approx(0.7), 7.0)
    assert part.report.totals.sent_bytes == {"b": 20}
    assert finishing(spent(8, 0.3, 3.0)) == []
    assert finishing(spent(8, 0.4, 4.0)) == ["a", "b"]


def test_a_region_whose_agent_is_a_new_process_is_told_again() -> None:
    machine = running(SMALL_LOSS)
    measured(machine, "a", 2, loss=0.1)
    measured(machine, "b", 2, loss=0.1)
    machine.handle(RegionLive(4.0, "b", restarted=True))
    again = machine.handle(Reported(5.0, "b", Report(1, "training", ps_address="b:2")))
    assert "b" in finishing(again)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["train.end.goal={metric: accuracy}", "train.evaluateEvery=1"], "exactly one of `atLeast` and `atMost`"),
        (["train.end.goal={metric: loss, atMost: 1, atLeast: 0}", "train.evaluateEvery=1"], "exactly one of"),
        (["train.end.goal={metric: accuracy, atLeast: 0.9}", "train.evaluateEvery=0"], "requires `evaluateEvery`"),
    ],
)
def test_a_goal_that_says_too_little_is_refused(job_file: Path, settings: list[str], says: str) -> None:
    with pytest.raises(GeofedError) as caught:
        load(job_file, settings)
    assert says in caught.value.message


def test_a_goal_of_the_job_file_is_the_jobs(job_file: Path) -> None:
    spec = load(job_file, ["train.end.goal={metric: loss, atMost: 0}", "train.evaluateEvery=3"]).spec
    assert goal_of(spec) == Goal("loss", 0.0, at_least=False, every=3)


def test_a_user_may_have_a_job_end_with_the_model_that_it_has() -> None:
    machine = running(None)
    asked = machine.handle(FinishRequested(3.0, "good enough"))
    assert finishing(asked) == ["a", "b"]
    assert told(asked) == [{"reached": True, "asked": True}]
    assert machine.state.ends_early == "requested by a user: good enough"
    assert machine.handle(FinishRequested(4.0, "again")) == []


@pytest.mark.parametrize("phase", ["queued", "planned", "starting", "finishing", "cancelling"])
def test_where_there_is_nothing_to_end_early_asking_for_it_changes_nothing(phase: Any) -> None:
    machine = running(None)
    machine.state = replace(machine.state, phase=phase)
    assert machine.handle(FinishRequested(3.0, "")) == []
