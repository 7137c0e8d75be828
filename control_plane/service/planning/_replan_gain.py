"""Estimate if replanning a running job over other regions saves time or cost."""

from __future__ import annotations

from collections import deque
from statistics import median

from control_plane.service.state._entries import JobEntry
from scheduler import Plan

__all__ = ["ROUNDS_SEEN", "RoundTimes", "pays"]

ROUNDS_SEEN = 3
"""Number of rounds before a job's pace counts as known."""
_RECENT_ROUNDS = 15
"""Number of latest rounds whose median is the pace."""
_MIN_REST_PER_CHANGE = 10.0
"""The rest of the job must take at least this many times as long as the change to another plan."""
_MIN_SAVING = 0.1
"""Least saving, as a fraction of the rest; predictions may be wrong by as much."""


class RoundTimes:
    """Median time of a job's latest rounds, by when their reports arrived, so that one pause affects one round only."""

    def __init__(self, begun_at: float | None) -> None:
        self._done = None if begun_at is None else 0
        self._at = begun_at
        """When the number of rounds last changed; None: unknown, since the first report may come late."""
        self._durations = deque[float](maxlen=_RECENT_ROUNDS)

    def record(self, done: int, at: float) -> None:
        """Record that `done` rounds are completed at time `at`."""
        before, since = self._done, self._at
        if done == before:
            return
        self._done, self._at = done, at if before is not None else None
        if before is None or since is None or done < before or at <= since:
            return
        # Of many rounds reported at once, as after a restart, only the mean is known.
        self._durations.extend([(at - since) / (done - before)] * min(done - before, ROUNDS_SEEN))

    @property
    def round_seconds(self) -> float | None:
        """Median time of a round in seconds; None: not known yet."""
        return median(self._durations) if len(self._durations) >= ROUNDS_SEEN else None


def pays(entry: JobEntry, then: Plan, round_seconds: float) -> str:
    """Return why a running job's rest should run by plan `then`; empty if it should not, or if that is not known yet.

    A plan with additional data pays if the change is cheap compared with the rest. With the same data, the rest must
    end a tenth sooner or cost a tenth less, by what the job minimises. Without a change, each of its remaining rounds
    takes ``round_seconds``.
    """
    state, plan = entry.state, entry.plan
    reports = [part.report for part in state.partitions if part.report is not None]
    done = min((report.round for report in reports), default=0)
    if not done or not state.started_at:
        return ""
    rounds = plan.rounds - done
    start_seconds = max(0.0, state.started_at - (state.begun_at or entry.row.created_at))
    left_seconds = rounds * round_seconds
    if left_seconds < _MIN_REST_PER_CHANGE * (round_seconds + start_seconds):
        return ""
    if brought := sorted(_sources(then) - _sources(plan)):
        return f"{', '.join(brought)} adds data"
    if then.estimate.basis == "prior":
        # A plan by default speeds is too uncertain.
        return ""
    if entry.spec.objective.minimise == "time":
        predicted = round_seconds + then.estimate.seconds.expected
        return (
            f"it ends {1 - predicted / left_seconds:.0%} sooner" if predicted < (1 - _MIN_SAVING) * left_seconds else ""
        )
    round_usd = state.usd / done
    left_usd, predicted = rounds * round_usd, round_usd + then.estimate.usd.expected
    return f"it costs {1 - predicted / left_usd:.0%} less" if predicted < (1 - _MIN_SAVING) * left_usd else ""


def _sources(plan: Plan) -> set[str]:
    """Return the regions whose shards a plan trains on."""
    return {region for part in plan.partitions for region in part.shards or (part.region,)}
