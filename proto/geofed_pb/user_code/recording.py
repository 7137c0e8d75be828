"""Values that a task's code logs while it trains: `geofed.log`.

A worker's process has one recorder while an invocation runs. Without one, as in a plain process, nothing is recorded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import SupportsFloat

from geofed_pb.bounds import LOGGED_NAME_BYTES, MOST_LOGGED, clean

__all__ = ["RESERVED", "Recorder", "Sums", "log", "log_losses", "log_sums", "recording"]

Sums = dict[str, tuple[float, int]]
"""Sum and number of the values, by name."""
RESERVED = frozenset({"region", "round", "at", "step", "samples", "loss", "test_loss"})
"""Names of figures that every round has."""
_TRAIN = "train/"
"""Prefix of the names of a loss's parts: an evaluation shows parts on the test data by their names alone."""
_KEPT_ROUNDS = 2
"""With background exchange values of the open round and of the one before it are recorded at the same time."""


class Recorder:
    """Sums of the values that were logged in the last rounds."""

    def __init__(self) -> None:
        self.round = 0
        """Round that values are of from now on; 0: they are left out."""
        self._rounds: dict[int, Sums] = {}
        self._told: set[str] = set()

    def add(self, name: str, value: SupportsFloat) -> None:
        """Add a value. Raises ``ValueError`` for a name that cannot be used, ``TypeError`` for what is no number."""
        if not _is_name(name):
            text = f"log: {name!r} is no name: up to {LOGGED_NAME_BYTES} bytes on one line"
            raise ValueError(text)
        if name in RESERVED or name.startswith("system/"):
            raise ValueError(f"log: {name!r} is the name of a figure that every round has; choose another one")
        self._put(name, float(value))

    def add_losses(self, losses: Mapping[str, SupportsFloat]) -> None:
        """Add the parts of a loss, each as "train/NAME"; names that cannot be shown are left out."""
        for name, value in losses.items():
            if _is_name(f"{_TRAIN}{name}"):
                self._put(f"{_TRAIN}{name}", float(value))

    def _put(self, name: str, number: float) -> None:
        if not self.round:
            return
        sums = self._rounds.setdefault(self.round, {})
        for old in [one for one in self._rounds if one <= max(self._rounds) - _KEPT_ROUNDS]:
            del self._rounds[old]
        if not math.isfinite(number):
            self._tell(name, f"log: values of {name} that are not finite are left out")
        elif name not in sums and len(sums) >= MOST_LOGGED:
            self._tell("", f"log: of more than {MOST_LOGGED} names in a round the first are kept, not {name}")
        else:
            total, count = sums.get(name, (0.0, 0))
            sums[name] = total + number, count + 1

    def add_sums(self, sums: Sums) -> None:
        """Add the sums of values that another recorder was given."""
        mine = self._rounds.setdefault(self.round, {}) if self.round else {}
        for name, (total, count) in sums.items():
            if name in mine or len(mine) < MOST_LOGGED:
                before, counted = mine.get(name, (0.0, 0))
                mine[name] = before + total, counted + count

    def _tell(self, about: str, text: str) -> None:
        if about not in self._told and len(self._told) < MOST_LOGGED:
            self._told.add(about)
            print(text, file=sys.stderr, flush=True)

    def up_to(self, last: int) -> dict[int, Sums]:
        """Return the sums of rounds up to ``last``, by round."""
        return {one: dict(sums) for one, sums in self._rounds.items() if one <= last and sums}

    def facts(self) -> dict[str, float]:
        """Return the sums as named numbers of a frame."""
        return {
            f"l/{kind}/{one}/{name}": float(value)
            for one, sums in self._rounds.items()
            for name, pair in sums.items()
            for kind, value in zip(("s", "n"), pair, strict=True)
        }

    def restore(self, facts: Mapping[str, float]) -> None:
        """Restore the result of `facts`; other numbers are ignored."""
        self._rounds = {}
        for key, total in facts.items():
            if key.startswith("l/s/"):
                one, _, name = key.removeprefix("l/s/").partition("/")
                self._rounds.setdefault(int(one), {})[name] = total, int(facts[f"l/n/{one}/{name}"])


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and clean(name, LOGGED_NAME_BYTES) == name and "\n" not in name


_current: Recorder | None = None


def log(name: str, value: SupportsFloat) -> None:
    """Log a value of the present round under a name; outside of a worker nothing happens.

    A region shows, for each round and name, the mean of all values that its workers have logged. Names: 100 in a round
    at most, of 100 bytes at most. Values: numbers, or tensors of one element; those that are not finite are left out.

    Raises ``ValueError``, in a worker, for a name that cannot be used.
    """
    if _current is not None:
        _current.add(name, value)


def log_losses(losses: Mapping[str, SupportsFloat]) -> None:
    """Log the parts of the loss of a training step."""
    if _current is not None:
        _current.add_losses(losses)


def log_sums(sums: Sums) -> None:
    """Log the sums of values that a process of this worker has logged."""
    if _current is not None and sums:
        _current.add_sums(sums)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let `log` add to a recorder, in place of the one before."""
    global _current
    before, _current = _current, recorder
    try:
        yield
    finally:
        _current = before
