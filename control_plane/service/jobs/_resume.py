"""Resume ended jobs: a new job trains the rest, with the same code, from the last kept model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from control_plane._view import standing_text
from control_plane.service.jobs._replanner import rest_of
from control_plane.service.jobs._submission import NewJob, admit, new_row, require_request_id
from control_plane.service.measuring._probing import Probing
from control_plane.service.measuring._task_history import task_keys
from control_plane.service.planning._initial_model import kept_model, starting_from
from control_plane.service.rpc._wire import submission_of
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._federation import Federation
from geofed_pb.errors import GeofedError

__all__ = ["resume"]


async def resume(federation: Federation, probing: Probing, job: str, request_id: str, by: str) -> tuple[JobEntry, bool]:
    """Store and start a job that continues an ended one; return it, and whether it is new. It is the user's whose the
    ended one is; ``by``: who asks for it.

    A deadline that is past is left out. Raises ``GeofedError``: ILLEGAL_STATE if the job has not ended, was continued
    by a replan, or has nothing left to train; MODEL_NOT_FOUND if no model of it is kept; and what `admit` raises.
    """
    require_request_id(request_id)
    entry = await federation.lookup.find_job(job)
    row, state = entry.row, entry.state
    if not state.terminal:
        text = f"job {row.id} {standing_text(state.phase)}; only an ended job can be resumed"
        raise GeofedError("ILLEGAL_STATE", text)
    if state.successor:
        hint = f"`geofed resume {state.successor}` continues that one once it has ended"
        raise GeofedError("ILLEGAL_STATE", f"job {row.id} was continued as {state.successor}", hint=hint)
    if (earlier := await _earlier(federation, entry, request_id)) is not None:
        return earlier, False
    model = kept_model(entry, None)
    rest = rest_of(entry, federation.clock(), model)
    if state.deadline_at is not None and state.deadline_at <= federation.clock():
        rest = rest.model_copy(update={"objective": rest.objective.model_copy(update={"deadline": None})})
    code_digest = await federation.code_digest(row.bundle_digest)
    history = await probing.history(rest, code_digest, row.bundle_digest, submission_of(row))
    new_job = replace(
        new_row(rest, row.bundle_digest, request_id, row.user),
        task_key=task_keys(rest, code_digest)[0],
        # The signature is over the code and its data, which both jobs share.
        signature_json=row.signature_json,
        shared_with=row.shared_with,
    )

    def check(draft: Draft) -> None:
        draft.by = by

    new = NewJob(new_job, rest, history, starting_from(federation, entry, model))
    return await admit(federation, new, check, earlier=partial(_earlier, federation, entry, request_id))


async def _earlier(federation: Federation, entry: JobEntry, request_id: str) -> JobEntry | None:
    """Return the job that was created with the same request ID, or None."""
    row = await federation.lookup.job_of_request(request_id)
    if row is None:
        return None
    found = await federation.lookup.find_job(row.id)
    initial = found.state.initial_model
    if row.user != entry.row.user or initial is None or initial.job != entry.row.id:
        raise GeofedError("REQUEST_CONFLICT", f"request ID {request_id} was used for another job")
    return found
