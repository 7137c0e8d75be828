"""Models of evaluated rounds: which of them the control plane keeps, and which one is the best."""

from __future__ import annotations

import math
from dataclasses import replace

from control_plane.core._goal import federated_metrics, is_together
from control_plane.core._state import Evaluation, JobState, Keep, KeptModel, Models, Partition, Report

__all__ = [
    "best_model", "keeps_models", "kept_text", "last_model", "models_of", "uploader", "with_answer", "with_evaluation",
    "with_final_model",
]  # fmt: skip

_EVALUATIONS = 4
"""Last evaluations of a region that are remembered, so that those of one round are put together."""
_AWAITED = 4
"""Models that may wait for their upload; a parameter server holds as many."""


def with_latest(known: tuple[Evaluation, ...], report: Report) -> tuple[Evaluation, ...]:
    """Return a region's last evaluations, with the one of its new report."""
    new = report.evaluation
    if new.round <= 0 or (known and new.round <= known[-1].round):
        return known
    return (*known, new)[-_EVALUATIONS:]


def with_evaluation(state: JobState) -> JobState:
    """Return the state after the last reports: if all regions have evaluated a further round, its model may be wanted,
    or be the best one."""
    new, models = _evaluated(state), state.models
    if state.phase != "running" or new is None or new.round <= models.evaluated:
        return state
    models = replace(models, evaluated=new.round)
    value = _value(state.keep, new)
    if value is not None:
        before = KeptModel(models.best_round, {state.keep.metric: models.best_value})
        if not models.best_round or _better(state.keep, new, before):
            models = replace(models, best_round=new.round, best_value=value, not_improved=0)
        else:
            models = replace(models, not_improved=models.not_improved + 1)
    if keeps_models(state):
        models = _with_wanted(state.keep, models, new)
    return replace(state, models=models)


def keeps_models(state: JobState) -> bool:
    """Whether a region's agent uploads models of evaluated rounds; older versions do not."""
    return any(part.report is not None and part.report.keeps_models for part in state.partitions)


def _evaluated(state: JobState) -> KeptModel | None:
    """Return the last round that all regions have evaluated, with its metrics.

    Regions that exchange in the background may never evaluate the same round; their last evaluations then count
    together, under the round of the region that is behind.
    """
    parts = state.partitions
    if not parts or not all(part.evaluations for part in parts):
        return None
    last = [part.evaluations[-1] for part in parts]
    if common := set.intersection(*({one.round for one in part.evaluations} for part in parts)):
        found = [next(one for one in part.evaluations if one.round == max(common)) for part in parts]
    elif is_together([one.round for one in last], state.evaluate_every):
        found = last
    else:
        return None
    return KeptModel(min(one.round for one in found), federated_metrics(found))


def _with_wanted(keep: Keep, models: Models, new: KeptModel) -> Models:
    """Queue a model for its upload, if it is wanted; it may replace models that wait."""
    under_way = models.awaited[:1] if models.region else ()
    waiting = models.awaited[len(under_way) :]
    if keep.best:
        if not all(_better(keep, new, one) for one in (*models.kept, *models.awaited)):
            return models
        waiting = (new,)
    else:
        waiting = (*waiting, new)[-min(keep.models or _AWAITED, _AWAITED) :]
    return replace(models, awaited=(*under_way, *waiting))


def uploader(state: JobState) -> Partition | None:
    """Return the partition that is to upload the next model; None: nothing is awaited, or none can."""
    models = state.models
    if models.region or not models.awaited or state.phase != "running":
        return None
    wanted = models.awaited[0].round
    able = (
        part
        for part in state.partitions
        if part.link == "live" and part.report is not None and part.report.keeps_models
        and part.state == "training" and any(one.round >= wanted for one in part.evaluations)
    )  # fmt: skip
    return next(able, None)


def with_answer(state: JobState, digest: str, size: int | None) -> JobState:
    """Return the state after the upload of the first awaited model; ``size``: its bytes, None if it failed."""
    models = state.models
    model = replace(models.awaited[0], digest=digest, bytes=size or 0)
    kept = _trimmed(state.keep, (*models.kept, model)) if size is not None else models.kept
    return replace(state, models=replace(models, kept=kept, awaited=models.awaited[1:], region=""))


def with_final_model(state: JobState) -> JobState:
    """Return the state of a job whose final model has arrived: it is kept, whatever else is."""
    kept = tuple(one for one in state.models.kept if one.digest != state.blob_digest)
    models = replace(state.models, kept=_trimmed(state.keep, (*kept, _final(state))), awaited=(), region="")
    if models.kept[-1].digest != state.blob_digest:
        models = replace(models, kept=(*models.kept, _final(state)))
    return replace(state, models=models)


def _final(state: JobState) -> KeptModel:
    reports = [part.report for part in state.remaining if part.report is not None]
    rounds = state.rounds_done if state.left_out else max((report.round for report in reports), default=0)
    metrics = federated_metrics([report.evaluation for report in reports])
    return KeptModel(rounds, metrics, state.blob_digest, state.blob_bytes)


def _trimmed(keep: Keep, models: tuple[KeptModel, ...]) -> tuple[KeptModel, ...]:
    """Return those of some models, sorted by round, that are kept."""
    models = tuple(sorted(models, key=lambda one: one.round))
    if not keep.best:
        return models[-keep.models :]
    best = models[0]
    for one in models[1:]:
        best = one if _better(keep, one, best) else best
    return (best,)


def models_of(state: JobState) -> tuple[KeptModel, ...]:
    """Return the models of a job at the control plane, by round; the final one, if there is one, is the last."""
    kept = state.models.kept
    # Jobs that ended under an older version have only their final model.
    return (*kept, _final(state)) if state.blob_digest and state.blob_digest not in {m.digest for m in kept} else kept


def last_model(state: JobState) -> KeptModel | None:
    """Return the final model of a job or, without one, that of its last kept round."""
    return next(reversed(models_of(state)), None)


def best_model(state: JobState) -> KeptModel | None:
    """Return the best model of a job among those that are kept; None: none of them has the metric."""
    best: KeptModel | None = None
    for one in models_of(state):
        if _value(state.keep, one) is not None and (best is None or _better(state.keep, one, best)):
            best = one
    return best


def kept_text(state: JobState) -> str:
    """Return what is kept of a job that ends without its final model: "; the model of round 8 is kept"."""
    rounds = [str(one.round) for one in models_of(state)]
    if not rounds:
        return ""
    if len(rounds) == 1:
        return f"; the model of round {rounds[0]} is kept"
    return f"; {len(rounds)} models are kept, the last one of round {rounds[-1]}"


def _better(keep: Keep, new: KeptModel, old: KeptModel) -> bool:
    """Whether a model is better than an earlier one. Without the metric, the later one is."""
    value, before = _value(keep, new), _value(keep, old)
    if before is None:
        return True
    return value is not None and (value > before if keep.highest else value < before)


def _value(keep: Keep, model: KeptModel) -> float | None:
    value = model.metrics.get(keep.metric)
    return value if value is not None and math.isfinite(value) else None
