"""A job whose shards are processed elsewhere: who is told what, and when the others begin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from support.budget import budget

from control_plane.core import (
    CancelRequested,
    Charge,
    Copy,
    Failure,
    JobEvent,
    JobMachine,
    JobState,
    MeterTotals,
    Partition,
    Planned,
    Record,
    RegionLive,
    RegionLost,
    Report,
    Reported,
    SendShard,
    SendStart,
    SendStop,
    StartAllowed,
    Tick,
    condition_of,
    job_state_from_json,
    job_state_to_json,
    with_late_charges,
)

LIMIT = 100.0
REGIONS, SOURCES = ("taker", "other"), ("holder", "keeper")


def machine() -> JobMachine:
    copies = tuple(Copy(source, "taker", 1000) for source in sorted(SOURCES))
    parts = tuple(Partition(region) for region in sorted(REGIONS))
    return JobMachine(JobState("j", LIMIT, 0.0, partitions=parts, copies=copies))


def begun() -> JobMachine:
    made = machine()
    made.handle(Planned(0.0))
    assert _started(made.handle(StartAllowed(0.0))) == ["taker"]
    return made


def _started(actions: list[Any]) -> list[str]:
    return [action.region for action in actions if isinstance(action, SendStart)]


def _told(actions: list[Any]) -> list[tuple[str, str]]:
    return [(action.region, action.address) for action in actions if isinstance(action, SendShard)]


def say(made: JobMachine, region: str, state: str, **more: Any) -> list[Any]:
    epoch = next((p.epoch for p in made.state.partitions if p.region == region), 1)
    return made.handle(Reported(1.0, region, Report(epoch, state, **more)))


def waiting() -> JobMachine:
    made = begun()
    assert _told(say(made, "taker", "preparing", shard_address="t:1")) == [("holder", "t:1"), ("keeper", "t:1")]
    return made


class AnyOrder(RuleBasedStateMachine):
    """Whatever is said by whom: nobody begins too early, and nobody is told to send to where nobody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.machine, self.at = machine(), 0.0

    def tell(self, event: JobEvent) -> None:
        before = self.machine.state
        twin = JobMachine(job_state_from_json(job_state_to_json(before)))
        actions = self.machine.handle(event)
        assert twin.handle(event) == actions
        assert twin.state == self.machine.state
        if before.terminal:
            assert (self.machine.state, actions) == (before, [])
        for action in actions:
            if isinstance(action, SendShard):
                part = self.machine.state.partition("taker")
                assert part is not None
                assert part.report is not None
                assert (part.state, part.report.shard_address) == ("preparing", action.address)
            if isinstance(action, SendStart) and action.region == "other":
                assert self.machine.state.copied
            if isinstance(action, Record) and action.terminal:
                told = {stop.region for stop in actions if isinstance(stop, SendStop)}
                assert told in (set(), {*REGIONS, *SOURCES})
        assert not (before.copied and not self.machine.state.copied)

    @rule(event=st.sampled_from([Planned, StartAllowed, Tick]))
    def go_on(self, event: Any) -> None:
        self.at += 1
        self.tell(event(self.at))

    @rule(
        region=st.sampled_from((*REGIONS, *SOURCES)),
        state=st.sampled_from(["preparing", "ready", "training", "sending", "sent", "stopped"]),
        address=st.sampled_from(["", "t:1", "t:2"]),
        here=st.booleans(),
    )
    def report(self, region: str, state: str, address: str, here: bool) -> None:
        part = self.machine.state.partition(region)
        epoch = part.epoch if part is not None else 1
        self.tell(
            Reported(self.at, region, Report(epoch, state, shard_address=address, ps_address="p:1", shards_here=here))
        )

    @rule(region=st.sampled_from((*REGIONS, *SOURCES)), restarted=st.booleans())
    def comes(self, region: str, restarted: bool) -> None:
        self.tell(RegionLive(self.at, region, restarted))

    @rule(region=st.sampled_from((*REGIONS, *SOURCES)))
    def goes(self, region: str) -> None:
        self.tell(RegionLost(self.at, region))

    @rule()
    def cancel(self) -> None:
        self.tell(CancelRequested(self.at, ""))


