"""Resolve `train.initialModel`: the model of another job that a job starts from."""

from __future__ import annotations

from control_plane._view import standing_text
from control_plane.core import InitialModel
from control_plane.service.rpc._users import Caller
from control_plane.service.state._federation import Federation
from control_plane.spec import JobSpec
from geofed_pb.errors import GeofedError

__all__ = ["initial_model_of"]


async def initial_model_of(federation: Federation, spec: JobSpec, user: str) -> InitialModel | None:
    """Return the model that a job of a user (empty: the operator) starts from; None: the task's own.

    Raises ``GeofedError``: JOB_NOT_FOUND; FORBIDDEN for a job that the user may not read; MODEL_NOT_FOUND if the job
    has no model.
    """
    wanted = spec.train.initial_model
    if wanted is None:
        return None
    entry = await federation.find_job(wanted.job, Caller(user).may_read)
    job, state = entry.row.id, entry.state
    Caller(user).require("read", entry.row)
    if state.phase != "succeeded" or not state.blob_digest:
        text = f"job {job} {standing_text(state.phase)}; it has no model to start from"
        pending = not state.terminal and state.phase != "cancelling"
        hint = "wait for it to succeed" if pending else "name a job that has succeeded"
        raise GeofedError("MODEL_NOT_FOUND", text, hint=hint)
    if federation.blobs.size(state.blob_digest) is None:
        hint = "its file was removed from the control plane's state directory"
        raise GeofedError("MODEL_NOT_FOUND", f"the model of {job}, {state.blob_digest}, is missing", hint=hint)
    return InitialModel(job, state.blob_digest, state.blob_bytes)
