"""What a job needs that agents of the previous release cannot do."""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.service.state._entries import RegionEntry
from control_plane.spec import JobSpec
from geofed_pb.features import (
    COMPILE,
    GPUS,
    IMAGE,
    INITIAL_ADAPTER,
    LEAVE_OUT,
    PRIVATE_COUNTS,
    QUARANTINE,
    RATE_OF_BATCH,
    ROBUST_BACKGROUND,
    SHARDING,
)
from geofed_pb.user_code.images import is_allowed_image
from scheduler import Declined, Plan, Reason
from sync.robust import QUARANTINE_ROUNDS
from sync.secure import hiding_regions

__all__ = ["most_left_out", "refused_by_age", "refused_by_lack", "refused_by_shares"]


def most_left_out(spec: JobSpec, plan: Plan, regions: Mapping[str, RegionEntry]) -> int:
    """Return the number of regions that a job can leave out together where they stay lost; 0: it cannot.

    With secure aggregation it is one. That region may have the sum of a round that the others make again, and then it
    could tell, from both sums, the update of another region that is left out with it.
    """
    if plan.background or not all(LEAVE_OUT in regions[part.region].state.features for part in plan.partitions):
        return 0
    return 1 if spec.privacy.secure_aggregation else len(plan.partitions) - 1


def refused_by_age(spec: JobSpec, plan: Plan, regions: Mapping[str, RegionEntry]) -> Declined | None:
    """Return the refusal of a job that needs what an agent of its plan cannot do; None: all can."""
    train = spec.train
    needed = [
        feature
        for feature, used in (
            (COMPILE, train.compile),
            (INITIAL_ADAPTER, train.initial_model is not None and train.initial_model.adapter is not None),
            (IMAGE, spec.task.image is not None),
            (GPUS, spec.function.gpus != 1),
            (SHARDING, spec.function.sharding != "none"),
            (RATE_OF_BATCH, train.learning_rate is not None and train.learning_rate.batch is not None),
            (LEAVE_OUT, spec.regions.lost == "continue"),
            (PRIVATE_COUNTS, spec.evaluates_only and spec.privacy.differential is not None),
            (QUARANTINE, spec.wan.quarantine != QUARANTINE_ROUNDS),
            (ROBUST_BACKGROUND, spec.wan.robust != "none" and spec.wan.exchange == "background"),
        )
        if used
    ]
    reasons = tuple(
        Reason(
            "INADMISSIBLE",
            f"the agent of region {part.region} is of an earlier version, which does not know `{feature}`",
            f"update that agent, or leave out `{feature}`",
        )
        for part in plan.partitions
        for feature in needed
        if feature not in regions[part.region].state.features
    )
    return Declined(reasons) if reasons else None


def refused_by_lack(spec: JobSpec, plan: Plan, regions: Mapping[str, RegionEntry]) -> Declined | None:
    """Return the refusal of a job that needs what a region of its plan does not offer; None: all do."""
    known = [(part.region, regions[part.region].catalogue) for part in plan.partitions]
    reasons = [
        Reason(
            "SECRET_MISSING",
            f"region {region} holds no secret {name}",
            f"its operator adds it to `secrets` of the region file, or avoid {region}",
        )
        for region, catalogue in known
        for name in spec.task.secrets
        if catalogue is not None and name not in catalogue.secrets
    ]
    if spec.task.requirements is not None:
        reasons += [
            Reason(
                "PACKAGES_UNAVAILABLE",
                f"region {region} installs no packages for tasks",
                f"its operator allows it by `taskPackages` in the region file, or avoid {region}",
            )
            for region, catalogue in known
            if catalogue is not None and not catalogue.installs
        ]
    if (image := spec.task.image) is not None:
        reasons += [
            Reason(
                "IMAGE_REFUSED",
                f"region {region} does not let tasks run in {image}"
                + ("" if catalogue.images else ": it allows no image but its own, or its functions have none"),
                f"its operator allows it by `policy.allowImages` of the region file, or avoid {region}",
            )
            for region, catalogue in known
            if catalogue is not None and not is_allowed_image(image, catalogue.images)
        ]
    return Declined(tuple(reasons)) if reasons else None


def refused_by_shares(spec: JobSpec, plan: Plan, regions: Mapping[str, RegionEntry]) -> Declined | None:
    """Return the refusal of a job with secure aggregation in which too few regions have more than a small share, so
    that the sum would be nearly that of fewer; None: there are enough."""
    fewest = spec.privacy.min_regions
    if not spec.privacy.secure_aggregation or (count := hiding_regions(plan.shares)) >= fewest:
        return None
    text = f"privacy.minRegions is {fewest}, and {count} of {len(plan.shares)} regions have more than a small share"
    remedy = "use regions with more samples: the sum would tell too much of the others"
    return Declined((Reason("INADMISSIBLE", text, remedy),))
