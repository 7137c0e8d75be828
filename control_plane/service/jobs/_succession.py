"""A running job that is replanned: it ends with the model that it has, and another one continues with that, over the
regions that are there now.

The job that ends stays until the other one is planned, and both are stored in one change: a crash between the two finds
the one waiting, or the other there. Where nothing is left to train, or what is left cannot be run, there is no other.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import structlog

from control_plane.core import InitialModel, ReplanRequested, SuccessorDecided, may_end_early
from control_plane.service.jobs._result import runs_so_far
from control_plane.service.jobs._submission import Newcomer, admit, new_row
from control_plane.service.measuring._known import Learnt, task_keys
from control_plane.service.planning._admission import Decision
from control_plane.service.planning._planning import declined_error
from control_plane.service.planning._replan_gain import ROUNDS_SEEN, Pace, pays
from control_plane.service.state._draft import Draft, JobEntry
from control_plane.service.state._federation import Federation
from control_plane.spec import JobSpec, parse_json
from geofed_pb.errors import GeofedError
from scheduler import Declined, Plan

__all__ = ["Succession", "rest_of"]

_log = structlog.get_logger("geofed.succession")
_LOOK_SECONDS = 0.5
_LATEST_SEED = 1 << 63
_SETTLED_SECONDS = 10.0
"""A region must have been there for so long: one that comes and goes is no reason."""
_AGAIN_SECONDS = 60.0
"""Between two plans of what is left, while the same regions are there."""
_SHARE_BEFORE_AGAIN = 0.1
"""Of the rounds of a job that continues with another's model, before it is replanned by itself: what it cost to start
must come back, whatever comes and goes."""
_BACK_SECONDS = 5.0
"""A region that has just become silent is waited for: all are when the control plane has been restarted."""
_REQUEST = "replan-"
"""What the request ids of jobs that continue with another's model begin with."""


class _Gone(Exception):
    """The job does not wait for another one any more."""


