"""Profile tasks: the agents that hold a task's data measure it, one after another, and the results are stored."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from control_plane.pki import utc_now
from control_plane.service.measuring._measurements import Measurements
from control_plane.service.measuring._task_history import counts_labels, merges_of, speeds_of, task_keys
from control_plane.service.planning._tuning import profile_from_json, tuned
from control_plane.service.rpc._wire import task_of, to_json
from control_plane.service.state._federation import Federation
from control_plane.spec import JobSpec, to_demand
from control_plane.store import RunRow, Store
from geofed_pb.errors import GeofedError
from geofed_pb.features import IMAGE
from geofed_pb.v1 import agent_pb2, control_pb2
from scheduler.tuning import TaskProfile

LIMIT_SECONDS = 60.0
"""Time limit for each memory size, after which no new measurement begins."""


class Profiling:
    """Runs profiles, one at a time and one region at a time, since regions on one machine would share cores."""

    def __init__(self, federation: Federation, measurements: Measurements) -> None:
        self._federation, self._measurements = federation, measurements
        self._turn = asyncio.Lock()

    async def run(self, request: control_pb2.ProfileRequest, spec: JobSpec) -> AsyncIterator[control_pb2.ProfileNews]:
        """Profile the task of a request, whose job file is ``spec``; yield progress messages, the last of which has the
        result.

        Raises ``GeofedError``: SPEC_INVALID; TASK_INVALID; DATASET_UNKNOWN; INADMISSIBLE if no region has a free
        worker; and the first region's error if all regions fail.
        """
        if not 1 <= len(request.request_id) <= 256:
            raise GeofedError("SPEC_INVALID", "the request ID must have 1 to 256 characters")
        if spec.function.gpus != 1:
            text = f"`geofed profile` measures one device, and `function.gpus` is {spec.function.gpus}"
            raise GeofedError("SPEC_INVALID", text, hint="a probe before the first plan measures a few steps")
        code_digest = await self._federation.code_digest(request.bundle_digest)
        regions = self._measurements.live_holders(spec)
        if self._turn.locked():
            yield control_pb2.ProfileNews(text="waiting for another profile to end")
        found: dict[str, dict[str, Any]] = {}
        failed: dict[str, GeofedError] = {}
        async with self._turn:
            for region in regions:
                try:
                    async for report in self._measured(region, spec, request, task_keys(spec, code_digest)[0]):
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
        result = {
            "task_key": task_keys(spec, code_digest)[0],
            "regions": found,
            "failed": {region: error.as_dict() for region, error in failed.items()},
        }
        yield control_pb2.ProfileNews(result_json=to_json(result))

    async def _measured(
        self, region: str, spec: JobSpec, request: control_pb2.ProfileRequest, key: str
    ) -> AsyncIterator[agent_pb2.ProfileReport]:
        """Yield an agent's reports up to the last one."""
        self._measurements.require_free(region)
        if spec.task.image is not None and not self._measurements.knows(region, IMAGE):
            text = f"the agent of region {region} does not know `{IMAGE}`"
            raise GeofedError("INADMISSIBLE", text, hint="update it")
        weight = await self._federation.read(partial(Store.weight, task_key=key))
        entry = self._federation.regions[region]
        asked = sorted(set(request.memories_mb)) or [self._measurements.memory_mb(region, spec, weight)]
        if entry.catalogue is not None:
            asked = sorted({entry.catalogue.capacity.function_mb(one) for one in asked})
        command = _command(region, asked, spec, request)
        async with aclosing(self._measurements.run(agent_pb2.ToAgent(profile=command))) as reports:
            async for report in reports:
                yield report

    async def _kept(
        self, region: str, spec: JobSpec, report: agent_pb2.ProfileReport, code_digest: str
    ) -> dict[str, Any]:
        """Store a profile for later plans; return its evaluation for the job."""
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
    region: str, memories_mb: list[int], spec: JobSpec, request: control_pb2.ProfileRequest
) -> agent_pb2.ProfileTask:
    digest = hashlib.sha256(f"{request.request_id}\n{request.spec_json}\n{request.bundle_digest}".encode()).hexdigest()
    return agent_pb2.ProfileTask(
        id=f"profile-{digest[:16]}",
        region=region,
        task=task_of(spec, request.bundle_digest, request.submission),
        batch=spec.train.probed_batch,
        evaluation_batch=spec.train.eval_batch or 0,
        seed=spec.train.seed,
        memories_mb=memories_mb,
        limit_seconds=LIMIT_SECONDS,
        # A job that hides what single regions or samples contribute does not ask for that otherwise.
        labels=counts_labels(spec),
    )


def _run_of(job: str, keys: tuple[str, str], at: float, profile: TaskProfile, text: str) -> RunRow:
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
