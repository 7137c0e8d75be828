"""The waiting policy: whom a region with background exchange waits for, and for how long.

There are two things to wait with. A *merge* of our last round waits while the workers already train on; it costs
nothing as long as it is done before they end the next round. The *workers* wait at the end of a round: that costs time.
`WaitingPolicy.decide` answers for both. All settings are in `WaitingSettings`; this is the list of the rules.

Which round of each other region must be here:

0. With ``Setup.same_round``: merge and workers wait for the same round of every region, without a limit; of the other
   rules only 12 applies.
1. First rounds (``first_rounds_together``): merge and workers wait for the same round. Regions receive the initial
   model one after the other, and who is ahead from the start merges old updates throughout.
2. Merge (``merge_waits``, ``merge_follows_lag``): the same round, or one as much older as the region lacked at the
   last two ends of a round. A merge that waits in vain is made while the workers wait.
3. Workers, for the grace time (``grace_rounds``): the round before the last one.
4. Workers, after the grace time (``max_lag_rounds``): a round that is a few older; of a region that has returned
   (``max_rejoin_lag_rounds``) as much older as it lacked then.
5. Last quarter (``final_fraction_together``): the round before the last one, of every region, without a limit.
6. With a quorum (a setting of the job): a merge waits for so many regions' updates for at most its grace time, and the
   workers for regions that are more than ``max_rounds_ahead`` rounds behind (stale synchronous parallel, Ho et al.
   2013).
7. What comes from a region that is far ahead, and very many updates, are merged as they come (``far_ahead_rounds``,
   ``max_waiting_updates``).

How long workers wait for a region that lacks it, by rule 4 (the earliest of these ends it):

8. Until it is late: some of its usual gaps after its last update (``late_after_gaps``,
   ``first_update_seconds``, ``min_late_seconds``).
9. No longer at once than about one gap of the slowest (``max_hold_gaps``).
10. No longer than the budget allows, a small fraction of the time (``budget_fraction``, ``max_budget_rounds``,
    ``min_budget_seconds``). It is charged from when the update of a slower region is due (``due_after_gaps``,
    ``heard_elsewhere_is_on_time``), else from the start.
11. A region that would continue alone waits at least for some seconds (``alone_seconds``), free of charge.

Then it is absent (`Membership`): nobody waits for it until it has kept up for a number of rounds that doubles with each
absence (``max_probation_rounds``).

When workers may end a round although nobody is late:

12. With slower regions: when the slowest ends the round too (``slower_factor``, ``max_in_step_rounds``), unless it is
    late. The job ends no later, and models are merged that were made at the same time.
13. Alone: no earlier than about the usual gap after the last round (``alone_gap_fraction``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sync.ps.core.actions import WaitReason
from sync.ps.core.machine import Setup
from sync.ps.core.membership import Membership
from sync.ps.core.timing import RoundClock, RoundDurations, SoloPacing, UpdateGaps, WaitBudget
from sync.wan import LinkSample

__all__ = ["Continue", "WaitUntil", "WaitView", "WaitingPolicy", "WorkerWait"]

_FIRST_TIMED_ROUND = 2
"""The first round whose updates tell a region's gap: those before come when the initial model has arrived."""


@dataclass(frozen=True)
class Continue:
    """What is next may be done: the merge of the last round, or the end of the next one."""


@dataclass(frozen=True)
class WaitUntil:
    """Wait until a time, or until something has changed."""

    at: float
    """Seconds of the clock; infinity: until something has changed."""
    reason: WaitReason


@dataclass(frozen=True)
class WaitView:
    """What a region knows when it decides."""

    ended: int
    """Our last round whose end is logged."""
    step: int
    """Step at which the open round began."""
    pending: bool
    """Whether the last round is not merged yet."""
    update_made: bool
    """Whether the update of the last round is durable."""
    workers_done: bool
    """Whether all workers have ended the open round."""
    own_last: bool
    """Whether the last round is our last one of the job."""
    newest: Mapping[str, int]
    """Newest round of each other region that is here with all before it."""
    last_here: frozenset[str]
    """Regions whose last update is here."""
    last_merged: frozenset[str]
    """Regions whose last update is merged."""
    mergeable: frozenset[str] = frozenset()
    """Regions with updates that the next merge takes."""
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    """Newest round of each region that any other region is known to have."""
    step_seconds: float = 0.0
    """Time of a step, its merge among the workers included; 0: not known."""
    update_bytes: int = 0
    """Size of our last update."""
    links: Mapping[str, LinkSample] = field(default_factory=dict)
    """Measurements of the links to the peers."""


