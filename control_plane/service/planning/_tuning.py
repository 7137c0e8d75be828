"""What a profile says for a job: the front of time and money in one region, and the configuration to take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from geofed_pb.errors import GeofedError
from scheduler import Demand, Region
from scheduler.tuning import (
    MergePoint,
    Platform,
    Prediction,
    Space,
    TaskModel,
    TaskProfile,
    TuningLimits,
    cheapest,
    fastest,
    front,
)
from scheduler.tuning import space_of as tuning_space
from scheduler.tuning import task_of as tuning_task

_PROFILE = TypeAdapter(TaskProfile)
_MERGE = TypeAdapter(MergePoint)
_SHOWN = 60
"""Of a longer front, evenly; its ends are kept."""


@lru_cache(maxsize=256)
def profile_from_json(text: str, region: str) -> TaskProfile:
    """What an agent has measured. Raises ``GeofedError("FRAME_INVALID")``."""
    try:
        profile = _PROFILE.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise GeofedError("FRAME_INVALID", f"the profile of region {region}: {where}: {first['msg']}") from None
    if profile.region != region or not profile.steps or profile.samples < 1:
        raise GeofedError("FRAME_INVALID", f"the profile of region {region} has no steps, or is of another region")
    return profile


@lru_cache(maxsize=1024)
def merge_from_json(text: str) -> MergePoint | None:
    """A merge of an earlier run; None: another version of geofed has stored it."""
    try:
        return _MERGE.validate_json(text)
    except ValidationError:
        return None


def tuned(
    profile: TaskProfile,
    region: Region,
    demand: Demand,
    samples_per_second: float | None = None,
    merges: Sequence[MergePoint] = (),
) -> dict[str, Any]:
    """The profile with what follows from it for the job's part in this region, if it ran there alone.

    ``samples_per_second``, ``merges``: of runs that count more than the profile.
    """
    task, space = _task(profile, region, demand, samples_per_second, merges), _space(profile, region, demand)
    limits = TuningLimits(demand.deadline_seconds or math.inf, demand.budget_usd or math.inf)
    chosen = (fastest if demand.minimise == "time" else cheapest)(task, space, limits)
    whole = front(task, space)
    return {
        **asdict(profile),
        "samples_per_second": profile.samples_per_second,
        "noise_samples": profile.noise_samples,
        "memory": asdict(task.memory),
        "compute": asdict(task.compute),
        "chosen": _told(chosen) if chosen is not None else None,
        "front": [_told(one) for one in _thinned(whole)],
    }


def _task(
    profile: TaskProfile,
    region: Region,
    demand: Demand,
    samples_per_second: float | None,
    merges: Sequence[MergePoint],
) -> TaskModel:
    prices = region.prices
    if prices is None:
        raise GeofedError("PRICE_UNKNOWN", f"region {region.name} states no prices")
    platform = Platform(
        usd_per_gb_second=prices.function_usd_per_gb_second,
        usd_per_call=prices.function_usd_per_request,
        server_usd_per_hour=prices.server_usd_per_hour,
        slice_seconds=demand.slice_seconds,
    )
    return tuning_task(
        profile,
        platform,
        epochs=demand.epochs,
        steps=demand.steps,
        staleness=int(demand.merging.get("staleness", 0)),
        samples_per_second=samples_per_second,
        merges=merges,
    )


def _space(profile: TaskProfile, region: Region, demand: Demand) -> Space:
    workers = demand.workers if isinstance(demand.workers, int | None) else demand.workers.get(region.name)
    collective = demand.collective if demand.collective != "isp" else None
    return tuning_space(
        profile,
        most_workers=region.capacity.workers,
        most_memory_mb=region.capacity.memory_mb,
        batch=demand.batch,
        collective=collective,
        chunks=int(demand.merging["k"]) if "k" in demand.merging and collective == "k-reduce" else None,
        workers=workers,
        memory_mb=demand.memory_mb,
    )


def _told(one: Prediction) -> dict[str, Any]:
    told = asdict(one)
    return {**told.pop("configuration"), **told}


def _thinned(whole: tuple[Prediction, ...]) -> list[Prediction]:
    if len(whole) <= _SHOWN:
        return list(whole)
    step = (len(whole) - 1) / (_SHOWN - 1)
    return [whole[round(number * step)] for number in range(_SHOWN)]
