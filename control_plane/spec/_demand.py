"""Convert a job file to the scheduler's demand."""

from __future__ import annotations

from datetime import datetime

from control_plane._durations import parse_duration
from control_plane.spec._model import JobSpec
from control_plane.spec.sections import GUARD, LONGEST_SLICE
from scheduler import ClientDemand, Demand, Plan
from sync.codec import codec_named
from sync.collective import collective_named
from sync.robust import QUARANTINE_ROUNDS, ROBUST_SETTING

LEAD = 8
"""Default of `advanced.wan.lead`, in rounds. Unbounded staleness makes a model diverge if rounds are shorter than the
WAN's round-trip time."""
COMPENSATION_STRENGTH = 0.04
"""Strength of DC-ASGD's compensation, from its paper for the adaptive form (arXiv 1609.08326, section 6.1)."""


def to_demand(spec: JobSpec, job: str, now: datetime, deadline: str | None = None) -> Demand:
    """Return a job's demand at the time `now`, which has a time zone.

    Args:
        deadline: a soft deadline to use instead of the job's first deadline.
    """
    return Demand(
        job=job,
        dataset=spec.data.dataset,
        batch=spec.train.probed_batch,
        chooses_batch=spec.train.batch == "auto",
        divides_batch=_divides_batch(spec),
        epochs=spec.train.end.epochs,
        # A job that trains nothing has a step that changes nothing.
        steps=1 if spec.evaluates_only else spec.train.end.steps,
        seed=spec.train.seed,
        use=tuple(spec.regions.use),
        avoid=tuple(spec.regions.avoid),
        residency=spec.data.residency if isinstance(spec.data.residency, str) else tuple(spec.data.residency),
        parallelism=_parallelism(spec),
        stages=None if isinstance(spec.parallelism, str) else _count(spec.parallelism.pipeline.stages),
        activations=None if isinstance(spec.parallelism, str) else _fixed(spec.parallelism.pipeline.activations),
        workers=spec.train.workers if isinstance(spec.train.workers, dict) else _count(spec.train.workers),
        memory_mb=_count(spec.function.memory_mb),
        gpus=_count(spec.function.gpus),
        sharded=spec.function.sharding != "none",
        slice_seconds=None if spec.function.slice == "auto" else spec.function.slice.total_seconds(),
        most_slice_seconds=LONGEST_SLICE.total_seconds(),
        balance=spec.train.balance,
        interval=_interval(spec),
        collective=_fixed(spec.collective),
        channel=_fixed(spec.channel),
        merging=_merging(spec),
        merging_codec=spec.merge.codec,
        wan_policy=_fixed(spec.wan.policy),
        wan_settings=_settings(spec),
        exchange="synchronous" if _waits(spec) else _fixed(spec.wan.exchange),
        codec=_codec(spec),
        topology=_fixed(spec.wan.topology),
        evaluate_every=spec.train.evaluate_every,
        evaluation_batch=spec.train.eval_batch or 0,
        minimise=_minimise(spec),
        to_goal=spec.train.end.goal is not None and spec.train.scaling == "fixed",
        tolerance=spec.objective.tolerance,
        method=_fixed(spec.objective.method),
        deadline_seconds=_seconds_left(deadline or spec.objective.deadline, now),
        budget_usd=spec.objective.budget,
        clients=_clients(spec),
        local=bool(spec.train.local),
    )


def batch_of(spec: JobSpec, plan: Plan) -> int:
    """Return the samples of one worker in one step of a planned job; with clients, those of a local step."""
    return spec.train.batch if isinstance(spec.train.batch, int) else plan.batch


def _divides_batch(spec: JobSpec) -> bool:
    """Whether workers may divide the batch without a change of what a step learns, as they do when their number
    changes: the plan chooses how many there are, and each merges the gradients of all."""
    chosen = spec.train.workers == "auto" and spec.objective.method == "auto" and spec.train.scaling == "fixed"
    given = spec.train.batch != "auto" and spec.function.gpus == 1 and spec.clients is None
    means = spec.collective == "auto" or collective_named(spec.collective).shares == "mean"
    exact = means and spec.merge.codec == "fp32" and not spec.merge.staleness and spec.merge.ratio == 1.0
    return chosen and given and exact and not spec.evaluates_only


