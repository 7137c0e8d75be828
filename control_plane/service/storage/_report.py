"""What is kept, as `geofed storage` shows it."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence

from control_plane.service.state._callers import Caller
from control_plane.service.state._federation import Federation
from control_plane.service.storage._sweeper import Sweeper
from control_plane.store import JobUse, Store
from geofed_pb.storage import Stored, Total, totals
from geofed_pb.v1 import control_pb2

__all__ = ["storage_report"]

_MOST_JOBS = 1000
"""Most jobs of a reply; each takes up to 200 bytes."""


async def storage_report(
    federation: Federation, sweeper: Sweeper, request: control_pb2.StorageRequest, caller: Caller
) -> control_pb2.StorageReply:
    """Return what is kept: everything, or what belongs to a job, or to the jobs of a user.

    Raises ``GeofedError("JOB_NOT_FOUND")``.
    """
    job = (await federation.lookup.find_job(request.job, caller.may_read)).row.id if request.job else ""
    found, uses = await sweeper.items(job=job)
    now = federation.clock()

    def told() -> control_pb2.StorageReply:
        items, shown = [item.stored for item in found], {job: uses[job]} if job else uses
        if caller.reads_of and not job:
            shown = {name: use for name, use in uses.items() if use.user == caller.user}
            items = [item for item in items if not shown.keys().isdisjoint(item.jobs)]
        kinds = [_kind(total) for total in totals(items, sweeper.keep, now)]
        # Freed here, since that takes long as well.
        found.clear()
        return control_pb2.StorageReply(kinds=kinds, jobs=_largest(items, shown, min(request.jobs, _MOST_JOBS)))

    # In a thread, since many jobs take long.
    reply = await asyncio.to_thread(told)
    if not caller.reads_of and not job:
        reply.database_bytes = await federation.read(Store.database_bytes)
        reply.free_bytes = (await asyncio.to_thread(shutil.disk_usage, federation.blobs.folder)).free
    return reply


def _kind(total: Total) -> control_pb2.StoredKind:
    return control_pb2.StoredKind(
        kind=total.kind,
        count=total.count,
        bytes=total.bytes,
        due_count=total.due_count,
        due_bytes=total.due_bytes,
        next_at=total.next_at or 0.0,
        keep_seconds=total.keep_seconds,
    )


def _largest(items: Sequence[Stored], uses: dict[str, JobUse], most: int) -> list[control_pb2.StoredJob]:
    by_job: dict[str, Counter[str]] = defaultdict(Counter)
    for item in items:
        for job in item.jobs:
            by_job[job][item.kind] += item.bytes
    named = sorted(by_job.keys() & uses.keys(), key=lambda job: (-by_job[job].total(), job))
    return [
        control_pb2.StoredJob(job=job, state=uses[job].phase, ended_at=uses[job].ended_at, bytes=by_job[job])
        for job in named[:most]
    ]
