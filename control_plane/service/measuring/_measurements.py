"""What agents are asked to measure, and what they tell of it; commands and answers that no store keeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from control_plane.service.planning._planning import lasting_workers_now
from control_plane.service.rpc._wire import failure_of
from control_plane.service.state._federation import Federation
from control_plane.spec import JobSpec
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2

USUAL_MEMORY_MB = 1024
SILENCE_SECONDS = 240.0
"""An agent that says nothing for so long is given up."""
AWAY_SECONDS = 30.0
"""How long an agent may be without a session."""
_LOOK_SECONDS = 1.0


@dataclass
class _Open:
    """A region's measurement that is waited for."""

    region: str
    digest: str
    reports: asyncio.Queue[agent_pb2.ProfileReport] = field(default_factory=asyncio.Queue)


class MeasurementFailed(GeofedError):
    """What an agent failed with."""

    def __init__(self, region: str, report: agent_pb2.ProfileReport) -> None:
        failure = failure_of(report.error)
        super().__init__(failure.code, f"{region}: {failure.message}", hint=failure.hint or None)
        self.usd = report.usd
        """Of its calls until then."""


class Measurements:
    """Those under way."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._open: dict[str, _Open] = {}

    def may_fetch(self, region: str, digest: str) -> bool:
        """Whether a region is measuring a task that is made of this bundle."""
        return any(one.region == region and one.digest == digest for one in self._open.values())

    def received(self, region: str, report: agent_pb2.ProfileReport) -> None:
        """An agent has told something; what nobody waits for is dropped."""
        waiting = self._open.get(report.id)
        if waiting is not None and waiting.region == region:
            waiting.reports.put_nowait(report)

    def going_on(self, region: str) -> int:
        """How many there are in a region."""
        return sum(one.region == region for one in self._open.values())

    def live_holders(self, spec: JobSpec) -> list[str]:
        """Live regions that hold a training split of a job's data and may be used, sorted.

        Raises ``GeofedError``: REGION_NOT_FOUND, DATASET_UNKNOWN, INADMISSIBLE where none is live.
        """
        regions = self._federation.regions
        for name in (*spec.regions.use, *spec.regions.avoid):
            if name not in regions:
                raise GeofedError("REGION_NOT_FOUND", f"region {name} is not part of the federation")
        wanted = [
            name
            for name in sorted(regions)
            if name not in spec.regions.avoid and (not spec.regions.use or name in spec.regions.use)
        ]
        dataset = spec.data.dataset
        held = [name for name in wanted if self.train_samples(name, dataset)]
        if not held:
            raise GeofedError("DATASET_UNKNOWN", f"no region that may be used holds a training split of {dataset}")
        live = [name for name in held if regions[name].state.phase == "live"]
        if not live:
            text = f"no agent of a region that holds {dataset} is connected: {', '.join(held)}"
            raise GeofedError("INADMISSIBLE", text, hint="start their agents: `region-agent run`")
        return live

    def train_samples(self, region: str, dataset: str) -> int:
        """In the training split that a region holds; 0: it holds none."""
        catalogue = self._federation.regions[region].catalogue
        held = catalogue.datasets if catalogue is not None else ()
        return sum(one.splits["train"].samples for one in held if one.name == dataset and "train" in one.splits)

    def require_free(self, region: str) -> None:
        """A worker that measures must not share the cores of workers that train. Raises ``GeofedError``
        INADMISSIBLE."""
        entry = self._federation.regions[region]
        held = sum(lasting_workers_now(job).get(region, 0) for job in self._federation.jobs.values())
        if entry.catalogue is not None and held >= entry.catalogue.capacity.workers:
            text = f"region {region} has no worker free: {held} are at work"
            raise GeofedError("INADMISSIBLE", text, hint="wait for a job to end")

    def usual_memory_mb(self, region: str) -> int:
        """What is measured with unless somebody says otherwise; never more than the region gives."""
        entry = self._federation.regions.get(region)
        known = entry.catalogue if entry is not None else None
        return min(USUAL_MEMORY_MB, known.capacity.memory_mb) if known is not None else USUAL_MEMORY_MB

    async def run(self, message: agent_pb2.ToAgent) -> AsyncGenerator[agent_pb2.ProfileReport]:
        """Have an agent measure; what it tells, its last word included. The command, a ``ProfileTask``, is sent again
        over each new session.

        Raises ``GeofedError``: REGION_LOST, WAIT_TIMEOUT, UNAVAILABLE; ``MeasurementFailed``: what the agent failed
        with.
        """
        command: agent_pb2.ProfileTask = getattr(message, str(message.WhichOneof("body")))
        region = command.region
        waiting = self._open[command.id] = _Open(region, command.task.bundle_digest)
        sent, seen, heard = -1, time.monotonic(), time.monotonic()
        try:
            while True:
                session = self._federation.sessions.get(region)
                if session is not None and session.number != sent:
                    session.send(message)
                    sent = session.number
                now = time.monotonic()
                seen = now if session is not None else seen
                if now - seen > AWAY_SECONDS:
                    raise GeofedError("REGION_LOST", f"the agent of region {region} went away while it measured")
                if now - heard > SILENCE_SECONDS:
                    raise GeofedError("WAIT_TIMEOUT", f"region {region} has told nothing for {SILENCE_SECONDS:g} s")
                if self._federation.stopping:
                    raise GeofedError("UNAVAILABLE", "the control plane is stopping")
                try:
                    async with asyncio.timeout(_LOOK_SECONDS):
                        report = await waiting.reports.get()
                except TimeoutError:
                    continue
                heard = time.monotonic()
                if report.HasField("error"):
                    raise MeasurementFailed(region, report)
                yield report
                if report.profile_json or report.weight.last:
                    return
        finally:
            del self._open[command.id]
