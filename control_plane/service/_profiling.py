"""Profiles: has the agents that hold a task's data measure it, one after another, and keeps what they say."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from control_plane.pki import utc_now
from control_plane.service._federation import Federation
from control_plane.service._known import merges_of, speeds_of, task_keys
from control_plane.service._planning import lasting_workers_now
from control_plane.service._tuning import profile_from_json, tuned
from control_plane.service._wire import failure_of, to_json
from control_plane.spec import JobSpec, parse_json, to_demand
from control_plane.store import RunRow, Store
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2, control_pb2
from scheduler.tuning import Profile

USUAL_MEMORY_MB = 1024
LIMIT_SECONDS = 60.0
"""For each memory; then no new measurement begins."""
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


class Profiling:
    """Measurements that go on. One profile at a time, one region at a time: on one machine they would share cores."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._turn = asyncio.Lock()
        self._open: dict[str, _Open] = {}

    def may_fetch(self, region: str, digest: str) -> bool:
        """Whether a region is measuring a task that is made of this bundle."""
        return any(one.region == region and one.digest == digest for one in self._open.values())

    def heard(self, region: str, report: agent_pb2.ProfileReport) -> None:
        """An agent has told something; what nobody waits for is dropped."""
        waiting = self._open.get(report.id)
        if waiting is not None and waiting.region == region:
            waiting.reports.put_nowait(report)

    async def run(self, request: control_pb2.ProfileRequest) -> AsyncIterator[control_pb2.ProfileNews]:
        """Measure, and tell how far it is; the last news has the result.

        Raises ``GeofedError``: SPEC_INVALID, TASK_INVALID, DATASET_UNKNOWN, INADMISSIBLE where no region has a worker
        free, and where every region failed, what the first failed with.
        """
        spec = parse_json(request.spec_json)
        if not 1 <= len(request.request_id) <= 256:
            raise GeofedError("SPEC_INVALID", "a profile needs a request id of 1 to 256 characters")
        if self._federation.blobs.size(request.bundle_digest) is None:
            raise GeofedError("TASK_INVALID", "the code of the task has not arrived", hint="upload the bundle first")
        code_digest = await self._federation.code_digest(request.bundle_digest)
        regions = self._holders(spec)
        if self._turn.locked():
            yield control_pb2.ProfileNews(text="waits for another profile to end")
        found: dict[str, dict[str, Any]] = {}
        failed: dict[str, GeofedError] = {}
        async with self._turn:
            for region in regions:
                try:
                    async for report in self._measured(region, spec, request):
                        if not report.profile_json:
                            yield control_pb2.ProfileNews(region=region, text=report.condition)
                            continue
                        found[region] = await self._kept(region, spec, report, code_digest)
                        yield control_pb2.ProfileNews(region=region, text="measured")
                except GeofedError as error:
                    failed[region] = error
                    yield control_pb2.ProfileNews(region=region, text=f"{error.code}: {error.message}")
        if not found:
            raise next(iter(failed.values()))
        told = {
            "task_key": task_keys(spec, code_digest)[0],
            "regions": found,
            "failed": {region: error.as_dict() for region, error in failed.items()},
        }
        yield control_pb2.ProfileNews(result_json=to_json(told))

    def _holders(self, spec: JobSpec) -> list[str]:
        """Live regions that hold a training split and may be used, sorted."""
        for name in (*spec.regions.use, *spec.regions.avoid):
            if name not in self._federation.regions:
                raise GeofedError("REGION_NOT_FOUND", f"region {name} is not part of the federation")
        wanted = [
            (name, entry)
            for name, entry in sorted(self._federation.regions.items())
            if name not in spec.regions.avoid and (not spec.regions.use or name in spec.regions.use)
        ]
        dataset = spec.data.dataset
        held = [
            name
            for name, entry in wanted
            if entry.catalogue is not None
            and any(one.name == dataset and one.splits.get("train") for one in entry.catalogue.datasets)
        ]
        if not held:
            raise GeofedError("DATASET_UNKNOWN", f"no region that may be used holds a training split of {dataset}")
        live = [name for name in held if self._federation.regions[name].state.phase == "live"]
        if not live:
            text = f"no agent of a region that holds {dataset} is connected: {', '.join(held)}"
            raise GeofedError("INADMISSIBLE", text, hint="start their agents: `region-agent run`")
        return live

    async def _measured(
        self, region: str, spec: JobSpec, request: control_pb2.ProfileRequest
    ) -> AsyncIterator[agent_pb2.ProfileReport]:
        """What an agent tells, its last word included. The command is sent again over each new session."""
        self._require_free(region)
        command = _command(region, self._usual_memory_mb(region), spec, request)
        waiting = self._open[command.id] = _Open(region, request.bundle_digest)
        told, seen, heard = -1, time.monotonic(), time.monotonic()
        try:
            while True:
                session = self._federation.sessions.get(region)
                if session is not None and session.number != told:
                    session.send(agent_pb2.ToAgent(profile=command))
                    told = session.number
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
                    failure = failure_of(report.error)
                    raise GeofedError(failure.code, f"{region}: {failure.message}", hint=failure.hint or None)
                yield report
                if report.profile_json:
                    return
        finally:
            del self._open[command.id]

    def _require_free(self, region: str) -> None:
        """A worker that measures must not share the cores of workers that train."""
        entry = self._federation.regions[region]
        held = sum(lasting_workers_now(job).get(region, 0) for job in self._federation.jobs.values())
        if entry.catalogue is not None and held >= entry.catalogue.capacity.workers:
            text = f"region {region} has no worker free: {held} are at work"
            raise GeofedError("INADMISSIBLE", text, hint="wait for a job to end")

    def _usual_memory_mb(self, region: str) -> int:
        """What is measured with unless somebody says otherwise; never more than the region gives."""
        entry = self._federation.regions.get(region)
        known = entry.catalogue if entry is not None else None
        return min(USUAL_MEMORY_MB, known.capacity.memory_mb) if known is not None else USUAL_MEMORY_MB

    async def _kept(
        self, region: str, spec: JobSpec, report: agent_pb2.ProfileReport, code_digest: str
    ) -> dict[str, Any]:
        """Store a profile for later plans; what it says for the job."""
        federation, keys = self._federation, task_keys(spec, code_digest)
        profile = profile_from_json(report.profile_json, region)
        runs = await federation.read(partial(Store.runs, task_key=keys[0], kin_key=keys[1]))
        async with federation.change() as draft:
            draft.runs.append(_run_of(report.id, keys, draft.at, profile, report.profile_json))
            data = {"samples_per_second": profile.samples_per_second, "usd": profile.usd}
            text = f"{spec.metadata.name} was profiled in {region}: {profile.samples_per_second:.0f} samples/s"
            draft.record("task.profiled", text, region=region, data=data)
            demand = to_demand(spec, report.id, utc_now(draft.at))
        catalogue = federation.regions[region].catalogue
        if catalogue is None:
            raise GeofedError("REGION_LOST", f"region {region} is not known any more")
        later = speeds_of([run for run in runs if not run.profile_json], profile.batch, {region: profile})[0].get(
            region
        )
        merges = merges_of(runs, region)
        try:
            return await asyncio.to_thread(tuned, profile, catalogue, demand, later, merges)
        except ValueError as error:
            raise GeofedError("FRAME_INVALID", f"the profile of region {region}: {error}") from None


