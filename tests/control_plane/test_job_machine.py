"""The job machine against any order of events, and along the paths that matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.budget import budget

from control_plane.core import (
    MAX_PUBLISHES,
    CancelRequested,
    Charge,
    Evaluation,
    Failure,
    FinishRequested,
    Goal,
    InitialModel,
    JobEvent,
    JobMachine,
    JobState,
    MeterTotals,
    Partition,
    Planned,
    Record,
    RegionLive,
    RegionLost,
    RegionUnreachable,
    ReplanRequested,
    Report,
    Reported,
    Rerouted,
    ScaleRequested,
    SendPeers,
    SendPublish,
    SendScale,
    SendStart,
    SendStop,
    StartAllowed,
    SuccessorDecided,
    Tick,
    WanExchange,
    condition_of,
    job_state_from_json,
    job_state_to_json,
)

REGIONS = ("a", "b", "c")
STATES = (
    "accepted",
    "refused",
    "preparing",
    "ready",
    "training",
    "waiting",
    "finished",
    "published",
    "stopped",
    "failed",
)
LIMIT = 100.0
ALL_PAIRS = (("a", "b"), ("a", "c"), ("b", "c"))


def fresh(*regions: str) -> JobMachine:
    parts = tuple(Partition(region) for region in regions or REGIONS)
    goal = Goal("accuracy", 0.4, at_least=True, every=3)
    return JobMachine(JobState("j", LIMIT, 0.0, partitions=parts, goal=goal, most_left_out=1))


def continuing(*regions: str) -> JobMachine:
    """A job that runs, and is to continue without a region that stays lost."""
    machine = running(*regions)
    machine.state = replace(machine.state, continues=True)
    return machine


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = fresh()
        self.at = 0.0
        self.asked: str | None = None
        self.ends = 0
        self.epochs = dict.fromkeys(REGIONS, 1)
        self.routes = 0
        self.no_successor = False

    def tell(self, event: JobEvent) -> None:
        before = self.machine.state
        early = before.ends_early
        twin = JobMachine(job_state_from_json(job_state_to_json(before)))
        if self.asked is not None and self._settles(event, before):
            self.asked = None
        actions = self.machine.handle(event)
        assert twin.handle(event) == actions
        assert twin.state == self.machine.state
        if before.terminal:
            assert (self.machine.state, actions) == (before, [])
        dropped = before.replanned and not self.machine.state.replanned
        assert self.machine.state.ends_early == early or not early or dropped, "it is told once"
        self.no_successor = self.no_successor or dropped
        assert not (self.no_successor and self.machine.state.successor)
        for action in actions:
            self._check(action)

    def _settles(self, event: JobEvent, before: JobState) -> bool:
        part = before.partition(self.asked or "")
        assert part is not None
        return (
            (isinstance(event, RegionLost) and event.region == self.asked)
            or (isinstance(event, RegionLive) and event.region == self.asked and event.restarted)
            or (
                isinstance(event, Reported)
                and event.region == self.asked
                and event.report.state == "published"
                and event.report.epoch == part.epoch
            )
        )

    def _check(self, action: Any) -> None:
        state = self.machine.state
        if isinstance(action, Record):
            self.ends += action.terminal
            return
        part = state.partition(action.region)
        assert part is not None
        assert action.epoch <= part.epoch
        if isinstance(action, SendPublish):
            assert self.asked is None, "one region at a time is asked for the model"
            self.asked = action.region
        if isinstance(action, SendPeers) and action.halt:
            assert action.region not in state.left_out
            assert (action.peers, action.finish) == ((), True)
        elif isinstance(action, SendPeers):
            assert not state.left_out
            known = tuple((p.region, p.epoch, p.address) for p in state.partitions)
            assert tuple((p.region, p.epoch, p.address) for p in action.peers) == known
            assert all(address for _, _, address in known)
            assert action.routes >= self.routes
            assert (action.neighbours, action.former) == (state.neighbours, state.former)
            assert action.finish == bool(state.ends_early)

    @rule()
    def plan(self) -> None:
        self.tell(Planned(self.at))

    @rule(pairs=st.sampled_from(((("a", "b"), ("b", "c")), (("a", "b"), ("a", "c")))))
    def reroute(self, pairs: Any) -> None:
        before = self.machine.state
        self.tell(Rerouted(self.at, "star", pairs, before.neighbours or ALL_PAIRS, "other ways", {}))
        assert self.machine.state.former in (before.former, before.neighbours or ALL_PAIRS)

    @rule(region=st.sampled_from((*REGIONS, "x")), workers=st.integers(0, 3))
    def scale(self, region: str, workers: int) -> None:
        self.tell(ScaleRequested(self.at, {region: workers}, "because"))

    @rule()
    def begin(self) -> None:
        self.tell(StartAllowed(self.at))

    @rule(
        region=st.sampled_from(REGIONS),
        state=st.sampled_from(STATES),
        back=st.integers(0, 1),
        address=st.sampled_from(("", "one:1", "two:2")),
        digest=st.sampled_from(("m", "m", "m", "other")),
        blob=st.sampled_from((None, 7)),
        count=st.integers(0, 9),
        routes=st.integers(0, 4),
    )
    def report(
        self, region: str, state: str, back: int, address: str, digest: str, blob: int | None, count: int, routes: int
    ) -> None:
        part = self.machine.state.partition(region)
        assert part is not None
        report = Report(
            part.epoch - back,
            state,
            ps_address=address,
            round=count,
            model_digest=digest,
            blob_digest="sha256:x" if state == "published" else "",
            error=Failure("TASK_FAILED", "boom") if state == "failed" else None,
            evaluation=Evaluation(metrics={"accuracy": 0.5}, round=count),
            exchange=WanExchange(routes=routes),
        )
        before = self.machine.state
        self.tell(Reported(self.at, region, report, blob))
        if back:
            assert self.machine.state == before, "what an older epoch says does not count"

    @rule(state=st.sampled_from(("ready", "training", "finished")))
    def all_report(self, state: str) -> None:
        for part in self.machine.state.partitions:
            known = self.machine.state.routes
            report = Report(
                part.epoch, state, ps_address=f"{part.region}:1", model_digest="m", exchange=WanExchange(routes=known)
            )
            self.tell(Reported(self.at, part.region, report))

    @rule()
    def replan(self) -> None:
        self.tell(ReplanRequested(self.at, "a region has come", {}))

    @rule(region=st.sampled_from(REGIONS))
    def replan_without(self, region: str) -> None:
        part = self.machine.state.partition(region)
        assert part is not None
        if part.link == "lost":
            self.tell(ReplanRequested(self.at, "a region has gone", {}, (region,)))

    @invariant()
    def the_model_is_of_the_furthest_region_that_is_there(self) -> None:
        state = self.machine.state
        if (asked := state.partition(state.publisher)) is not None and state.left_out:
            assert asked.region not in state.left_out
            assert asked.report is not None
            assert asked.report.round == state.rounds_done
        assert len(state.left_out) <= state.most_left_out

    @rule(successor=st.sampled_from(("", "k")))
    def go_on(self, successor: str) -> None:
        awaited = self.machine.state.awaits_successor
        self.tell(SuccessorDecided(self.at, successor, "continues", {}))
        assert self.machine.state.successor == (successor if awaited else self.machine.state.successor)
        assert not awaited or self.machine.state.phase == "succeeded"

    @rule()
    def finish(self) -> None:
        before = self.machine.state
        self.tell(FinishRequested(self.at, "enough"))
        now = self.machine.state
        if before.phase in ("running", "finishing"):
            assert not now.replanned, "what a user wants ended is not continued with"
            assert now.phase == ("succeeded" if before.awaits_successor else before.phase)
        else:
            assert now == before

    @rule()
    def cancel(self) -> None:
        self.tell(CancelRequested(self.at, "why not"))

    @rule(region=st.sampled_from(REGIONS), restarted=st.booleans())
    def live(self, region: str, restarted: bool) -> None:
        self.tell(RegionLive(self.at, region, restarted))

    @rule(region=st.sampled_from(REGIONS))
    def unreachable(self, region: str) -> None:
        self.tell(RegionUnreachable(self.at, region))

    @rule(region=st.sampled_from(REGIONS))
    def lost(self, region: str) -> None:
        self.tell(RegionLost(self.at, region))

    @rule(seconds=st.sampled_from((1.0, LIMIT + 1)))
    def wait(self, seconds: float) -> None:
        self.at += seconds
        self.tell(Tick(self.at))

    @invariant()
    def epochs_only_grow(self) -> None:
        for part in self.machine.state.partitions:
            assert part.epoch >= self.epochs[part.region]
            self.epochs[part.region] = part.epoch

    @invariant()
    def former_ways_hold_until_all_know_the_present_ones(self) -> None:
        state = self.machine.state
        if state.routes == self.routes + 1:
            known = [
                part.report is not None and part.report.exchange.routes >= self.routes for part in state.partitions
            ]
            assert state.former or all(known)
        assert state.routes - self.routes in (0, 1, 2)
        self.routes = state.routes

    @invariant()
    def it_ends_once(self) -> None:
        assert self.ends == self.machine.state.terminal
        assert self.machine.state.publishes <= 1000
        assert isinstance(condition_of(self.machine.state), str)


AnyOrder.TestCase.settings = settings(max_examples=budget(80), stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def running(*regions: str) -> JobMachine:
    machine = fresh(*regions)
    machine.handle(Planned(0))
    machine.handle(StartAllowed(0))
    for state in ("ready", "training"):
        for part in machine.state.partitions:
            machine.handle(Reported(1, part.region, Report(part.epoch, state, ps_address=f"{part.region}:1")))
    assert machine.state.phase == "running"
    return machine


def finished(machine: JobMachine, digest: str = "m") -> list[Any]:
    actions = []
    for part in machine.state.partitions:
        actions += machine.handle(Reported(5, part.region, Report(part.epoch, "finished", model_digest=digest)))
    return actions


def sent(actions: list[Any], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def test_a_lost_region_comes_back_under_a_new_epoch() -> None:
    machine = running("a", "b")
    machine.handle(RegionUnreachable(10, "a"))
    unreachable = "region a unreachable since 1970-01-01T00:00:10Z"
    assert condition_of(machine.state) == unreachable, "its server and the others may train on"
    machine.handle(Reported(12, "b", Report(1, "training", "waits for a", ps_address="b:1", round=3)))
    assert condition_of(machine.state) == f"{unreachable}; b: waits for a"
    machine.handle(Reported(13, "b", Report(1, "training", ps_address="b:1", round=4)))
    machine.handle(RegionLost(20, "a"))
    assert machine.state.phase == "running"
    assert sent(machine.handle(RegionLive(30, "a", True)), SendStart) == [SendStart("a", 2, resumed=True)]
    assert condition_of(machine.state) == ""
    assert not sent(machine.handle(Reported(31, "a", Report(1, "ready", ps_address="a:1"))), SendPeers)
    peers = sent(machine.handle(Reported(32, "a", Report(2, "ready", ps_address="a:2"))), SendPeers)
    assert [(p.region, p.epoch) for p in peers] == [("a", 2), ("b", 1)]
    assert [(p.region, p.epoch, p.address) for p in peers[1].peers] == [("a", 2, "a:2"), ("b", 1, "b:1")]


def test_a_restarted_agent_gets_its_orders_again() -> None:
    machine = running("a", "b")
    assert sent(machine.handle(RegionLive(3, "a", True)), SendStart) == [SendStart("a", 1, resumed=True)]
    told = sent(machine.handle(Reported(4, "a", Report(1, "ready", ps_address="a:1"))), SendPeers)
    assert [p.region for p in told] == ["a"]
    assert machine.handle(RegionLive(5, "a", False)) == []


def test_a_region_has_run_once_its_server_had_an_address() -> None:
    """Until then nobody can have anything of it, and it begins as if for the first time."""
    machine = fresh("a", "b")
    machine.handle(Planned(0))
    machine.handle(StartAllowed(0))
    machine.handle(Reported(1, "a", Report(1, "preparing")))
    assert sent(machine.handle(RegionLive(2, "a", True)), SendStart) == [SendStart("a", 1, resumed=False)]
    machine.handle(RegionLost(3, "a"))
    assert sent(machine.handle(RegionLive(4, "a", True)), SendStart) == [SendStart("a", 2, resumed=False)]
    machine.handle(Reported(5, "a", Report(2, "ready", ps_address="a:1")))
    machine.handle(RegionLost(6, "a"))
    assert sent(machine.handle(RegionLive(7, "a", True)), SendStart) == [SendStart("a", 3, resumed=True)]
    machine.handle(Reported(8, "a", Report(3, "preparing")))
    machine.handle(RegionLost(9, "a"))
    assert sent(machine.handle(RegionLive(10, "a", True)), SendStart) == [SendStart("a", 4, resumed=True)]


def test_a_region_that_stays_lost_fails_the_job() -> None:
    machine = running("a", "b")
    machine.handle(RegionLost(10, "b"))
    assert machine.handle(Tick(10 + LIMIT)) == []
    actions = machine.handle(Tick(11 + LIMIT))
    assert machine.state.error is not None
    assert machine.state.error.code == "REGION_LOST"
    assert {stop.region for stop in sent(actions, SendStop)} == {"a", "b"}


def ended_at(machine: JobMachine, at: float, **rounds: int) -> list[Any]:
    """The regions report their end, each with the model of its last round."""
    actions = []
    for name, made in rounds.items():
        part = machine.state.partition(name)
        assert part is not None
        report = Report(part.epoch, "finished", round=made, model_digest=f"m{made}", ps_address=part.address)
        actions += machine.handle(Reported(at, name, report))
    return actions


def test_a_job_continues_without_a_region_that_stays_lost() -> None:
    machine = continuing("a", "b", "c")
    machine.handle(RegionLost(10, "c"))
    assert machine.handle(Tick(10 + LIMIT)) == []
    told = sent(machine.handle(Tick(11 + LIMIT)), SendPeers)
    assert [(one.region, one.peers, one.finish, one.halt) for one in told] == [
        ("a", (), True, True), ("b", (), True, True),
    ]  # fmt: skip
    assert machine.handle(Tick(12 + 2 * LIMIT)) == [], "it is gone, and that is known"
    # The one that is further has the job's model.
    assert sent(ended_at(machine, 250, a=6), SendPublish) == []
    assert sent(ended_at(machine, 250, b=7), SendPublish) == [SendPublish("b", 1)]
    assert (machine.state.model_digest, machine.state.rounds_done) == ("m7", 7)
    stop = sent(machine.handle(RegionLive(260, "c", True)), SendStop)
    assert [(one.region, one.epoch, one.discard) for one in stop] == [("c", 2, True)]
    machine.handle(Reported(270, "b", Report(1, "published", round=7, blob_digest="d"), blob_bytes=1, flat_bytes=1))
    assert machine.state.awaits_successor
    machine.handle(SuccessorDecided(280, "k", "continues", {}))
    assert (machine.state.phase, machine.state.successor) == ("succeeded", "k")


def test_a_region_that_restarts_meanwhile_is_told_again_to_end() -> None:
    machine = continuing("a", "b", "c")
    machine.handle(RegionLost(10, "c"))
    machine.handle(Tick(11 + LIMIT))
    assert sent(machine.handle(RegionLive(112, "a", True)), SendStart) == [SendStart("a", 1, resumed=True)]
    told = sent(machine.handle(Reported(113, "a", Report(1, "ready", ps_address="a:1"))), SendPeers)
    assert [(one.region, one.halt) for one in told] == [("a", True)]


def test_a_job_that_nobody_can_continue_fails_with_its_model() -> None:
    machine = continuing("a", "b", "c")
    machine.handle(RegionLost(10, "c"))
    machine.handle(Tick(11 + LIMIT))
    ended_at(machine, 120, a=6, b=6)
    machine.handle(Reported(130, "a", Report(1, "published", round=6, blob_digest="d"), blob_bytes=1, flat_bytes=1))
    machine.handle(SuccessorDecided(140, "", "no job continues its model: too few", {}, fails=True))
    assert machine.state.phase == "failed"
    assert machine.state.error is not None
    assert (machine.state.error.code, machine.state.blob_digest) == ("REGION_LOST", "d")
    assert "region c stays away, and no job continues its model: too few" in machine.state.error.message


@pytest.mark.parametrize("why", ["two at once", "another one later", "one that does not end", "in the background"])
def test_what_a_job_cannot_continue_without(why: str) -> None:
    machine = continuing("a", "b", "c")
    machine.state = replace(machine.state, most_left_out=0 if why == "in the background" else 1)
    machine.handle(RegionLost(10, "c"))
    if why == "two at once":
        machine.handle(RegionLost(10, "b"))
    machine.handle(Tick(11 + LIMIT))
    if why == "another one later":
        machine.handle(RegionLost(120, "b"))
        machine.handle(Tick(121 + LIMIT))
    if why == "one that does not end":
        ended_at(machine, 120, a=6)
        machine.handle(Tick(4000))
    assert machine.state.phase == "failed"
    assert machine.state.error is not None
    text = {
        "two at once": "with secure aggregation only one region can be left out",
        "another one later": "it ends without c already",
        "one that does not end": "region c stays away, and b does not end without it",
        "in the background": "it exchanges in the background",
    }[why]
    assert text in machine.state.error.message


def test_different_models_fail_the_job() -> None:
    machine = running("a", "b")
    machine.handle(Reported(5, "a", Report(1, "finished", model_digest="m")))
    machine.handle(Reported(5, "b", Report(1, "finished", model_digest="n")))
    assert machine.state.error is not None
    assert "a m, b n" in machine.state.error.message


def test_another_region_publishes_when_the_first_is_lost() -> None:
    machine = running("a", "b")
    assert sent(finished(machine), SendPublish) == [SendPublish("a", 1)]
    assert sent(machine.handle(RegionLost(6, "a")), SendPublish) == [SendPublish("b", 1)]
    published = Report(1, "published", model_digest="m", blob_digest="sha256:x")
    machine.handle(Reported(7, "b", published, 12))
    assert (machine.state.phase, machine.state.blob_bytes) == ("succeeded", 12)


def test_a_model_that_never_arrives_whole_fails_the_job() -> None:
    machine = running("a")
    finished(machine)
    published = Report(1, "published", model_digest="m", blob_digest="sha256:x")
    for _ in range(MAX_PUBLISHES - 1):
        assert sent(machine.handle(Reported(7, "a", published, None)), SendPublish)
    machine.handle(Reported(7, "a", published, None))
    assert machine.state.error is not None
    assert machine.state.error.code == "DIGEST_MISMATCH"


def test_cancel_waits_for_all_but_the_lost() -> None:
    machine = running("a", "b")
    actions = machine.handle(CancelRequested(5, "enough"))
    assert {stop.region for stop in sent(actions, SendStop)} == {"a", "b"}
    machine.handle(Reported(6, "a", Report(1, "stopped")))
    assert machine.state.phase == "cancelling"
    assert "b to stop" in condition_of(machine.state)
    machine.handle(RegionLost(7, "b"))
    assert machine.state.phase == "cancelled"


def test_a_veto_fails_the_job_with_its_code() -> None:
    machine = fresh("a", "b")
    machine.handle(Planned(0))
    machine.handle(StartAllowed(0))
    refusal = Report(1, "refused", error=Failure("RESIDENCY_VIOLATION", "not this data"))
    machine.handle(Reported(1, "a", refusal))
    assert machine.state.error == Failure("RESIDENCY_VIOLATION", "region a refused the partition: not this data")


def test_a_loss_that_is_no_number_survives_storage() -> None:
    machine = running("a")
    machine.handle(Reported(2, "a", Report(1, "training", round=1, loss=float("nan"))))
    part = job_state_from_json(job_state_to_json(machine.state)).partitions[0]
    assert part.report is not None
    assert part.report.loss != part.report.loss


def test_a_region_is_told_its_workers_again_when_it_gets_its_orders_again() -> None:
    machine = fresh("a", "b")
    assert machine.handle(ScaleRequested(1.0, {"a": 3})) == [], "nothing runs yet"
    machine.handle(Planned(1.0))
    machine.handle(StartAllowed(1.0))
    actions = machine.handle(ScaleRequested(2.0, {"a": 3, "b": 0}, "cheaper"))
    sent = [action for action in actions if isinstance(action, SendScale)]
    assert [(action.region, action.workers, action.reason) for action in sent] == [
        ("a", 3, "cheaper"),
        ("b", 0, "cheaper"),
    ]
    assert machine.handle(ScaleRequested(3.0, {"a": 3})) == [], "it is told once"
    machine.handle(RegionLost(4.0, "a"))
    again = machine.handle(RegionLive(5.0, "a", restarted=True))
    assert [type(a) for a in again if not isinstance(a, Record)] == [SendStart, SendScale]
    assert [a.workers for a in again if isinstance(a, SendScale)] == [3]


def test_every_region_fetches_what_the_job_begins_with() -> None:
    machine = fresh("a", "b")
    machine.state = replace(machine.state, initial_model=InitialModel("before", "sha256:m", 7))
    machine.handle(Planned(0))
    starts = sent(machine.handle(StartAllowed(0)), SendStart)
    assert [(start.region, start.initial_model) for start in starts] == [("a", "sha256:m"), ("b", "sha256:m")]
    machine.handle(RegionLost(1, "a"))
    (again,) = sent(machine.handle(RegionLive(2, "a", restarted=True)), SendStart)
    assert again.initial_model == "sha256:m"


def replanned() -> JobMachine:
    """Its model is here, and another job is to continue with it."""
    machine = running("a", "b")
    machine.state = replace(machine.state, deadline_at=100.0)
    told = sent(machine.handle(ReplanRequested(3, "c has come", {"regions": ["a", "b"]})), SendPeers)
    assert [peers.finish for peers in told] == [True, True]
    finished(machine)
    published = Report(1, "published", model_digest="m", blob_digest="sha256:x")
    actions = machine.handle(Reported(7, "a", published, 12))
    assert {stop.region for stop in sent(actions, SendStop)} == {"a", "b"}
    assert (machine.state.phase, machine.state.awaits_successor) == ("finishing", True)
    assert "waiting for the plan" in condition_of(machine.state)
    return machine


def test_a_job_that_is_planned_again_ends_with_the_job_that_goes_on() -> None:
    machine = replanned()
    late = Report(
        1, "stopped", meter=1, totals=MeterTotals(money=(Charge("function-seconds", 1.0, "GB-s", 0.5, "file"),))
    )
    machine.handle(Reported(8, "b", late))
    assert [machine.handle(event) for event in (RegionLost(8, "a"), Tick(900), RegionLive(901, "a", True))] == [[]] * 3
    kinds = [record.kind for record in sent(machine.handle(SuccessorDecided(902, "k", "continues", {})), Record)]
    assert kinds == ["job.replanned", "job.succeeded"], "the promise is the other's"
    assert (machine.state.phase, machine.state.successor) == ("succeeded", "k")
    part = machine.state.partition("b")
    assert part is not None
    assert part.report is not None
    assert part.report.totals.money == late.totals.money


def test_where_none_can_go_on_it_ends_with_its_own_account() -> None:
    machine = replanned()
    kinds = [record.kind for record in sent(machine.handle(SuccessorDecided(9, "", "no room", {})), Record)]
    assert kinds == ["job.replanned", "job.deadline", "job.succeeded"]
    machine = replanned()
    machine.handle(CancelRequested(9, "enough"))
    assert (machine.state.phase, machine.state.blob_digest) == ("cancelled", "sha256:x")
    assert machine.handle(SuccessorDecided(10, "k", "too late", {})) == []


def kinds_of(actions: list[Any]) -> list[str]:
    return [record.kind for record in sent(actions, Record) if record.kind.startswith("job.")]


def test_what_a_user_finishes_is_not_gone_on_with() -> None:
    machine = running("a", "b")
    machine.handle(ReplanRequested(3, "c has come", {}))
    assert kinds_of(machine.handle(FinishRequested(4, "enough"))) == ["job.goal", "job.replanned"]
    assert machine.state.ends_early == "requested by a user: enough"
    assert machine.handle(FinishRequested(4, "enough")) == [], "it is told once"
    finished(machine)
    machine.handle(Reported(7, "a", Report(1, "published", model_digest="m", blob_digest="sha256:x"), 12))
    assert (machine.state.phase, machine.state.successor) == ("succeeded", "")
    machine = replanned()
    told = kinds_of(machine.handle(FinishRequested(9, "enough")))
    assert told == ["job.goal", "job.replanned", "job.deadline", "job.succeeded"], "its model is here already"
    assert machine.handle(SuccessorDecided(10, "k", "too late", {})) == []


def test_metrics_that_fail_are_told_of_once_and_cost_no_model() -> None:
    machine = running("a", "b")
    unmeasured = Report(1, "training", round=1, evaluation=Evaluation(round=1, error="metrics raised KeyError: 'y'"))
    first, again = (sent(machine.handle(Reported(at, "a", unmeasured)), Record) for at in (4, 5))
    assert [record.kind for record in first] == ["partition.round", "partition.unmeasured"]
    assert again == []
    assert machine.state.phase == "running"


def test_a_goal_that_the_last_round_meets_leaves_nothing_to_go_on_with() -> None:
    machine = running("a", "b")
    machine.handle(ReplanRequested(3, "c has come", {}))
    told = []
    for region in ("a", "b"):
        good = {"evaluation": Evaluation({"accuracy": 0.5}, 10, 3)}
        last = Report(1, "finished", model_digest="m", round=3, **good)
        told += kinds_of(machine.handle(Reported(5, region, last)))
    assert told == ["job.goal", "job.replanned", "job.finishing", "job.publishing"]
    machine.handle(Reported(7, "a", Report(1, "published", model_digest="m", blob_digest="sha256:x"), 12))
    assert machine.state.phase == "succeeded"
    assert machine.state.ends_early == "accuracy is 0.5000; the goal is at least 0.4"
