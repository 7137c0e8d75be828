"""What the sums of two jobs with secure aggregation tell together."""

from __future__ import annotations

from control_plane.core import InitialModel
from control_plane.service.state._entries import JobEntry
from control_plane.spec import JobSpec
from scheduler import Declined, Plan, Reason

__all__ = ["refused_by_difference"]


def refused_by_difference(
    spec: JobSpec, plan: Plan, model: InitialModel | None, earlier: JobEntry | None
) -> Declined | None:
    """Return the refusal of a job that starts from a model from which an earlier job has gone on, with almost the same
    regions: both publish a sum of updates of the same model, and their difference is that of few regions. None: it does
    not.

    ``earlier``: the job that ``model`` is of; None: it is none's.
    """
    if model is None or earlier is None or not (_secure(spec) and _secure(earlier.spec)):
        return None
    if model.digest == earlier.state.blob_digest:
        # The final model: no round of that job began with it.
        return None
    apart = {part.region for part in plan.partitions} ^ {part.region for part in earlier.plan.partitions}
    if not apart or len(apart) >= spec.privacy.min_regions:
        return None
    names = ", ".join(sorted(apart))
    text = (
        f"{model.job} has gone on from this model, and differs by {names}: the sums of both jobs would tell its updates"
    )
    remedy = "use the same regions, or start from the final model of a job that has succeeded"
    return Declined((Reason("INADMISSIBLE", text, remedy),))


def _secure(spec: JobSpec) -> bool:
    return spec.privacy.secure_aggregation
