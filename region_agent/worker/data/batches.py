"""Samples of a region in each step, and the factor of the learning rate, where they change during training.

Both depend only on the step, so every worker, every slice and every attempt draws the same samples for a step, also for
a repeated one: the samples of a step begin where those of the previous step ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from geofed_pb.errors import GeofedError
from region_agent.worker.invocation import Stretch

__all__ = ["Batches"]


class Batches:
    """Batch size of a region by step. It changes only at the beginning of a round.

    Raises ``GeofedError("CONFIG_INVALID")`` if the stretches are not in the order of their first steps.
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
        """Smallest batch of all stretches."""
        return min(self._batches)

    @property
    def change(self) -> bool:
        """Whether the batch changes."""
        return len(self._batches) > 1

    def of(self, step: int) -> int:
        """Return the region's samples in a step; steps count from 1."""
        return self._batches[self._stretch(step)]

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate in a step."""
        return self._rates[self._stretch(step)]

    def before(self, step: int) -> int:
        """Return the region's samples in all steps before one."""
        ends = [*self._steps[1:], step]
        return sum(
            batch * max(0, min(end, step) - begin)
            for begin, end, batch in zip(self._steps, ends, self._batches, strict=True)
        )

    def _stretch(self, step: int) -> int:
        return max(number for number, begin in enumerate(self._steps) if begin <= max(1, step))