class Succession:
    """Has running jobs replanned."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._asked: dict[str, tuple[set[str], float]] = {}
        """Jobs that might take regions up: which were there when that was last evaluated, and when."""
        self._paces: dict[str, Pace] = {}
        """Of those jobs."""
        self._since = federation.clock()

    async def replan(self, job: str, reason: str) -> None:
        """Replan a job: end it, and continue its model in a new job; once, however often it is asked for.

        Raises ``GeofedError``: ILLEGAL_STATE where it does not run, or is about to end, INADMISSIBLE or the code of the
        reason where what is left of it could not be run, or would be run in the same regions. It continues then.
        """
        federation = self._federation
        entry = federation.jobs.get(job)
        if entry is None or entry.state.phase != "running":
            raise GeofedError("ILLEGAL_STATE", f"job {job} does not run; only a running job is replanned")
        if entry.state.replanned:
            return
        if entry.state.ends_early:
            raise GeofedError("ILLEGAL_STATE", f"job {job} is ending already: {entry.state.ends_early}")
        if away := [part.region for part in entry.state.partitions if part.link == "lost"]:
            text = f"region {', '.join(away)} is lost: all regions of {job} must be there to end together"
            raise GeofedError("ILLEGAL_STATE", text)
        await self._ask(entry, await self._predicted(entry), reason)

    async def _predicted(self, entry: JobEntry) -> Plan:
        """How what is left of a job would be run; raises ``GeofedError`` where not at all, or in the same regions."""
        job, rest = entry.row.id, rest_of(entry)
        learnt = await self._learnt(entry, rest)
        async with self._federation.planning:
            there = _without_regions(rest, self._silent(entry))
            _, answer = await self._federation.answer(there, "plan", learnt, entry.row.user, without=job)
        if isinstance(answer, Declined):
            refused = declined_error(answer)
            text = f"what is left of {job} could not be run, so it continues as it is: {refused.message}"
            raise GeofedError(refused.code, text, hint=refused.hint)
        if _regions(answer.plan) == _regions(entry.plan):
            now = ", ".join(_regions(entry.plan))
            text = f"what is left of {job} would be run in the same regions again, so it continues: {now}"
            raise GeofedError("INADMISSIBLE", text, hint="`control-plane explain` says why others are left out")
        return answer.plan

    async def _ask(self, entry: JobEntry, then: Plan, reason: str, *, by_itself: bool = False) -> None:
        job, regions = entry.row.id, _regions(then)
        why = f"what is left is replanned, over {', '.join(regions)}" + (f": {reason}" if reason else "")
        data = {"regions": _regions(entry.plan), "wanted": regions, "reason": reason, "by_itself": by_itself}
        async with self._federation.change() as draft:
            draft.tell_job(job, ReplanRequested(draft.at, why, data))
            present = draft.job(job)
            if present is None or not present.state.replanned:
                raise GeofedError("ILLEGAL_STATE", f"job {job} is about to end")

    async def run(self) -> None:
        """Look after jobs that wait for the one that continues with their model, for ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for entry in list(self._federation.jobs.values()):
                try:
                    if entry.state.awaits_successor:
                        await self._go_on(entry)
                    elif self._may_pay(entry):
                        await self._take_up(entry)
                except GeofedError as error:
                    what = "not continued with yet" if entry.state.awaits_successor else "stays as it is"
                    _log.info(what, job=entry.row.id, code=error.code, error=error.message)
                except Exception:  # noqa: BLE001 - the edge of a task that must not end: jobs wait for it
                    _log.exception("a job could not be replanned", job=entry.row.id)

    # --- by itself

    def _may_pay(self, entry: JobEntry) -> bool:
        """Where regions that a job has no part in have been there for a while: now and then it is worth a plan."""
        state, spec, at = entry.state, entry.spec, self._federation.clock()
        job, parts = entry.row.id, entry.state.partitions
        for known in (self._asked, self._paces):
            for gone in set(known) - set(self._federation.jobs):
                del known[gone]
        if spec.regions.replan != "auto" or not may_end_early(state):
            return False
        done = min((part.report.round if part.report else 0 for part in parts), default=0)
        if job not in self._paces:
            self._paces[job] = Pace(state.started_at if state.started_at >= self._since else None)
        self._paces[job].heard(done, at)
        if any(part.link != "live" for part in parts):
            return False
        least = _SHARE_BEFORE_AGAIN * entry.plan.rounds if entry.row.request_id.startswith(_REQUEST) else 0.0
        if self._paces[job].round_seconds is None or done < max(ROUNDS_SEEN, least):
            return False
        there = {
            name
            for name, region in self._federation.regions.items()
            if name not in _taken(entry)
            and region.state.phase == "live"
            and at - region.state.since >= _SETTLED_SECONDS
        }
        before, asked_at = self._asked.get(job, (set(), -math.inf))
        if not there or (there == before and at - asked_at < _AGAIN_SECONDS):
            return False
        self._asked[job] = there, at
        return True

    async def _take_up(self, entry: JobEntry) -> None:
        then, pace = await self._predicted(entry), self._paces[entry.row.id].round_seconds
        if pace is not None and (reason := pays(entry, then, pace)):
            await self._ask(entry, then, reason, by_itself=True)

    # --- the job under way

    def _silent(self, entry: JobEntry, seconds: float = math.inf) -> list[str]:
        """Regions that a job has no part in and that are silent, for less than so long: they may be gone already, and
        what would wait for them would fail without them."""
        at, taken = self._federation.clock(), _taken(entry)
        return [
            name
            for name, region in sorted(self._federation.regions.items())
            if name not in taken and region.state.phase == "unreachable" and at - region.state.since < seconds
        ]

    async def _go_on(self, entry: JobEntry) -> None:
        if silent := self._silent(entry, _BACK_SECONDS):
            raise GeofedError("UNAVAILABLE", f"region {', '.join(silent)} is silent; it may be back in a moment")
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
        request = f"{_REQUEST}{row.id}-{secrets.token_hex(8)}"
        key, _ = await self._keys(entry, rest)
        new_job = new_row(rest, row.bundle_digest, request, row.user)
        model = InitialModel(row.id, state.blob_digest, state.blob_bytes)
        silent = self._silent(entry)
        # Only planned without them: its file stays as it is.
        planned = _without_regions(rest, silent)
        new = Newcomer(replace(new_job, task_key=key), planned, await self._learnt(entry, rest), model)

        async def look(draft: Draft) -> JobEntry | None:
            present = draft.job(row.id)
            if present is None or not present.state.awaits_successor:
                raise _Gone
            return None

        def also(draft: Draft, decided: Decision) -> None:
            regions, taken = _regions(decided.plan), _taken(entry)
            wanted = {*regions, *(copy.source for copy in decided.plan.copies)}
            for name in sorted(wanted - taken):
                region = draft.region(name)
                if region is None or region.state.phase != "live":
                    raise GeofedError("UNAVAILABLE", f"region {name} has become silent")
            if (stored := draft.job(new_job.id)) is not None:
                draft.add_job(replace(stored, spec=rest))
            over = "the same regions as before" if regions == _regions(entry.plan) else ", ".join(regions)
            text = f"job {new_job.id} continues with its model, over {over}"
            if silent:
                text += f"; planned without {', '.join(silent)}, as nothing is heard of it"
            data = {"successor": new_job.id, "regions": regions}
            draft.tell_job(row.id, SuccessorDecided(draft.at, new_job.id, text, data))
            if late is not None:
                told = f"the deadline promised to {row.id} cannot be promised any more: {late.message}"
                draft.record("job.promise", told, job=new_job.id, data={"in_danger": True, "late_seconds": None})

        await admit(self._federation, new, look, also)

    async def _give_up(self, entry: JobEntry, error: GeofedError) -> None:
        async with self._federation.change() as draft:
            text = f"no job continues with its model: {error.message}"
            data: dict[str, Any] = {"successor": None, "regions": [], "code": error.code}
            draft.tell_job(entry.row.id, SuccessorDecided(draft.at, "", text, data))

    async def _keys(self, entry: JobEntry, rest: JobSpec) -> tuple[str, str]:
        return task_keys(rest, await self._federation.code_digest(entry.row.bundle_digest))

    async def _learnt(self, entry: JobEntry, rest: JobSpec) -> Learnt:
        """Of the task: what the job itself has told comes before all."""
        keys = await self._keys(entry, rest)
        own = runs_so_far(entry.row, entry.state, entry.spec, entry.plan, self._federation.clock())
        return await self._federation.read(lambda store: Learnt((*own, *store.runs(*keys)), store.weight(keys[0])))


def rest_of(entry: JobEntry) -> JobSpec:
    """What is left of a job, as the file of another one that starts from its model.

    Deadline and budget are what is left of them. The samples come in another order, as the first ones were seen; a
    learning rate that follows a schedule continues where it is. Raises ``GeofedError`` ILLEGAL_STATE: nothing is left.
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


def _without_regions(spec: JobSpec, names: list[str]) -> JobSpec:
    avoid = list(dict.fromkeys([*spec.regions.avoid, *names]))
    return spec.model_copy(update={"regions": spec.regions.model_copy(update={"avoid": avoid})})


def _taken(entry: JobEntry) -> set[str]:
    """Regions that have a part in a job, or hand a shard of it over."""
    return {*_regions(entry.plan), *(copy.source for copy in entry.plan.copies)}


def _regions(plan: Plan) -> list[str]:
    return [part.region for part in plan.partitions]
