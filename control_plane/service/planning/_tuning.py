"""Evaluate a profile: the Pareto front of time and cost in one region, and the configuration to choose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from control_plane.store import RunRow
from geofed_pb.bounds import MOST_LABELS
from geofed_pb.errors import GeofedError
from scheduler import ConfiguredJob, Declined, Demand, Planner, Region, Snapshot, step_seconds
from scheduler.tuning import MergePoint, PlatformCosts, TaskModel, TaskProfile, needed_mb, task_of
from sync.collective import DEFAULT, collective_named

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
    """Return a profile with its Pareto front and the configuration that a plan chooses, for a job that runs in this
    region alone with whole models in its workers, by the cost model of plans.

    Args:
        samples_per_second: speed measured by an earlier run, which takes precedence over the profile.
        merges: merge times measured by earlier runs.
    """
    if region.prices is None:
        raise GeofedError("PRICE_UNKNOWN", f"the prices of region {region.name} are unknown")
    task = task_of(profile, PlatformCosts(0.0), epochs=demand.epochs, steps=demand.steps)
    told = _planner(profile, region, samples_per_second, merges).configured(_alone(region, demand))
    each, chosen, why = ([], None, _told(told)) if isinstance(told, Declined) else (*told, "")
    rows = {id(one): _row(one, profile, task) for one in each}
    front = [rows[id(one)] for one in _front(each)]
    cheapest = {one.part.workers: one for one in sorted(each, key=lambda one: (-one.usd, -one.seconds))}
    others = [rows[id(cheapest[workers])] for workers in _thinned(sorted(cheapest))]
    return {
        **asdict(profile),
        "samples_per_second": profile.samples_per_second,
        "noise_samples": profile.noise_samples,
        "memory": asdict(task.memory),
        "compute": asdict(task.compute),
        "chosen": rows[id(chosen)] if chosen is not None else None,
        "front": _thinned(front),
        "others": [one for one in others if one not in front],
        "why_none": why,
    }


def _told(declined: Declined) -> str:
    return "; ".join(f"{reason.text}: {reason.remedy}" for reason in declined.reasons)


def _planner(
    profile: TaskProfile, region: Region, samples_per_second: float | None, merges: Sequence[MergePoint]
) -> Planner:
    """Return a planner for the region alone, with all its workers free."""
    name = region.name
    return Planner(
        Snapshot(
            (replace(region, channel=profile.channel.name),),
            speeds={name: samples_per_second or profile.samples_per_second},
            profiled=frozenset([name]),
            model_bytes=profile.model_bytes,
            start_seconds=profile.start_seconds,
            start_of_run=False,
            profiles={name: profile},
            merges={name: tuple(merges)},
        )
    )


def _alone(region: Region, demand: Demand) -> Demand:
    """Return what is asked of the region alone: nothing of other regions."""
    fixed = demand.collective is not None and collective_named(demand.collective).predictable
    stated = demand.workers if isinstance(demand.workers, int | None) else demand.workers.get(region.name)
    return replace(
        demand,
        use=(region.name,),
        avoid=(),
        workers=stated,
        parallelism="data",
        clients=None,
        channel=None,
        wan_policy=None,
        wan_settings={},
        codec=None,
        exchange=None,
        topology=None,
        collective=demand.collective if fixed else None,
        merging=demand.merging if fixed else {},
    )


def _front(each: Iterable[ConfiguredJob]) -> list[ConfiguredJob]:
    """Return those that no other one beats in time and money, the fastest first."""
    found: list[ConfiguredJob] = []
    for one in sorted(each, key=lambda one: (one.seconds, one.usd)):
        if not found or one.usd < found[-1].usd:
            found.append(one)
    return found


def _row(one: ConfiguredJob, profile: TaskProfile, task: TaskModel) -> dict[str, Any]:
    part, (collective, chunks) = one.part, one.merging or (DEFAULT, 0)
    merge, step = part.merge_seconds or 0.0, step_seconds(part)
    owners = collective_named(collective).owners(part.workers, chunks or None)
    return {
        "memory_mb": part.memory_mb,
        "workers": part.workers,
        "batch": part.batch,
        "collective": collective,
        "chunks": owners,
        "channel": profile.channel.name,
        "iteration_seconds": step,
        "compute_seconds": step - merge,
        "merge_seconds": merge,
        "iterations": one.steps,
        "seconds": one.seconds,
        "usd": one.usd,
        "requests_usd": part.merge_usd * one.steps,
        "needed_mb": float(needed_mb(task.memory, part.batch, profile.model_bytes, owners)),
    }


def _thinned(whole: Sequence[_Item]) -> list[_Item]:
    if len(whole) <= _MAX_FRONT_POINTS:
        return list(whole)
    step = (len(whole) - 1) / (_MAX_FRONT_POINTS - 1)
    return [whole[round(number * step)] for number in range(_MAX_FRONT_POINTS)]
