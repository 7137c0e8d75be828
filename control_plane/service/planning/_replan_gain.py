"""Whether a running job is better off over other regions."""

from __future__ import annotations

from collections import deque
from statistics import median

from control_plane.service.state._draft import JobEntry
from scheduler import Plan

__all__ = ["ROUNDS_SEEN", "Pace", "pays"]

ROUNDS_SEEN = 3
"""Of every region, before a job's pace counts as known."""
_ROUNDS_RECENT = 15
_LEAST_LEFT = 10.0
"""Times as long as the change must what is left take."""
_SAVES = 0.1
"""Of what is left, at least; what is predicted may be off by as much."""


class Pace:
    """How long a job's rounds take, by when they were heard of: the median of the last ones, so that a pause, or a
    region that was away, makes no round look slow but its own."""

    def __init__(self, begun_at: float | None) -> None:
        self._done = None if begun_at is None else 0
        self._at = begun_at
        """When that was first heard of; None: what is known at first may have been so for long."""
        self._took = deque[float](maxlen=_ROUNDS_RECENT)

    def heard(self, done: int, at: float) -> None:
        """So many rounds are done."""
        before, since = self._done, self._at
        if done == before:
            return
        self._done, self._at = done, at if before is not None else None
        if before is None or since is None or done < before or at <= since:
            return
        # Many that are heard of at once, as after a restart, are known by their mean only.
        self._took.extend([(at - since) / (done - before)] * min(done - before, ROUNDS_SEEN))

    @property
    def round_seconds(self) -> float | None:
        """None: not known yet."""
        return median(self._took) if len(self._took) >= ROUNDS_SEEN else None


def pays(entry: JobEntry, then: Plan, round_seconds: float) -> str:
    """Why what is left of a running job should be run as planned here; empty: it should not, or it is not known yet.

    A region that brings data of the job is wanted for them, as long as the change costs little. Where the data are the
    same, what is left must end a tenth sooner with the change, or cost a tenth less, as the job minimises. How long it
    would take as it is, its own rounds tell: they take ``round_seconds`` each.
    """
    state, plan = entry.state, entry.plan
    reports = [part.report for part in state.partitions if part.report is not None]
    done = min((report.round for report in reports), default=0)
    if not done or not state.started_at:
        return ""
    rounds = plan.rounds - done
    start_seconds = max(0.0, state.started_at - (state.begun_at or entry.row.created_at))
    left_seconds = rounds * round_seconds
    if left_seconds < _LEAST_LEFT * (round_seconds + start_seconds):
        return ""
    if brought := sorted(_sources(then) - _sources(plan)):
        return f"{', '.join(brought)} can bring data in"
    if then.estimate.basis == "prior":
        # A guess is worth no change.
        return ""
    if entry.spec.objective.minimise == "time":
        predicted = round_seconds + then.estimate.seconds.expected
        return f"it ends {1 - predicted / left_seconds:.0%} sooner" if predicted < (1 - _SAVES) * left_seconds else ""
    handed = [copy.report for copy in state.copies if copy.report is not None]
    round_usd = sum(charge.usd for report in (*reports, *handed) for charge in report.money) / done
    left_usd, predicted = rounds * round_usd, round_usd + then.estimate.usd.expected
    return f"it costs {1 - predicted / left_usd:.0%} less" if predicted < (1 - _SAVES) * left_usd else ""


def _sources(plan: Plan) -> set[str]:
    """Regions whose shards are trained on."""
    return {region for part in plan.partitions for region in part.shards or (part.region,)}
