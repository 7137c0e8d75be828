"""From the user's words to the scheduler's."""

from __future__ import annotations

from datetime import datetime

from control_plane._durations import parse_duration
from control_plane.spec._model import JobSpec
from scheduler import Demand


def to_demand(spec: JobSpec, job: str, now: datetime) -> Demand:
    """What the job asks of the scheduler at the time `now` (with a zone)."""
    return Demand(
        job=job,
        dataset=spec.data.dataset,
        batch=spec.train.batch,
        epochs=spec.train.end.epochs,
        steps=spec.train.end.steps,
        seed=spec.train.seed,
        use=tuple(spec.regions.use),
        avoid=tuple(spec.regions.avoid),
        workers=_count(spec.train.workers),
        memory_mb=_count(spec.function.memory_mb),
        slice_seconds=spec.function.slice.total_seconds(),
        interval=_count(spec.wan.interval),
        collective=_fixed(spec.collective),
        channel=_fixed(spec.channel),
        wan_policy=_fixed(spec.wan.policy),
        wan_settings=spec.wan.outer.model_dump() if spec.wan.outer else {},
        codec=_fixed(spec.wan.codec),
        evaluate_every=spec.train.evaluate_every,
        minimise=spec.objective.minimise,
        deadline_seconds=_seconds_left(spec.objective.deadline, now),
        budget_usd=spec.objective.budget,
    )


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
