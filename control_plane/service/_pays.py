"""Whether a running job is better off over other regions."""

from __future__ import annotations

from control_plane.service._draft import JobEntry
from scheduler import Plan

__all__ = ["pays"]

_LEAST_LEFT = 10.0
"""Times as long as the change must what is left take."""
_SAVES = 0.1
"""Of what is left, at least; what is foretold may be off by as much."""


def pays(entry: JobEntry, then: Plan, at: float) -> str:
    """Why what is left of a running job should be run as planned here; empty: it should not, or it is not known yet.

    A region that brings data of the job is wanted for them, as long as the change costs little. Where the data are the
    same, what is left must end a tenth sooner with the change, or cost a tenth less, as the job minimises. How long it
    would take as it is, its own rounds tell.
    """
    state, plan = entry.state, entry.plan
    reports = [part.report for part in state.partitions if part.report is not None]
    done = min((report.round for report in reports), default=0)
    if not done or not state.started_at:
        return ""
    round_seconds, rounds = (at - state.started_at) / done, plan.rounds - done
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
        foretold = round_seconds + then.estimate.seconds.expected
        return f"it ends {1 - foretold / left_seconds:.0%} sooner" if foretold < (1 - _SAVES) * left_seconds else ""
    handed = [copy.report for copy in state.copies if copy.report is not None]
    round_usd = sum(charge.usd for report in (*reports, *handed) for charge in report.money) / done
    left_usd, foretold = rounds * round_usd, round_usd + then.estimate.usd.expected
    return f"it costs {1 - foretold / left_usd:.0%} less" if foretold < (1 - _SAVES) * left_usd else ""


def _sources(plan: Plan) -> set[str]:
    """Regions whose shards are trained on."""
    return {region for part in plan.partitions for region in part.shards or (part.region,)}
