"""How long the waiting policy has workers wait for regions that are late or slower, and the engine's timer."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geofed_pb.errors import GeofedError
from sync.channel_clients import FileChannel
from sync.codec import codec_named
from sync.ps.core.actions import SetTimer, WaitReason
from sync.ps.core.events import Event, TimerFired
from sync.ps.core.machine import Setup
from sync.ps.core.timing import UpdateGaps
from sync.ps.core.waiting import Continue, WaitingPolicy, WaitUntil, WaitView
from sync.ps.core.waiting_settings import WaitingSettings
from sync.ps.engine import Engine
from sync.ps.execution.executor import ActionExecutor
from sync.ps.execution.storage import Storage
from sync.wan import LinkSample, policy_of

NOW = 1000.0
HERE = 19
"""The newest round of a region that keeps up; 20 is the last that has ended here."""


def _policy(*, quorum: int = 0, round_seconds: float = 0.0, changed: WaitingSettings | None = None) -> WaitingPolicy:
    """Of a region `a`; it and others have made a round each second, the last a second ago. The grace time is over.

    ``round_seconds``: what the region's own rounds take.
    """
    waiting = changed or WaitingSettings()
    setup = Setup(
        "a", ("a", "b", "c"), 2, 40, 1, 0, quorum=quorum, max_rounds_ahead=8, background=True, waiting=waiting
    )
    policy = WaitingPolicy(setup)
    policy.grace_over_round = 20
    for region in setup.regions:
        for ago in range(10, 0, -1):
            policy.gaps.came(region, NOW - ago)
    for _ in range(3):
        policy.durations.ended("a", round_seconds)
    return policy


def _view(
    *late: str, ended: int = 20, elsewhere: tuple[str, ...] = (), links: dict[str, LinkSample] | None = None
) -> WaitView:
    """Workers have ended round 21; these regions are ten rounds late, and some of them are heard elsewhere."""
    return WaitView(
        ended=ended, step=ended, pending=False, update_made=False, workers_done=True, own_last=False,
        newest={region: HERE - 10 * (region in late) for region in ("b", "c")}, last_here=frozenset(),
        last_merged=frozenset(), elsewhere=dict.fromkeys(elsewhere, HERE), links=links or {},
    )  # fmt: skip


def _wait_seconds(policy: WaitingPolicy, view: WaitView) -> float:
    decision = policy.decide(view, NOW)
    assert isinstance(decision, WaitUntil)
    assert decision.reason is WaitReason.LATE
    return decision.at - NOW


def test_of_a_region_that_may_be_slow_only_what_comes_after_it_was_due_is_charged() -> None:
    seconds = _wait_seconds(_policy(), _view("b"))
    assert seconds == pytest.approx(0.5 + 0.25), "due in half a second, then a quarter of a round"


def test_a_region_that_others_hear_is_waited_for_with_the_budget_alone() -> None:
    assert _wait_seconds(_policy(), _view("b", elsewhere=("b",))) == pytest.approx(0.25)
    both = _wait_seconds(_policy(), _view("b", "c", elsewhere=("b",)))
    # With both late the region would be alone.
    assert both == pytest.approx(2.0)


def test_of_two_late_regions_one_that_nobody_hears_may_be_slow() -> None:
    policy = _policy()
    four = Setup("a", ("a", "b", "c", "d"), 2, 40, 1, 0, background=True)
    policy.setup = four
    view = WaitView(20, 20, False, False, True, False, {"b": 9, "c": 9, "d": HERE}, frozenset(), frozenset(),
        elsewhere={"b": HERE})  # fmt: skip
    assert _wait_seconds(policy, view) == pytest.approx(0.75)


def test_who_waits_because_of_its_lead_needs_no_budget() -> None:
    seconds = _wait_seconds(_policy(quorum=1), _view("b", elsewhere=("b",)))
    assert seconds == pytest.approx(1.25)


def test_a_region_that_would_be_alone_waits_for_two_seconds_at_no_charge() -> None:
    policy = _policy()
    assert _wait_seconds(policy, _view("b", "c")) == pytest.approx(2.0)
    policy.grace_over_round = 21
    assert _wait_seconds(policy, _view("b", ended=21, elsewhere=("b",))) == pytest.approx(0.25)


def test_a_region_of_our_pace_that_is_late_has_been_away() -> None:
    seconds = _wait_seconds(_policy(round_seconds=1.0), _view("b"))
    assert seconds == pytest.approx(0.25), "only the budget"
    seconds = _wait_seconds(_policy(round_seconds=0.5), _view("b"))
    assert seconds == pytest.approx(0.75), "it is slow: due in half a second"


def test_once_its_time_has_passed_a_region_is_not_waited_for() -> None:
    policy = _policy()
    at = NOW + _wait_seconds(policy, _view("b"))
    assert policy.decide(_view("b"), at) == Continue()
    assert policy.membership.absent == ("b",)
    assert policy.hold is None


def test_each_update_of_a_late_region_extends_its_time() -> None:
    policy = _policy(quorum=1, changed=WaitingSettings(max_hold_gaps=100.0))
    assert _wait_seconds(policy, _view("b")) == pytest.approx(1.5), "two and a half seconds after its last update"
    policy.update_came("b", 10, 0.0, NOW)
    assert 2.0 < _wait_seconds(policy, _view("b")) <= 2.5


def test_a_grace_time_comes_before_a_region_is_late() -> None:
    policy = _policy()
    policy.grace_over_round = 19
    decision = policy.decide(_view("b"), NOW)
    assert decision == WaitUntil(pytest.approx(NOW + 0.06), WaitReason.GRACE)
    assert policy.decide(_view("b"), NOW + 0.05) == decision
    after = policy.decide(_view("b"), NOW + 0.06 + 1e-9)
    assert isinstance(after, WaitUntil)
    assert after.reason is WaitReason.LATE


@given(st.sampled_from(["grace_rounds", "max_lag_rounds"]), st.booleans())
def test_rules_that_are_off_do_not_wait(rule: str, both: bool) -> None:
    changed = WaitingSettings.of({"grace_rounds": 0.0} if rule == "grace_rounds" else {"max_lag_rounds": 30})
    policy = _policy(changed=changed)
    if rule == "grace_rounds":
        policy.grace_over_round = 19
        decision = policy.decide(_view("b", *(("c",) if both else ())), NOW)
        assert isinstance(decision, WaitUntil)
        assert decision.reason is WaitReason.LATE
    else:
        assert policy.decide(_view("b"), NOW) == Continue()


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(GeofedError, match="of the waiting policy: speed"):
        WaitingSettings.of({"speed": 1.0})


# In step


def _paused(silent_seconds: float, round_seconds: float = 2.0) -> WaitingPolicy:
    """`b`, whose rounds take so long, ended round 20 so long ago, and nothing has come of it since."""
    policy = _policy(round_seconds=1.0)
    policy.clock.next_round(NOW - 0.5)
    policy.clock.came("b", 20, NOW - silent_seconds)
    policy.gaps = UpdateGaps(policy.setup.waiting)
    for number in range(5):
        policy.gaps.came("b", NOW - silent_seconds - 2.0 * (4 - number))
    for _ in range(3):
        policy.durations.ended("b", round_seconds)
    return policy


def test_a_region_keeps_step_as_long_as_the_slower_one_is_not_silent() -> None:
    decision = _paused(0.5).decide(_view(), NOW)
    assert decision == WaitUntil(pytest.approx(NOW + 1.5), WaitReason.IN_STEP)
    assert _paused(4.5).decide(_view(), NOW) == Continue(), "it should be there already"
    assert _paused(60.0).decide(_view(), NOW) == Continue(), "it is gone"


def test_what_a_region_states_of_its_rounds_delays_nobody_for_longer_than_until_it_is_late() -> None:
    decision = _paused(1.0, 1e300).decide(_view(), NOW)
    assert decision == WaitUntil(pytest.approx(NOW + 4.0), WaitReason.IN_STEP), "two and a half gaps"


def test_the_time_that_an_update_takes_is_no_part_of_the_others_round() -> None:
    link = LinkSample(8.0, 200.0)
    decision = _paused(0.5).decide(_view(links={"b": link}), NOW)
    assert decision == WaitUntil(pytest.approx(NOW + 1.4), WaitReason.IN_STEP)


def test_a_region_continues_once_the_slower_one_has_ended_the_round_sooner() -> None:
    policy = _paused(0.5)
    assert isinstance(policy.decide(_view(), NOW), WaitUntil)
    policy.update_came("b", 21, 2.0, NOW + 0.1)
    assert policy.decide(_view(), NOW + 0.1) == Continue()


# Any view


@given(
    ended=st.integers(0, 40), pending=st.booleans(), made=st.booleans(), done=st.booleans(), quorum=st.integers(0, 3),
    newest=st.tuples(st.integers(-1, 40), st.integers(-1, 40)), times=st.lists(st.floats(0.0, 5.0), max_size=8),
)  # fmt: skip
def test_asked_again_the_policy_answers_the_same_and_every_time_that_it_names_comes(
    ended: int, pending: bool, made: bool, done: bool, quorum: int, newest: tuple[int, int], times: list[float]
) -> None:
    policy, now = _policy(quorum=quorum), NOW
    view = WaitView(ended, ended, pending, pending and made, done, False, dict(zip("bc", newest, strict=True)),
        frozenset(), frozenset())  # fmt: skip
    for passed in times:
        now += passed
        first = policy.decide(view, now)
        assert policy.decide(view, now) == first
        assert isinstance(first, Continue) or first.at > now
    for _ in range(10):
        decision = policy.decide(view, now)
        if isinstance(decision, Continue) or decision.at == math.inf:
            return
        now = decision.at
    raise AssertionError("it waits again and again though nothing has changed")


# The engine


def test_the_engine_sets_one_timer(tmp_path: Path) -> None:
    async def fires() -> list[Event]:
        setup = Setup("a", ("a", "b"), 2, 40, 1, 0, background=True)
        storage = Storage(tmp_path / "ps", setup)
        channel, policy, codec = FileChannel(tmp_path / "channel"), policy_of("ma"), codec_named("fp32")
        engine, fed = Engine(ActionExecutor(setup, storage, channel, policy, codec)), []
        handle = engine.machine.handle
        engine.machine.handle = lambda event, measured: fed.append(event) or handle(event, measured)
        now = asyncio.get_running_loop().time()
        for seconds in (0.01, 0.05, 60.0, 0.1):
            engine._carry_out(SetTimer(now + seconds, WaitReason.LATE))
        await asyncio.sleep(0.3)
        await engine.close()
        return fed

    assert asyncio.run(fires()) == [TimerFired()]
