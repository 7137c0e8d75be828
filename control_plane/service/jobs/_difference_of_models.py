"""What two jobs that begin with the same model tell together, if one of them has secure aggregation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from control_plane.core import InitialModel, last_model, models_of
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._federation import Federation
from control_plane.spec import JobSpec
from scheduler import Declined, Plan, Reason

__all__ = ["refused_by_difference", "refused_without", "same_start"]


async def same_start(
    federation: Federation, spec: JobSpec, model: InitialModel | None, task_key: str
) -> list[JobEntry]:
    """Return stored jobs that have trained from the model that a new job starts from, newest first.

    ``model``: None: the one that the task makes, which is the same for one task and seed. ``task_key``: the new job's;
    empty: its code is not known. Only jobs count that began to train, or still may; and of a job without secure
    aggregation only those with it.
    """
    secure = not _secure(spec)
    if model is not None:
        named = await federation.lookup.jobs_that_began(digest=model.digest, secure=secure)
        found = [entry for entry in named if _has_trained_from(entry, model)]
    elif task_key:
        of_task = await federation.lookup.jobs_that_began(task_key=task_key, secure=secure)
        found = [
            entry for entry in of_task if entry.state.initial_model is None and entry.spec.train.seed == spec.train.seed
        ]
    else:
        found = []
    return [entry for entry in found if entry.state.started_at or not entry.state.terminal]


def _has_trained_from(entry: JobEntry, model: InitialModel) -> bool:
    began, state = entry.state.initial_model, entry.state
    # No round of the job began with its final model, unless it ended in the middle of one.
    last = set[str]() if state.left_out else {state.blob_digest}
    rounds = {kept.digest for kept in models_of(state)} - last
    if began is not None and (began.digest, began.adapter) == (model.digest, model.adapter):
        return True
    return not model.adapter and model.digest in rounds


def refused_by_difference(
    spec: JobSpec, plan: Plan, model: InitialModel | None, earlier: Sequence[JobEntry]
) -> Declined | None:
    """Return the refusal of a job that would tell, together with an earlier one, the updates of few regions; None: it
    does not.

    Two jobs with secure aggregation publish a sum each, whose difference is that of the regions by which they differ.
    One without it shows the updates of its regions: with the other's sum, those of the regions that are in that alone.
    ``model``: what the job starts from; None: the model that the task makes. ``earlier``: jobs that have trained from
    the same model.
    """
    for entry in earlier:
        secure = [one for one in (spec, entry.spec) if _secure(one)]
        mine, theirs = _regions(plan), _regions(entry.plan)
        apart = mine ^ theirs if len(secure) == 2 else mine - theirs if _secure(spec) else theirs - mine
        if apart == set(entry.state.left_out) and _makes_open_round_again(entry, model):
            continue  # Only the region itself can have the sum of the round that the others make again.
        if secure and 0 < len(apart) < max(one.privacy.min_regions for one in secure):
            job, names = entry.row.id, ", ".join(sorted(apart))
            text = f"{job} trains from the same model, and differs by {names}: both together would tell its updates"
            remedy = "use the same regions, another train.seed, or the final model of a job that has succeeded"
            return Declined((Reason("INADMISSIBLE", text, remedy),))
    return None


def refused_without(entry: JobEntry, rest: JobSpec, plan: Plan, away: Sequence[str]) -> Declined | None:
    """Return the refusal of a running job's rest, if the job ended now without some regions (``away``); None: none."""
    state = replace(entry.state, left_out=tuple(away), blob_digest="its final model")
    last = last_model(state)
    assert last is not None
    model = InitialModel(entry.row.id, last.digest, last.bytes, last.round)
    return refused_by_difference(rest, plan, model, [replace(entry, state=state)])


def _makes_open_round_again(entry: JobEntry, model: InitialModel | None) -> bool:
    """Whether a job starts where an earlier one ended without a region, so that no other has the sum of its first
    round. Of all rounds before, every region of the earlier job has it.

    Not where the earlier job has merged no round: its model is that which it began with, under another digest, and
    others may have trained from that.
    """
    last, began = last_model(entry.state), entry.state.initial_model
    if model is None or model.adapter or last is None or model.digest != last.digest:
        return False
    before = {kept.digest for kept in models_of(entry.state) if kept.round < last.round}
    started = began.digest if began is not None else ""
    ended = last.digest == entry.state.blob_digest and last.round > 0
    return ended and last.digest not in {*before, started}


def _regions(plan: Plan) -> set[str]:
    return {part.region for part in plan.partitions}


def _secure(spec: JobSpec) -> bool:
    return spec.privacy.secure_aggregation
