"""What users may do to a job: end it, replan it, name it, and let others read it."""

from __future__ import annotations

import re
from dataclasses import replace

from control_plane._view import standing_text
from control_plane.core import CancelRequested, FinishRequested
from control_plane.service.jobs._replanner import Replanner
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._federation import Federation
from geofed_pb.errors import GeofedError

__all__ = ["cancel", "finish", "rename", "replan", "share"]

_JOB_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


async def cancel(federation: Federation, entry: JobEntry, reason: str, by: str) -> JobEntry:
    """Cancel a job; repeating it has no effect. ``by``: name of the caller, for events.

    Raises ``GeofedError("ILLEGAL_STATE")`` if it has succeeded or failed.
    """
    if entry.state.phase in ("succeeded", "failed"):
        raise GeofedError("ILLEGAL_STATE", f"job {entry.row.id} has {entry.state.phase} already")
    async with federation.change() as draft:
        draft.by = by
        draft.apply_to_job(entry.row.id, CancelRequested(draft.at, reason))
    return await federation.lookup.find_job(entry.row.id)


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
    entry = await federation.lookup.find_job(job)
    if after := entry.state.successor:
        hint = f"`geofed finish {after}` ends that job"
        raise GeofedError("ILLEGAL_STATE", f"job {job} has ended already; job {after} continues", hint=hint)
    return entry


async def replan(federation: Federation, replanner: Replanner, entry: JobEntry, reason: str, by: str) -> JobEntry:
    """Replan a job that runs: end it, and continue its model in a new job over the regions that are available now.

    Raises ``GeofedError("ILLEGAL_STATE")`` if it has ended, and what `Replanner.replan` raises.
    """
    if entry.state.terminal:
        raise _ended(entry)
    await replanner.replan(entry.row.id, reason, by)
    return await federation.lookup.find_job(entry.row.id)


async def share(federation: Federation, entry: JobEntry, user: str, by: str, *, end: bool = False) -> JobEntry:
    """Let a user read a job, or not any more; repeating it has no effect. Raises ``GeofedError("USER_NOT_FOUND")``."""
    if user not in federation.users and not end:
        raise GeofedError("USER_NOT_FOUND", f"user {user} not found")
    async with federation.change() as draft:
        draft.by = by
        entry = await _now(federation, draft, entry.row.id)
        others = {*entry.row.shared_with} - {user}
        shared = tuple(sorted(others if end else {*others, user}))
        if shared != entry.row.shared_with:
            draft.add_job(replace(entry, row=replace(entry.row, shared_with=shared)))
            what = f"is not shared with {user} any more" if end else f"is shared with {user}"
            draft.record("job.shared", f"job {entry.row.id} {what}", job=entry.row.id, data={"users": shared})
    await federation.rights_changed()
    return await federation.lookup.find_job(entry.row.id)


async def rename(federation: Federation, entry: JobEntry, name: str, by: str) -> JobEntry:
    """Give a job another name; repeating it has no effect. Raises ``GeofedError("SPEC_INVALID")``."""
    if not _JOB_NAME.fullmatch(name):
        hint = "lower-case letters, digits and hyphens, 63 at most"
        raise GeofedError("SPEC_INVALID", f"{name!r} is no name of a job", hint=hint)
    async with federation.change() as draft:
        draft.by = by
        entry = await _now(federation, draft, entry.row.id)
        if name != entry.row.name:
            text = f"job {entry.row.id} is called {name}, no longer {entry.row.name}"
            draft.record("job.renamed", text, job=entry.row.id, data={"before": entry.row.name, "name": name})
            draft.add_job(replace(entry, row=replace(entry.row, name=name)))
    return await federation.lookup.find_job(entry.row.id)


async def _now(federation: Federation, draft: Draft, job: str) -> JobEntry:
    """Return a job as it is during a change, when nobody else changes or deletes it."""
    entry = draft.job(job) or await federation.lookup.ended_job(job)
    if entry is None:
        raise GeofedError("JOB_NOT_FOUND", f"job {job} not found")
    return entry


def _ended(entry: JobEntry) -> GeofedError:
    """Return the error for replanning a job that has ended."""
    job, state = entry.row.id, entry.state
    hint = None
    if state.successor:
        hint = f"it continued as {state.successor}"
    elif state.phase == "succeeded":
        hint = f"a new job with `train.initialModel: {{job: {job}}}` starts from its model"
    text = f"job {job} {standing_text(state.phase)}; only a running job can be replanned"
    return GeofedError("ILLEGAL_STATE", text, hint=hint)
