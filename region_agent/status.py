"""What `geofed agent status` shows: a file that the running agent writes."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import structlog

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import disk_full_as_error
from region_agent.state.store import AgentStore

__all__ = ["Status", "StatusFile"]

_log = structlog.get_logger("geofed.agent")


@dataclass(frozen=True)
class Status:
    """Output of `geofed agent status`; written to the state directory every second, and when a session begins."""

    region: str
    pid: int
    at: float
    connected: bool
    last_heard: float
    control_plane: str
    federation: str
    certificate_ends: float
    gateway: str
    isolation: str
    """How job code is isolated, from what was tried."""
    partitions: dict[str, dict[str, object]]
    shards: dict[str, dict[str, object]]
    """Shards that are sent to other regions, by job."""
    condition: str
    channel: str = ""
    """Kind of the channel, with a note if it is unencrypted."""
    pending: list[dict[str, object]] = field(default_factory=list)
    """What waits for the operator's approval."""


class StatusFile:
    """The file in the state directory. While the disk is full only its time of modification is up to date."""

    def __init__(self, state_dir: Path, store: AgentStore) -> None:
        self._state_dir, self._store = state_dir, store
        self._full = False
        """The disk is full, and a warning was logged."""

    def write(self, status: Status) -> None:
        """Write the status, and store that the agent is alive."""
        try:
            with disk_full_as_error(self._state_dir):
                self._store.alive(status.at)
                # Written without fsync: after a crash the status is out of date anyway.
                fresh = self._state_dir / ".status.json"
                # Conditions may quote what job code has said of the data.
                fresh.touch(mode=0o600)
                fresh.chmod(0o600)
                fresh.write_text(json.dumps(asdict(status)))
                os.replace(fresh, self._state_dir / "status.json")
        except GeofedError as error:
            if error.code != "DISK_FULL":
                raise
            if not self._full:
                _log.warning("the agent continues, and writes deferred changes when there is space", error=str(error))
            self._full = True
            # `geofed agent status`, which is a health check too, sees by this that the agent runs.
            with contextlib.suppress(OSError):
                os.utime(self._state_dir / "status.json", (status.at, status.at))
            return
        self._full = False
