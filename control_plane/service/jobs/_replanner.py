"""Replan running jobs: a job ends early, and a new job continues its model over the regions that are available now.

The ending job stays active until its successor is planned, and both changes are stored in one transaction, so that a
crash leaves either the job waiting or the successor created. If nothing is left to train, or the rest cannot be run,
there is no successor.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

from control_plane._durations import format_duration
from control_plane.core import (
    InitialModel,
    KeptModel,
    ReplanRequested,
    SuccessorDecided,
    may_end_early,
    why_not_without,
)
from control_plane.service.jobs._difference_of_models import refused_without
from control_plane.service.jobs._result import runs_so_far
from control_plane.service.jobs._submission import NewJob, admit, new_row
from control_plane.service.measuring._task_history import TaskHistory, task_keys
from control_plane.service.planning._admission import AdmittedJob
from control_plane.service.planning._initial_model import kept_model
from control_plane.service.planning._planning import declined_error
from control_plane.service.planning._replan_gain import ROUNDS_SEEN, RoundTimes, pays
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._federation import Federation
from control_plane.spec import JobSpec, batch_of, parse_json
from geofed_pb.errors import GeofedError
from scheduler import Declined, Plan

__all__ = ["Replanner", "rest_of"]

_log = structlog.get_logger("geofed.replanner")
_POLL_SECONDS = 0.5
"""Time between two checks of all jobs."""
_CHECKED_AT_ONCE = 100
"""Jobs that are checked before others of the control plane's work: about a millisecond."""
_SEED_LIMIT = 1 << 63
"""Seeds are below this."""
_STABLE_SECONDS = 10.0
"""Time that a region must have been live before a job is replanned for it, so that an unstable region does not
count."""
_REPLAN_INTERVAL_SECONDS = 60.0
"""Time between two plans of a job's rest while the same regions are live."""
_MIN_SHARE_OF_ROUNDS = 0.1
"""Share of its rounds that a successor completes before it is replanned automatically, to pay for its start."""
_RECONNECT_SECONDS = 5.0
"""Time that a region which has just become unreachable is waited for; all are after a restart of the control plane."""
_REQUEST_PREFIX = "replan-"
"""Prefix of the request IDs of successors."""


class _NotWaiting(Exception):
    """The job does not wait for a successor any more."""


