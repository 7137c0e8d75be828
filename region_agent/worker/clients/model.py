"""Federated averaging over the clients that a region holds (McMahan et al. 2017, arXiv 1602.05629, algorithm 1).

A step of the region is a round of its clients. The workers divide the clients of the round among themselves; each
client starts from the region's model and trains with an optimiser of its own. The weighted mean of the clients' changes
takes the place of a step's gradient, with its sign turned: the region's collective merges it, and an optimiser step of
rate 1 adds it to the model.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from geofed_pb.errors import GeofedError
from geofed_pb.user_code.recording import log
from region_agent.worker.clients.local import LocalTraining
from region_agent.worker.clients.sampling import ClientSampler
from region_agent.worker.invocation import ClientRounds, Invocation
from region_agent.worker.ps_client import PsClient
from region_agent.worker.task import TaskModule
from region_agent.worker.training.merging import Merging, merging_for
from region_agent.worker.training.trainer import WholeModel
from sync.channel import Channel
from sync.flat import FlatModel
from sync.layout import Vector

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
        """``begun``: begin of the invocation, in seconds of the monotonic clock. Raises as `ClientSampler`, too."""
        with task.calling("dataset"):
            self._clients = ClientSampler(data["train"], call.seed, call.region, rounds, task.collate)
        super().__init__(call, task, data, channel, begun)

    def _made_merging(self, merged: FlatModel, begun: float) -> Merging:
        """Open what merges the mean changes of the workers' clients."""
        call = self._call
        # Clients get new optimisers, which are scheduled as this one.
        self._local = LocalTraining(
            self._task, self._module, merged, self._clients, seed=call.seed, region=call.region, at_once=call.batch,
            where=self._device, clip_norm=call.clip_norm, proximal=self._proximal, scheduled=self._optimizer,
        )  # fmt: skip
        self._optimizer = torch.optim.SGD([one for one in self._module.parameters() if one.requires_grad], lr=1.0)
        merged_only = call.model_copy(update={"clip_norm": 0.0})
        return merging_for(merged_only, self._task, self._optimizer, merged, self._channel, begun)

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
        with self._task.calling("the model's train() and the optimiser's groups"):
            self._module.train()
            self._rate.set(step)
        trained = self._local.round(step, mine)
        if not trained.weight and self._call.workers == 1:
            raise GeofedError("TASK_INVALID", f"all samples that dataset gives for round {step} of clients are None")
        self.counted = trained.samples
        log("clients", self._clients.of_round)
        seconds = time.monotonic() - begun
        self._merging.arm(step, trained.weight)
        self._merging.step(server, step, trained.weight, trained.loss)
        return trained.loss, seconds

    def begin_round(self, model: Vector) -> None:
        """Do nothing: each client starts from the model of its own round."""

    def close(self) -> None:
        """End the threads of the merge, and log how many samples were left out."""
        self._stream.skipped += self._clients.skipped
        super().close()
