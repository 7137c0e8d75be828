"""Plan, admit and scale jobs."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

from google.protobuf.json_format import MessageToJson

from control_plane.core import InitialModel, ScaleRequested, StartDelayed, job_state_to_json
from control_plane.pki import utc_now
from control_plane.service.jobs._difference_of_models import refused_by_difference, same_start
from control_plane.service.jobs._signed import require_signed
from control_plane.service.measuring._probing import Probing
from control_plane.service.measuring._task_history import TaskHistory, task_keys
from control_plane.service.planning._admission import AdmittedJob
from control_plane.service.planning._allocation import begin
from control_plane.service.planning._initial_model import initial_model_of
from control_plane.service.planning._planning import (
    declined_error,
    first_state,
    lasting_workers_now,
    on_preemptible,
    plan_json,
    snapshot_of,
    workers_now,
)
from control_plane.service.planning._scaling import is_tuned, pool_of
from control_plane.service.planning._warnings import warnings_of
from control_plane.service.state._draft import OPERATOR, Draft
from control_plane.service.state._entries import JobEntry, RegionEntry
from control_plane.service.state._federation import Federation
from control_plane.spec import JobSpec
from control_plane.store import JobRow
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import common_pb2, control_pb2
from scheduler import Declined, Plan, PlannedPartition, Snapshot

_MAX_PLANS = 5
"""Number of times that a new job is planned, since the federation may change before the plan is stored."""
_VERSION = version("geofed")


@dataclass(frozen=True)
class NewJob:
    """A job that is to be planned and, if it can be run, stored."""

    row: JobRow
    spec: JobSpec
    history: TaskHistory
    """Measurements of its task."""
    initial_model: InitialModel | None


async def answer_plan(
    federation: Federation, probing: Probing, request: control_pb2.PlanRequest, spec: JobSpec, user: str = ""
) -> tuple[str, bool]:
    """Plan a job of a user (empty: the operator) without storing it; return the plan as JSON, and if it is admissible.

    ``spec``: the request's. Raises ``GeofedError``: TASK_FAILED or TASK_INVALID if the task cannot create its model;
    and what `initial_model_of` raises.
    """
    code_digest = request.code_digest
    if request.bundle_digest:
        code_digest = await federation.code_digest(request.bundle_digest)
    initial_model = await initial_model_of(federation, spec, user)
    submission = common_pb2.Submission(user=user or OPERATOR)
    if request.bundle_digest:
        submission = await require_signed(
            federation, request.submission, user, request.spec_json, spec, request.bundle_digest
        )
    history = await probing.history(spec, code_digest, request.bundle_digest, submission)
    async with federation.planning:
        _, answer = await federation.answer(spec, "plan", history, user)
    if isinstance(answer, Declined):
        return plan_json(answer), False
    task_key = task_keys(spec, code_digest)[0] if code_digest else ""
    earlier = await same_start(federation, spec, initial_model, task_key)
    if (refused := refused_by_difference(spec, answer.plan, initial_model, earlier)) is not None:
        return plan_json(refused), False
    warnings = _warnings_of(answer.plan, spec, history, federation.regions, federation.clock())
    return plan_json(answer.plan, answer.waits_for, warnings, initial_model, _promise_of(answer, spec)), True


def _promise_of(decided: AdmittedJob, spec: JobSpec) -> dict[str, Any]:
    """Return what a plan promises: the deadline and the budget. ``deadline_step``: which of the soft deadlines."""
    at = decided.deadline_at
    return {
        "deadline_asked": spec.objective.deadline is not None,
        "deadline_at": utc_now(at).isoformat(timespec="seconds").replace("+00:00", "Z") if at is not None else None,
        "deadline_step": decided.step,
        "budget_usd": spec.objective.budget,
    }


def _warnings_of(
    plan: Plan, spec: JobSpec, history: TaskHistory, regions: Mapping[str, RegionEntry], at: float
) -> tuple[str, ...]:
    return (
        *([history.note] if history.note else ()),
        *warnings_of(plan, spec, regions, at, history.weight, history.runs),
    )


async def submit(
    federation: Federation, probing: Probing, request: control_pb2.SubmitRequest, spec: JobSpec, user: str = ""
) -> tuple[JobEntry, bool]:
    """Store and start a job of a user (empty: the operator); return it, and whether it is new.

    ``spec``: the request's. Raises ``GeofedError``: SPEC_INVALID, REQUEST_CONFLICT; TASK_FAILED or TASK_INVALID if the
    task cannot create its model; INADMISSIBLE, or the code of the reason, if it is declined; and what
    `initial_model_of` raises.
    """
    require_request_id(request.request_id)
    row = new_row(spec, request.bundle_digest, request.request_id, user)
    if (earlier := await _earlier(federation, row)) is not None:
        return earlier, False
    code_digest = await federation.code_digest(request.bundle_digest)
    submission = await require_signed(
        federation, request.submission, user, request.spec_json, spec, request.bundle_digest
    )
    initial_model = await initial_model_of(federation, spec, user)
    signature_json = MessageToJson(submission, indent=None) if submission.public_key else ""
    row = replace(row, task_key=task_keys(spec, code_digest)[0], signature_json=signature_json)
    history = await probing.history(spec, code_digest, request.bundle_digest, submission)
    new = NewJob(row, spec, history, initial_model)

    def check(draft: Draft) -> None:
        if user and user not in draft.users:
            raise GeofedError("UNAUTHENTICATED", f"user {user} was removed")
        for digest in initial_model.uploaded if initial_model is not None else ():
            if federation.blobs.size(digest) is None:
                assert initial_model is not None
                text = f"{initial_model.text}, {digest}, is not at the control plane"
                raise GeofedError("MODEL_NOT_FOUND", text, hint="submit the job again, which uploads a file again")

    return await admit(federation, new, check, earlier=partial(_earlier, federation, row))


def require_request_id(request_id: str) -> None:
    """Raise ``GeofedError("SPEC_INVALID")`` unless it is valid."""
    if not 1 <= len(request_id) <= 256:
        raise GeofedError("SPEC_INVALID", "the request ID must have 1 to 256 characters")


def new_row(spec: JobSpec, bundle_digest: str, request_id: str, user: str) -> JobRow:
    """Return the row of a new job, under a new ID, without a plan."""
    return JobRow(
        id=f"{spec.metadata.name[:40].rstrip('-')}-{secrets.token_hex(4)}",
        name=spec.metadata.name,
        request_id=request_id,
        content_digest=_content_digest(spec, bundle_digest),
        bundle_digest=bundle_digest,
        task_key="",
        spec_json=spec.to_json(),
        plan_json="",
        state_json="",
        phase="",
        created_at=0.0,
        user=user,
        secure_aggregation=spec.privacy.secure_aggregation,
    )


async def _is_new() -> JobEntry | None:
    """Return that a job does not exist yet."""
    return None


async def admit(
    federation: Federation,
    new: NewJob,
    check: Callable[[Draft], None],
    also: Callable[[Draft, AdmittedJob], None] = lambda draft, decided: None,
    earlier: Callable[[], Awaitable[JobEntry | None]] = _is_new,
) -> tuple[JobEntry, bool]:
    """Plan a job, store it and start it; return it, and whether it is new.

    Args:
        check: called in each change before the job is stored; aborts by raising.
        also: further changes, stored together with the job.
        earlier: returns the job if it exists already; None: it does not.

    Raises ``GeofedError``: INADMISSIBLE, or the code of the reason, if it is declined; UNAVAILABLE if the federation
    changes faster than it is planned.
    """
    spec, row, model = new.spec, new.row, new.initial_model
    with ExitStack() as planning:
        await federation.planning.acquire()
        planning.callback(federation.planning.release)
        # No other job is planned meanwhile; the store is read while this one is planned.
        reading = asyncio.gather(earlier(), same_start(federation, spec, model, row.task_key))
        planning.callback(reading.cancel)
        for _ in range(_MAX_PLANS):
            admission, answer = await federation.answer(spec, row.id, new.history, row.user)
            known, earlier_jobs = await reading
            if known is not None:
                return known, False
            async with federation.change() as draft:
                check(draft)
                if isinstance(answer, Declined):
                    raise declined_error(answer)
                present = federation.allocation.admission(draft, spec, row.id, new.history, row.user, at_once=True)
                decided = present.confirm(answer, admission)
                await asyncio.sleep(0)  # others get a turn, since either half takes some milliseconds
                if decided is not None:
                    if (refused := refused_by_difference(spec, decided.plan, model, earlier_jobs)) is not None:
                        raise declined_error(refused)
                    _store(draft, new, decided)
                    also(draft, decided)
                    # The next job is planned while this one is stored.
                    draft.applied = planning.close
            if decided is not None:
                return await federation.lookup.find_job(row.id), True
    raise GeofedError("UNAVAILABLE", "the regions change faster than the job is planned")


async def _earlier(federation: Federation, row: JobRow) -> JobEntry | None:
    """Return the job that was created with the same request ID, or None."""
    earlier = await federation.lookup.job_of_request(row.request_id)
    if earlier is None:
        return None
    if earlier.user != row.user:
        raise GeofedError("REQUEST_CONFLICT", f"request ID {row.request_id} was used by another user")
    if earlier.content_digest != row.content_digest:
        text = f"request ID {row.request_id} was used for job {earlier.id}, with other content"
        raise GeofedError("REQUEST_CONFLICT", text)
    return await federation.lookup.find_job(earlier.id)


def _store(draft: Draft, new: NewJob, decided: AdmittedJob) -> None:
    """Add a new job to a draft, and start it or have it wait."""
    row, spec, model = new.row, new.spec, new.initial_model
    state = first_state(row.id, draft.at, spec, decided.plan, draft.regions, decided.deadline_at, model)
    warnings = _warnings_of(decided.plan, spec, new.history, draft.regions, draft.at)
    row = replace(
        row,
        plan_json=plan_json(decided.plan, "", warnings, model, _promise_of(decided, spec)),
        state_json=job_state_to_json(state),
        phase=state.phase,
        created_at=draft.at,
    )
    entry = JobEntry(row, state, spec, decided.plan)
    draft.add_job(entry)
    by = f" by {row.user}" if row.user else ""
    start = f", to start from {model.text}" if model is not None else ""
    data = {"user": row.user or OPERATOR, "initial_model": asdict(model) if model is not None else None}
    draft.record("job.submitted", f"job {row.id} was submitted{by}{start}", job=row.id, data=data)
    draft.audit(
        "job.submitted", job=row.id, user=data["user"], initial_model=data["initial_model"],
        code=row.bundle_digest, spec_and_code=row.content_digest, dataset=spec.data.dataset,
        residency=decided.plan.residency, plan=_digest_of(row.plan_json),
        regions={part.region: part.workers for part in decided.plan.partitions},
        copies={copy.source: copy.destination for copy in decided.plan.copies},
        secure_aggregation=spec.privacy.secure_aggregation, geofed=_VERSION,
    )  # fmt: skip
    if decided.waits_for:
        draft.apply_to_job(row.id, StartDelayed(draft.at, decided.waits_for))
    else:
        begin(draft, entry, decided.workers, preemptible=decided.preemptible)


def _most_workers(snapshot: Snapshot, part: PlannedPartition, held: int) -> int:
    """Return how many workers a partition that holds some may have; no more if its region is not live."""
    name = part.region
    if (region := snapshot.by_name.get(name)) is None:
        return held
    most = max(0, region.capacity.workers - snapshot.busy_workers.get(name, 0)) + held
    there = region.capacity.shared_devices
    if there is None or not part.devices:
        return most
    return min(most, max(0, there - snapshot.busy_devices.get(name, 0)) // part.devices + held)


async def scale(federation: Federation, job: str, workers: dict[str, int], reason: str, by: str) -> None:
    """Change the numbers of workers of a job's regions, as a user (``by``) has requested; 0 pauses a region.

    Raises ``GeofedError``: ILLEGAL_STATE if the job does not run; REGION_NOT_FOUND; INADMISSIBLE if a region lacks free
    workers, or if a step has fewer samples, or a round fewer clients, than workers.
    """
    entry = await federation.lookup.find_job(job)
    async with federation.change() as draft:
        draft.by = by
        entry = draft.job(entry.row.id) or entry
        if entry.state.phase not in ("starting", "running"):
            raise GeofedError(
                "ILLEGAL_STATE", f"job {entry.row.id} is {entry.state.phase}; only a running job can be scaled"
            )
        planned = {part.region: part for part in entry.plan.partitions}
        snapshot = snapshot_of(federation.regions.values(), federation.jobs.values(), TaskHistory())
        if unknown := next((region for region in workers if region not in planned), ""):
            raise GeofedError(
                "REGION_NOT_FOUND", f"region {unknown} is not part of job {entry.row.id}", hint=", ".join(planned)
            )
        moves = on_preemptible(entry)
        if moves:
            # Scaling by hand moves all regions of the job from preemptible to regular workers.
            workers = {**workers_now(entry), **workers}
        for region, wanted in workers.items():
            held = lasting_workers_now(entry).get(region, 0)
            free = _most_workers(snapshot, planned[region], held)
            if wanted > free:
                kind, hint = "regular workers" if moves else "workers", ""
                if moves:
                    hint = "scaling moves all regions of the job to regular workers: give fewer for each region"
                text = f"region {region} has {free} {kind} for this job; {wanted} were requested"
                raise GeofedError("INADMISSIBLE", text, hint=hint or None)
            if is_tuned(entry.spec) and wanted > (most := pool_of(entry.plan)[region]):
                text = f"region {region} is limited to {most} workers of this tuned job; {wanted} were requested"
                raise GeofedError("INADMISSIBLE", text)
            if wanted > (most := planned[region].most_workers):
                step = (
                    f"round in {region} has {most} clients"
                    if planned[region].clients
                    else (f"step in {region} has {most} samples")
                )
                raise GeofedError("INADMISSIBLE", f"a {step}, fewer than {wanted} workers")
            stages = len(shape.stages) if (shape := planned[region].pipeline) is not None else 1
            if wanted % stages:
                raise GeofedError(
                    "INADMISSIBLE",
                    f"region {region} runs a pipeline of {stages} stages: its workers must be a multiple of {stages}",
                )
        federation.allocation.scaled_by_hand(entry, workers, draft.at)
        draft.apply_to_job(entry.row.id, ScaleRequested(draft.at, workers, reason))


def _digest_of(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _content_digest(spec: JobSpec, bundle_digest: str) -> str:
    content = f"{spec.to_json()}\n{bundle_digest}"
    return _digest_of(content)
