"""The samples that a partition draws in a step, where they go with its workers.

The batch changes with the attempt that has other workers, at the beginning of a round: in the one that is open when
the attempt before is fenced some steps may have been made already, and whoever continues in it makes the others with
the same batch. So every step has one batch, whatever is made again.
"""

from __future__ import annotations

from collections.abc import Sequence

from region_agent.worker.invocation import Stretch

__all__ = ["BatchPlan"]


class BatchPlan:
    """What is in force, step by step, and what is wanted from soon on."""

    def __init__(
        self,
        steps_per_round: int,
        first: int,
        stretches: Sequence[Stretch] = (),
        wanted: tuple[int, float] | None = None,
    ) -> None:
        """``first``: samples of a step as planned. ``wanted``: samples, and the learning rate's factor; None: as it
        is."""
        self._steps_per_round, self._first = steps_per_round, first
        self.stretches = tuple(stretches)
        self._wanted = wanted

    def want(self, batch: int, rate: float) -> None:
        """From soon on; what was wanted before and is not in force does not count any more."""
        self._wanted = batch, rate

    @property
    def pending(self) -> bool:
        """Whether something is wanted that is not in force yet."""
        last = self.stretches[-1] if self.stretches else None
        present = (last.batch, last.rate) if last is not None else (self._first, 1.0)
        return self._wanted is not None and self._wanted != present

    def settle(self, completed: int | None) -> Stretch:
        """Put it into force from the round after the open one on; ``completed``: rounds; None: no step was made yet."""
        assert self._wanted is not None
        step = 1 if completed is None else (completed + 1) * self._steps_per_round + 1
        batch, rate = self._wanted
        made = Stretch(first_step=step, batch=batch, rate=rate)
        # One that would begin with the same step has never been.
        self.stretches = (*(one for one in self.stretches if one.first_step < step), made)
        return made
