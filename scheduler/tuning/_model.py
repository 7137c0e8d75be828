"""Inputs and outputs of the configuration search: task, platform, channel, choices, prediction. Units in names."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field

from sync.collective import ChannelCosts, Correction, collectives


@dataclass(frozen=True)
class ChannelProfile(ChannelCosts):
    """Measured speed of a region's channel for one worker, and its prices."""

    _: KW_ONLY
    name: str
    full_rate_mb: float = 0.0
    """Memory at which a function gets the full bandwidth; below, it is proportional. 0: independent of memory."""


@dataclass(frozen=True)
class Compute:
    """Seconds of a step's forward and backward pass: ``fixed + per sample * batch / share``.

    ``share`` is the part of a core that a function's memory buys: memory / ``full_core_mb``, at most 1 (AWS Lambda:
    1769 MB a core). FasDL's a (B + b) / (M + m) has no upper limit, so it predicts that single-threaded code gets
    faster with any amount of memory.
    """

    fixed_seconds: float
    seconds_per_sample: float
    full_core_mb: float = 0.0
    """Memory that buys one core; 0: speed does not depend on memory, as on one's own machines."""


@dataclass(frozen=True)
class Memory:
    """MB that a worker needs: ``base + per sample * batch``, plus the buffers that its collective states."""

    base_mb: float
    mb_per_sample: float
    least_mb: float = 0.0
    """Lower bound, from work other than steps, such as an evaluation."""
    spare: float = 0.2
    """Share of a function's memory that must stay free."""


@dataclass(frozen=True)
class Convergence:
    """How many iterations a job needs: ``least * (1 + noise / global batch)``, McCandlish et al.'s (arXiv 1812.06162,
    eq. 2.11).

    A job with a number of epochs has ``samples`` set instead: a larger batch then needs fewer iterations.
    """

    samples: float | None = None
    """Samples that the job trains on in all; None: it trains until it reaches its goal."""
    least_steps: float = 0.0
    """Iterations to the goal in the limit of an infinite batch."""
    noise_samples: float = 0.0
    """Gradient noise scale, in samples: a batch of this size needs twice ``least_steps``."""
    staleness: int = 0
    """Iterations by which merged gradients may be late, for collectives that support it."""


@dataclass(frozen=True)
class PlatformCosts:
    """Prices and limits of the platform that runs the functions."""

    usd_per_gb_second: float
    usd_per_call: float = 0.0
    server_usd_per_hour: float = 0.0
    """Price of the parameter server."""
    usd_per_second: float = 0.0
    """Price of a running function besides its memory: its devices."""
    slice_seconds: float = 30.0
    """An invocation ends at the first step boundary after this."""
    start_seconds: float = 0.0
    """Time from the start of the job to the first step."""
    again_seconds: float = 0.0
    """Time from each further invocation of a worker to its first step."""


@dataclass(frozen=True)
class TaskModel:
    """All coefficients of one task in one region."""

    model_bytes: float
    """Encoded size of the vector that one worker contributes to a merge."""
    compute: Compute
    memory: Memory
    progress: Convergence
    platform: PlatformCosts
    channels: tuple[ChannelProfile, ...]
    corrections: dict[str, Correction] = field(default_factory=dict)
    """Measured corrections of the cost formula, by channel; absent: the formula is used unchanged."""
    faithful: bool = False
    """Whether collectives run as published: one request after the other, and values found by listing the store."""


@dataclass(frozen=True)
class Space:
    """Choices of the search, each in ascending order."""

    memories_mb: tuple[int, ...]
    workers: tuple[int, ...]
    batches: tuple[int, ...]
    """Samples of one worker in one step."""
    collectives: tuple[str, ...] = field(default_factory=lambda: collectives(lambda method: method.predictable))
    chunks: tuple[int, ...] | None = None
    """K of collectives that take one; None: from 1 to the number of workers."""
    channels: tuple[str, ...] | None = None
    """None: all of the task's."""


@dataclass(frozen=True)
class TuningLimits:
    """Limits that a configuration must keep."""

    deadline_seconds: float = math.inf
    budget_usd: float = math.inf


@dataclass(frozen=True)
class Configuration:
    """One configuration of a region."""

    memory_mb: int
    workers: int
    batch: int
    collective: str
    chunks: int
    """K, as the collective's ``owners`` says."""
    channel: str


@dataclass(frozen=True)
class Prediction:
    """Predicted time, cost and memory of a configuration."""

    configuration: Configuration
    iteration_seconds: float
    compute_seconds: float
    """Part of ``iteration_seconds`` that is compute."""
    merge_seconds: float
    """Part of ``iteration_seconds`` that is merging."""
    iterations: int
    seconds: float
    """Total time, starts included."""
    usd: float
    requests_usd: float
    """Part of ``usd`` that the channel's requests cost."""
    needed_mb: float
    """Memory that a worker needs; never more than it has."""
