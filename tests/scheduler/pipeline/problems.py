"""Small random problems, their brute-force fronts, and an independent mixed-integer program for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from scheduler.pipeline import (
    Cut,
    FunctionSize,
    Hop,
    Layer,
    LayerProfile,
    LinearCost,
    PipelineOptions,
    PipelineProblem,
    PlannedPipeline,
    StageChannel,
    StageRegion,
    evaluate,
)

MB = 1 << 20


def problem(seed: int, *, layers: int = 5, sizes: int = 3, places: int = 1) -> PipelineProblem:
    """Memory is tight, transfers and compute are about as long; every third one has two places or more replicas."""
    draw = random.Random(seed)
    chain = tuple(_layer(draw, n) for n in range(draw.randint(2, layers)))
    memories = sorted(draw.sample([256, 512, 1024, 1536, 3072], sizes))
    where = tuple(_place(draw, n, memories) for n in range(places))
    hops = {
        (a.name, b.name): Hop(draw.uniform(0.01, 0.1), draw.uniform(2e6, 4e7), draw.choice([0.0, 0.02, 0.09]))
        for a in where
        for b in where
        if a is not b
    }
    asked = PipelineProblem(
        LayerProfile(chain, draw.randint(1, 500_000), draw.choice([0.0, 1.0, 2.0]), base_mb=100.0),
        draw.choice([4, 6, 8]),
        where,
        hops,
        ends_last=places > 1 and draw.random() < 0.3,
        degrees=(1, draw.choice([2, 3])),
        micro_batches=(1, draw.choice([2, 4])),
        rematerialise=draw.random() < 0.7,
        most_workers=draw.choice([None, 4, 8]),
        sent_share=draw.choice([1.0, 0.5]),
        merged_share=draw.choice([1.0, 0.25]),
        merges_early=draw.random() < 0.5,
        merges_apart=draw.random() < 0.5,
    )
    return _sharing(asked, draw) if draw.random() < 0.5 else asked


def _sharing(asked: PipelineProblem, draw: random.Random) -> PipelineProblem:
    """The same with an optimiser that takes time, and with cores that functions share, or more than enough."""
    layers = tuple(replace(layer, update_s=draw.uniform(0, 0.05)) for layer in asked.profile.layers)
    places = tuple(
        replace(
            place,
            cores=draw.choice([0.0, 1.0, 2.0, 6.0]),
            channel=replace(place.channel, request_core_s=draw.uniform(0, 0.01), byte_core_s=draw.uniform(0, 1e-8)),
        )
        for place in asked.places
    )
    return replace(asked, profile=replace(asked.profile, layers=layers), places=places)


def _layer(draw: random.Random, number: int) -> Layer:
    forward = draw.uniform(0.002, 0.08)
    return Layer(
        f"layer{number}",
        draw.randint(1, 40 * MB),
        draw.randint(0, 25 * MB),
        draw.randint(1000, 2 * MB),
        LinearCost(draw.uniform(0, 0.01), forward),
        LinearCost(draw.uniform(0, 0.01), forward * draw.uniform(0.8, 3)),
    )


def _place(draw: random.Random, number: int, memories: list[int]) -> StageRegion:
    price = draw.uniform(1e-5, 3e-5)
    sizes = tuple(
        FunctionSize(m, min(1.0, m / 1536) * draw.uniform(0.8, 1.2), price, draw.choice([0.5, 1.0])) for m in memories
    )
    up, down = draw.uniform(1e7, 1e8), draw.uniform(1e7, 1e8)
    return StageRegion(f"place{number}", sizes, StageChannel(0.01, 0.02, up, down, draw.choice([1, 8]), 5e-6, 4e-7))


def every_cut(problem: PipelineProblem, way: PipelineOptions) -> Iterator[tuple[Cut, ...]]:
    """All cuts, places, sizes and choices to compute again, whether they fit or not."""
    length, places = len(problem.profile.layers), problem.places
    options = [(p, s, again) for p, place in enumerate(places) for s in range(len(place.sizes)) for again in (0, 1)]
    for stages in range(1, length + 1) if problem.stages is None else (problem.stages,):
        if problem.most_workers is not None and stages * way.degree > problem.most_workers:
            return
        for inner in combinations(range(1, length), stages - 1):
            ends = (0, *inner, length)
            for chosen in product(options, repeat=stages):
                order = [place for place, _, _ in chosen]
                begins_and_ends = order[0] == 0 and (not problem.ends_last or order[-1] == len(places) - 1)
                if (
                    begins_and_ends
                    and order == sorted(order)
                    and (problem.rematerialise or not any(c[2] for c in chosen))
                ):
                    yield tuple(
                        Cut(a, b - 1, p, s, bool(again))
                        for a, b, (p, s, again) in zip(ends, ends[1:], chosen, strict=False)
                    )


def brute_force(problem: PipelineProblem, ways: tuple[PipelineOptions, ...]) -> list[tuple[float, float]]:
    """The front of seconds and USD by trying everything."""
    found: list[PlannedPipeline] = []
    for way in ways:
        found += [plan for cuts in every_cut(problem, way) if (plan := evaluate(problem, way, cuts)) is not None]
    best: list[tuple[float, float]] = []
    for seconds, usd in sorted((plan.seconds, plan.usd) for plan in found):
        if not best or usd < best[-1][1]:
            best.append((seconds, usd))
    return best
