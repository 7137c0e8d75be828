"""What configurations take: seconds, money and memory, for one of them or for many at once."""

from __future__ import annotations

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


@dataclass(frozen=True)
class Outcomes:
    """What the configurations of a grid take, in the same places."""

    compute_seconds: Floats
    merge_seconds: Floats
    iterations: Floats
    seconds: Floats
    usd: Floats
    requests_usd: Floats
    needed_mb: Floats
    fits: npt.NDArray[np.bool_]
    """In memory."""


@dataclass(frozen=True, eq=False)
class MergeCosts:
    """Of one merge each."""

    seconds: Floats
    usd: Floats

    def at(self, places: npt.NDArray[np.int64]) -> MergeCosts:
        """Those at some places, in that order."""
        return MergeCosts(self.seconds[places], self.usd[places])


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


def outcomes(task: TaskModel, grid: ConfigurationGrid, costs: MergeCosts | None = None) -> Outcomes:
    """Predict all configurations of a grid; ``costs``: their merges', where they are known already."""
    merges, platform = grid.merges, task.platform
    if costs is None:
        costs = merge_costs(task, grid.channel, merges)
    compute, merge = step_seconds(task.compute, grid.batches, grid.memories_mb), costs.seconds
    one = compute + merge
    count = iterations(task.progress, grid.batches * merges.workers)
    # An invocation makes whole steps, the first however long it takes.
    steps = np.maximum(1.0, np.ceil(platform.slice_seconds / one))
    calls = np.ceil(count / steps)
    worked = count * one + (calls - 1) * platform.again_seconds
    seconds = platform.start_seconds + worked
    functions = merges.workers * (
        (grid.memories_mb / 1024 * platform.usd_per_gb_second + platform.usd_per_second) * worked
        + calls * platform.usd_per_call
    )
    requests = count * costs.usd
    nodes = seconds / _SECONDS_PER_HOUR * platform.server_usd_per_hour
    needed = needed_mb(task.memory, grid.batches, task.model_bytes, merges.chunks)
    fits = needed <= grid.memories_mb
    return Outcomes(compute, merge, count, seconds, functions + requests + nodes, requests, needed, fits)


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
    row = (one.collective, one.workers, one.chunks, share_of(one.memory_mb, channel.full_rate_mb))
    grid = ConfigurationGrid(
        one.channel, np.array([float(one.memory_mb)]), np.array([float(one.batch)]), Merges.of([row])
    )
    told = outcomes(task, grid)
    return prediction(one, told, 0) if told.fits[0] else None


def prediction(one: Configuration, told: Outcomes, at: int) -> Prediction:
    """Of one place of a grid."""
    compute, merge = float(told.compute_seconds[at]), float(told.merge_seconds[at])
    return Prediction(
        configuration=one,
        iteration_seconds=compute + merge,
        compute_seconds=compute,
        merge_seconds=merge,
        iterations=int(told.iterations[at]),
        seconds=float(told.seconds[at]),
        usd=float(told.usd[at]),
        requests_usd=float(told.requests_usd[at]),
        needed_mb=float(told.needed_mb[at]),
    )
