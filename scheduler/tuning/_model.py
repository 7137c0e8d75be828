"""What tuning knows of a task, a platform and a channel, and what it may choose. Frozen dataclasses; units in names."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field

from sync.collective import ChannelCosts, Correction, collectives


@dataclass(frozen=True)
class ChannelProfile(ChannelCosts):
    """One worker's use of a region's channel, as it was measured, and what it costs."""

    _: KW_ONLY
    name: str
    full_rate_mb: float = 0.0
    """Memory from which a function has its whole bandwidth, in proportion below; 0: memory buys none."""


@dataclass(frozen=True)
class Compute:
    """Seconds of a step's forward and backward pass: ``fixed + per sample * batch / share``.

    ``share`` is what a function's memory buys it of a core: memory / ``full_core_mb``, at most 1, as the clouds
    have it (AWS Lambda: 1769 MB). FasDL's a (B + b) / (M + m) has no such end: it promises single-threaded code more
    speed for ever.
    """

    fixed_seconds: float
    seconds_per_sample: float
    full_core_mb: float = 0.0
    """0: memory buys no speed, as on a platform of one's own."""


@dataclass(frozen=True)
class Memory:
    """MB that a worker needs: ``base + per sample * batch``, and for each byte of the model what merging holds."""

    base_mb: float
    mb_per_sample: float
    least_mb: float = 0.0
    """What it needs besides its steps, as for an evaluation."""
    spare: float = 0.2
    """Share of it that is left free besides."""


@dataclass(frozen=True)
class Convergence:
    """How many iterations a job needs: ``least * (1 + noise / global batch)``, McCandlish et al.'s (arXiv 1812.06162,
    eq. 2.11).

    A job that is given epochs makes the steps that these take: there ``samples`` is set, and a larger batch loses
    nothing.
    """

    samples: float | None = None
    """That the job passes over; None: it continues until a goal."""
    least_steps: float = 0.0
    """To the goal with a batch without end."""
    noise_samples: float = 0.0
    """The gradient noise scale: the batch from which on doubling it saves less than half of the steps."""
    staleness: int = 0
    """Merges by which workers that own no chunk are behind, with a collective that takes it."""


@dataclass(frozen=True)
class Platform:
    """Where functions run."""

    usd_per_gb_second: float
    usd_per_call: float = 0.0
    server_usd_per_hour: float = 0.0
    """Of the parameter server beside the workers."""
    slice_seconds: float = 30.0
    """An invocation ends at the first step boundary after this."""
    start_seconds: float = 0.0
    """From the answer to the first step."""
    again_seconds: float = 0.0
    """Of each further invocation in a worker's chain, until its first step."""


@dataclass(frozen=True)
class TaskModel:
    """All coefficients of one task in one region."""

    model_bytes: float
    """Of one vector that workers merge, as it travels."""
    compute: Compute
    memory: Memory
    progress: Convergence
    platform: Platform
    channels: tuple[ChannelProfile, ...]
    corrections: dict[str, Correction] = field(default_factory=dict)
    """By channel; none: the closed form as it is."""
    faithful: bool = False
    """Collectives as published: one request after the other, values found by listing."""


@dataclass(frozen=True)
class Space:
    """What may be chosen; each in ascending order."""

    memories_mb: tuple[int, ...]
    workers: tuple[int, ...]
    batches: tuple[int, ...]
    """Of one worker."""
    collectives: tuple[str, ...] = field(default_factory=lambda: collectives(lambda method: method.predictable))
    chunks: tuple[int, ...] | None = None
    """K of collectives that take one; None: from 1 to the number of workers."""
    channels: tuple[str, ...] | None = None
    """None: all of the task's."""


@dataclass(frozen=True)
class TuningLimits:
    """What must be kept."""

    deadline_seconds: float = math.inf
    budget_usd: float = math.inf


@dataclass(frozen=True)
class Configuration:
    """One choice."""

    memory_mb: int
    workers: int
    batch: int
    collective: str
    chunks: int
    """K, as the collective's ``owners`` says."""
    channel: str


@dataclass(frozen=True)
class Prediction:
    """What a configuration takes."""

    configuration: Configuration
    iteration_seconds: float
    compute_seconds: float
    """Of it."""
    merge_seconds: float
    iterations: int
    seconds: float
    """In all, starts included."""
    usd: float
    requests_usd: float
    """Of it."""
    needed_mb: float
    """Memory that a worker needs; never more than it has."""
