"""What tuning knows of a task, a platform and a channel, and what it may choose. Frozen dataclasses; units in names."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

COLLECTIVES = ("server-reduce", "all-reduce", "scatter-reduce", "pipelined-scatter-reduce", "k-reduce")
"""By their numbers in arrays."""


@dataclass(frozen=True)
class ChannelProfile:
    """One worker's use of a region's channel, as it was measured, and what it costs."""

    name: str
    put_seconds: float
    """Latency of a request that stores; its bytes come on top."""
    get_seconds: float
    up_bytes_per_second: float
    """Of one worker's own link."""
    down_bytes_per_second: float
    poll_seconds: float = 0.0
    """Between two looks of a worker that waits; 0: it is told."""
    list_seconds: float = 0.0
    """What a look takes that lists the channel, for collectives as published."""
    parallel: int = 8
    """Requests of one worker that may be on their way at once, each way."""
    put_usd: float = 0.0
    get_usd: float = 0.0
    """Also of a look that finds nothing."""
    list_usd: float = 0.0
    usd_per_hour: float = 0.0
    """Of a node that is there for the job alone."""
    merge_seconds_per_byte: float = 0.0
    """What adding a part to a sum takes, by the bytes of float32 that it has."""
    request_cpu_seconds: float = 0.0
    """Of a request, what keeps a core of the worker busy."""
    cores: float = 0.0
    """Of a channel in the memory of one machine: the cores that all workers on it share; 0: each has its own."""
    jitter: float = 0.0
    """Standard deviation of the latency's logarithm."""
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
class Correction:
    """What runs have taught about merges: the weight of each term of the closed form.

    The defaults are the closed form as it is, over constants that were probed.
    """

    latency: float = 1.0
    late: float = 1.0
    """Of what the latest of many requests takes longer than one: workers that continue by themselves are not late all
    at once."""
    transfer: float = 1.0
    work: float = 1.0
    """Of requests that keep a core busy."""
    adding: float = 1.0
    hidden: float = 1.0
    """How much of what overlapping could hide it does hide, where some workers own no chunk. Below 0 it costs more than
    it hides: looks that come too early, and requests that wait behind others."""
    duplex: float = 1.0
    """The same where all do: each then needs both directions of its link at once."""
    request_seconds: float = 0.0
    """Of each request in the longest chain, beyond its latency."""
    merge_seconds: float = 0.0
    """Of each merge, whatever it moves."""

    @property
    def weights(self) -> tuple[float, ...]:
        """In the order of `TERMS`."""
        return (
            self.latency, self.late, self.transfer, self.work, self.adding, -self.hidden, -self.duplex,
            self.request_seconds, self.merge_seconds,
        )  # fmt: skip


TERMS = ("latency", "late", "transfer", "work", "adding", "hidden", "duplex", "requests", "merge")
"""What a merge's seconds are made of; "requests" is a number of them, "merge" is 1, the others are seconds."""


@dataclass(frozen=True)
class Convergence:
    """How many iterations a job needs: ``least * (1 + noise / global batch) * (1 + rho * staleness * share stale)``.

    The first factor is McCandlish et al.'s (arXiv 1812.06162, eq. 2.11). A job that is given epochs makes the steps
    that these take: there ``samples`` is set, and a larger batch loses nothing.
    """

    samples: float | None = None
    """That the job passes over; None: it continues until a goal."""
    least_steps: float = 0.0
    """To the goal with a batch without end."""
    noise_samples: float = 0.0
    """The gradient noise scale: the batch from which on doubling it saves less than half of the steps."""
    rho: float = 0.0
    """What a step of staleness costs, if all workers had it."""
    staleness: int = 0
    """Of ``k-reduce``: merges by which workers that own no chunk are behind."""
    most_batch: float = math.inf
    """Largest global batch that may be used (FasDL's Bg)."""


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
    collectives: tuple[str, ...] = COLLECTIVES
    chunks: tuple[int, ...] | None = None
    """K of ``k-reduce``; None: from 1 to the number of workers."""
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
    """K; 1 of ``all-reduce``, else as many as workers."""
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
