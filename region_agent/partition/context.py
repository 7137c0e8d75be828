"""The parts of the region that each of its partitions uses."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geofed_pb.fork_server import ExecStarter, Starter
from geofed_pb.v1 import agent_pb2
from region_agent.config import RegionConfig
from region_agent.gateway import GatewayClient
from region_agent.gateway.device_blocks import DeviceBlocks
from region_agent.gateway.functions import Isolation
from region_agent.gateway.owner import Owner
from region_agent.isolation import NOT_ISOLATED
from region_agent.link.identity import Identity
from region_agent.partition.channel import RegionChannel
from region_agent.partition.events import RecordEvent
from region_agent.partition.server.process import PsProcess
from region_agent.state.store import AgentStore
from region_agent.tasks.environments import Environments
from region_agent.tasks.folder import TaskFolder

__all__ = ["PartitionContext"]


@dataclass(frozen=True)
class PartitionContext:
    """The parts of the region that a partition uses."""

    config: RegionConfig
    identity: Identity
    store: AgentStore
    gateway: GatewayClient
    state_dir: Path
    channel: RegionChannel
    image: str
    """Image of the worker function, where a task names none."""
    fetch_task: Callable[[str], Coroutine[Any, Any, TaskFolder]]
    """Download the packed task folder with a digest from the control plane."""
    fetch_model: Callable[[str, Path], Coroutine[Any, Any, None]]
    """Download the model with a digest into a file, and verify it."""
    publish_model: Callable[[str, PsProcess, int], Coroutine[Any, Any, str]]
    """Upload the server's model to the control plane, the present one (0) or an evaluated round's; returns its
    digest."""
    report: Callable[[agent_pb2.PartitionReport, bool], None]
    """Send a report to the control plane; the flag: durably, until it is acknowledged."""
    record_event: Callable[[str, RecordEvent], None]
    """Add an event to a job's history."""
    log: Callable[[str, str, str], None]
    """Add a line to a job's log: job, source, line."""
    log_format: str = "text"
    """Format of the parameter servers' own logs: "text" or "json"."""
    starter: Starter = field(default_factory=ExecStarter)
    """Starts the parameter servers' processes."""
    isolation: Isolation = NOT_ISOLATED
    """How functions are isolated."""
    owner: Owner = field(default_factory=Owner)
    """Owner of the region's functions."""
    environments: Environments | None = None
    """Packages for tasks; None: none are installed."""
    devices: DeviceBlocks = field(default_factory=lambda: DeviceBlocks(0))
    """Which of the machine's devices each worker has."""
