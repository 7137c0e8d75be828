"""What every peer's process has in common: the tensors, the calibrated compute, and the marks that it leaves.

A peer runs once per region, by the Python that has its package; nothing here imports geofed. Its marks are lines of
JSON in the file ``--marks``: ``begin`` when the warm-up is over, ``end`` with what was done since.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence


def shapes() -> list[tuple[int, ...]]:
    """The 62 parameter tensors of ResNet-18 for CIFAR, in order: 11.17 M coordinates, 44.7 MB as float32."""
    found: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    inputs = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            found += [(width, inputs, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if block == 0 and inputs != width:
                found += [(width, inputs, 1, 1), (width,), (width,)]
            inputs = width
    return [*found, (10, 512), (10,)]


class Options(argparse.Namespace):
    """What the benchmark tells every peer."""

    rank: int
    addresses: str
    marks: str
    compute_ms: float
    local_steps: int
    warmup: int
    exchanges: int

    @property
    def hosts(self) -> list[str]:
        return self.addresses.split(",")

    @property
    def host(self) -> str:
        return self.hosts[self.rank]


def parser() -> argparse.ArgumentParser:
    """The options that all peers take; a peer adds its own."""
    made = argparse.ArgumentParser()
    made.add_argument("--rank", type=int, required=True)
    made.add_argument("--addresses", required=True, help="of all regions, in order of rank, with commas")
    made.add_argument("--marks", required=True, help="file for the marks of this region")
    made.add_argument("--compute-ms", type=float, required=True, help="length of a step's compute")
    made.add_argument("--local-steps", type=int, required=True, help="steps between two exchanges")
    made.add_argument("--warmup", type=int, required=True, help="exchanges before the measurement")
    made.add_argument("--exchanges", type=int, required=True, help="exchanges that are measured")
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> Options:
    return made.parse_args(argv, Options())


class Course:
    """A region's way through warm-up and measurement, a step at a time."""

    def __init__(self, options: Options, steps_per_exchange: int | None = None) -> None:
        self._marks = options.marks
        self.step_s = options.compute_ms / 1000
        each = options.local_steps if steps_per_exchange is None else steps_per_exchange
        self.first = options.warmup * each
        self.last = self.first + options.exchanges * each
        self.done = 0
        self.phases: dict[str, float] = {}
        self._begun = 0.0
        self._at_begin: dict[str, float] = {}
        self._begin_if_due()

    @property
    def running(self) -> bool:
        return self.done < self.last

    def compute(self) -> None:
        """One step's calibrated compute."""
        begun = time.perf_counter()
        sleep_until(begun + self.step_s)
        self.spent("compute", begun)

    def spent(self, phase: str, since: float) -> None:
        """Count the time since ``since`` as that of a phase."""
        self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - since

    def stepped(self, notes: dict[str, object] | None = None) -> None:
        """A step is over, with what belongs to it; ``notes`` are kept where it was the last one."""
        self.done += 1
        self._begin_if_due()
        if self.done == self.last:
            seconds = time.perf_counter() - self._begun
            phases = {name: spent - self._at_begin.get(name, 0.0) for name, spent in self.phases.items()}
            mark(
                self._marks,
                event="end",
                steps=self.last - self.first,
                seconds=seconds,
                phases=phases,
                notes=notes or {},
            )

    def _begin_if_due(self) -> None:
        if self.done == self.first:
            self._begun = time.perf_counter()
            self._at_begin = dict(self.phases)
            mark(self._marks, event="begin")


def mark(path: str, **fields: object) -> None:
    """Append one mark, whole."""
    line = json.dumps({**fields, "time": time.time()}) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def sleep_until(moment: float) -> None:
    """Sleep until a moment of time.perf_counter."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
