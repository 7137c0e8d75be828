"""Measurements of a task from earlier runs and profiles: which tasks count as the same, and how fast they are."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.service.planning._tuning import merge_from_json
from control_plane.spec import JobSpec
from control_plane.store import RunRow, WeightRow
from scheduler import StartBilled
from scheduler.tuning import MergePoint, TaskProfile, fit_compute

__all__ = [
    "TaskHistory",
    "fixed_shares_of",
    "gpu_bytes_of",
    "gpu_lacks_of",
    "measured_batches",
    "merges_of",
    "probed_speeds",
    "speeds_of",
    "stage_paces_of",
    "starts_of",
    "task_keys",
]

_IRRELEVANT_KEYS = {
    "lr",
    "learning_rate",
    "learningRate",
    "momentum",
    "weight_decay",
    "weightDecay",
    "betas",
    "eps",
    "seed",
}
"""Usual keys of a task's configuration that affect what it learns, but not its speed."""
_RECENT_RUNS = 5
"""Number of latest runs whose median stage pace counts."""


@dataclass(frozen=True)
class TaskHistory:
    """Measurements of a task."""

    runs: Sequence[RunRow] = ()
    """Earlier runs of the task, newest first; if there are none, of its other versions."""
    weight: WeightRow | None = None
    """Result of the task's probe."""
    note: str = ""
    """What could not be measured, as a sentence for the plan."""

    def of_own_code(self, task_key: str) -> bool:
        """Whether a run is of this very code, not of another version of the task."""
        return any(run.task_key == task_key for run in self.runs)


def counts_labels(spec: JobSpec) -> bool:
    """Whether regions are asked how often labels occur: not for a job with privacy rules, or that trains nothing."""
    has_rules = spec.privacy.differential is not None or spec.privacy.secure_aggregation
    return not (has_rules or spec.evaluates_only)


def task_keys(spec: JobSpec, code_digest: str) -> tuple[str, str]:
    """Return two keys: of the task itself, with this code, configuration and dataset under any job name; and of all
    versions of the task, with this job name and any code. Learning rates and batch do not count."""
    config = {name: value for name, value in spec.task.config.items() if name not in _IRRELEVANT_KEYS}
    same: list[object] = [spec.task.module, config, spec.data.dataset, *([spec.task.env] if spec.task.env else [])]
    if (spec.train.precision, spec.train.accumulate) != ("fp32", 1):
        same.append([spec.train.precision, spec.train.accumulate])
    if spec.train.compile:
        same.append("compiled")
    if spec.function.gpus != 1:
        same.append({"gpus": spec.function.gpus})
    if spec.function.sharding != "none":
        same.append({"sharding": spec.function.sharding})
    if spec.evaluates_only:
        same.append("evaluates only")
    if spec.task.requirements:
        same.append({"requirements": spec.task.requirements})
    if spec.task.image:
        same.append({"image": spec.task.image})
    if spec.task.secrets:
        same.append({"secrets": sorted(spec.task.secrets)})
    if spec.clients is not None:
        # What a sample takes, depends on how much of it a client's own costs are.
        same.append({"clients": [spec.clients.epochs or 1, spec.clients.steps or 0]})
    if spec.train.local:
        same.append(spec.train.local)
    kin = _key([spec.metadata.name, *same])
    return (_key([code_digest, *same]) if code_digest else kin), kin


def _key(same: list[object]) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()}"


def merges_of(runs: Iterable[RunRow], region: str) -> tuple[MergePoint, ...]:
    """Return the merge times that earlier runs of a task have measured in a region."""
    found = (merge_from_json(run.merge_json) for run in runs if run.region == region and run.merge_json)
    return tuple(point for point in found if point is not None)


def starts_of(runs: Iterable[RunRow]) -> dict[str, StartBilled]:
    """Return what the newest run of a task was billed for its start in each region, where it has told so."""
    found: dict[str, StartBilled] = {}
    for run in runs:
        if run.start_function_seconds is not None and run.start_server_seconds is not None:
            found.setdefault(run.region, StartBilled(run.start_function_seconds, run.start_server_seconds))
    return found


def stage_paces_of(runs: Iterable[RunRow]) -> dict[str, float]:
    """Return for pipelines, by region, the median ratio of measured to profiled step time over the latest runs."""
    ratios: dict[str, list[float]] = {}
    for run in runs:
        if run.stage_pace > 0:
            ratios.setdefault(run.region, []).append(run.stage_pace)
    # Limit the effect of a single run on a machine that was busy otherwise.
    return {region: min(max(statistics.median(own[:_RECENT_RUNS]), 0.5), 4.0) for region, own in ratios.items()}


def measured_batches(history: TaskHistory, profiles: Mapping[str, TaskProfile]) -> frozenset[int]:
    """Return the batches of which steps of a task were measured, by runs, profiles and its probe."""
    ran = [run.batch for run in history.runs if run.samples_per_second > 0 and run.batch and not run.profile_json]
    profiled = [point.batch for profile in profiles.values() for point in profile.steps]
    return frozenset([*ran, *profiled, *(size for size, *_ in _probed_steps(history.weight))])