AnyOrder.TestCase.settings = settings(max_examples=budget(150), stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_the_others_begin_once_the_shards_are_there() -> None:
    made = waiting()
    assert "for the shard of holder to arrive in taker" in condition_of(made.state)
    say(made, "holder", "sending", condition="10 of 1,000 bytes are in taker")
    assert "10 of 1,000 bytes" in condition_of(made.state)
    assert _started(say(made, "keeper", "sent")) == []
    assert _started(say(made, "holder", "sent")) == [], "the taker is the one who says that they are there"
    assert _started(say(made, "taker", "preparing")) == []
    assert _started(say(made, "taker", "preparing", shards_here=True)) == ["other"]
    assert _started(say(made, "taker", "training")) == []
    assert made.state.copied


def test_an_address_is_told_once_and_a_new_one_again() -> None:
    made = waiting()
    assert _told(say(made, "taker", "preparing", shard_address="t:1")) == []
    assert _told(say(made, "taker", "preparing", shard_address="t:2")) == [("holder", "t:2"), ("keeper", "t:2")]


def test_a_taker_that_begins_again_may_ask_at_the_same_address() -> None:
    made = waiting()
    say(made, "holder", "sent")
    assert _started(made.handle(RegionLive(2.0, "taker", restarted=True))) == ["taker"]
    assert _told(say(made, "taker", "preparing", shard_address="t:1")) == [("holder", "t:1"), ("keeper", "t:1")]


def test_a_source_that_begins_again_is_told_again_unless_it_was_done() -> None:
    made = waiting()
    say(made, "holder", "sent")
    assert _told(made.handle(RegionLive(2.0, "keeper", restarted=True))) == [("keeper", "t:1")]
    assert _told(made.handle(RegionLive(2.0, "holder", restarted=True))) == []


def test_a_region_that_is_held_back_does_not_begin_by_coming_back() -> None:
    made = waiting()
    assert _started(made.handle(RegionLive(2.0, "other", restarted=True))) == []
    made.handle(RegionLost(3.0, "other"))
    assert _started(say(made, "taker", "ready")) == []
    assert _started(made.handle(RegionLive(4.0, "other", restarted=False))) == ["other"]


def test_a_source_that_refuses_fails_the_job_with_its_code() -> None:
    made = waiting()
    actions = say(made, "holder", "refused", error=Failure("RESIDENCY_VIOLATION", "not there"))
    assert made.state.error is not None
    assert made.state.error.code == "RESIDENCY_VIOLATION"
    assert "region holder refused" in made.state.error.message
    assert {action.region for action in actions if isinstance(action, SendStop)} == {*REGIONS, *SOURCES}


def test_a_source_that_stays_lost_fails_the_job_only_while_it_is_needed() -> None:
    for done in (False, True):
        made = waiting()
        if done:
            say(made, "taker", "training")
        made.handle(RegionLost(10.0, "holder"))
        made.handle(Tick(10.0 + LIMIT + 1))
        assert made.state.terminal is not done


def test_a_cancelled_job_waits_for_its_sources() -> None:
    made = waiting()
    say(made, "holder", "sending")
    made.handle(CancelRequested(2.0, ""))
    for region in (*REGIONS, "keeper"):
        say(made, region, "stopped")
    assert "holder" in condition_of(made.state)
    spent = (Charge("egress to taker", 1.0, "GB", 0.5, "list"),)
    say(made, "holder", "stopped", totals=MeterTotals(money=spent))
    assert made.state.phase == "cancelled"
    copy = made.state.copy_from("holder")
    assert copy is not None
    assert copy.report is not None
    assert copy.report.totals.money == spent


def test_what_an_earlier_meter_of_a_source_has_counted_stays_in_the_account() -> None:
    made = waiting()
    say(made, "holder", "sending", meter=1, totals=MeterTotals(sent_bytes={"taker": 100}))
    say(made, "holder", "sending", meter=2, totals=MeterTotals(sent_bytes={"taker": 30}))
    copy = made.state.copy_from("holder")
    assert copy is not None
    assert copy.report is not None
    assert copy.report.totals.sent_bytes == {"taker": 130}


@pytest.mark.parametrize("phase", ["succeeded", "failed"])
def test_what_a_source_has_spent_last_is_in_the_account_of_an_ended_job(phase: Any) -> None:
    made = waiting()
    say(made, "holder", "sending", meter=1, totals=MeterTotals(sent_bytes={"taker": 100}))
    ended = replace(made.state, phase=phase)
    assert "the last transfers of holder" in condition_of(ended)
    spent = (Charge("egress to taker", 0.9, "GB", 0.08, "list"),)
    late = with_late_charges(
        ended, "holder", Report(1, "stopped", meter=1, totals=MeterTotals(sent_bytes={"taker": 900}, money=spent))
    )
    copy = late.copy_from("holder")
    assert copy is not None
    assert copy.report is not None
    assert (copy.state, copy.report.totals.sent_bytes, copy.report.totals.money) == ("stopped", {"taker": 900}, spent)
    assert condition_of(late) == ""
    assert with_late_charges(late, "holder", Report(1, "stopped")) == late, (
        "one who has counted nothing changes nothing"
    )


@pytest.mark.parametrize("there", ["here", "again", "training"])
def test_a_source_that_knocks_where_nobody_waits_any_more_fails_nothing(there: str) -> None:
    """The port may be another job's by then."""
    made = waiting()
    say(made, "holder", "sending")
    if there == "again":
        made.handle(RegionLive(2.0, "taker", restarted=True))
    else:
        say(made, "taker", "preparing", shards_here=True)
    if there == "training":
        for region in REGIONS:
            say(made, region, "training", ps_address="p:1")
        assert made.state.phase == "running"
    refusal = Failure("FORBIDDEN", "no shard is wanted here for j")
    say(made, "holder", "refused", error=refusal)
    assert not made.state.terminal
    if there == "again":
        assert ("holder", "t:1") in _told(say(made, "taker", "preparing", shard_address="t:1")), "it is wanted again"
        say(made, "holder", "refused", error=refusal)
        assert made.state.phase == "failed", "this time it is waited for"


def test_once_training_has_begun_no_source_goes_on_trying() -> None:
    made = waiting()
    say(made, "holder", "sending")
    say(made, "keeper", "sent")
    say(made, "taker", "preparing", shards_here=True)
    actions = say(made, "taker", "training", ps_address="p:1")
    assert [action.region for action in actions if isinstance(action, SendStop)] == ["holder"]


def test_a_source_that_was_stopped_and_is_asked_again_is_paid_for_both() -> None:
    """Its meters begin again with each order, under the same name."""
    made = waiting()
    spent = Charge("egress to taker", 1.0, "GB", 0.5, "list")
    say(made, "holder", "sending", meter=7, totals=MeterTotals(sent_bytes={"taker": 100}))
    say(made, "taker", "preparing", shards_here=True)
    say(made, "taker", "training", ps_address="p:1")
    say(made, "holder", "stopped", meter=7, totals=MeterTotals(sent_bytes={"taker": 120}, money=(spent,)))
    made.handle(RegionLive(3.0, "taker", restarted=True))
    assert ("holder", "t:2") in _told(say(made, "taker", "preparing", shard_address="t:2"))
    for count, usd in ((10, 0.1), (30, 0.25)):
        say(
            made,
            "holder",
            "sending",
            meter=7,
            totals=MeterTotals(sent_bytes={"taker": count}, money=(replace(spent, usd=usd),)),
        )
    copy = made.state.copy_from("holder")
    assert copy is not None
    assert copy.report is not None
    assert copy.report.totals.sent_bytes == {"taker": 150}
    assert sum(charge.usd for charge in copy.report.totals.money) == 0.75
