"""A running job that is planned anew: it ends with the model that it has, and another one goes on with that, over the
regions that are there now.

The job that ends stays until the other one is planned, and both are stored in one change: a crash between the two finds
the one waiting, or the other there. Where nothing is left to train, or what is left cannot be run, there is no other.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import structlog

from control_plane.core import Continued, InitialModel, ReplanAsked
from control_plane.service._admission import Decision
from control_plane.service._draft import Draft, JobEntry
from control_plane.service._federation import Federation
from control_plane.service._known import task_keys
from control_plane.service._planning import declined_error
from control_plane.service._result import runs_so_far
from control_plane.service._submission import Newcomer, admit, new_row
from control_plane.spec import JobSpec, parse_json
from control_plane.store import RunRow
from geofed_pb.errors import GeofedError
from scheduler import Declined

__all__ = ["Succession", "rest_of"]

_log = structlog.get_logger("geofed.succession")
_LOOK_SECONDS = 0.5
_LATEST_SEED = 1 << 63


class _Gone(Exception):
    """The job does not wait for another one any more."""


class Succession:
    """Has running jobs planned anew."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation

    async def replan(self, job: str, reason: str) -> None:
        """Have a job end, and another one go on with its model; once, however often it is asked for.

        Raises ``GeofedError``: ILLEGAL_STATE where it does not run, or is about to end, INADMISSIBLE or the code of the
        reason where what is left of it could not be run, or would be run in the same regions. It goes on then.
        """
        federation = self._federation
        entry = federation.jobs.get(job)
        if entry is None or entry.state.phase != "running":
            raise GeofedError("ILLEGAL_STATE", f"job {job} does not run; only a running job is planned anew")
        if entry.state.replanned:
            return
        if entry.state.ends_early:
            raise GeofedError("ILLEGAL_STATE", f"job {job} is ending already: {entry.state.ends_early}")
        now = [part.region for part in entry.plan.partitions]
        rest = rest_of(entry)
        runs = await self._runs(entry, rest)
        async with federation.planning:
            _, answer = await federation.answer(rest, "plan", runs, entry.row.user, without=job)
        if isinstance(answer, Declined):
            refused = declined_error(answer)
            text = f"what is left of {job} could not be run, so it goes on as it is: {refused.message}"
            raise GeofedError(refused.code, text, hint=refused.hint)
        then = [part.region for part in answer.plan.partitions]
        if then == now:
            text = f"what is left of {job} would be run in the same regions again, so it goes on: {', '.join(now)}"
            raise GeofedError("INADMISSIBLE", text, hint="`control-plane explain` says why others are left out")
        why = f"what is left is planned anew, over {', '.join(then)}" + (f": {reason}" if reason else "")
        async with federation.change() as draft:
            asked = ReplanAsked(draft.at, why, {"regions": now, "wanted": then, "reason": reason})
            draft.tell_job(job, asked)
            entry = draft.job(job)
            if entry is None or not entry.state.replanned:
                raise GeofedError("ILLEGAL_STATE", f"job {job} is about to end")

    async def run(self) -> None:
        """Look after jobs that wait for the one that goes on with their model, for ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for entry in [entry for entry in self._federation.jobs.values() if entry.state.awaits_successor]:
                try:
                    await self._go_on(entry)
                except GeofedError as error:
                    _log.warning("not gone on with yet", job=entry.row.id, code=error.code, error=error.message)
                except Exception:  # noqa: BLE001 - the edge of a task that must not end: jobs wait for it
                    _log.exception("not gone on with", job=entry.row.id)

    async def _go_on(self, entry: JobEntry) -> None:
        try:
            rest = rest_of(entry)
            try:
                await self._admit(entry, rest)
            except GeofedError as error:
                if rest.objective.deadline is None or error.code not in ("INADMISSIBLE", "QUOTA_EXCEEDED"):
                    raise
                # It could be promised when the job was asked to end; it trains on, late as it may be.
                await self._admit(entry, _without_deadline(rest), late=error)
        except GeofedError as error:
            if error.retryable:
                raise
            await self._give_up(entry, error)
        except _Gone:
            return

    async def _admit(self, entry: JobEntry, rest: JobSpec, late: GeofedError | None = None) -> None:
        state, row = entry.state, entry.row
        # Of each try, another one: whether it was stored is seen by what the job before it waits for.
        request = f"replan-{row.id}-{secrets.token_hex(8)}"
        key, _ = await self._keys(entry, rest)
        new_job = new_row(rest, row.bundle_digest, request, row.user)
        model = InitialModel(row.id, state.blob_digest, state.blob_bytes)
        new = Newcomer(replace(new_job, task_key=key), rest, await self._runs(entry, rest), model)

        async def look(draft: Draft) -> JobEntry | None:
            present = draft.job(row.id)
            if present is None or not present.state.awaits_successor:
                raise _Gone
            return None

        def also(draft: Draft, decided: Decision) -> None:
            regions = [part.region for part in decided.plan.partitions]
            text = f"job {new_job.id} goes on with its model, over {', '.join(regions)}"
            data = {"successor": new_job.id, "regions": regions}
            draft.tell_job(row.id, Continued(draft.at, new_job.id, text, data))
            if late is not None:
                told = f"the deadline promised to {row.id} cannot be promised any more: {late.message}"
                draft.record("job.promise", told, job=new_job.id, data={"in_danger": True, "late_seconds": None})

        await admit(self._federation, new, look, also)

    async def _give_up(self, entry: JobEntry, error: GeofedError) -> None:
        async with self._federation.change() as draft:
            text = f"no job goes on with its model: {error.message}"
            data: dict[str, Any] = {"successor": None, "regions": [], "code": error.code}
            draft.tell_job(entry.row.id, Continued(draft.at, "", text, data))

    async def _keys(self, entry: JobEntry, rest: JobSpec) -> tuple[str, str]:
        return task_keys(rest, await self._federation.code_digest(entry.row.bundle_digest))

    async def _runs(self, entry: JobEntry, rest: JobSpec) -> list[RunRow]:
        """Of the task, newest first: what the job itself has told comes before all."""
        keys = await self._keys(entry, rest)
        own = runs_so_far(entry.row, entry.state, entry.spec, entry.plan, self._federation.clock())
        return [*own, *await self._federation.read(lambda store: store.runs(*keys))]


def rest_of(entry: JobEntry) -> JobSpec:
    """What is left of a job, as the file of another one that starts from its model.

    Deadline and budget are what is left of them. The samples come in another order, as the first ones were seen; a
    learning rate that follows a schedule goes on where it is. Raises ``GeofedError`` ILLEGAL_STATE: nothing is left.
    """
    state, spec, job = entry.state, entry.spec, entry.row.id
    reports = [part.report for part in state.partitions if part.report is not None]
    done = min((report.round for report in reports), default=0)
    share = done / entry.plan.rounds
    told: dict[str, Any] = json.loads(spec.to_json())
    train, objective = told["train"], told["objective"]
    train["initialModel"] = {"job": job}
    train["seed"] = (spec.train.seed + 1) % _LATEST_SEED
    end = spec.train.end
    if end.steps is not None:
        train["end"]["steps"] = end.steps - done * entry.plan.interval
    if end.epochs is not None:
        train["end"]["epochs"] = end.epochs * (1 - share)
    if max(train["end"]["steps"] or 0, train["end"]["epochs"] or 0) <= 0:
        raise GeofedError("ILLEGAL_STATE", f"nothing is left to train of {job}")
    if spec.train.learning_rate is not None:
        begin = spec.train.learning_rate.begin
        train["learningRate"]["begin"] = begin + (1 - begin) * share
    objective["soft"] = []
    ends = state.deadline_at
    objective["deadline"] = None if ends is None else datetime.fromtimestamp(ends, UTC).isoformat()
    if spec.objective.budget is not None:
        handed = [copy.report for copy in state.copies if copy.report is not None]
        paid = sum(charge.usd for report in (*reports, *handed) for charge in report.money)
        objective["budget"] = spec.objective.budget - paid
        if objective["budget"] <= 0:
            raise GeofedError("ILLEGAL_STATE", f"the budget of {job} is spent")
    return parse_json(json.dumps(told))


def _without_deadline(spec: JobSpec) -> JobSpec:
    return spec.model_copy(update={"objective": spec.objective.model_copy(update={"deadline": None})})