class Replanner:
    """Replans running jobs, on request or automatically, and creates their successors."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._evaluated: dict[str, tuple[set[str], float]] = {}
        """By job: the additional live regions at the last automatic evaluation, and its time."""
        self._paces: dict[str, RoundTimes] = {}
        """Pace of the jobs that may be replanned automatically."""
        self._since = federation.clock()

    async def replan(self, job: str, reason: str, by: str = "") -> None:
        """Replan a job, as a user (``by``) has requested: end it, and continue its model in a new job. Repeated
        requests replan it once.

        Regions that are lost are left out: the others end at once, with the last round that they have merged.

        Raises ``GeofedError``, and the job continues: ILLEGAL_STATE if it does not run or is about to end;
        INADMISSIBLE, or the code of the reason, if its rest cannot be run or would run in the same regions.
        """
        federation = self._federation
        entry = federation.jobs.get(job)
        if entry is None or entry.state.phase != "running":
            raise GeofedError("ILLEGAL_STATE", f"job {job} is not running; only a running job can be replanned")
        if entry.state.replanned:
            return
        if entry.state.ends_early:
            raise GeofedError("ILLEGAL_STATE", f"job {job} is ending already: {entry.state.ends_early}")
        away = tuple(part.region for part in entry.state.partitions if part.link == "lost")
        if away and (why_not := why_not_without(entry.state, away)):
            text = f"region {', '.join(away)} is lost, and {job} cannot be replanned without it: {why_not}"
            raise GeofedError("ILLEGAL_STATE", text)
        await self._request(entry, await self._plan_of_rest(entry, away), reason, by=by, without=away)

    async def _plan_of_rest(self, entry: JobEntry, away: Sequence[str] = ()) -> Plan:
        """Return the plan of a job's rest; raise ``GeofedError`` if it cannot be run, or would run in the same
        regions. ``away``: lost regions of the job, which are left out."""
        job, rest = entry.row.id, rest_of(entry, self._federation.clock())
        history = await self._history(entry, rest)
        async with self._federation.planning:
            reachable = _without_regions(rest, [*self._silent(entry), *self._not_to_join(entry, away)])
            _, answer = await self._federation.answer(reachable, "plan", history, entry.row.user, without=job)
        if not isinstance(answer, Declined) and away:
            answer = refused_without(entry, rest, answer.plan, away) or answer
        if isinstance(answer, Declined):
            refused = declined_error(answer)
            text = f"the rest of {job} cannot be run, so it continues unchanged: {refused.message}"
            raise GeofedError(refused.code, text, hint=refused.hint)
        if _regions(answer.plan) == _regions(entry.plan):
            now = ", ".join(_regions(entry.plan))
            text = f"the rest of {job} would run in the same regions, so it continues unchanged: {now}"
            raise GeofedError("INADMISSIBLE", text, hint="`geofed explain` shows why other regions are left out")
        return answer.plan

    async def _request(
        self,
        entry: JobEntry,
        then: Plan,
        reason: str,
        *,
        by_itself: bool = False,
        by: str = "",
        without: tuple[str, ...] = (),
    ) -> None:
        job, regions = entry.row.id, _regions(then)
        why = f"the rest is replanned over {', '.join(regions)}" + (f": {reason}" if reason else "")
        data = {"regions": _regions(entry.plan), "wanted": regions, "reason": reason, "by_itself": by_itself}
        if without:
            data["without"] = list(without)
        async with self._federation.change() as draft:
            draft.by = by
            draft.apply_to_job(job, ReplanRequested(draft.at, why, data, without))
            present = draft.job(job)
            if present is None or not present.state.replanned:
                raise GeofedError("ILLEGAL_STATE", f"job {job} is about to end")

    async def run(self) -> None:
        """Create successors of replanned jobs, and replan jobs automatically, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            for known in (self._evaluated, self._paces):
                for gone in [job for job in known if job not in self._federation.jobs]:
                    del known[gone]
            for number, job in enumerate(list(self._federation.changes.index.may_be_replanned)):
                if number % _CHECKED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if (entry := self._federation.jobs.get(job)) is None:
                    continue
                try:
                    if entry.state.awaits_successor:
                        await self._create_successor(entry)
                    elif self._may_pay(entry):
                        await self._replan_if_it_pays(entry)
                except GeofedError as error:
                    text = "successor not planned yet" if entry.state.awaits_successor else "job not replanned"
                    _log.info(text, job=entry.row.id, code=error.code, error=error.message)
                except Exception:  # noqa: BLE001 - this task must not end, since jobs wait for it
                    _log.exception("a job could not be replanned", job=entry.row.id)

    # --- automatic replanning

    def _may_pay(self, entry: JobEntry) -> bool:
        """Whether other regions have been live long enough to plan a job's rest with them, and it is time for that."""
        state, spec, at = entry.state, entry.spec, self._federation.clock()
        job, parts = entry.row.id, entry.state.partitions
        if spec.regions.replan != "auto" or not may_end_early(state):
            return False
        done = min((part.report.round if part.report else 0 for part in parts), default=0)
        if job not in self._paces:
            self._paces[job] = RoundTimes(state.started_at if state.started_at >= self._since else None)
        self._paces[job].record(done, at)
        if any(part.link != "live" for part in parts):
            return False
        least = _MIN_SHARE_OF_ROUNDS * entry.plan.rounds if entry.row.request_id.startswith(_REQUEST_PREFIX) else 0.0
        if self._paces[job].round_seconds is None or done < max(ROUNDS_SEEN, least):
            return False
        there = {
            name
            for name, region in self._federation.regions.items()
            if name not in _taken(entry)
            and region.state.standing == "live"
            and at - region.state.since >= _STABLE_SECONDS
        }
        before, asked_at = self._evaluated.get(job, (set(), -math.inf))
        if not there or (there == before and at - asked_at < _REPLAN_INTERVAL_SECONDS):
            return False
        self._evaluated[job] = there, at
        return True

    async def _replan_if_it_pays(self, entry: JobEntry) -> None:
        then, pace = await self._plan_of_rest(entry), self._paces[entry.row.id].round_seconds
        if pace is not None and (reason := pays(entry, then, pace)):
            await self._request(entry, then, reason, by_itself=True)

    # --- creation of the successor

    def _silent(self, entry: JobEntry, seconds: float = math.inf) -> list[str]:
        """Return other regions that have been unreachable for less than `seconds`. They are not planned with: they may
        be lost, and a job that waits for them would fail."""
        at, taken = self._federation.clock(), _taken(entry)
        return [
            name
            for name, region in sorted(self._federation.regions.items())
            if name not in taken and region.state.phase == "unreachable" and at - region.state.since < seconds
        ]

    def _not_to_join(self, entry: JobEntry, away: Sequence[str]) -> list[str]:
        """Return the regions that take no part in a job's rest, if some (``away``) are left out.

        With secure aggregation no other region joins: those that differ could not be told apart from the one that is
        left out, and the rest would be refused.
        """
        if not away or not entry.spec.privacy.secure_aggregation:
            return list(away)
        plan = entry.plan
        stay = {*_regions(plan), *(copy.source for copy in plan.copies if copy.destination not in away)} - {*away}
        return sorted({*away, *self._federation.regions} - stay)

    async def _create_successor(self, entry: JobEntry) -> None:
        if silent := self._silent(entry, _RECONNECT_SECONDS):
            raise GeofedError("UNAVAILABLE", f"region {', '.join(silent)} is unreachable; it may reconnect in a moment")
        try:
            rest = rest_of(entry, self._federation.clock())
            try:
                await self._admit(entry, rest)
            except GeofedError as error:
                if rest.objective.deadline is None or error.code not in ("INADMISSIBLE", "QUOTA_EXCEEDED"):
                    raise
                # The deadline could be promised when the replan was requested; now the job continues without it.
                await self._admit(entry, _without_deadline(rest), late=error)
        except GeofedError as error:
            if error.retryable:
                raise
            await self._give_up(entry, error)
        except _NotWaiting:
            return

    async def _admit(self, entry: JobEntry, rest: JobSpec, late: GeofedError | None = None) -> None:
        row = entry.row
        # A new ID for each attempt: the old job's state shows if an attempt was stored.
        request = f"{_REQUEST_PREFIX}{row.id}-{secrets.token_hex(8)}"
        key, _ = await self._keys(entry, rest)
        new_job = new_row(rest, row.bundle_digest, request, row.user)
        last = kept_model(entry, None)
        model = InitialModel(row.id, last.digest, last.bytes, last.round)
        silent = self._silent(entry)
        # Unreachable regions are only left out of the plan, not excluded in the stored spec.
        planned = _without_regions(rest, [*silent, *self._not_to_join(entry, entry.state.left_out)])
        # The signature is over the code and its data, which the successor shares.
        new_job = replace(new_job, task_key=key, signature_json=row.signature_json, shared_with=row.shared_with)
        new = NewJob(new_job, planned, await self._history(entry, rest), model)

        def check(draft: Draft) -> None:
            present = draft.job(row.id)
            if present is None or not present.state.awaits_successor:
                raise _NotWaiting

        def also(draft: Draft, decided: AdmittedJob) -> None:
            regions, taken = _regions(decided.plan), _taken(entry)
            wanted = {*regions, *(copy.source for copy in decided.plan.copies)}
            for name in sorted(wanted - taken):
                region = draft.region(name)
                if region is None or region.state.standing != "live":
                    raise GeofedError("UNAVAILABLE", f"region {name} has become unreachable")
            if (stored := draft.job(new_job.id)) is not None:
                draft.add_job(replace(stored, spec=rest))
            over = "the same regions as before" if regions == _regions(entry.plan) else ", ".join(regions)
            text = f"job {new_job.id} continues its model over {over}"
            if silent:
                text += f"; planned without {', '.join(silent)}, which is unreachable"
            data = {"successor": new_job.id, "regions": regions}
            draft.apply_to_job(row.id, SuccessorDecided(draft.at, new_job.id, text, data))
            if late is not None:
                broken = f"the deadline promised to {row.id} cannot be promised any more: {late.message}"
                draft.record("job.promise", broken, job=new_job.id, data={"in_danger": True, "late_seconds": None})

        await admit(self._federation, new, check, also)

    async def _give_up(self, entry: JobEntry, error: GeofedError) -> None:
        async with self._federation.change() as draft:
            text = f"no job continues its model: {error.message}"
            data: dict[str, Any] = {"successor": None, "regions": [], "code": error.code}
            # A job of which nothing is left to train has succeeded without the region.
            fails = bool(entry.state.left_out) and error.code != "ILLEGAL_STATE"
            draft.apply_to_job(entry.row.id, SuccessorDecided(draft.at, "", text, data, fails))

    async def _keys(self, entry: JobEntry, rest: JobSpec) -> tuple[str, str]:
        return task_keys(rest, await self._federation.code_digest(entry.row.bundle_digest))

    async def _history(self, entry: JobEntry, rest: JobSpec) -> TaskHistory:
        """Return the measurements of the task, those of the job itself first."""
        keys = await self._keys(entry, rest)
        own = runs_so_far(entry.row, entry.state, entry.spec, entry.plan, self._federation.clock())
        return await self._federation.read(lambda store: TaskHistory((*own, *store.runs(*keys)), store.weight(keys[0])))


