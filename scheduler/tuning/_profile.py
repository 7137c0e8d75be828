"""What a profile run tells of a task in one region, and the coefficients that follow from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from scheduler.tuning._fit import MergePoint, StepPoint, fit_compute, fit_correction, fit_memory
from scheduler.tuning._model import ChannelProfile, Compute, Convergence, Memory, PlatformCosts, Space, TaskModel
from scheduler.tuning._progress import NormPair, noise_scale
from sync.collective import Correction, collectives

MEMORIES_MB = (128, 256, 512, 768, 1024, 1536, 1769, 2048, 3008, 4096, 6144, 8192, 10240)
"""Steps in which memory is chosen; clouds sell it by the megabyte, and cost hardly differs between."""


_MOST_COUNTS = 64
"""Numbers of workers that are tried in a region: of more, neighbours differ by little."""


@dataclass(frozen=True)
class TaskProfile:
    """Measured in one region by one worker. Numbers alone: of the data only how often labels occur, where allowed."""

    region: str
    samples: int
    """In the region's training split."""
    batch: int
    """Of the job file."""
    parameters: int
    model_bytes: int
    """Of the flat vector that workers merge: parameters and buffers, in float32."""
    steps: tuple[StepPoint, ...]
    """Forward and backward pass, by batch and memory."""
    update_seconds: float
    """Of the optimiser's step."""
    norms: tuple[NormPair, ...]
    """Of gradients along the first steps of training."""
    evaluation_peak_mb: float
    """Largest memory of an evaluation; 0: not measured."""
    channel: ChannelProfile
    start_seconds: float
    """From the command to a worker that is ready to make its first step."""
    again_seconds: float
    """Of an invocation of a worker that is there already, besides its steps."""
    gb_seconds: float
    """That measuring took."""
    usd: float
    layers: tuple[dict[str, float | str], ...] = field(default=(), hash=False)
    """By layer, as the room of pipelines measures them; empty where the model is not made of layers."""
    layers_note: str = ""
    """Why there are none."""
    message_seconds: float = 0.0
    """Of a short message from stage to stage, from the call that sends it until the other has it; 0: not measured."""
    message_core_seconds: float = 0.0
    """What it keeps cores busy, on both sides together."""
    stored_bytes_per_second: float = 0.0
    """That become durable where parameter servers keep them, with their digest; 0: not measured."""
    fresh_bytes_per_second: float = 0.0
    """Of memory that a process there has not had before; 0: not measured."""
    labels: tuple[tuple[int, int], ...] = ()
    """Labels with their number among some samples, without those that the region's rules withhold."""

    @property
    def step_seconds(self) -> float:
        """Forward and backward pass of the job's batch, of the batches that were tried the nearest below."""
        near = [point for point in self.steps if point.batch <= self.batch] or list(self.steps)
        point = max(near, key=lambda point: (point.batch, point.memory_mb))
        return point.seconds * self.batch / point.batch

    @property
    def samples_per_second(self) -> float:
        """Of one worker that computes."""
        return self.batch / self.step_seconds

    @cached_property
    def noise_samples(self) -> float | None:
        """The gradient noise scale; None: the gradients did not tell it."""
        try:
            scale = noise_scale(self.norms)
        except ValueError:
            return None
        return scale if math.isfinite(scale) else None


def task_of(
    profile: TaskProfile,
    platform: PlatformCosts,
    *,
    epochs: float | None,
    steps: int | None,
    staleness: int = 0,
    samples_per_second: float | None = None,
    merges: Sequence[MergePoint] = (),
) -> TaskModel:
    """Coefficients of a task that makes so many epochs, or so many steps whatever the number of workers.

    ``samples_per_second``: of a worker of a later run, which counts more than the profile. ``merges``: of earlier runs,
    which mend the closed form. Raises ``ValueError`` where the profile has no steps.
    """
    corrections: dict[str, Correction] = {}
    formed = set(collectives(lambda method: method.predictable))
    if told := [point for point in merges if point.collective in formed]:
        # A worker's time beyond its compute has the optimiser's step in it.
        own = [replace(point, seconds=max(1e-6, point.seconds - profile.update_seconds)) for point in told]
        corrections[profile.channel.name] = fit_correction(own, profile.channel)
    return TaskModel(
        model_bytes=profile.model_bytes,
        compute=compute_of(profile, samples_per_second),
        memory=_memory(profile),
        progress=replace(_progress(profile, epochs, steps), staleness=staleness),
        platform=replace(platform, start_seconds=profile.start_seconds, again_seconds=profile.again_seconds),
        channels=(profile.channel,),
        corrections=corrections,
    )


def compute_of(profile: TaskProfile, samples_per_second: float | None) -> Compute:
    """Return the time of a worker's step. ``samples_per_second``: of a later run, which counts more than the profile.

    Raises ``ValueError`` where the profile has no steps.
    """
    compute, slower = fit_compute(profile.steps), 1.0
    if samples_per_second:
        slower = profile.samples_per_second / samples_per_second
    return replace(
        compute,
        fixed_seconds=compute.fixed_seconds * slower + profile.update_seconds,
        seconds_per_sample=compute.seconds_per_sample * slower,
    )


def _memory(profile: TaskProfile) -> Memory:
    if not any(point.peak_mb for point in profile.steps):
        # The system does not tell: what it ran in is enough, and nothing else is known.
        return Memory(0.0, 0.0, least_mb=float(min(point.memory_mb for point in profile.steps)), spare=0.0)
    return replace(fit_memory(profile.steps), least_mb=profile.evaluation_peak_mb)


def _progress(profile: TaskProfile, epochs: float | None, steps: int | None) -> Convergence:
    if epochs is None:
        return Convergence(least_steps=float(steps or 1))
    return Convergence(samples=profile.samples * epochs, noise_samples=profile.noise_samples or 0.0)


def worker_counts(most: int) -> tuple[int, ...]:
    """Numbers of workers to try, from 1 to the most; above `_MOST_COUNTS` they are spread evenly."""
    stride = max(1, math.ceil(most / _MOST_COUNTS))
    return tuple(sorted({*range(1, most + 1, stride), max(1, most)}))


def space_of(
    profile: TaskProfile, *, workers: tuple[int, ...], most_memory_mb: int, batch: int, collective: str | None = None,
    chunks: int | None = None, memory_mb: int | None = None,
) -> Space:  # fmt: skip
    """What may be chosen in a region; what the job file names is fixed."""
    memories = [mb for mb in MEMORIES_MB if mb < most_memory_mb] + [most_memory_mb]
    chosen = collectives(lambda method: method.automatic and method.predictable)
    return Space(
        memories_mb=tuple(memories) if memory_mb is None else (memory_mb,),
        workers=workers,
        batches=(batch,),
        collectives=chosen if collective is None else (collective,),
        chunks=None if chunks is None else (chunks,),
    )
