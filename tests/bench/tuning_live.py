"""Live iterations: workers that compute, as a sleep of calibrated length, and merge real tensors over a real channel.

The stores, relays and workers are those of `collectives_live.py`, with its ``scale`` and ``slower``. A setting is a
chain of iterations, in which every worker continues as soon as it has the merged vector; what counts is the median time
between the moments at which the last worker has one merged vector and the next.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from collectives_live import Contender, Group, Workers, counts, group

from sync.collective import ChannelCosts, Settings

MB = 1e6
ITERATIONS = {"redis": 8, "s3": 20}
"""Of one setting; the first is not counted. Requests of S3 take as long as is drawn, each."""
QUICK_ITERATIONS = {"redis": 5, "s3": 7}
_DISTURBED, _AGAIN = 1.25, 2
"""A setting whose slowest iteration took so many times its fastest is tried again, at most so often."""


@dataclass(frozen=True)
class Setting:
    """One configuration that is tried."""

    kind: str
    """Of the channel: "s3" or "redis"."""
    size_mb: float
    workers: int
    pattern: str
    chunks: int
    """K."""
    batch: int
    memory_mb: int
    faithful: bool = False
    per_sample_seconds: float = 0.006
    """That is computed, on a whole core."""

    @property
    def contender(self) -> Contender:
        pauses = {"s3": 0.1, "redis": 0.001}
        chunks = self.chunks if self.pattern == "k-reduce" else None
        settings = Settings(self.pattern, chunks=chunks, faithful=self.faithful)  # type: ignore[arg-type]
        if self.faithful:
            pause = pauses[self.kind] if self.pattern != "k-reduce" or self.kind != "s3" else 0.0
            settings = Settings(self.pattern, chunks=chunks, faithful=True, poll_seconds=pause)  # type: ignore[arg-type]
        return Contender(self.pattern, settings)


@dataclass(frozen=True)
class Measured:
    """What came of a setting."""

    setting: Setting
    seconds: float
    """Of an iteration, median."""
    least: float
    most: float
    merge_seconds: float
    """Of it, beyond the compute."""
    compute_seconds: float
    """As the sleeps came out, median over workers and iterations."""
    requests: dict[str, int]
    """Of an iteration, mean, as the store counted them; empty where it does not count."""
    scale: int
    slower: float
    load: float
    """Of the machine, as the setting began."""


def compute_seconds(batch: int, memory_mb: int, per_sample_seconds: float) -> float:
    """What the emulated function takes for a step: a core of Lambda's, which is whole from 1769 MB on."""
    return (0.03 + per_sample_seconds * batch) * max(1.0, 1769 / memory_mb)


def measured(settings: Sequence[Setting], *, quick: bool = False) -> Iterator[tuple[Setting, Measured, ChannelCosts]]:
    """Try settings, those of one store after another; with the constants that the store's first worker has probed.
    Quick: a third of the iterations, each setting once."""
    iterations, again = (QUICK_ITERATIONS, 0) if quick else (ITERATIONS, _AGAIN)
    workers = Workers(max(setting.workers for setting in settings))
    places = dict.fromkeys((setting.kind, setting.size_mb, setting.workers) for setting in settings)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for kind, size_mb, count in places:
                mine = [s for s in settings if (s.kind, s.size_mb, s.workers) == (kind, size_mb, count)]
                slower = {2: 2.0, 4: 2.0, 8: 3.0}.get(count, 4.0)
                with group(workers, kind, int(size_mb * MB), count, slower, Path(folder)) as one:
                    costs = one.probed()
                    for number, setting in enumerate(mine):
                        took = _undisturbed(one, f"it{number}", setting, costs, iterations[kind], again)
                        yield setting, took, costs
    finally:
        workers.close()


def _undisturbed(group: Group, name: str, setting: Setting, costs: ChannelCosts, count: int, again: int) -> Measured:
    """What was disturbed is tried again, and the calmest counts: other work on the machine is not in the model."""
    took = _iterations(group, name, setting, costs, count)
    for number in range(again):
        if took.most <= _DISTURBED * took.least:
            break
        other = _iterations(group, f"{name}.{number}", setting, costs, count)
        took = min(took, other, key=lambda one: one.most / one.least)
    return took


def _iterations(group: Group, name: str, setting: Setting, costs: ChannelCosts, count: int) -> Measured:
    load = float(Path("/proc/loadavg").read_text().split()[0])
    group.open(name, setting.contender, costs)
    compute = compute_seconds(setting.batch, setting.memory_mb, setting.per_sample_seconds) * group.slower
    if group.control:
        counts(group.control)
    begin = time.monotonic() + 0.06
    told = group.workers.ask(group.count, "iterate", name, begin, count, compute)
    group.workers.ask(group.count, "close", name)
    asked = counts(group.control) if group.control else {}
    ends = [max(worker[step][1] for worker in told) for step in range(count)]
    spans = [(after - before) / group.slower for before, after in itertools.pairwise(ends)]
    computed = statistics.median(step[0] for worker in told for step in worker[1:]) / group.slower
    seconds = statistics.median(spans)
    return Measured(
        setting, seconds, min(spans), max(spans), seconds - computed, computed,
        {kind: round(number / count) for kind, number in asked.items() if not kind.startswith("bytes")},
        group.scale, group.slower, load,
    )  # fmt: skip
