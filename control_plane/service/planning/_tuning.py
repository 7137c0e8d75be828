"""Evaluate a profile: the Pareto front of time and cost in one region, and the configuration to choose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from control_plane.store import RunRow
from geofed_pb.bounds import MOST_LABELS
from geofed_pb.errors import GeofedError
from scheduler import Demand, Region
from scheduler.tuning import (
    MergePoint,
    PlatformCosts,
    Prediction,
    Space,
    TaskModel,
    TaskProfile,
    TuningLimits,
    cheapest,
    fastest,
    front,
    worker_counts,
)
from scheduler.tuning import space_of as tuning_space
from scheduler.tuning import task_of as tuning_task
from sync.collective import collective_named

_PROFILE = TypeAdapter(TaskProfile)
_MERGE = TypeAdapter(MergePoint)
_Item = TypeVar("_Item")
_COUNTS_BELOW = 2**31
"""Limit of a plausible number of labels."""
_SAMPLES_BELOW = 2**53
"""Limit of a plausible number of samples, up to which a float has all whole numbers."""
_MAX_FRONT_POINTS = 60
"""Number of points returned of a longer front, evenly spaced and with both ends."""


@lru_cache(maxsize=256)
def profile_from_json(text: str, region: str) -> TaskProfile:
    """Parse an agent's profile. Raises ``GeofedError("FRAME_INVALID")``."""
    try:
        profile = _PROFILE.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise GeofedError("FRAME_INVALID", f"the profile of region {region}: {where}: {first['msg']}") from None
    if profile.region != region or not profile.steps or not 1 <= profile.samples < _SAMPLES_BELOW:
        raise GeofedError("FRAME_INVALID", f"the profile of region {region} has no steps, or belongs to another region")
    labels = [label for label, _ in profile.labels]
    if len(set(labels)) < len(labels) or not all(
        0 <= label < MOST_LABELS and 1 <= count < _COUNTS_BELOW for label, count in profile.labels
    ):
        raise GeofedError("FRAME_INVALID", f"the profile of region {region} counts labels that cannot be")
    return profile


def profiles_of(runs: Iterable[RunRow]) -> dict[str, TaskProfile]:
    """Return the newest profile of each region; ``runs``: newest first."""
    found: dict[str, TaskProfile] = {}
    for run in runs:
        if run.profile_json and run.region not in found:
            # A profile stored by another version of geofed may not be readable; its run counts without it.
            with suppress(GeofedError):
                found[run.region] = profile_from_json(run.profile_json, run.region)
    return found


@lru_cache(maxsize=1024)
def merge_from_json(text: str) -> MergePoint | None:
    """Parse a merge measured by an earlier run; None if another version of geofed has stored it."""
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
    """Return a profile with its Pareto front and the chosen configuration, for a job that runs in this region alone.

    Args:
        samples_per_second: speed measured by an earlier run, which takes precedence over the profile.
        merges: merge times measured by earlier runs.
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
        "chosen": _as_dict(chosen) if chosen is not None else None,
        "front": [_as_dict(one) for one in _thinned(whole)],
        "others": [_as_dict(one) for one in _best_of_each(task, space) if one not in whole],
    }


def _best_of_each(task: TaskModel, space: Space) -> list[Prediction]:
    """Return the cheapest configuration with each number of workers, for comparison with the front."""
    counts = _thinned(space.workers)
    found = (cheapest(task, replace(space, workers=(count,))) for count in counts)
    return [one for one in found if one is not None]


def _task(
    profile: TaskProfile,
    region: Region,
    demand: Demand,
    samples_per_second: float | None,
    merges: Sequence[MergePoint],
) -> TaskModel:
    prices = region.prices
    if prices is None:
        raise GeofedError("PRICE_UNKNOWN", f"the prices of region {region.name} are unknown")
    platform = PlatformCosts(
        usd_per_gb_second=prices.function_usd_per_gb_second,
        usd_per_call=prices.function_usd_per_request,
        server_usd_per_hour=prices.server_usd_per_hour,
        slice_seconds=demand.longest_slice([region]),
        usd_per_second=region.worker_devices(demand.gpus) * prices.device_usd_per_second,
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
    fixed = demand.collective is not None and collective_named(demand.collective).predictable
    collective = demand.collective if fixed else None
    return tuning_space(
        profile,
        most_memory_mb=region.capacity.memory_mb,
        batch=demand.batch,
        collective=collective,
        chunks=int(demand.merging["k"]) if fixed and "k" in demand.merging else None,
        workers=worker_counts(min(region.capacity.workers, profile.samples // demand.batch))
        if workers is None
        else (workers,),
        memory_mb=demand.memory_mb,
    )


def _as_dict(one: Prediction) -> dict[str, Any]:
    fields = asdict(one)
    return {**fields.pop("configuration"), **fields}


def _thinned(whole: Sequence[_Item]) -> list[_Item]:
    if len(whole) <= _MAX_FRONT_POINTS:
        return list(whole)
    step = (len(whole) - 1) / (_MAX_FRONT_POINTS - 1)
    return [whole[round(number * step)] for number in range(_MAX_FRONT_POINTS)]
