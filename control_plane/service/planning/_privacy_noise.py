"""The noise of a job with differential privacy, and what its plan costs."""

from __future__ import annotations

from dataclasses import replace

from control_plane.spec import JobSpec
from geofed_pb.errors import GeofedError
from scheduler import Declined, Plan, PlannedPartition, Reason
from sync.privacy import Release, check_masked_noise, epsilon_of, noise_for, standard_deviation

__all__ = ["with_noise"]


def with_noise(spec: JobSpec, plan: Plan) -> Plan | Declined:
    """Return a plan with the settings of `privacy.differential`, which follow from its rounds, steps and batches.

    Raises ``GeofedError("UNAVAILABLE")`` if `dp-accounting` is not installed.
    """
    wanted = spec.privacy.differential
    if wanted is None:
        return plan
    sampled, counts = wanted.level == "sample", spec.evaluates_only
    if len(plan.partitions) < 2 and not sampled:
        text = "`privacy.differential.level: region` hides a region among others, and one takes part"
        return Declined((Reason("INADMISSIBLE", text, "use more regions, or `level: sample`"),))
    # An evaluation is one release, of all samples.
    releases = [(1.0, 1) if counts else _releases(plan, part, sampled=sampled) for part in plan.partitions]
    try:
        noise = wanted.noise_multiplier or max(
            noise_for(wanted.epsilon or 0.0, wanted.delta, rate, count, sampled=sampled) for rate, count in releases
        )
    except GeofedError as error:
        if error.code != "INADMISSIBLE":
            raise
        return Declined((Reason("INADMISSIBLE", error.message, error.hint or ""),))
    epsilon = max(
        epsilon_of([(Release.of(noise, rate, sampled=sampled), count)], wanted.delta) for rate, count in releases
    )
    settings = {
        "noise": noise,
        "clip": wanted.clip_norm or 1.0,
        "sampled": float(sampled and not counts),
        "delta": wanted.delta,
        "epsilon": epsilon,
    }
    settings |= {"measured": 1.0} if counts else {}
    if spec.privacy.secure_aggregation and not (sampled or counts):
        try:
            for region, share in plan.shares.items():
                fewest = spec.privacy.min_regions
                std = standard_deviation(noise, settings["clip"], region, plan.shares, fewest)
                check_masked_noise(settings["clip"], std, share)
        except GeofedError as error:
            return Declined((Reason("INADMISSIBLE", error.message, error.hint or ""),))
    return replace(plan, wan_settings={**plan.wan_settings, **settings})


def _releases(plan: Plan, part: PlannedPartition, *, sampled: bool) -> tuple[float, int]:
    """Return the sampling rate of a region, and how often it releases something."""
    if not sampled:
        return 1.0, plan.rounds
    return min(1.0, part.replicas * part.batch / part.samples), plan.rounds * part.steps_per_round