def _command(
    region: str, usual_memory_mb: int, spec: JobSpec, request: control_pb2.ProfileRequest
) -> agent_pb2.ProfileTask:
    memory = spec.function.memory_mb if isinstance(spec.function.memory_mb, int) else usual_memory_mb
    mark = hashlib.sha256(f"{request.request_id}\n{request.spec_json}\n{request.bundle_digest}".encode()).hexdigest()
    return agent_pb2.ProfileTask(
        id=f"profile-{mark[:16]}",
        region=region,
        task=agent_pb2.TaskRef(
            bundle_digest=request.bundle_digest,
            module=spec.task.module,
            config_json=json.dumps(spec.task.config),
            dataset=spec.data.dataset,
        ),
        batch=spec.train.batch,
        seed=spec.train.seed,
        memories_mb=sorted(set(request.memories_mb)) or [memory],
        limit_seconds=LIMIT_SECONDS,
    )


def _run_of(job: str, keys: tuple[str, str], at: float, profile: Profile, text: str) -> RunRow:
    return RunRow(
        job=job,
        region=profile.region,
        task_key=keys[0],
        at=at,
        samples_per_second=profile.samples_per_second,
        model_bytes=profile.model_bytes,
        start_seconds=profile.start_seconds,
        profile_json=text,
        kin_key=keys[1],
        batch=profile.batch,
    )
