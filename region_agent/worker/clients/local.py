"""One worker's part of a round of clients: each is trained from the region's model, and their changes are added up.

A job's rounds and the measurements before a plan make the same ones.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from region_agent.worker.clients.sampling import ClientSampler
from region_agent.worker.data.shard import move
from region_agent.worker.task import TaskModule
from region_agent.worker.training.learning_rate import copy_scheduled
from region_agent.worker.training.passes import accumulate
from region_agent.worker.training.proximal import ProximalTerm
from region_agent.worker.training.trainer import checked_loss
from region_agent.worker.training.update import OptimizerStep
from sync.device import finish
from sync.flat import FlatModel
from sync.layout import Layout
from sync.seeding import reseed

__all__ = ["ClientRound", "LocalTraining", "held_bytes"]

_HELD_BYTES = 16
"""For each coordinate that a worker holds besides the module: of the region's model, of the present client's, and of
the sum of changes, in double precision, so that it hardly depends on how workers divide the clients."""
_LEAST_SECONDS = 1.0
"""Seconds that a client in a measurement may take although time is over, so that its begin is a small part of them."""
_BLOCK = 1 << 16
"""Coordinates that are added at a time, so that no further vector of the model's size is needed."""


def held_bytes(layout: Layout) -> int:
    """Return the memory in bytes that rounds of clients take, besides the module, its gradients and the optimiser."""
    return _HELD_BYTES * layout.size


@dataclass(frozen=True)
class ClientRound:
    """What the clients of a round have done."""

    weight: int = 0
    """What they count by in the mean."""
    samples: int = 0
    """Samples that they have processed."""
    loss: float = 0.0
    """Mean loss of these samples."""
    seconds: tuple[float, ...] = ()
    """Seconds that each client took."""
    each: tuple[int, ...] = ()
    """Samples that each has processed."""


class LocalTraining:
    """Trains the clients of rounds, with an optimiser that is new for each client."""

    def __init__(
        self,
        task: TaskModule,
        module: torch.nn.Module,
        flat: FlatModel,
        clients: ClientSampler,
        *,
        seed: int,
        region: str,
        at_once: int,
        where: torch.device,
        clip_norm: float = 0.0,
        proximal: ProximalTerm | None = None,
        scheduled: torch.optim.Optimizer | None = None,
    ) -> None:
        """``flat``: all that a region's workers merge. ``at_once``: most samples of a forward pass; 0: no limit.
        ``where``: the module's device. ``scheduled``: an optimiser of the task with the rates of the round; None:
        clients keep the task's."""
        self._task, self._module, self._flat, self._clients = task, module, flat, clients
        self._seed, self._region, self._at_once, self._where = seed, zlib.crc32(region.encode()), at_once, where
        self._clip_norm, self._proximal, self._scheduled = clip_norm, proximal, scheduled
        size = flat.layout.size
        self._start, self._after = np.empty(size, np.float32), np.empty(size, np.float32)
        self._sums: npt.NDArray[np.float64] = np.empty(size)
        self._unsaved = [
            (owner, name, value.clone())
            for owner in module.modules()
            for name, value in owner.named_buffers(recurse=False)
            if name in owner._non_persistent_buffers_set
        ]

    def round(self, step: int, mine: Sequence[int], until: float | None = None) -> ClientRound:
        """Train clients from the module's present state; the mean change, weighted by samples, then is the module's
        gradient, with its sign turned, and part of the rest of its state.

        ``until``, of measurements: monotonic seconds after which no client is begun but the first, and one that has
        taken a second makes no further local step after one with samples; None: all are trained, to their end.
        """
        self._flat.vector(self._start)
        if self._proximal is not None:
            own = self._flat is self._proximal.flat
            self._proximal.begin_round(self._start if own else self._proximal.flat.vector(), lasting=True)
        self._sums.fill(0.0)
        weight, loss, seconds, each = 0, 0.0, list[float](), list[int]()
        for place, client in enumerate(mine):
            begun = time.monotonic()
            if until is not None and place and begun > until:
                break
            samples, loss_sum = self._train(client, step, mine[place + 1 :], until)
            if samples:
                counts = self._clients.weight(client, samples)
                self._add(counts)
                weight += counts
            loss += loss_sum
            finish(self._where)
            seconds.append(time.monotonic() - begun)
            each.append(samples)
        self._restore_unsaved()
        self._set(weight)
        finish(self._where)
        return ClientRound(weight, sum(each), loss / max(1, sum(each)), tuple(seconds), tuple(each))

    def _train(self, client: int, step: int, following: Sequence[int], until: float | None = None) -> tuple[int, float]:
        """Train a client; returns the samples that it has processed, and the sum of their losses. ``until``: as in
        `round`."""
        ends = math.inf if until is None else max(until, time.monotonic() + _LEAST_SECONDS)
        self._flat.load(self._start)
        for parameter in self._flat.parameters():
            parameter.grad = None
        self._restore_unsaved()
        # Random numbers of a client depend on it and the round, not on the worker, nor on clients before it.
        reseed(self._seed, self._region, client, step)
        optimizer = self._task.optimizer(self._module.parameters())
        if self._scheduled is not None:
            with self._task.calling("optimizer"):
                copy_scheduled(self._scheduled, optimizer)
        update = OptimizerStep(optimizer, self._task, self._clip_norm, self._proximal)
        samples, loss = 0, 0.0
        for indices in self._clients.batches(client, step, following):
            if samples and time.monotonic() > ends:
                break
            with self._task.calling("dataset"):
                found = self._clients.batch(indices, self._at_once)
                drawn = [(size, move(batch, self._where)) for size, batch in found]
            if not drawn:
                continue
            with self._task.calling("the optimiser's zero_grad()"):
                optimizer.zero_grad(set_to_none=True)
            value = accumulate(self._task, self._module, drawn, lambda found: checked_loss(found, step))
            update()
            count = sum(size for size, _ in drawn)
            samples, loss = samples + count, loss + value * count
        return samples, loss

    def _add(self, weight: int) -> None:
        """Add the client's change, times its weight, to the sum."""
        after = self._flat.vector(self._after)
        after -= self._start
        for begin in range(0, after.size, _BLOCK):
            at = slice(begin, begin + _BLOCK)
            self._sums[at] += np.multiply(after[at], weight, dtype=np.float64)

    def _restore_unsaved(self) -> None:
        """Give buffers that are not part of the state the values that model(config) gave them: no client, and no
        later invocation, depends on which clients this worker has trained before."""
        for owner, name, value in self._unsaved:
            owner._buffers[name] = value.clone()

    def _set(self, weight: int) -> None:
        """Return to the region's model, with the mean change as the gradient of what is trained, and as part of the
        rest of the state."""
        cut, mean = self._flat.layout.trainable_size, self._after
        self._sums /= max(1, weight)
        mean[:] = self._sums
        self._start[cut:] += mean[cut:]
        self._flat.load(self._start)
        np.negative(mean[:cut], out=mean[:cut])
        places = zip(self._flat.parameters(), self._flat.layout.places(), strict=False)
        for parameter, (slot, at) in places:
            # Not a copy, where the type is the parameter's: the vector is not needed until the next round.
            value = torch.from_numpy(mean[at]).reshape(slot.shape)
            parameter.grad = value.to(parameter.device, parameter.dtype)
