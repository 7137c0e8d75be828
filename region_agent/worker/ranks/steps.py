"""Steps of a worker with several ranks: rank 0 has the optimiser, merges, and gives the others what to compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from geofed_pb.errors import GeofedError
from region_agent.worker.data.loading import DrawnSamples, Loading
from region_agent.worker.data.shard import BatchStream, move, parts_of, share_of
from region_agent.worker.invocation import Invocation
from region_agent.worker.ranks.devices import per_device
from region_agent.worker.ranks.group import Ranks
from region_agent.worker.ranks.messages import Begin, RankStep
from region_agent.worker.ranks.passes import Passes, RankPasses, described
from region_agent.worker.task import TaskModule
from region_agent.worker.training.loss_scale import LossScale
from sync.seeding import reseed

__all__ = ["RankedSteps", "part_of"]

_SAMPLES_SEED = 2
"""Extra seed of the random numbers that `dataset` and `collate` draw."""


def part_of(
    step: RankStep, rank: int, loading: Loading, passes: Passes, device: torch.device
) -> tuple[list[tuple[int, Any]], int]:
    """Return a rank's batches of a step, each with its number of samples, and the samples of all ranks.

    A rank without a sample gets one of another's batches, which does not count: all must compute something. Raises
    ``GeofedError("TASK_INVALID")`` if no rank has samples.
    """
    made = [one for one in loading.take(step.own) if one[0]]
    counts = passes.counts(sum(size for size, _ in made))
    if not sum(counts):
        raise GeofedError("TASK_INVALID", "all samples that dataset gives for a step are None")
    if not made:
        other = next(place for place, count in enumerate(counts) if count)
        made = [(0, next(batch for size, batch in loading.made_here(step.all[other]) if size))]
    made += [(0, made[-1][1])] * (passes.passes(len(made)) - len(made))
    # Ranks draw other random numbers, as workers do.
    reseed(*step.seeds, *([rank] if rank else []))
    return [(size, move(batch, device)) for size, batch in made], sum(counts)


class RankedSteps:
    """Rank 0's side of the steps of one invocation."""

    def __init__(
        self,
        ranks: Ranks,
        call: Invocation,
        task: TaskModule,
        module: torch.nn.Module,
        stream: BatchStream,
        loading: Loading,
        scale: LossScale | None,
        base: frozenset[str],
        passes: Passes | None = None,
    ) -> None:
        """``base``: names of the tensors that never change. ``passes``: this rank's, if the ranks have begun."""
        self.ranks, self._call, self._task, self._module = ranks, call, task, module
        self._stream, self._loading, self._scale, self._base = stream, loading, scale, base
        self._passes = passes

    def step(
        self, coming: Sequence[int], seeds: Callable[[int], tuple[int, ...]], ready: Callable[[float, int], object]
    ) -> tuple[int, float]:
        """Compute the gradients of a step with the other ranks; returns the samples, and their mean loss.

        Args:
            coming: the step, and those after it whose samples may be made ahead.
            seeds: returns what a step's random numbers follow from.
            ready: called with this rank's part of the loss, and the samples of all ranks, before the last backward
                pass.
        """
        if self._passes is None:
            # Only now the worker has the model that it continues from.
            begin = Begin(self._call.model_dump_json(), described(self._module), self._base)
            with self.ranks.beginning(begin):
                self._passes = RankPasses(self._task, self._module, self._scale, self._base)
        passes, scale = self._passes, self._scale.state() if self._scale is not None else {}
        drawn = [self._drawn(step, seeds(step)) for step in coming]
        steps = [
            RankStep(tuple(of_step[rank] for of_step in drawn), drawn[0], seeds(coming[0]), scale)
            for rank in range(len(self.ranks.devices))
        ]
        with self.ranks.computing(steps[1:]) as made:
            with self._task.calling("dataset"):
                parts, samples = part_of(steps[0], 0, self._loading, passes, self.ranks.devices[0])
            self._stream.skipped += self._stream.count(coming[0]) - samples
            passes.share()
            value = passes.run(parts, samples, lambda own: ready(own, samples))
        return samples, value + sum(one.value for one in made)

    def _drawn(self, step: int, seeds: tuple[int, ...]) -> tuple[DrawnSamples, ...]:
        """Return the samples of each rank in a step: the worker's, divided as evenly as can be."""
        number, count = len(self.ranks.devices), self._stream.count(step)
        at_once = per_device(self._call.batch, number)
        sizes = [
            parts_of(size, at_once) if (size := len(share_of(rank, number, count))) else [] for rank in range(number)
        ]
        groups = iter(self._stream.groups(step, [size for of_rank in sizes for size in of_rank]))
        return tuple(
            DrawnSamples(
                "train", tuple(next(groups) for _ in of_rank), (*seeds, _SAMPLES_SEED, *([rank] if rank else []))
            )
            for rank, of_rank in enumerate(sizes)
        )