@dataclass(frozen=True)
class WorkerWait:
    """The workers' present waiting for late regions."""

    sequence: int
    """The last round that has ended."""
    regions: tuple[str, ...]
    alone: bool
    """Whether this region would continue alone."""
    elsewhere: tuple[str, ...]
    """Those whose update another region has already: the link to this region is slow, not they."""
    earliest: float
    """It lasts until then at least, seconds of the clock."""
    latest: float
    """It lasts no longer, whatever comes."""


@dataclass(frozen=True)
class _Pause:
    """The workers wait with a round that nobody is late for."""

    sequence: int
    slower: tuple[tuple[str, float], ...]
    """The slower regions and the durations of their rounds; empty: this region is alone."""
    until: float
    arrivals: int
    """Updates that had come when ``until`` was computed."""


@dataclass
class WaitingPolicy:
    """Decides from what a region knows (`WaitView`) and what it has measured; times are seconds of one clock."""

    setup: Setup
    membership: Membership = field(init=False)
    durations: RoundDurations = field(init=False)
    gaps: UpdateGaps = field(init=False)
    budget: WaitBudget = field(init=False)
    clock: RoundClock = field(init=False)
    hold: WorkerWait | None = None
    grace_over_round: int = -1
    """The last round whose grace time is over."""
    _alone_pace: SoloPacing = field(init=False)
    _grace: tuple[int, float] | None = None
    """A round and the end of its grace time."""
    _pause: _Pause | None = None
    _paused_round: int = 0
    """The last round whose pause is over."""
    _arrivals: int = 0
    _lags: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Rounds that each region lacked at the last end of a round, and at the one before."""
    _lags_round: int = 0

    def __post_init__(self) -> None:
        settings = self.setup.waiting
        self.membership, self.durations = Membership(settings), RoundDurations(settings)
        self.gaps, self.budget = UpdateGaps(settings), WaitBudget(settings)
        self.clock, self._alone_pace = RoundClock(settings), SoloPacing(settings)

    # What has happened

    def update_came(self, region: str, sequence: int, round_seconds: float, now: float) -> None:
        """Record that another region's update is durable here. ``round_seconds``: what it states; 0: nothing."""
        self._gap_ended(region, sequence, now)
        self.clock.came(region, sequence, now)
        self.durations.ended(region, round_seconds)
        self._arrivals += 1

    def own_update_made(self, sequence: int, now: float) -> None:
        """Record that our update of a round is durable."""
        self._gap_ended(self.setup.region, sequence, now)

    def _gap_ended(self, region: str, sequence: int, now: float) -> None:
        if sequence >= _FIRST_TIMED_ROUND:
            self.gaps.came(region, now)

    def round_logged(self, now: float, overlap_seconds: float) -> float:
        """Record that the next round begins; return how long the last one took by itself (`RoundClock.next_round`)."""
        took = self.clock.next_round(now, overlap_seconds)
        self.durations.ended(self.setup.region, took)
        return took

    def workers_continue(self, now: float) -> None:
        """Record that the workers wait for nobody any more: the end of the round is being logged."""
        self.budget.end(now)
        self.hold = None

    # Decisions

    def decide(self, view: WaitView, now: float) -> Continue | WaitUntil:
        """Return whether what is next may be done now: the merge of the last round, or the end of the next one."""
        if view.workers_done:
            self._note_lags(view)
        waits: list[WaitUntil] = []
        if (end := self._quorum_until(view, now)) is not None:
            waits.append(WaitUntil(end, WaitReason.QUORUM))
        while late := self.late(view):
            wait = self._wait_for(view, late, now)
            if now < wait.at:
                waits.append(wait)
                break
            # A grace time or a hold is over: fewer regions are late now.
        if waits:
            return min(waits, key=lambda wait: wait.at)
        if view.workers_done and not view.pending:
            return self._pace(view, now)
        return Continue()

    def holds_workers(self, view: WaitView) -> bool:
        """Whether workers that have ended their round are waiting for other regions."""
        pausing = self._pause is not None and self._pause.sequence > max(self._paused_round, view.ended)
        return pausing or bool(self.late(view))

    def late(self, view: WaitView) -> tuple[str, ...]:
        """Return the regions that lack the round that the merge waits for, or the workers if they have ended theirs."""
        if self.setup.quorum and (not self.setup.max_rounds_ahead or view.own_last):
            return ()
        away = view.last_merged | (frozenset() if self.setup.same_round else view.last_here)
        if not self._near_end(view):
            away |= {*self.membership.absent}
        present = (region for region in self.setup.others if region not in away)
        return tuple(region for region in present if view.newest[region] < self.awaited_round(region, view))

    def awaited_round(self, region: str, view: WaitView) -> int:
        """Return the round of a region that must be here for the merge, or for the workers once they are done."""
        settings = self.setup.waiting
        if self.setup.quorum:
            return view.ended - self.setup.max_rounds_ahead
        if self.setup.same_round or view.ended <= settings.first_rounds_together:
            return view.ended
        if not view.workers_done:
            if not settings.merge_waits:
                return 0
            # The more of two: an update that comes just at the end of a round is missing every other time. If one more
            # was missing than the time before, nothing has come since, and one more will be missing.
            lag, before = self._lags.get(region, (0, 0)) if settings.merge_follows_lag else (0, 0)
            return view.ended - (lag + 1 if lag > before else before)
        if self._near_end(view) or view.ended != self.grace_over_round:
            return view.ended - 1
        return view.ended - self.membership.lag_rounds(region) - settings.max_lag_rounds

    def alone(self, view: WaitView) -> bool:
        """Whether no region that is still training is waited for, and none is ahead of this one."""
        absent = self.membership.absent
        if self.setup.quorum or self._near_end(view) or not {*absent, *view.last_merged} >= {*self.setup.others}:
            return False
        training = [region for region in absent if region not in view.last_here]
        return bool(training) and all(view.newest[region] < view.ended for region in training)

    def slower(self, view: WaitView) -> dict[str, float]:
        """Return the regions that are still training, not absent, and slower, with their rounds' durations."""
        return {} if self.setup.quorum else self._slower(view)

    def slowest_seconds(self, view: WaitView) -> float:
        """Return the duration of the slowest of these regions' rounds, for which this one waits in the end: with a
        quorum, too, once it is as many rounds ahead as it may be; 0: none is slower."""
        return max(self._slower(view).values(), default=0.0)

    def _slower(self, view: WaitView) -> dict[str, float]:
        gone = {*self.membership.absent, *view.last_merged, *view.last_here}
        return self.durations.slower_than(self.setup.region, [one for one in self.setup.others if one not in gone])

    def knows_durations(self, view: WaitView) -> bool:
        """Whether it is known how long the rounds take here and in all regions that are still training."""
        gone = {*self.membership.absent, *view.last_merged, *view.last_here}
        return all(self.durations.usual(one) for one in self.setup.regions if one not in gone)

    def _near_end(self, view: WaitView) -> bool:
        return view.step > self.setup.steps * (1 - self.setup.waiting.final_fraction_together)

    def _note_lags(self, view: WaitView) -> None:
        """Record once a round what was missing when the workers ended it."""
        if self._lags_round == view.ended:
            return
        self._lags_round = view.ended
        for region in self.setup.others:
            before, _ = self._lags.get(region, (0, 0))
            self._lags[region] = max(0, view.ended - view.newest[region]), before

    # Quorum and grace

    def _quorum_until(self, view: WaitView, now: float) -> float | None:
        """Return until when the merge of the last round waits for a quorum; None: it does not."""
        quorum = min(self.setup.quorum, len(self.setup.regions))
        if not view.pending or not view.update_made or len(view.mergeable) + 1 >= quorum:
            return None
        if self._grace is None or self._grace[0] != view.ended:
            self._grace = view.ended, now + self.setup.grace_seconds
        return self._grace[1] if self._in_grace(view, now) else None

    def _in_grace(self, view: WaitView, now: float) -> bool:
        """Whether the grace time that has begun for the last round is not over."""
        if view.ended == self.grace_over_round:
            return False
        if self._grace is not None and now >= self._grace[1]:
            self.grace_over_round = view.ended
            return False
        return True

    # Late regions

    def _wait_for(self, view: WaitView, late: tuple[str, ...], now: float) -> WaitUntil:
        """Wait for late regions. If the returned time has come, fewer regions are late than before."""
        making = view.pending and not view.update_made
        if not view.workers_done or making or self.setup.same_round or self._near_end(view):
            return WaitUntil(math.inf, WaitReason.ROUND)
        if not self.setup.quorum and view.ended != self.grace_over_round:
            if self._grace is None or self._grace[0] != view.ended:
                usual = self.gaps.usual_seconds(self.setup.region)
                self._grace = view.ended, now + self.budget.grace_seconds(now, usual)
            return WaitUntil(self._grace[1] if self._in_grace(view, now) else now, WaitReason.GRACE)
        if self.hold is None or self.hold.sequence != view.ended:
            self.hold = self._begin_hold(view, late, now)
        hold = self.hold
        work = view.step_seconds * self.setup.steps_per_round
        # It is extended by each update of theirs: they may have rounds to catch up.
        end = min(max(hold.earliest, self.gaps.late_at(hold.regions, now, work)), hold.latest)
        if now >= end:
            self.membership.remove(region for region in late if region in hold.regions)
            self.hold = None
        return WaitUntil(end, WaitReason.LATE)

    def _begin_hold(self, view: WaitView, late: tuple[str, ...], now: float) -> WorkerWait:
        settings, own = self.setup.waiting, self.setup.region
        alone = {*late, *self.membership.absent, *view.last_merged} >= {*self.setup.others}
        elsewhere = tuple(one for one in late if view.elsewhere.get(one, -1) >= self.awaited_round(one, view))
        if alone:
            self.budget.end(now)
            return WorkerWait(view.ended, late, alone, elsewhere, now + settings.alone_seconds, math.inf)
        latest = now + self.gaps.longest_hold_seconds(own, late)
        if not self.setup.quorum and math.isfinite(latest):  # with a quorum, `max_rounds_ahead` bounds the distance
            perhaps_slower = {*late} - ({*elsewhere} if settings.heard_elsewhere_is_on_time else set())
            due = self.gaps.due_at(perhaps_slower, now, self.durations.usual(own))
            allowed = self.budget.hold_seconds(now, self.gaps.usual_seconds(own), due)
            latest = min(latest, due + allowed)
        return WorkerWait(view.ended, late, alone, elsewhere, now, latest)

    # Pace

    def _pace(self, view: WaitView, now: float) -> Continue | WaitUntil:
        """Return when the workers may end the round although nobody is late."""
        sequence, slower = view.ended + 1, self.slower(view)
        if self._paused_round >= sequence or not (slower or self.alone(view)):
            return Continue()
        pause = self._pause
        if pause is None or pause.sequence != sequence:
            self.workers_continue(now)
            pause = self._paused(view, sequence, tuple(sorted(slower.items())), now)
        elif pause.slower and pause.arrivals != self._arrivals:
            # A slower region may have ended its round sooner than expected.
            pause = self._paused(view, sequence, pause.slower, now)
        self._pause = pause
        if now >= pause.until:
            self._paused_round = sequence
            return Continue()
        return WaitUntil(pause.until, WaitReason.IN_STEP if pause.slower else WaitReason.ALONE)

    def _paused(self, view: WaitView, sequence: int, slower: tuple[tuple[str, float], ...], now: float) -> _Pause:
        if not slower:
            until = self._alone_pace.round_at(sequence, now, self._usual_gap(view))
            return _Pause(sequence, slower, until, self._arrivals)
        ways = {peer: _way_seconds(link, view.update_bytes) for peer, link in view.links.items()}
        farthest = max(ways.values(), default=0.0)  # an update that is passed on takes as long, or longer
        until = -math.inf
        for region, seconds in slower:
            in_step = self.clock.in_step_at(sequence, region, seconds, ways.get(region, farthest))
            until = max(until, min(in_step, self.gaps.late_at((region,), now)))
        return _Pause(sequence, slower, until, self._arrivals)

    def _usual_gap(self, view: WaitView) -> float:
        """Return the usual seconds between our rounds while regions hear each other, at least a round trip; 0: not
        known."""
        farthest = max((link.rtt_ms for link in view.links.values()), default=0.0)
        usual = self.gaps.usual_seconds(self.setup.region)
        return max(usual, farthest / 1e3) if usual else 0.0


def _way_seconds(link: LinkSample, update_bytes: int) -> float:
    """Return the time of an update from one end of a link to the other; both directions are taken to be equal."""
    sending = 8e-6 * update_bytes / link.goodput_mbps if link.goodput_mbps else 0.0
    return link.rtt_ms / 2e3 + sending
