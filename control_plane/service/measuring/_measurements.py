"""Measurements by agents: send the command and receive the reports, neither of which is stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from control_plane.pki import utc_now
from control_plane.service.rpc._wire import failure_of
from control_plane.service.state._federation import Federation
from control_plane.spec import JobSpec, to_demand
from control_plane.store import WeightRow
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from scheduler import Snapshot, unmeasured_mb
from scheduler.deadline import devices_of

USUAL_MEMORY_MB = 1024
"""Memory of a measuring function in a region whose limit is unknown."""
SILENCE_SECONDS = 240.0
"""Timeout for the next report of a measuring agent."""
AWAY_SECONDS = 30.0
"""Timeout for a disconnected agent to reconnect."""
_POLL_SECONDS = 1.0
"""Interval in which session and timeouts are checked."""


@dataclass
class _OpenMeasurement:
    """A running measurement in a region."""

    region: str
    digest: str
    reports: asyncio.Queue[agent_pb2.ProfileReport] = field(default_factory=asyncio.Queue)


class MeasurementFailed(GeofedError):
    """A measurement failed in an agent."""

    def __init__(self, region: str, report: agent_pb2.ProfileReport) -> None:
        failure = failure_of(report.error)
        super().__init__(failure.code, f"{region}: {failure.message}", hint=failure.hint or None)
        self.usd = report.usd
        """Cost of its calls until then."""


class Measurements:
    """Running measurements, by command ID."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._open: dict[str, _OpenMeasurement] = {}

    def may_fetch(self, region: str, digest: str) -> bool:
        """Whether a region is measuring a task with this code bundle, or with this file in its folder."""
        bundles = [one.digest for one in self._open.values() if one.region == region and one.digest]
        return digest in bundles or any(digest in self._federation.blobs.parts(bundle) for bundle in bundles)

    def received(self, region: str, report: agent_pb2.ProfileReport) -> None:
        """Pass on an agent's report; reports of ended measurements are dropped."""
        waiting = self._open.get(report.id)
        if waiting is not None and waiting.region == region:
            waiting.reports.put_nowait(report)

    def running(self, region: str) -> int:
        """Return the number of running measurements in a region."""
        return sum(one.region == region for one in self._open.values())

    def live_holders(self, spec: JobSpec) -> list[str]:
        """Return the allowed live regions that hold a training split of a job's dataset, sorted.

        Raises ``GeofedError``: REGION_NOT_FOUND; DATASET_UNKNOWN; INADMISSIBLE if none is live.
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
            raise GeofedError("DATASET_UNKNOWN", f"no allowed region has a training split of {dataset}")
        live = [name for name in held if regions[name].state.standing == "live"]
        if not live:
            text = f"no agent of a region that holds {dataset} is connected: {', '.join(held)}"
            raise GeofedError("INADMISSIBLE", text, hint="start their agents: `geofed agent run`")
        return live

    def train_samples(self, region: str, dataset: str) -> int:
        """Return the number of samples of a region's training split; 0: it has none."""
        catalogue = self._federation.regions[region].catalogue
        held = catalogue.datasets if catalogue is not None else ()
        return sum(one.splits["train"].samples for one in held if one.name == dataset and "train" in one.splits)

    def tells_clients(self, region: str, dataset: str) -> bool:
        """Whether a region tells how many clients its training split has: rounds of clients need it."""
        catalogue = self._federation.regions[region].catalogue
        held = catalogue.datasets if catalogue is not None else ()
        return any(one.name == dataset and "train" in one.splits and one.splits["train"].clients for one in held)

    def knows(self, region: str, feature: str) -> bool:
        """Whether a region's agent has a feature of `geofed_pb.features`."""
        return feature in self._federation.regions[region].state.features

    def require_free(self, region: str) -> None:
        """Raise ``GeofedError("INADMISSIBLE")`` unless a worker is free, and a device where workers have some, since
        measuring and training must not share cores."""
        catalogue, index = self._federation.regions[region].catalogue, self._federation.changes.index
        if catalogue is None:
            return
        there = {"worker": catalogue.capacity.workers, "device": catalogue.capacity.shared_devices}
        held = {"worker": index.lasting(region), "device": index.lasting(devices_of(region))}
        for what, count in there.items():
            if count is not None and held[what] >= count:
                text = f"region {region} has no free {what}; {held[what]} are in use"
                raise GeofedError("INADMISSIBLE", text, hint="wait for a job to end")

    def memory_mb(self, region: str, spec: JobSpec, weight: WeightRow | None) -> int:
        """Return the memory to measure with: the job's, or what a plan gives a worker of a model so large.

        Args:
            weight: result of the task's probe; None: the usual memory.
        """
        demand = to_demand(spec, "", utc_now(self._federation.clock()))
        entry = self._federation.regions.get(region)
        if entry is None or entry.catalogue is None:
            return demand.memory_mb or USUAL_MEMORY_MB
        known = Snapshot((entry.catalogue,))
        if weight is not None:
            known = replace(known, model_bytes=weight.model_bytes, held_bytes=weight.held_bytes or None)
        return unmeasured_mb(entry.catalogue, known, demand)

    async def run(self, message: agent_pb2.ToAgent) -> AsyncGenerator[agent_pb2.ProfileReport]:
        """Have an agent measure a task, or upload its own model of a job; yield its reports up to the last one.

        The command, a ``ProfileTask`` or an ``OwnModel``, is sent again over each new session.

        Raises ``GeofedError``: REGION_LOST, WAIT_TIMEOUT, UNAVAILABLE; ``MeasurementFailed`` if the agent fails.
        """
        command: agent_pb2.ProfileTask | agent_pb2.OwnModel = getattr(message, str(message.WhichOneof("body")))
        region = command.region
        code = command.task.bundle_digest if isinstance(command, agent_pb2.ProfileTask) else ""
        waiting = self._open[command.id] = _OpenMeasurement(region, code)
        sent, connected_at, reported_at = -1, time.monotonic(), time.monotonic()
        try:
            while True:
                session = self._federation.sessions.get(region)
                if session is not None and session.number != sent:
                    session.send(message)
                    sent = session.number
                now = time.monotonic()
                connected_at = now if session is not None else connected_at
                if now - connected_at > AWAY_SECONDS:
                    raise GeofedError(
                        "REGION_LOST", f"lost the connection to the agent of region {region} during a measurement"
                    )
                if now - reported_at > SILENCE_SECONDS:
                    raise GeofedError("WAIT_TIMEOUT", f"region {region} timed out: no report for {SILENCE_SECONDS:g} s")
                if self._federation.stopping:
                    raise GeofedError("UNAVAILABLE", "the control plane is stopping")
                try:
                    async with asyncio.timeout(_POLL_SECONDS):
                        report = await waiting.reports.get()
                except TimeoutError:
                    continue
                reported_at = time.monotonic()
                if report.HasField("error"):
                    raise MeasurementFailed(region, report)
                yield report
                if report.profile_json or report.weight.last or report.model_digest:
                    return
        finally:
            del self._open[command.id]
