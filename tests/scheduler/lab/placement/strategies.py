"""Small federations and jobs, drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from scheduler import Path
from scheduler.lab.placement import (
    Device,
    PlacementFederation,
    PlacementJob,
    PlacementRegion,
    PlacementShard,
    federation,
)

GB = 10**9
NAMES = "abcdef"


@st.composite
def federations(draw: st.DrawFn, most: int = 5) -> PlacementFederation:
    regions = []
    for name in NAMES[: draw(st.integers(1, most))]:
        devices = tuple(
            Device(
                kind,
                draw(st.integers(0, 6)),
                speed * draw(st.sampled_from([0.7, 1.0, 1.3])),
                draw(st.floats(0.1, 2.0)),
                memory * GB,
            )
            for kind, speed, memory in (("small", 100.0, 8), ("large", 250.0, 32))[: draw(st.integers(1, 2))]
        )
        regions.append(PlacementRegion(name, draw(st.sampled_from(["x", "y"])), devices, draw(st.floats(0, 0.2))))
    links = {
        (a.name, b.name): Path(50.0, draw(st.sampled_from([5.0, 500.0, 5000.0])), draw(st.floats(0, 0.2)))
        for a in regions
        for b in regions
        if a is not b and draw(st.integers(0, 5))
    }
    return federation(tuple(regions), links)


@st.composite
def jobs_over(draw: st.DrawFn, names: list[str], most: int = 6, shards: int = 4) -> tuple[PlacementJob, ...]:
    rules = st.one_of(
        st.sampled_from(["region", "cloud", "anywhere", "anywhere"]), st.frozensets(st.sampled_from(names), max_size=3)
    )
    found = []
    for number in range(draw(st.integers(1, most))):
        parts = tuple(
            PlacementShard(
                f"s{place}",
                draw(st.sampled_from(names)),
                draw(st.integers(1_000, 2_000_000)),
                draw(st.integers(0, 40)) * GB,
                draw(rules),
            )
            for place in range(draw(st.integers(1, shards)))
        )
        found.append(
            PlacementJob(
                name=f"job-{number}",
                shards=parts,
                deadline_seconds=draw(st.floats(10, 30_000)),
                model_bytes=draw(st.integers(0, 500)) * 1_000_000,
                rounds=draw(st.integers(0, 200)),
                passes=draw(st.sampled_from([0.5, 1.0, 3.0])),
                memory_bytes=draw(st.sampled_from([0, 16 * GB])),
                start_seconds=draw(st.sampled_from([0.0, 20.0])),
            )
        )
    return tuple(found)


@st.composite
def worlds(
    draw: st.DrawFn, regions: int = 5, jobs: int = 6, shards: int = 4
) -> tuple[PlacementFederation, tuple[PlacementJob, ...]]:
    drawn = draw(federations(regions))
    return drawn, draw(jobs_over([region.name for region in drawn.regions], jobs, shards))
