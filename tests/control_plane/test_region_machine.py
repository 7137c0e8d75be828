"""The region machine against any order of events."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.budget import budget

from control_plane.core import (
    ClockJumped,
    Connected,
    ControlPlaneRestarted,
    Disconnected,
    EndSession,
    Heartbeat,
    NotifyJobs,
    RegionEvent,
    RegionLive,
    RegionLost,
    RegionMachine,
    RegionState,
    RegionUnreachable,
    Tick,
    region_state_from_json,
    region_state_to_json,
)

LEASE = 30.0
LEGAL = {
    ("invited", "live"),
    ("live", "unreachable"),
    ("live", "lost"),
    ("unreachable", "live"),
    ("unreachable", "lost"),
    ("lost", "live"),
}


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = RegionMachine(RegionState("a"))
        self.at = 1000.0
        self.jobs_think = "lost"

    def tell(self, event: RegionEvent) -> None:
        before = self.machine.state
        twin = RegionMachine(region_state_from_json(region_state_to_json(before)))
        actions = self.machine.handle(event)
        after = self.machine.state
        assert (twin.handle(event), twin.state) == (actions, after)
        assert after.session >= before.session
        assert before.phase == after.phase or (before.phase, after.phase) in LEGAL
        for action in actions:
            if isinstance(action, EndSession):
                assert action.session == before.session
            elif isinstance(action, NotifyJobs):
                names = {RegionLive: "live", RegionUnreachable: "unreachable", RegionLost: "lost"}
                self.jobs_think = names[type(action.event)]

    @rule(boot=st.sampled_from(("x", "y")))
    def connect(self, boot: str) -> None:
        before = self.machine.state.session
        self.tell(Connected(self.at, boot, LEASE))
        assert self.machine.state.session == before + 1

    @rule(back=st.integers(0, 1))
    def heard(self, back: int) -> None:
        before = self.machine.state
        self.tell(Heartbeat(self.at, before.session - back, LEASE))
        if back:
            assert self.machine.state == before, "an earlier session is fenced"

    @rule(back=st.integers(0, 1))
    def disconnect(self, back: int) -> None:
        before = self.machine.state
        self.tell(Disconnected(self.at, before.session - back))
        if back:
            assert self.machine.state == before

    @rule()
    def restart_of_the_control_plane(self) -> None:
        self.tell(ControlPlaneRestarted(self.at, LEASE))

    @rule()
    def standstill_of_the_control_plane(self) -> None:
        self.at += 1000.0
        self.tell(ClockJumped(self.at, LEASE))
        before = self.machine.state.phase
        self.tell(Tick(self.at))
        assert self.machine.state.phase in (before, "unreachable")

    @rule(seconds=st.sampled_from((1.0, 16.0, 31.0)))
    def wait(self, seconds: float) -> None:
        self.at += seconds
        self.tell(Tick(self.at))

    @invariant()
    def jobs_know(self) -> None:
        state = self.machine.state
        assert state.phase == "invited" or self.jobs_think == state.phase or state.untold
        assert not state.untold or state.phase == "unreachable"

    @invariant()
    def a_lease_holds(self) -> None:
        state = self.machine.state
        assert state.phase != "live" or state.connected


AnyOrder.TestCase.settings = settings(max_examples=budget(100), stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_silence_is_seen_before_the_lease_ends() -> None:
    machine = RegionMachine(RegionState("a"))
    machine.handle(Connected(0, "x", LEASE))
    assert machine.handle(Tick(15)) == []
    machine.handle(Tick(16))
    assert machine.state.phase == "unreachable"
    machine.handle(Heartbeat(20, 1, LEASE))
    assert machine.state.phase == "live"
    machine.handle(Tick(36))
    machine.handle(Tick(50))
    assert machine.state.phase == "lost"
    assert not machine.state.connected


def test_jobs_are_told_of_a_restart_only_where_an_agent_stays_away() -> None:
    back, away = RegionMachine(RegionState("a")), RegionMachine(RegionState("b"))
    for machine in (back, away):
        machine.handle(Connected(0, "x", LEASE))
        assert not [one for one in machine.handle(ControlPlaneRestarted(100, LEASE)) if isinstance(one, NotifyJobs)]
        assert machine.state.phase == "unreachable"
    assert NotifyJobs(RegionLive(101, "a", restarted=False)) in back.handle(Connected(101, "x", LEASE))
    assert away.handle(Tick(115)) == []
    assert away.handle(Tick(116)) == [NotifyJobs(RegionUnreachable(116, "b"))]
    assert away.handle(Tick(117)) == []
    away.handle(Tick(130))
    assert away.state.phase == "lost"