def _probed_steps(weight: WeightRow | None) -> list[tuple[int, float]]:
    """Return the batches and seconds of the steps that a task's probe has timed."""
    return [(size, seconds) for size, seconds, *_ in json.loads(weight.steps_json)] if weight is not None else []


def speeds_of(
    runs: Sequence[RunRow], batch: int, profiles: Mapping[str, TaskProfile], weight: WeightRow | None = None
) -> tuple[dict[str, float], frozenset[str]]:
    """Return samples/s of one worker at a batch by region, and the regions where the value is a guess.

    The newest run with that batch counts, or a profile where there was no run. A run with another batch is converted by
    the profile, by two runs with different batches, or by the task's probe (``weight``); without any, half of its step
    time is assumed fixed and half proportional to the batch. Runs with a speed of 0 tell none.
    """
    speeds, guessed = {}, set()
    runs = [run for run in runs if run.samples_per_second > 0]
    for region in dict.fromkeys(run.region for run in runs):
        there = [run for run in runs if run.region == region]
        # A profile's single worker runs alone: what a run has measured counts more, however old it is.
        own = [run for run in there if not run.profile_json] or there
        exact = next((run for run in own if run.batch in (0, batch) or not batch), None)
        if exact is not None:
            speeds[region] = exact.samples_per_second
            continue
        newest = own[0]
        fixed, each = _line(own, profiles.get(region))
        if fixed + each <= 0:
            probed = _line_of_probe(weight)
            if probed is None or batch % newest.batch:
                # Of a batch that its workers divided, the probe tells the rest: plans divide it again, as measured.
                guessed.add(region)
            fixed, each = probed or (float(newest.batch), 1.0)
        slower = (fixed + each * batch) / (fixed + each * newest.batch)
        speeds[region] = batch * newest.samples_per_second / newest.batch / slower
    return speeds, frozenset(guessed)


def fixed_shares_of(
    regions: Iterable[str],
    runs: Sequence[RunRow],
    batch: int,
    profiles: Mapping[str, TaskProfile],
    weight: WeightRow | None,
) -> dict[str, float]:
    """Return the part of a step's seconds that does not depend on its samples, at a batch, by region: by its profile,
    by two runs with different batches, or by the task's probe (``weight``); regions of which nothing tells are left
    out."""
    by_region: dict[str, list[RunRow]] = {}
    for run in runs:
        if run.samples_per_second > 0 and run.batch:
            by_region.setdefault(run.region, []).append(run)
    probed, found = _line_of_probe(weight), {}
    for region in regions:
        there = by_region.get(region, [])
        own = [run for run in there if not run.profile_json] or there
        fixed, each = _line(own, profiles.get(region)) if own else (0.0, 0.0)
        if fixed + each <= 0 and probed is not None:
            fixed, each = probed
        if fixed + each > 0 and batch:
            found[region] = fixed / (fixed + each * batch)
    return found


def probed_speeds(weight: WeightRow | None, batch: int) -> dict[str, float]:
    """Return samples/s of one worker at a batch, by the steps that the probe has timed; empty if it has timed none."""
    if weight is None:
        return {}
    timed = [
        RunRow("", weight.region, weight.task_key, weight.at, size / seconds, weight.model_bytes, 0.0, batch=size)
        for size, seconds in _probed_steps(weight)
    ]
    return speeds_of(timed, batch, {})[0]


def gpu_bytes_of(weight: WeightRow | None) -> dict[int, int]:
    """Return the memory of a GPU that steps of a probe took, by batch; empty: there was no GPU."""
    steps = json.loads(weight.steps_json) if weight is not None else []
    return {size: taken for size, _, *more in steps for taken in more if taken}


def gpu_lacks_of(weight: WeightRow | None) -> dict[str, tuple[int, str]]:
    """Return the regions in which a probe did not fit into the GPU's memory: its batch, and what was told of it."""
    lacks = json.loads(weight.gpu_lacks_json) if weight is not None else {}
    return {region: (batch, text) for region, (batch, text, *_) in lacks.items()}


def _line_of_probe(weight: WeightRow | None) -> tuple[float, float] | None:
    """Return the fixed seconds of a step and the seconds per sample by a task's probe; None: it does not tell."""
    steps = sorted(_probed_steps(weight))
    if len(steps) < 2:
        return None
    (small, least), (large, most) = steps[0], steps[-1]
    # Limit noise, as of two runs.
    each = min(max((most - least) / (large - small), 0.0), most / large)
    return most - each * large, each


def _line(own: Sequence[RunRow], profile: TaskProfile | None) -> tuple[float, float]:
    """Return the fixed seconds of a step and the seconds per sample; both 0: unknown."""
    if profile is not None:
        compute = fit_compute(profile.steps)
        return compute.fixed_seconds, compute.seconds_per_sample
    newest = own[0]
    other = next((run for run in own if run.batch != newest.batch), None)
    if other is None:
        return 0.0, 0.0
    step, step_of_other = newest.batch / newest.samples_per_second, other.batch / other.samples_per_second
    each = (step - step_of_other) / (newest.batch - other.batch)
    # Limit noise of two runs: more samples take no less time, and the fixed part is not negative.
    each = min(max(each, 0.0), step / newest.batch)
    return step - each * newest.batch, each
