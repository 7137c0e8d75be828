"""Quality of the chosen topologies over real grids, by a flood simulation that the planner does not share.

    .venv/bin/python tests/bench/topology.py [--quick] [--json PATH] [--grid PATH]

Draws regions, sizes and rates from Skyplane's measured links (a generated grid where the file is missing), takes links
away in a quarter of the draws, and lets the planner choose. The best topology of every kind is then run through an
event simulation: updates go hop by hop, links send one after another, each at the pace of TCP's window, which opens
with every round trip and stays open while the link is in use. The planner has recursions for the same TCP instead of
events and loops, so this holds its formulae and its search to account, not the idea of TCP.
"""

from __future__ import annotations

import csv
import heapq
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path as File

from report import Bar, Report, options

from scheduler import LinkTable, Path, Topologies, choose_topology, evaluate_topologies

GRID = File(__file__).resolve().parents[3] / "shared" / "data" / "wan" / "skyplane_wan.csv"
DRAWS, QUICK_DRAWS = 1000, 100
NEAR = 1.05
"""The chosen topology may take this many times the best one's time."""
FEWEST, MOST = 3, 12
FIRST_WINDOW_BYTES, OFFER_FROM_BYTES, OVERHEAD = 14_600, 1 << 20, 1.05
TOLD_USD_PER_GB = 0.09
"""Where the grid has no price."""


def main() -> int:
    given = options(__doc__, grid=GRID)
    report = Report("topology", given.quick)
    grid = _read(given.grid) if given.grid.exists() else _generated()
    print(f"grid: {given.grid if given.grid.exists() else 'generated'}, {len(grid)} links")
    draw = random.Random(20260101)
    evaluate_topologies(["a", "b"], {("a", "b"): Path(1, 1, 0), ("b", "a"): Path(1, 1, 0)}, 1)
    for number in range(QUICK_DRAWS if given.quick else DRAWS):
        report.runs.append(_run(number, draw, grid))
    near = sum(run["ratio"] <= NEAR for run in report.runs) / len(report.runs)
    worst = max(report.runs, key=lambda run: run["ratio"])
    chosen, best = (Counter(run[key] for run in report.runs) for key in ("chosen", "best"))
    print(f"{'kind':<14}{'chosen':>8}{'best':>8}{'if always taken: near the best':>34}")
    for kind in sorted(best | chosen):
        always = sum(run["simulated"].get(kind, math.inf) <= NEAR * run["best_seconds"] for run in report.runs)
        print(f"{kind:<14}{chosen[kind]:>8}{best[kind]:>8}{always / len(report.runs):>34.1%}")
    print(
        f"worst: {worst['ratio']:.3f} times the best time"
        f" ({worst['chosen']} for {worst['best']}, {worst['regions']} regions)"
    )
    rough = sum(run["rough_ratio"] <= NEAR for run in report.runs) / len(report.runs)
    print(f"with rates that differ from the table's by a quarter either way: {rough:.1%} near the best")
    errors = sorted(run["predicted_seconds"] / run["simulated"][run["chosen"]] for run in report.runs)
    print(f"predicted over simulated: {_quantile(errors, 0.5):.3f} ({errors[0]:.3f} to {errors[-1]:.3f})")
    took = sorted(run["choice_ms"] for run in report.runs if run["regions"] == MOST)
    print(
        f"{MOST} regions: {_quantile(took, 0.5):.1f} ms (95th percentile {_quantile(took, 0.95):.1f}, of {len(took)})"
    )
    report.bars = [
        Bar.at_least("chosen within 5 % of the best kind", 100 * near, "% of draws", 99.0),
        Bar.at_most(f"choice for {MOST} regions, 95th percentile", _quantile(took, 0.95), "ms", 20.0),
    ]
    return report.close(given.json)


def _run(number: int, draw: random.Random, grid: LinkTable) -> dict[str, object]:
    names, table = _drawn(number, draw, grid)
    size = int(10 ** draw.uniform(5, 9.6))
    clouds = {name: name.partition(":")[0] for name in names}
    begun = time.thread_time()
    evaluated = evaluate_topologies(names, table, size, clouds)
    chosen = choose_topology(evaluated)
    took = (time.thread_time() - begun) * 1e3
    assert chosen is not None, "a draw is connected"
    simulated = {kind: simulate(links, table, size) for kind, links in _by_kind(evaluated).items()}
    best = min(simulated, key=lambda kind: simulated[kind])
    other = {link: replace(path, mbps=path.mbps * math.exp(draw.gauss(0, 0.25))) for link, path in table.items()}
    rough = {kind: simulate(links, other, size) for kind, links in _by_kind(evaluated).items()}
    return {
        "regions": len(names),
        "links": len(table),
        "update_bytes": size,
        "chosen": chosen.kind,
        "best": best,
        "best_seconds": simulated[best],
        "predicted_seconds": chosen.seconds,
        "simulated": simulated,
        "ratio": simulated[chosen.kind] / simulated[best],
        "rough_ratio": rough[chosen.kind] / min(rough.values()),
        "choice_ms": took,
    }


