"""Federated averaging over the clients that a region holds (McMahan et al. 2017, arXiv 1602.05629, algorithm 1).

A step of the region is a round of its clients. The workers divide the clients of the round among themselves; each
client starts from the region's model and trains with an optimiser of its own. The weighted mean of the clients' changes
takes the place of a step's gradient, with its sign turned: the region's collective merges it, and an optimiser step of
rate 1 adds it to the model.
"""

from __future__ import annotations

import time
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from geofed_pb.errors import GeofedError
from geofed_pb.recording import log
from region_agent.worker.clients.sampling import Clients
from region_agent.worker.data.shard import move
from region_agent.worker.invocation import ClientRounds, Invocation
from region_agent.worker.ps_client import PsClient
from region_agent.worker.task import TaskModule
from region_agent.worker.training.learning_rate import copy_scheduled
from region_agent.worker.training.merging import Merging, merging_for
from region_agent.worker.training.passes import accumulate
from region_agent.worker.training.trainer import WholeModel, checked_loss
from region_agent.worker.training.update import OptimizerStep
from sync.channel import Channel
from sync.device import finish
from sync.flat import FlatModel
from sync.layout import Vector
from sync.seeding import reseed

__all__ = ["ClientsModel"]


class ClientsModel(WholeModel):
    """Every worker holds the whole model, and trains one client after the other from it."""

    needs_round_model = False
    """The proximal term draws a client to the model that it started from."""

    def __init__(
        self,
        rounds: ClientRounds,
        call: Invocation,
        task: TaskModule,
        data: dict[str, Any],
        channel: Channel,
        begun: float,
    ) -> None:
        """``begun``: begin of the invocation, in seconds of the monotonic clock. Raises as `Clients`, too."""
        with task.calling("dataset"):
            self._clients = Clients(data["train"], call.seed, call.region, rounds, task.collate)
        super().__init__(call, task, data, channel, begun)

    def _made_merging(self, merged: FlatModel, begun: float) -> Merging:
        """Open what merges the mean changes of the workers' clients."""
        self._merged = merged
        self._after: Vector | None = None
        self._next: list[int] = []
        self._unsaved = [
            (owner, name, value.clone())
            for owner in self._module.modules()
            for name, value in owner.named_buffers(recurse=False)
            if name in owner._non_persistent_buffers_set
        ]
        # Clients get new optimisers, which are scheduled as this one.
        self._scheduled, call = self._optimizer, self._call.model_copy(update={"clip_norm": 0.0})
        self._optimizer = torch.optim.SGD([one for one in self._module.parameters() if one.requires_grad], lr=1.0)
        return merging_for(call, self._task, self._optimizer, merged, self._channel, begun)

    def share(self, step: int) -> int:
        """Return the samples of this worker's clients in the open round up to a step."""
        each = self._call.steps_per_round
        begin = max(0, step - 1) // each * each
        return sum(self._clients.trained_samples(one) for at in range(begin, step) for one in self._mine(at + 1))

    def _mine(self, step: int) -> list[int]:
        return self._clients.share(step, self._call.worker, self._call.workers)

    def step(self, server: PsClient, step: int, more: bool) -> tuple[float, float]:
        """Train this worker's clients of a round, merge their changes, and add the mean to the model; returns the mean
        loss of their samples, and seconds.

        Raises ``GeofedError("TASK_INVALID")`` if all samples of the clients are None, and no other worker trains any.
        """
        begun, mine = time.monotonic(), self._mine(step)
        start = self._merged.vector()
        if self._proximal is not None:
            self._proximal.begin_round(self.flat.vector())
        with self._task.calling("the model's train() and the optimiser's groups"):
            self._module.train()
            self._rate.set(step)
        sums: npt.NDArray[np.float64] = np.zeros(start.size)
        weight, self.counted, loss = 0, 0, 0.0
        for place, client in enumerate(mine):
            self._next = mine[place + 1 :]
            samples, loss_sum = self._train(client, step, start)
            if not samples:
                continue
            self._after = self._merged.vector(self._after)
            own = self._clients.weight(client, samples)
            sums += np.multiply(self._after - start, own, dtype=np.float64)
            weight += own
            self.counted += samples
            loss += loss_sum
        if not weight and self._call.workers == 1:
            raise GeofedError("TASK_INVALID", f"all samples that dataset gives for round {step} of clients are None")
        self._restore_unsaved()
        self._set(start, (sums / max(1, weight)).astype(np.float32))
        log("clients", self._clients.of_round)
        finish(self._device)
        value, seconds = loss / max(1, self.counted), time.monotonic() - begun
        self._merging.arm(step, weight)
        self._merging.step(server, step, weight, value)
        return value, seconds

    def _train(self, client: int, step: int, start: Vector) -> tuple[int, float]:
        """Train a client from a model; returns the samples that it has processed, and the sum of their losses."""
        self._merged.load(start)
        self._restore_unsaved()
        # Random numbers of a client depend on it and the round, not on the worker, nor on clients before it.
        reseed(self._call.seed, zlib.crc32(self._call.region.encode()), client, step)
        optimizer = self._task.optimizer(self._module.parameters())
        with self._task.calling("optimizer"):
            copy_scheduled(self._scheduled, optimizer)
        update = OptimizerStep(optimizer, self._task, self._call.clip_norm, self._proximal)
        samples, loss = 0, 0.0
        for indices in self._clients.batches(client, step, self._next):
            with self._task.calling("dataset"):
                found = self._clients.batch(indices, self._call.batch)
                drawn = [(size, move(batch, self._device)) for size, batch in found]
            if not drawn:
                continue
            with self._task.calling("the optimiser's zero_grad()"):
                optimizer.zero_grad(set_to_none=True)
            value = accumulate(self._task, self._module, drawn, lambda found: checked_loss(found, step))
            update()
            count = sum(size for size, _ in drawn)
            samples, loss = samples + count, loss + value * count
        return samples, loss

    def _restore_unsaved(self) -> None:
        """Give buffers that are not part of the state the values that model(config) gave them: no client, and no
        later invocation, depends on which clients this worker has trained before."""
        for owner, name, value in self._unsaved:
            owner._buffers[name] = value.clone()

    def _set(self, start: Vector, change: Vector) -> None:
        """Return to a model, with a change as the gradient of what is trained, and as part of the rest of the state."""
        cut = self._merged.layout.trainable_size
        model = start.copy()
        model[cut:] += change[cut:]
        self._merged.load(model)
        places = zip(self._merged.parameters(), self._merged.layout.places(), strict=False)
        for parameter, (slot, at) in places:
            value = torch.from_numpy(-change[at]).reshape(slot.shape)
            parameter.grad = value.to(parameter.device, parameter.dtype)

    def begin_round(self, model: Vector) -> None:
        """Do nothing: each client starts from the model of its own round."""

    def close(self) -> None:
        """End the threads of the merge, and log how many samples were left out."""
        self._stream.skipped += self._clients.skipped
        super().close()
