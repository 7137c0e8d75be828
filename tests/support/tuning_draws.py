"""Random tasks and what may be chosen for them, and the search that tries everything one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator

from scheduler.tuning import (
    ChannelProfile,
    Compute,
    Configuration,
    Convergence,
    Memory,
    PlatformCosts,
    Prediction,
    Space,
    TaskModel,
    TuningLimits,
    predict,
)
from sync.collective import Correction, collective_named, collectives


def drawn_task(rng: random.Random) -> TaskModel:
    """Anything between a laptop's shared memory and an object store far away."""
    channels = tuple(_channel(rng, name) for name in ("near", "far")[: rng.randint(1, 2)])
    epochs = rng.random() < 0.5
    progress = Convergence(
        samples=float(rng.randint(100, 200_000)) if epochs else None,
        least_steps=0.0 if epochs else 10 ** rng.uniform(1, 4),
        noise_samples=10 ** rng.uniform(1, 4),
        staleness=rng.randint(0, 2),
    )
    return TaskModel(
        model_bytes=10 ** rng.uniform(4.5, 8.3),
        compute=Compute(10 ** rng.uniform(-3, 0), 10 ** rng.uniform(-5, -1), rng.choice([0.0, 1769.0])),
        memory=Memory(rng.uniform(100, 900), rng.uniform(0, 8)),
        progress=progress,
        platform=PlatformCosts(
            1.66667e-5, rng.choice([0.0, 2e-7]), rng.choice([0.0, 0.08]), rng.choice([5.0, 30.0, 600.0]),
            rng.uniform(0, 10), rng.uniform(0, 2),
        ),
        channels=channels,
        corrections={"near": Correction(*(rng.uniform(0.5, 1.5) for _ in range(4)))} if rng.random() < 0.5 else {},
        faithful=rng.random() < 0.2,
    )  # fmt: skip


def _channel(rng: random.Random, name: str) -> ChannelProfile:
    priced = rng.random() < 0.5
    return ChannelProfile(
        10 ** rng.uniform(-3.5, -0.7),
        10 ** rng.uniform(-3.5, -1),
        10 ** rng.uniform(6.5, 9),
        10 ** rng.uniform(6.5, 9),
        poll_seconds=rng.choice([0.0, rng.uniform(0.001, 0.1)]),
        list_seconds=rng.uniform(0, 0.05),
        parallel=rng.choice([1, 8, 16]),
        put_usd=10 ** rng.uniform(-7, -5) if priced else 0.0,
        get_usd=10 ** rng.uniform(-8, -6) if priced else 0.0,
        list_usd=5e-6 if priced else 0.0,
        merge_seconds_per_byte=rng.choice([0.0, 3e-10]),
        request_cpu_seconds=rng.choice([0.0, 2e-4]),
        cores=rng.choice([0.0, 0.0, 2.0]),
        jitter=rng.choice([0.0, 0.15]),
        full_rate_mb=rng.choice([0.0, 1024.0]),
        name=name,
    )


def drawn_space(rng: random.Random, most_workers: int = 8) -> Space:
    """Small enough that everything can be tried."""
    memories = sorted(rng.sample([256, 512, 768, 1024, 1536, 1769, 2048, 3008], rng.randint(1, 4)))
    workers = sorted(rng.sample(range(1, most_workers + 1), rng.randint(1, min(5, most_workers))))
    known = collectives(lambda method: method.predictable)
    chosen = tuple(sorted(rng.sample(known, rng.randint(1, len(known))), key=known.index))
    batches = sorted(rng.sample([8, 16, 32, 64, 128], rng.randint(1, 3)))
    return Space(tuple(memories), tuple(workers), tuple(batches), chosen)


def drawn_limits(rng: random.Random, every: list[Prediction]) -> TuningLimits:
    """TuningLimits that some of the configurations keep, that one just keeps, or that none does."""
    if not every:
        return TuningLimits(rng.uniform(1, 1000))
    some = rng.choice(every)
    return TuningLimits(
        rng.choice([float("inf"), some.seconds, some.seconds * rng.uniform(0.3, 2)]),
        rng.choice([float("inf"), some.usd, some.usd * rng.uniform(0.3, 2)]),
    )


def enumerated(task: TaskModel, space: Space) -> list[Prediction]:
    """Every configuration that fits, each by itself."""
    told = predict(task, list(_configurations(task, space)))
    return [one for one in told if one is not None]


def cheapest(task: TaskModel, space: Space, limits: TuningLimits) -> Prediction | None:
    """The cheapest configuration that keeps the limits, of equals the fastest; None: there is none."""
    kept = [
        one
        for one in enumerated(task, space)
        if one.seconds <= limits.deadline_seconds and one.usd <= limits.budget_usd
    ]
    return min(kept, key=lambda one: (one.usd, one.seconds), default=None)


def _configurations(task: TaskModel, space: Space) -> Iterator[Configuration]:
    channels = [channel.name for channel in task.channels if space.channels is None or channel.name in space.channels]
    for channel in channels:
        for workers in space.workers:
            for name in space.collectives:
                method = collective_named(name)
                owners = {method.owners(workers, None)}
                if method.takes_k:
                    owners = {k for k in space.chunks or range(1, workers + 1) if k <= workers}
                for chunks in sorted(owners):
                    for memory_mb in space.memories_mb:
                        for batch in space.batches:
                            yield Configuration(memory_mb, workers, batch, name, chunks, channel)