def rest_of(entry: JobEntry, at: float, model: KeptModel | None = None) -> JobSpec:
    """Return the spec of a job that trains the rest of a job, starting from its model, or that of a kept round.

    Epochs or steps, time, deadline and budget are the remaining ones. The seed differs, so that samples come in a new
    order; a learning rate schedule continues where it is. Raises ``GeofedError("ILLEGAL_STATE")`` if nothing is left.
    """
    state, spec, job = entry.state, entry.spec, entry.row.id
    done = state.rounds_done if model is None else model.round
    share = done / entry.plan.rounds
    rest: dict[str, Any] = json.loads(spec.to_json())
    train, objective = rest["train"], rest["objective"]
    train["initialModel"] = {"job": job, "round": model.round if model is not None else None}
    # A batch that the plan has chosen stays.
    train["batch"] = batch_of(spec, entry.plan)
    train["seed"] = (spec.train.seed + 1) % _SEED_LIMIT
    end = spec.train.end
    if end.steps is not None:
        train["end"]["steps"] = end.steps - done * entry.plan.interval
    if end.epochs is not None:
        train["end"]["epochs"] = end.epochs * (1 - share)
    if end.time is not None:
        left = end.time.total_seconds() - ((state.finished_at or at) - state.started_at)
        if left <= 0:
            raise GeofedError("ILLEGAL_STATE", f"the training time of {job} is over")
        train["end"]["time"] = format_duration(timedelta(seconds=left))
    if max(train["end"]["steps"] or 0, train["end"]["epochs"] or 0) <= 0:
        raise GeofedError("ILLEGAL_STATE", f"job {job} has nothing left to train")
    if spec.train.learning_rate is not None:
        begin = spec.train.learning_rate.begin
        train["learningRate"]["begin"] = begin + (1 - begin) * share
    objective["soft"] = []
    ends = state.deadline_at
    objective["deadline"] = None if ends is None else datetime.fromtimestamp(ends, UTC).isoformat()
    if spec.objective.budget is not None:
        objective["budget"] = spec.objective.budget - state.usd
        if objective["budget"] <= 0:
            raise GeofedError("ILLEGAL_STATE", f"the budget of {job} is spent")
    return parse_json(json.dumps(rest))


def _without_deadline(spec: JobSpec) -> JobSpec:
    return spec.model_copy(update={"objective": spec.objective.model_copy(update={"deadline": None})})


def _without_regions(spec: JobSpec, names: list[str]) -> JobSpec:
    avoid = list(dict.fromkeys([*spec.regions.avoid, *names]))
    return spec.model_copy(update={"regions": spec.regions.model_copy(update={"avoid": avoid})})


def _taken(entry: JobEntry) -> set[str]:
    """Return the regions that run a partition of a job or send a shard for it."""
    return {*_regions(entry.plan), *(copy.source for copy in entry.plan.copies)}


def _regions(plan: Plan) -> list[str]:
    return [part.region for part in plan.partitions]
