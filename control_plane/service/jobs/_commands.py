"""What users may do to a job that runs: end it, with or without a model, and let others read it."""

from __future__ import annotations

from dataclasses import replace

from control_plane.core import CancelRequested, FinishRequested
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._federation import Federation
from geofed_pb.errors import GeofedError

__all__ = ["cancel", "finish", "share"]


async def cancel(federation: Federation, entry: JobEntry, reason: str, by: str) -> JobEntry:
    """Cancel a job; repeating it has no effect. ``by``: name of the caller, for events.

    Raises ``GeofedError("ILLEGAL_STATE")`` if it has succeeded or failed.
    """
    if entry.state.phase in ("succeeded", "failed"):
        raise GeofedError("ILLEGAL_STATE", f"job {entry.row.id} has {entry.state.phase} already")
    async with federation.change() as draft:
        draft.by = by
        draft.apply_to_job(entry.row.id, CancelRequested(draft.at, reason))
    return await federation.find_job(entry.row.id)


async def finish(federation: Federation, entry: JobEntry, reason: str, by: str) -> JobEntry:
    """End a job early with its current model, without a successor. A job that is ending anyway just ends.

    Raises ``GeofedError("ILLEGAL_STATE")`` if it has no model yet, or has ended.
    """
    phase, job = entry.state.phase, entry.row.id
    if phase in ("queued", "planned", "starting"):
        hint = f"`geofed cancel {job}` ends it without a model"
        raise GeofedError("ILLEGAL_STATE", f"job {job} is {phase}: it has no model yet", hint=hint)
    if phase not in ("running", "finishing", "succeeded"):
        raise GeofedError("ILLEGAL_STATE", f"job {job} is {phase} already")
    async with federation.change() as draft:
        draft.by = by
        draft.apply_to_job(job, FinishRequested(draft.at, reason))
    entry = await federation.find_job(job)
    if after := entry.state.successor:
        hint = f"`geofed finish {after}` ends that job"
        raise GeofedError("ILLEGAL_STATE", f"job {job} has ended already; job {after} continues", hint=hint)
    return entry


async def share(federation: Federation, entry: JobEntry, user: str, by: str, *, end: bool = False) -> JobEntry:
    """Let a user read a job, or not any more; repeating it has no effect. Raises ``GeofedError("USER_NOT_FOUND")``."""
    if user not in federation.users and not end:
        raise GeofedError("USER_NOT_FOUND", f"user {user} not found")
    async with federation.change() as draft:
        draft.by = by
        entry = draft.job(entry.row.id) or entry
        others = {*entry.row.shared_with} - {user}
        shared = tuple(sorted(others if end else {*others, user}))
        if shared != entry.row.shared_with:
            draft.add_job(replace(entry, row=replace(entry.row, shared_with=shared)))
            what = f"is not shared with {user} any more" if end else f"is shared with {user}"
            draft.record("job.shared", f"job {entry.row.id} {what}", job=entry.row.id, data={"users": shared})
    await federation.rights_changed()
    return await federation.find_job(entry.row.id)