def _by_kind(evaluated: Topologies) -> dict[str, tuple[tuple[str, str], ...]]:
    return {topology.kind: topology.links for topology in evaluated.possible}


# --- the simulation


@dataclass
class Line:
    """One directed link and its TCP connection."""

    path: Path
    free_at: float = 0.0
    window_bytes: float = FIRST_WINDOW_BYTES

    def send(self, ready: float, size: int) -> float:
        """Send an update that is there at `ready`; returns when the other side has it."""
        rtt, rate = self.path.rtt_ms / 1e3, self.path.mbps * 1e6 / 8
        # The offer and its answer pass while the line may still be busy with the update before.
        begin = max(self.free_at, ready + (rtt if size > OFFER_FROM_BYTES else 0.0))
        if begin - self.free_at > max(0.2, 2 * rtt):
            self.window_bytes = FIRST_WINDOW_BYTES
        left, at, full = size * OVERHEAD, begin, max(rate * rtt, FIRST_WINDOW_BYTES)
        while self.window_bytes < full and left > self.window_bytes:
            left -= self.window_bytes
            self.window_bytes *= 2
            at += rtt
        self.free_at = at + left / rate
        return self.free_at + rtt / 2


def simulate(links: tuple[tuple[str, str], ...], table: LinkTable, size: int) -> float:
    """Seconds until every region has every update; each goes along the shortest path, the first by name."""
    regions = sorted({name for link in links for name in link})
    near = {name: sorted({a if b == name else b for a, b in links if name in (a, b)}) for name in regions}
    routes = {origin: _routes(origin, near) for origin in regions}
    lines = {(a, b): Line(table[a, b]) for p, q in links for a, b in ((p, q), (q, p))}
    events = [(0.0, origin, origin) for origin in regions]
    finished, received = 0.0, 0
    while events:
        at, here, origin = heapq.heappop(events)
        if here != origin:
            finished, received = max(finished, at), received + 1
        for there in routes[origin].get(here, ()):
            heapq.heappush(events, (lines[here, there].send(at, size), there, origin))
    assert received == len(regions) * (len(regions) - 1), "every region has every update, once"
    return finished


def _routes(origin: str, near: Mapping[str, list[str]]) -> dict[str, list[str]]:
    paths: dict[str, tuple[str, ...]] = {origin: (origin,)}
    ring = [origin]
    while ring:
        reached: dict[str, tuple[str, ...]] = {}
        for here in ring:
            for there in near[here]:
                if there not in paths:
                    reached[there] = min(reached.get(there, ("~",)), (*paths[here], there))
        paths |= reached
        ring = list(reached)
    children: dict[str, list[str]] = {}
    for path in paths.values():
        if len(path) > 1:
            children.setdefault(path[-2], []).append(path[-1])
    return children


# --- what is drawn


def _drawn(number: int, draw: random.Random, grid: LinkTable) -> tuple[list[str], dict[tuple[str, str], Path]]:
    everyone = sorted({name for link in grid for name in link})
    lost = 0.2 if number % 4 == 0 else 0.0
    while True:
        count = draw.randint(FEWEST, MOST)
        names = sorted(draw.sample(everyone, count))
        scale = draw.choice([1.0, 0.1, 0.01])
        table = {}
        for a, b in combinations(names, 2):
            if (a, b) in grid and (b, a) in grid and draw.random() >= lost:
                for link in ((a, b), (b, a)):
                    path = grid[link]
                    table[link] = Path(path.rtt_ms, path.mbps * scale, path.usd_per_gb)
        if evaluate_topologies(names, table, 1).possible:
            return names, table


def _read(file: File) -> dict[tuple[str, str], Path]:
    with file.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["gbps"] and row["rtt_ms"]]
    return {
        (row["src"], row["dst"]): Path(
            float(row["rtt_ms"]), float(row["gbps"]) * 1e3, float(row["egress_usd_per_gb"] or TOLD_USD_PER_GB)
        )
        for row in rows
    }


def _generated() -> dict[tuple[str, str], Path]:
    """Regions on a sphere's map: round trips by distance, rates that fall with it and vary by direction."""
    draw = random.Random(7)
    places = {f"{cloud}:r{i}": (draw.uniform(0, 200), draw.uniform(0, 80)) for cloud in ("x", "y") for i in range(20)}
    table = {}
    for a, b in combinations(places, 2):
        rtt = 5 + 1.2 * math.dist(places[a], places[b])
        for link in ((a, b), (b, a)):
            table[link] = Path(rtt, draw.lognormvariate(8.2, 0.7) / (1 + rtt / 200), draw.choice([0.02, 0.09, 0.12]))
    return table


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


if __name__ == "__main__":
    sys.exit(main())
