"""Batch size of each step of a partition, where it depends on the number of workers.

The batch changes at the beginning of a round, after the attempt with another number of workers has begun. In the round
that is open when the previous attempt is fenced, some steps may have been made already; the new workers make the rest
of it with the same batch. So every step has one batch size, also when it is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

from region_agent.worker.invocation import Stretch

__all__ = ["BatchPlan"]


class BatchPlan:
    """Batch sizes in force, by step, and the one that is requested next."""

    def __init__(
        self,
        steps_per_round: int,
        first: int,
        stretches: Sequence[Stretch] = (),
        wanted: tuple[int, float] | None = None,
    ) -> None:
        """``first``: samples of a step as planned. ``wanted``: samples, and factor of the learning rate; None: no
        change."""
        self._steps_per_round, self._first = steps_per_round, first
        self.stretches = tuple(stretches)
        self._wanted = wanted

    def want(self, batch: int, rate: float) -> None:
        """Request a batch size and a factor of the learning rate; replaces a request that is not in force yet."""
        self._wanted = batch, rate

    @property
    def pending(self) -> bool:
        """Whether a request is not in force yet."""
        last = self.stretches[-1] if self.stretches else None
        present = (last.batch, last.rate) if last is not None else (self._first, 1.0)
        return self._wanted is not None and self._wanted != present

    def settle(self, completed: int | None) -> Stretch:
        """Put the request into force from the round after the open one.

        ``completed``: rounds completed so far; None: no step was made yet, so it holds from the first step.
        """
        assert self._wanted is not None
        step = 1 if completed is None else (completed + 1) * self._steps_per_round + 1
        batch, rate = self._wanted
        stretch = Stretch(first_step=step, batch=batch, rate=rate)
        # Stretches from the same step on, or later, were never used.
        self.stretches = (*(one for one in self.stretches if one.first_step < step), stretch)
        return stretch
