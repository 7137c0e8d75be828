"""The region's own word: what the federation may not do here, whatever the control plane has planned."""

from __future__ import annotations

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from region_agent.config import RegionConfig

__all__ = ["check_partition"]


def check_partition(config: RegionConfig, command: agent_pb2.StartPartition) -> None:
    """Raises ``GeofedError`` with the code of the rule that a partition breaks."""
    plan, dataset = command.plan, config.datasets.get(command.task.dataset)
    if not config.policy.accept_jobs:
        raise GeofedError("FORBIDDEN", f"region {config.name} takes no jobs", hint="its policy.acceptJobs is false")
    if command.region != config.name:
        raise GeofedError("RESIDENCY_VIOLATION", f"a partition of {command.region} was sent to {config.name}")
    if dataset is None or "train" not in dataset.splits:
        raise GeofedError("SHARD_UNREADABLE", f"region {config.name} holds no training split of {command.task.dataset}")
    most = min(config.capacity.workers, config.policy.max_workers_per_job or config.capacity.workers)
    if plan.workers > most:
        raise GeofedError("FORBIDDEN", f"region {config.name} gives a job {most} workers, {plan.workers} were planned")
    if plan.memory_mb > config.capacity.memory_mb:
        text = f"region {config.name} gives a function {config.capacity.memory_mb} MB, {plan.memory_mb} were planned"
        raise GeofedError("FORBIDDEN", text)
