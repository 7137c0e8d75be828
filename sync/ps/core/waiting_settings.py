"""Settings of the waiting policy, each with its unit and why it has this value (`sync.ps.core.waiting`).

"Gap" is the time between two updates of a region as this one receives them, "round" that between two ends of a
round. A rule is switched off by the value that its docstring names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from geofed_pb.errors import GeofedError

__all__ = ["WaitingSettings"]


@dataclass(frozen=True)
class WaitingSettings:
    """When a region with background exchange waits for others, and for how long."""

    # Which round must be here

    first_rounds_together: int = 2
    """Rounds at the start that every region waits for. Regions receive the initial model one after the other; a region
    that is ahead from the start would merge old updates throughout. 0: off."""
    final_fraction_together: float = 0.25
    """Fraction of the job's steps, at its end, in which every region is waited for, however long: what regions made
    apart is averaged when they meet, and must be trained on. The job ends with the slowest anyway. 0: off."""
    merge_waits: bool = True
    """Whether a merge waits for the updates of the same round, while the workers are still training. False: it takes
    what has come."""
    merge_follows_lag: bool = True
    """Whether a merge waits for an older round of a region that lacked some rounds at the last ends of a round: waiting
    for the newest would be in vain. False: for the same round."""
    max_lag_rounds: int = 3
    """Rounds that a region may lack after the grace time before the workers wait for it: the time that a server needs
    to restart, or bytes to be sent again. More than what a region that sends nothing falls behind until it is late, so
    that it delays nobody. 1: off."""
    max_rejoin_lag_rounds: int = 16
    """Rounds that a region may lack when it returns and is waited for again: it catches up during the grace times, and
    models that stayed close average better. 0: it must lack none."""
    max_probation_rounds: int = 32
    """Rounds in a row, at most, that a region must keep up for after an absence. It begins with 1 and doubles with each
    absence, so that an unstable link does not delay the others each time. 1: off."""
    far_ahead_rounds: int = 4
    """A region whose updates are further ahead than this is merged as updates arrive: they would be old by the time
    that this region ends the same round. A large number: off."""
    max_waiting_updates: int = 32
    """Remote updates after which a merge does not wait for the end of our round; it bounds what a merge takes. A large
    number: off."""

    # How long workers wait for regions that are late

    late_after_gaps: float = 2.5
    """Usual gaps after its last update at which a region is late and the others continue without it: one update
    may be lost and sent again."""
    first_update_seconds: float = 10.0
    """Seconds after which a region is late if nothing has come from any region: connections are being made."""
    min_late_seconds: float = 0.25
    """Shortest time, in seconds, after which a region is late: processes pause for as long, and rounds may be
    shorter. 0: off."""
    max_hold_gaps: float = 1.25
    """Usual gaps, of the slowest region concerned, that workers wait at once. A region that is a little slow needs
    part of one to arrive; one whose updates come irregularly would need many. A large number: off."""
    due_after_gaps: float = 1.5
    """Usual gaps (median) after its last update at which the next one of a slower region is due; waiting until
    then is not charged to the budget, because the end of the job waits for that region as well. 0: off."""
    heard_elsewhere_is_on_time: bool = True
    """Whether a region whose update another region has already is not counted as slower: the link is slow, not the
    region, and waiting for it is charged."""
    budget_fraction: float = 0.005
    """Fraction of the time that workers may wait for late regions in the long run: the accepted cost of letting them
    catch up."""
    max_budget_rounds: float = 0.25
    """Fraction of a round that the budget can save up, and begins with. A large number: no budget, waiting is bounded
    by the other rules."""
    min_budget_seconds: float = 0.1
    """Seconds that the budget can save up where rounds are short: processes pause for as long."""
    grace_rounds: float = 0.06
    """Grace time: the fraction of a round that workers wait for a region that lacks two rounds or more, out of the
    budget. Small, so that most of the budget is left for a region that would be left out. 0: off."""
    alone_seconds: float = 2.0
    """Seconds that a region waits at least before it continues alone: the others may be waiting for the same region, or
    be reached by another route, and what it trains alone is worth least. 0: off."""

    # Pace

    slower_factor: float = 1.1
    """A region is slower if its rounds take this multiple of ours or more; less is the usual variation. A region ends
    its rounds when the slowest does: the job ends no later, and models are merged that were made at the same time. A
    large number: off."""
    max_in_step_rounds: float = 1.25
    """Longest that a faster region's round may take, in rounds of the slower one: so one that is rounds behind catches
    up."""
    alone_gap_fraction: float = 0.9
    """A region that is alone ends rounds no closer together than this fraction of the usual gap, so that a job of
    short rounds is not over before anybody is heard again. Less than 1: variation shall cost no time. 0: off."""

    @classmethod
    def of(cls, changed: Mapping[str, float]) -> WaitingSettings:
        """Create settings from those that differ from the defaults.

        Raises ``GeofedError("CONFIG_INVALID")`` for an unknown name.
        """
        kinds = {field.name: field.type for field in fields(cls)}
        if unknown := sorted(set(changed) - set(kinds)):
            raise GeofedError("CONFIG_INVALID", f"unknown settings of the waiting policy: {', '.join(unknown)}")
        values = {name: float(value) if kinds[name] == "float" else int(value) for name, value in changed.items()}
        return cls(**values)  # type: ignore[arg-type]  # a flag is 0 or 1
