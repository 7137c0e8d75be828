"""Makes a task's batches: in the worker's own thread, or ahead in processes (`num_workers` of the task module)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import TensorDataset

from geofed_pb.errors import GeofedError
from region_agent.worker.data.loaders import Loaders
from region_agent.worker.data.shard import collated
from region_agent.worker.data.streamed import Streamed
from region_agent.worker.task import TaskModule
from sync.seeding import reseed_cpu

__all__ = ["DrawnSamples", "Loading"]

Made = list[tuple[int, Any]]
"""Batches, each with its number of samples that are not None."""


@dataclass(frozen=True)
class DrawnSamples:
    """Samples of a step, or of a batch of an evaluation."""

    split: str
    groups: tuple[tuple[int, ...], ...]
    """Indices of the samples of each batch."""
    seeds: tuple[int, ...]
    """What the random numbers that the task draws for them follow from, wherever and whenever they are made."""


class Loading:
    """Makes batches of the splits of one invocation. Must be used from one thread, and closed."""

    def __init__(self, task: TaskModule, data: Mapping[str, Any]) -> None:
        """Raises ``GeofedError("TASK_INVALID")`` for a number that cannot be used."""
        self._task, self._data, self._number, self._collate = task, data, task.num_workers, task.collate
        # Otherwise the name may mean anything in a task.
        reads = bool(self._number) or any(isinstance(one, Streamed) for one in data.values())
        prefetch = task.prefetch if reads else 0
        self._made_ahead = max(prefetch, self._number) if self._number else 0
        self.ahead = self._made_ahead + prefetch
        """How many of the next ones `take` should be told."""
        self._loaders: Loaders | None = None
        self._ended_cpu_seconds = 0.0

    def take(self, wanted: Sequence[DrawnSamples]) -> Made:
        """Return the batches of the first of what is wanted. The others come next, and may be made ahead.

        Leaves random generators of the CPU in any state.
        Raises what the task's functions raise, and what `Loaders.take` does.
        """
        data = self._data[wanted[0].split]
        if isinstance(data, Streamed):
            data.expect([[index for group in one.groups for index in group] for one in wanted])
        if not self._number or (isinstance(data, Streamed) and data.is_plain and self._collate is None):
            return self.made_here(wanted[0])
        if self._loaders is None:
            self._loaders = Loaders(self._made_elsewhere, self._number)
        try:
            made: Made = self._loaders.take(wanted[: self._made_ahead + 1], self._with_rows)
        except GeofedError:
            if self._loaders.broken:
                # An evaluation that fails does not end the job, and the next step needs them.
                self.close()
            raise
        return made

    def _with_rows(self, drawn: DrawnSamples) -> tuple[DrawnSamples, dict[int, Any] | None]:
        """Add the rows of data with a format: the worker reads them, so that each block is read once."""
        data = self._data[drawn.split]
        if not isinstance(data, Streamed):
            return drawn, None
        indices = list(dict.fromkeys(index for group in drawn.groups for index in group))
        return drawn, dict(zip(indices, data.rows.__getitems__(indices), strict=True))

    def made_here(self, drawn: DrawnSamples) -> Made:
        """Make batches in this process, whatever is being made ahead.

        Leaves random generators of the CPU in any state.
        """
        data = self._data[drawn.split]
        if type(data) is not TensorDataset or self._collate is not None:
            reseed_cpu(*drawn.seeds)
        # The same wherever it is called, or these processes were forked: also in an evaluation.
        with self._task.calling("dataset"), torch.autocast("cpu", enabled=False), torch.enable_grad():
            return [collated(data, list(group), self._collate) for group in drawn.groups]

    def _made_elsewhere(self, request: tuple[DrawnSamples, dict[int, Any] | None]) -> Made:
        """Make batches in another process."""
        drawn, rows = request
        if rows is not None:
            self._data[drawn.split].rows.give(rows)
        return self.made_here(drawn)

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the processes."""
        return self._ended_cpu_seconds + (self._loaders.cpu_seconds if self._loaders is not None else 0.0)

    @property
    def memory_bytes(self) -> int:
        """Memory of the processes that they do not share with the worker."""
        return self._loaders.memory_bytes if self._loaders is not None else 0

    def close(self) -> None:
        """End the processes."""
        if self._loaders is not None:
            self._ended_cpu_seconds += self._loaders.cpu_seconds
            self._loaders.close()
            self._loaders = None