def _interval(spec: JobSpec) -> int | None:
    """Return the steps between exchanges. A round of clients is one step, after which federated averaging merges."""
    return 1 if spec.clients is not None and spec.wan.interval == "auto" else _count(spec.wan.interval)


def _clients(spec: JobSpec) -> ClientDemand | None:
    wanted = spec.clients
    if wanted is None:
        return None
    return ClientDemand(wanted.fraction, wanted.min, wanted.epochs or 1, wanted.steps or 0)


def _parallelism(spec: JobSpec) -> str:
    if spec.evaluates_only:
        # No step is made whose memory a profile has measured.
        return "data"
    whole = spec.train.scaling != "fixed" or spec.privacy.differential is not None or spec.clients is not None
    whole = whole or spec.function.sharding != "none" or spec.objective.method != "auto"
    if (whole or spec.keys_without_pipeline) and spec.parallelism != "data":
        return "whole"
    return spec.parallelism if isinstance(spec.parallelism, str) else "pipeline"


def _minimise(spec: JobSpec) -> str:
    """Return what the plan minimises. For a tuned job with automatic workers that is time: the plan then chooses the
    largest useful pool, and the tuner finds the cost-efficient number while the job trains."""
    return "time" if spec.train.scaling != "fixed" and spec.train.workers == "auto" else spec.objective.minimise


def _merging(spec: JobSpec) -> dict[str, float]:
    """Return the collective's settings in the job file, as numbers by name."""
    found = {
        "k": _count(spec.advanced.k),
        "staleness": spec.merge.staleness or None,
        "significance": spec.merge.significance,
        "ratio": spec.merge.ratio if spec.merge.ratio != 1.0 else None,
        "mean": 1 if spec.merge.step == "mean" else None,
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _waits(spec: JobSpec) -> bool:
    privacy = spec.privacy
    waits = spec.wan.waits or privacy.secure_aggregation or privacy.differential is not None
    waits = waits or spec.regions.lost == "continue"
    return spec.train.scaling != "fixed" or spec.clients is not None or waits


def _codec(spec: JobSpec) -> str | None:
    """Return the codec in the job file, or what takes its place with secure aggregation; None: the plan's choice."""
    # Integers of a range that is limited would be noise that is not Gaussian.
    exact = spec.privacy.secure_aggregation and spec.privacy.differential is not None
    named = "fp32" if exact else _fixed(spec.wan.codec)
    return codec_named(named).masked if named and spec.privacy.secure_aggregation else named


def _settings(spec: JobSpec) -> dict[str, float]:
    """Return the settings of WAN policy and exchange in the job file, as numbers by name."""
    wan = spec.wan
    found = dict(wan.outer or {})
    if spec.privacy.secure_aggregation:
        found["secure"] = float(spec.privacy.min_regions)
    defaults = {"fragments": 1, "guard": GUARD}
    found |= {name: float(getattr(wan, name)) for name, default in defaults.items() if getattr(wan, name) != default}
    if wan.quorum is not None or wan.traits.on_arrival:
        found["quorum"] = float(wan.quorum or 1)
        found["lead"] = float(LEAD if wan.lead is None else wan.lead)
    if wan.grace:
        found["grace_seconds"] = wan.grace.total_seconds()
    if wan.staleness == "damping":
        found["damping"] = 1.0
    if wan.staleness == "compensation":
        found["compensation"] = COMPENSATION_STRENGTH
    if wan.robust != "none":
        found[f"{ROBUST_SETTING}{wan.robust}"] = float(_count(wan.byzantine) or 0)
        if wan.quarantine != QUARANTINE_ROUNDS:
            found["quarantine"] = float(wan.quarantine)
    if wan.traits.significance:
        found["significance"] = wan.significance or wan.traits.significance
    return found


def _fixed(value: str) -> str | None:
    return None if value == "auto" else value


def _count(value: int | str) -> int | None:
    return value if isinstance(value, int) else None


def _seconds_left(deadline: str | None, now: datetime) -> float | None:
    if deadline is None:
        return None
    if "-" in deadline:
        return (datetime.fromisoformat(deadline) - now).total_seconds()
    return parse_duration(deadline).total_seconds()
