"""Resolve `train.initialModel`: what a job starts from, the model of another job or a user's file."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from control_plane._safetensors import check_weights
from control_plane._view import standing_text
from control_plane.core import InitialModel, KeptModel, best_model, last_model, models_of
from control_plane.service.state._callers import caller_named
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._federation import Federation
from control_plane.spec import JobSpec, StartsFrom
from geofed_pb.errors import GeofedError

__all__ = ["initial_model_of", "kept_model", "starting_from"]


async def initial_model_of(federation: Federation, spec: JobSpec, user: str) -> InitialModel | None:
    """Return the model that a job of a user (empty: the operator) starts from; None: the task's own.

    Raises ``GeofedError``: JOB_NOT_FOUND; FORBIDDEN for a job that the user may not read; MODEL_NOT_FOUND if the job
    has not ended, or has no such model; SPEC_INVALID for a file that is none. A file need not have arrived yet: it has
    0 bytes then, as one that the regions read themselves.
    """
    wanted = spec.train.initial_model
    if wanted is None:
        return None
    if wanted.job is None:
        return await _of_files(federation, wanted)
    caller = caller_named(federation.users, user)
    entry = await federation.lookup.find_job(wanted.job, caller.may_read)
    job, state = entry.row.id, entry.state
    caller.require("contents", entry.row)
    if not state.terminal:
        text = f"job {job} {standing_text(state.phase)}; a job can start from its model once it has ended"
        raise GeofedError("MODEL_NOT_FOUND", text, hint="wait for it, or finish it")
    return starting_from(federation, entry, kept_model(entry, wanted.round))


async def _of_files(federation: Federation, wanted: StartsFrom) -> InitialModel:
    adapter = wanted.adapter
    if wanted.uri is not None:
        assert wanted.digest is not None
        model = InitialModel("", wanted.digest, 0, 0, wanted.uri.rpartition("/")[2], wanted.partial, wanted.uri)
    else:
        digest, size = await _uploaded(federation, wanted.digest, "file")
        model = InitialModel("", digest, size, 0, wanted.file or "", wanted.partial)
    if adapter is None:
        return model
    digest, size = await _uploaded(federation, adapter.digest, "adapter.file")
    return replace(model, adapter=digest, adapter_bytes=size, adapter_file=adapter.file)


async def _uploaded(federation: Federation, digest: str | None, key: str) -> tuple[str, int]:
    """Return the digest and bytes of an uploaded file; 0: it has not arrived yet."""
    if digest is None:
        text = f"train.initialModel.{key}: the digest is missing"
        raise GeofedError("SPEC_INVALID", text, hint="submit by `geofed`")
    size = federation.blobs.size(digest)
    if size is not None:
        try:
            await asyncio.to_thread(check_weights, federation.blobs.path(digest))
        except (OSError, ValueError) as error:
            raise GeofedError("SPEC_INVALID", f"{digest} is no file of safetensors: {error}") from None
    return digest, size or 0


def starting_from(federation: Federation, entry: JobEntry, model: KeptModel) -> InitialModel:
    """Return a model of a job as the one to start from. Raises ``GeofedError("MODEL_NOT_FOUND")``: it is missing."""
    job = entry.row.id
    if federation.blobs.size(model.digest) is None:
        hint = "its file was removed from the control plane's state directory"
        raise GeofedError("MODEL_NOT_FOUND", f"the model of {job}, {model.digest}, is missing", hint=hint)
    return InitialModel(job, model.digest, model.bytes, model.round)


def kept_model(entry: JobEntry, wanted: int | str | None) -> KeptModel:
    """Return a model of a job: that of a round, the "best" one, or (None) the last one.

    Raises ``GeofedError("MODEL_NOT_FOUND")``.
    """
    job, state = entry.row.id, entry.state
    models = models_of(state)
    if not models:
        text, hint = f"job {job} {standing_text(state.phase)}; no model of it is kept", "wait for its first evaluation"
        if state.terminal or not state.evaluate_every:
            hint = "with `train.evaluateEvery` the control plane keeps models of evaluated rounds"
        raise GeofedError("MODEL_NOT_FOUND", text, hint=hint)
    if wanted == "best":
        found = best_model(state)
        text = f"no kept model of job {job} has the metric {state.keep.metric}"
        measured = ", ".join(sorted({name for model in models for name in model.metrics}))
        hint = f"name one of {measured} in `train.best`" if measured else "its `metrics` measure nothing"
    else:
        last = last_model(state) if wanted is None else None
        found = last or next((model for model in models if model.round == wanted), None)
        text = f"the model of round {wanted} of job {job} is not kept"
        hint = "kept rounds: " + ", ".join(str(model.round) for model in models)
    if found is None:
        raise GeofedError("MODEL_NOT_FOUND", text, hint=hint)
    return found
