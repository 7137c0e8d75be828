"""How many samples a region draws in each step, and with what learning rate, where that changes while it trains.

It follows from the step alone, so every worker, every slice and every attempt that makes a step, or makes it again,
draws the same samples for it: those of a step begin where those of the one before ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from geofed_pb.errors import GeofedError
from region_agent.worker.invocation import Stretch

__all__ = ["Batches"]


class Batches:
    """A region's batch by step. Changes come at the beginning of rounds, so that it is the same within a round.

    Raises ``GeofedError("CONFIG_INVALID")`` where stretches do not follow each other.
    """

    def __init__(self, first: int, stretches: Sequence[Stretch] = ()) -> None:
        """``first``: samples of all workers of the region in a step, up to the first stretch."""
        steps = [1, *(stretch.first_step for stretch in stretches)]
        if any(later < sooner for sooner, later in pairwise(steps)):
            raise GeofedError("CONFIG_INVALID", f"batches that change at steps {steps[1:]}")
        self._steps, self._batches = steps, [first, *(stretch.batch for stretch in stretches)]
        self._rates = [1.0, *(stretch.rate for stretch in stretches)]

    @property
    def least(self) -> int:
        """Of all."""
        return min(self._batches)

    @property
    def change(self) -> bool:
        """Whether there is more than one."""
        return len(self._batches) > 1

    def of(self, step: int) -> int:
        """Samples of the region in a step, counted from 1."""
        return self._batches[self._place(step)]

    def rate(self, step: int) -> float:
        """What the learning rate of a step is multiplied by."""
        return self._rates[self._place(step)]

    def before(self, step: int) -> int:
        """Samples of all steps before one."""
        ends = [*self._steps[1:], step]
        return sum(
            batch * max(0, min(end, step) - begin)
            for begin, end, batch in zip(self._steps, ends, self._batches, strict=True)
        )

    def _place(self, step: int) -> int:
        return max(place for place, begin in enumerate(self._steps) if begin <= max(1, step))
