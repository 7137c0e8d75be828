"""The region's own word: what the federation may not do here, whatever the control plane has planned."""

from __future__ import annotations

import re
from datetime import timedelta

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from region_agent.config import RegionConfig
from sync.ps.tokens import LONGEST_LIFE

__all__ = ["check_partition", "most_workers"]

_JOB = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST_SLICE = LONGEST_LIFE - timedelta(minutes=5)
"""A worker goes on for a while after its slice: to the end of its step, and while it waits for an answer."""


def most_workers(config: RegionConfig, *, preemptible: bool = False) -> int:
    """That one job may have here of a kind."""
    there = config.capacity.preemptible if preemptible else config.capacity.workers
    return min(there, config.policy.max_workers_per_job or there)


def check_partition(config: RegionConfig, command: agent_pb2.StartPartition) -> None:
    """Raises ``GeofedError`` with the code of the rule that a partition breaks."""
    plan, dataset = command.plan, config.datasets.get(command.task.dataset)
    if not (_JOB.fullmatch(command.job) and _DIGEST.fullmatch(command.task.bundle_digest)):
        # Both become names of files.
        raise GeofedError("CONFIG_INVALID", f"{command.job!r} is no job, or its bundle has no digest")
    if not config.policy.accept_jobs:
        raise GeofedError("FORBIDDEN", f"region {config.name} takes no jobs", hint="its policy.acceptJobs is false")
    if command.region != config.name:
        raise GeofedError("RESIDENCY_VIOLATION", f"a partition of {command.region} was sent to {config.name}")
    if dataset is None or "train" not in dataset.splits:
        raise GeofedError("SHARD_UNREADABLE", f"region {config.name} holds no training split of {command.task.dataset}")
    most = most_workers(config)
    if plan.workers > most:
        raise GeofedError("FORBIDDEN", f"region {config.name} gives a job {most} workers, {plan.workers} were planned")
    if not 0 < plan.slice_seconds <= _LONGEST_SLICE.total_seconds():
        text = f"a slice of {plan.slice_seconds:g} s; a worker's token is good for {LONGEST_LIFE.total_seconds():g} s"
        raise GeofedError("LIMIT_EXCEEDED", text, hint=f"function.slice is at most {_LONGEST_SLICE.total_seconds():g}s")
    if plan.memory_mb > config.capacity.memory_mb:
        text = f"region {config.name} gives a function {config.capacity.memory_mb} MB, {plan.memory_mb} were planned"
        raise GeofedError("FORBIDDEN", text)
