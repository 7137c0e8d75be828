"""What steps and merges take, for one configuration or for many at once; and what FasDL's search compares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.tuning._model import ChannelProfile, Compute, Configuration, Convergence, Memory, Prediction, TaskModel
from sync.collective import Correction, Merges, merge_terms

Floats = npt.NDArray[np.float64]

_MB = float(1 << 20)
"""Bytes of the megabyte in which functions' memory is stated."""
_SECONDS_PER_HOUR = 3600.0
"""Seconds of an hour: prices of machines are by the hour."""
_HELD_VECTORS = 3.0
"""Of a worker that merges, beyond its training: the vector that it gives, parts on their way, the merged vector."""
_SUM_BYTES = 2.0
"""An owner's sum is of float64: for each byte of its chunk."""


def step_seconds(compute: Compute, batch: Floats | float, memory_mb: Floats | float) -> Floats:
    """Of one worker's forward and backward pass."""
    slower = np.maximum(1.0, compute.full_core_mb / np.asarray(memory_mb, float))
    return np.asarray((compute.fixed_seconds + compute.seconds_per_sample * batch) * slower)


def needed_mb(memory: Memory, batch: Floats | float, model_bytes: float, chunks: Floats | float) -> Floats:
    """Memory of a worker that owns one of so many chunks, spare included."""
    merging = model_bytes * (_HELD_VECTORS + _SUM_BYTES / np.asarray(chunks, float)) / _MB
    training = memory.base_mb + memory.mb_per_sample * np.asarray(batch, float) + merging
    return np.asarray(np.maximum(training, memory.least_mb) * (1 + memory.spare))


def iterations(progress: Convergence, global_batch: Floats | float) -> Floats:
    """Until the job's end."""
    batch = np.asarray(global_batch, float)
    if progress.samples is not None:
        steps = progress.samples / batch
    else:
        steps = progress.least_steps * (1 + progress.noise_samples / batch)
    # A hair less, so that what divides evenly stays what it is.
    return np.asarray(np.maximum(1.0, np.ceil(steps - 1e-9)))


@dataclass(frozen=True)
class ConfigurationGrid:
    """Many configurations of one channel, each at one place of arrays of one length."""

    channel: str
    memories_mb: Floats
    batches: Floats
    merges: Merges


@dataclass(frozen=True, eq=False)
class MergeCosts:
    """Of one merge each."""

    seconds: Floats
    usd: Floats


def merge_costs(task: TaskModel, name: str, merges: Merges) -> MergeCosts:
    """What merges take over one of the task's channels."""
    channel = next(one for one in task.channels if one.name == name)
    correction, grouped = task.corrections.get(name, Correction()), not task.progress.staleness
    return costs_over(channel, merges, task.model_bytes, correction, task.faithful, grouped)


def costs_over(
    channel: ChannelProfile, merges: Merges, model_bytes: float, correction: Correction, faithful: bool, grouped: bool
) -> MergeCosts:
    """What merges take over a channel."""
    told = merge_terms(merges, model_bytes, channel, faithful=faithful, grouped=grouped)
    return MergeCosts(told.seconds(correction), told.usd(channel))


def share_of(memory_mb: float, full_rate_mb: float) -> float:
    """What a function of so much memory has of the bandwidth."""
    return min(1.0, memory_mb / full_rate_mb) if full_rate_mb else 1.0


def predict(task: TaskModel, configurations: Sequence[Configuration]) -> list[Prediction | None]:
    """What each configuration takes; None: it does not fit into memory.

    Raises ``StopIteration`` where a configuration names a channel that the task does not have.
    """
    return [_predict(task, configuration) for configuration in configurations]


def _predict(task: TaskModel, one: Configuration) -> Prediction | None:
    channel = next(known for known in task.channels if known.name == one.channel)
    needed = float(needed_mb(task.memory, one.batch, task.model_bytes, one.chunks))
    if needed > one.memory_mb:
        return None
    row = (one.collective, one.workers, one.chunks, share_of(one.memory_mb, channel.full_rate_mb))
    costs, platform = merge_costs(task, one.channel, Merges.of([row])), task.platform
    compute, merge = float(step_seconds(task.compute, one.batch, one.memory_mb)), float(costs.seconds[0])
    count = int(iterations(task.progress, one.batch * one.workers))
    # An invocation makes whole steps, the first however long it takes.
    calls = math.ceil(count / max(1, math.ceil(platform.slice_seconds / (compute + merge))))
    worked = count * (compute + merge) + (calls - 1) * platform.again_seconds
    seconds, requests = platform.start_seconds + worked, count * float(costs.usd[0])
    functions = one.workers * (
        (one.memory_mb / 1024 * platform.usd_per_gb_second + platform.usd_per_second) * worked
        + calls * platform.usd_per_call
    )
    nodes = seconds / _SECONDS_PER_HOUR * platform.server_usd_per_hour
    return Prediction(
        one, compute + merge, compute, merge, count, seconds, functions + requests + nodes, requests, needed
    )  # fmt: skip
