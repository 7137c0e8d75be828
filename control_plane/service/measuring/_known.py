"""What earlier runs and profiles teach about a task: which tasks count as the same, and how fast one is."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.service.planning._tuning import merge_from_json
from control_plane.spec import JobSpec
from control_plane.store import RunRow, WeightRow
from scheduler.tuning import MergePoint, TaskProfile, fit_compute

__all__ = ["Learnt", "merges_of", "probed_speeds", "speeds_of", "stage_paces_of", "task_keys"]

_NO_MATTER = {"lr", "learning_rate", "learningRate", "momentum", "weight_decay", "weightDecay", "betas", "eps", "seed"}
"""Names in a task's configuration, as they are usual, that change what is learnt and not how long it takes."""
_PACES = 5
"""Runs whose pace counts."""


@dataclass(frozen=True)
class Learnt:
    """All that is known of a task."""

    runs: Sequence[RunRow] = ()
    """Of it, newest first; where there are none, of its kin."""
    weight: WeightRow | None = None
    """What an agent has found before its first plan."""
    note: str = ""
    """A sentence for whoever reads the plan: what could not be found out."""

    def of_own_code(self, task_key: str) -> bool:
        """Whether the runs are of the task itself."""
        return any(run.task_key == task_key for run in self.runs)


def task_keys(spec: JobSpec, code_digest: str) -> tuple[str, str]:
    """Of the task itself, whatever the job is called: the same code, configuration and dataset; and of its kin, the
    tasks of that name, though their code may have changed. Neither learning rates nor the batch count."""
    config = {name: value for name, value in spec.task.config.items() if name not in _NO_MATTER}
    same = [spec.task.module, config, spec.data.dataset]
    kin = _key([spec.metadata.name, *same])
    return (_key([code_digest, *same]) if code_digest else kin), kin


def _key(same: list[object]) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()}"


def merges_of(runs: Iterable[RunRow], region: str) -> tuple[MergePoint, ...]:
    """What earlier runs of a task in a region have measured of its merges."""
    found = (merge_from_json(run.merge_json) for run in runs if run.region == region and run.merge_json)
    return tuple(point for point in found if point is not None)


def stage_paces_of(runs: Iterable[RunRow]) -> dict[str, float]:
    """Of models in stages, by region: how many times as long as by the profile alone a step took, as earlier runs of
    the task have it, the median of the last few."""
    told: dict[str, list[float]] = {}
    for run in runs:
        if run.stage_pace > 0:
            told.setdefault(run.region, []).append(run.stage_pace)
    # What a single run had to share its machine with is no reason to plan for ten times as long.
    return {region: min(max(statistics.median(own[:_PACES]), 0.5), 4.0) for region, own in told.items()}


def speeds_of(
    runs: Sequence[RunRow], batch: int, profiles: Mapping[str, TaskProfile]
) -> tuple[dict[str, float], frozenset[str]]:
    """Samples/s of one worker at a batch by region, by its newest run; and the regions where that is a guess.

    A run with that batch counts before all others. A step of another one is longer by what a profile says, or two runs
    with different batches; where there is neither, it is taken to be half fixed and half in proportion.
    """
    speeds, guessed = {}, set()
    for region in dict.fromkeys(run.region for run in runs):
        own = [run for run in runs if run.region == region]
        exact = next((run for run in own if run.batch in (0, batch) or not batch), None)
        if exact is not None:
            speeds[region] = exact.samples_per_second
            continue
        newest = own[0]
        fixed, each = _line(own, profiles.get(region))
        if fixed + each <= 0:
            guessed.add(region)
            fixed, each = float(newest.batch), 1.0
        slower = (fixed + each * batch) / (fixed + each * newest.batch)
        speeds[region] = batch * newest.samples_per_second / newest.batch / slower
    return speeds, frozenset(guessed)


def probed_speeds(weight: WeightRow | None, batch: int) -> dict[str, float]:
    """Samples/s of one worker at a batch, by the steps that an agent has timed; empty where it has timed none."""
    if weight is None:
        return {}
    timed = [
        RunRow("", weight.region, weight.task_key, weight.at, size / seconds, weight.model_bytes, 0.0, batch=size)
        for size, seconds in json.loads(weight.steps_json)
    ]
    return speeds_of(timed, batch, {})[0]


def _line(own: Sequence[RunRow], profile: TaskProfile | None) -> tuple[float, float]:
    """Seconds of a step that are fixed, and of each sample; both 0: not known."""
    if profile is not None:
        compute = fit_compute(profile.steps)
        return compute.fixed_seconds, compute.seconds_per_sample
    newest = own[0]
    other = next((run for run in own if run.batch != newest.batch), None)
    if other is None:
        return 0.0, 0.0
    step, step_of_other = newest.batch / newest.samples_per_second, other.batch / other.samples_per_second
    each = (step - step_of_other) / (newest.batch - other.batch)
    # What two runs say may be noise: no step is shorter with more samples, or has less than nothing fixed.
    each = min(max(each, 0.0), step / newest.batch)
    return step - each * newest.batch, each
