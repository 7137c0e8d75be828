"""Deletion of an ended job with all that belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from control_plane._view import standing_text
from control_plane.core import models_of
from control_plane.service.state._callers import Caller
from control_plane.service.state._draft import OPERATOR, Draft
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._federation import Federation
from control_plane.store import CommandRow, Deletion, Store
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2, control_pb2

__all__ = ["BY_RULE", "delete_job", "require_deletable"]

BY_RULE = Caller("--keep jobs")
"""Deletes the jobs that the control plane's own rule no longer keeps. No user can have this name."""


async def delete_job(
    federation: Federation, name: str, caller: Caller
) -> tuple[control_pb2.DeleteReply, frozenset[str]]:
    """Delete a job, and have its regions delete what they keep of it; repeating it has no effect.

    Returns also the digests of the files that it needed; those that no other job needs are left to be removed.

    Raises ``GeofedError``: JOB_NOT_FOUND; ILLEGAL_STATE if it has not ended, or if a job that has not ended started
    from its model.
    """
    if (before := await federation.read(lambda store: store.deletion(name))) is not None:
        return _reply(before, []), frozenset()
    job = (await federation.lookup.find_job(name, caller.may_read)).row.id
    async with federation.change() as draft:
        entry = await federation.lookup.ended_job(job) or draft.job(job)
        if entry is None:
            # It was deleted a moment ago.
            raise GeofedError("JOB_NOT_FOUND", f"job {job} not found")
        require_deletable(draft.jobs, entry, caller)
        digest = entry.row.bundle_digest
        is_shared = await federation.read(partial(Store.is_code_shared, bundle_digest=digest, job=job))
        gone = _deletion(draft, entry, caller.user or OPERATOR)
        draft.by = gone.by
        draft.deletions.append(gone)
        draft.record("job.deleted", f"job {job} was deleted", data={"job": job, "user": gone.user or OPERATOR})
        regions = sorted(_regions(entry) & set(draft.regions))
        code = "" if is_shared else digest
        for region in regions:
            stop = agent_pb2.StopPartition(
                job=job, epoch=_epoch(entry, region), reason="the job was deleted", discard=True, deleted=True,
                bundle_digest=code,
            )  # fmt: skip
            draft.commands.append(CommandRow(region, job, agent_pb2.ToAgent(stop=stop).SerializeToString()))
    initial = entry.state.initial_model
    models = {*(model.digest for model in models_of(entry.state)), *(initial.uploaded if initial is not None else ())}
    return _reply(gone, regions), frozenset({digest, *federation.blobs.parts(digest), *models})


def require_deletable(active: Mapping[str, JobEntry], entry: JobEntry, caller: Caller) -> None:
    """Raise ``GeofedError("ILLEGAL_STATE")`` if a job has not ended, or if one of the ``active`` jobs started from its
    model: its regions may have to fetch it again."""
    job = entry.row.id
    if not entry.state.terminal:
        hint = f"`geofed cancel {job}` ends it"
        if entry.state.phase == "running":
            hint += f" and discards its model, `geofed finish {job}` keeps that"
        text = f"job {job} {standing_text(entry.state.phase)}; only an ended job can be deleted"
        raise GeofedError("ILLEGAL_STATE", text, hint=hint)
    heirs = [
        other.row for other in active.values() if (model := other.state.initial_model) is not None and model.job == job
    ]
    if heirs:
        named = [row.id if caller.may_read(row) else "another user's job" for row in heirs]
        text = f"{', '.join(sorted(named))} started from the model of {job}, and has not ended"
        raise GeofedError("ILLEGAL_STATE", text, hint="delete it when that job has ended")


def _deletion(draft: Draft, entry: JobEntry, by: str) -> Deletion:
    row = entry.row
    return Deletion(row.id, row.user, by, draft.at, row.created_at, row.unpromised_worker_seconds)


def _regions(entry: JobEntry) -> set[str]:
    """Return the regions that have run a part of a job."""
    return {part.region for part in entry.state.partitions} | {copy.source for copy in entry.state.copies}


def _epoch(entry: JobEntry, region: str) -> int:
    part = entry.state.partition(region) or entry.state.copy_from(region)
    return part.epoch if part is not None else 0


def _reply(gone: Deletion, regions: list[str]) -> control_pb2.DeleteReply:
    return control_pb2.DeleteReply(job=gone.job, deleted_at=gone.at, deleted_by=gone.by, regions=regions)
