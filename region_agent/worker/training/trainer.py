"""What one worker holds of the model, and how it makes its steps: the whole of it, or a stage.

The loop around it, rounds and slices and what passes from one invocation to the next, is the same for both.
"""

from __future__ import annotations

import math
import time
import zlib
from typing import Any, Protocol

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from region_agent.worker.data.batches import Batches
from region_agent.worker.data.shard import BatchStream, evaluation_batches, move, share_of
from region_agent.worker.invocation import Invocation
from region_agent.worker.ps_client import PsClient
from region_agent.worker.task import Task
from region_agent.worker.training.learning_rate import LearningRate
from region_agent.worker.training.merging import merging_for
from region_agent.worker.training.optimizer_state import State, dump_state, load_state
from sync import framing
from sync.channel import Channel
from sync.collective import State as CollectiveState
from sync.device import device, finish
from sync.flat import FlatModel
from sync.layout import Layout, Vector
from sync.seeding import reseed, seed_all

__all__ = ["Trainer", "WholeModel", "checked_loss"]


_SMALLER = 8
"""By so much, where a worker was killed in an evaluation, the next try's batches are smaller."""
_EVALUATION = 1
"""Sets what is drawn in an evaluation apart from what is drawn in a step."""


class Trainer(Protocol):
    """One invocation's part of the model. A round begins and ends in all workers alike."""

    flat: FlatModel
    """Of the part."""
    layout: Layout
    """Of the whole model."""
    counted: int
    """Samples of the last step that are this worker's, and that no other worker tells the server of."""
    group: int
    """Workers of one group hold the same."""
    alone: bool
    """There is no other worker in the group."""
    leads: bool
    """Hands over the group's part at the end of a round."""
    tells: bool
    """Tells the server of steps, where it does not know."""
    in_stages: bool
    name: str
    """How the workers merge, for people."""
    server_knows: bool
    """The server hears of every step."""

    def share(self, step: int) -> int:
        """This worker's samples in a step; the same in all steps of a round."""

    def step(self, server: PsClient, step: int, more: bool) -> tuple[float, float]:
        """Make a step; its loss over `counted` samples and the seconds of computing. ``more``: another follows."""

    def drain(self) -> None:
        """Wait until all that is being sent beside the steps has been. Raises ``CHANNEL_TIMEOUT``."""

    def settle(self, step: int) -> None:
        """At the end of a WAN round, after ``step``: all workers of a group then hold the same, bit for bit."""

    @property
    def may_not_measure(self) -> bool:
        """Nobody waits for what this worker does in an evaluation, so that it may fail in it."""

    def evaluate(self, sequence: int, tries: int = 0) -> tuple[int, dict[str, float]]:
        """Samples of the test data that were measured, and what was found, after a round. ``tries``: how often this
        worker was killed in it before."""

    def offer(self, key: str) -> str:
        """Put the freshly made model under a key; what the server is told of it, "" where another worker tells it."""

    def withdraw(self, key: str) -> None:
        """Forget what was offered."""

    def put(self, key: str, vector: Vector) -> None:
        """Hand over this worker's part of the model under a key."""

    def own(self, key: str) -> Vector | None:
        """What `put` has put; None where it is gone."""

    def read(self, key: str, name: str) -> Vector:
        """This worker's part of a vector in the channel; raises ``GeofedError("FENCED")`` where it has gone."""

    def dump_state(self) -> State:
        """Of the optimiser; parameters have the numbers of the whole model."""

    def load_state(self, state: State) -> None:
        """Put a dumped state into the optimiser; of parameters that this worker holds."""

    def put_state(self, key: str, state: State) -> None:
        """Hand over this worker's part of the optimiser's state."""

    def read_state(self, key: str) -> State:
        """This worker's part; raises ``GeofedError("FENCED")`` where it has gone."""

    def left_key(self, step: int, broken: bool) -> str:
        """Where an invocation leaves what the next one needs; ``broken``: one of another attempt."""

    def taken_over(self, key: str) -> str:
        """Where the attempt before has left this worker's part, told of one that it has left; "": nowhere."""

    def keep(self, step: int, pieces: list[memoryview]) -> None:
        """After a step: store what another attempt would need of it, beside the next step."""

    def keeps(self, step: int) -> bool:
        """Whether it is for this worker to store something after this step."""

    def facts(self) -> dict[str, float]:
        """What else the next invocation must know."""

    def recall(self, facts: dict[str, float]) -> None:
        """Take that up."""

    def merging_state(self) -> CollectiveState: ...

    def restore_merging(self, state: CollectiveState) -> None: ...

    def forget(self) -> None:
        """The job is done: nothing of this worker is needed any more."""

    def close(self) -> None: ...


def checked_loss(value: float, step: int) -> float:
    """The loss; raises ``GeofedError("TASK_FAILED")`` where it is not finite."""
    if not np.isfinite(value):
        text = f"the loss is {value} at step {step}"
        raise GeofedError("TASK_FAILED", text, hint="training diverged: lower the learning rate")
    return value


class WholeModel:
    """Data parallel: every worker holds all of the model."""

    group = 0
    in_stages = False
    may_not_measure = True

    def __init__(self, call: Invocation, task: Task, data: dict[str, Any], channel: Channel, begun: float) -> None:
        """``begun``: when the invocation was, on the monotonic clock."""
        self._call, self._task, self._data, self._channel = call, task, data, channel
        self._device = device(call.worker)
        # Seeded alike everywhere: all workers of the partition make the same model.
        seed_all(call.seed)
        self._module = task.model(call.seed)
        with task.calling("model"):
            self.flat = FlatModel(self._module, calling=task.calling)
            self._module.to(self._device)
        self.layout = self.flat.layout
        self._optimizer = task.optimizer(self._module.parameters())
        batches = Batches(call.region_batch, call.stretches)
        with task.calling("optimizer"):
            self._rate = LearningRate(self._optimizer, call.schedule, call.rounds * call.steps_per_round, batches)
        with task.calling("dataset"):
            self._stream = BatchStream(data["train"], call.seed, call.region, call.worker, call.workers, batches)
        self.counted = self.share(1)
        self._merging = merging_for(call, task, self._optimizer, self.flat, channel, begun)
        self.name, self.server_knows = self._merging.name, self._merging.server_knows
        self.alone = call.workers == 1
        self.leads = self.tells = call.worker == 0

    def share(self, step: int) -> int:
        return self._stream.count(step)

    def step(self, server: PsClient, step: int, more: bool) -> tuple[float, float]:
        begun = time.monotonic()
        self.counted = self.share(step)
        # What a step does must follow from the step alone, not from the steps that this invocation made before.
        reseed(self._call.seed, zlib.crc32(self._call.region.encode()), self._call.worker, step)
        with self._task.calling("the model's train() and the optimiser's zero_grad()"):
            self._module.train()
            self._optimizer.zero_grad(set_to_none=True)
        value = self._pass(step)
        finish(self._device)
        seconds = time.monotonic() - begun
        with self._task.calling("the optimiser's groups"):
            self._rate.set(step)
        self._merging.step(server, step, self.counted, value)
        return value, seconds

    def _pass(self, step: int) -> float:
        """Forward and backward; the mean loss of the samples. Gradients may leave while the last part gives them.

        A worker that stands in for others has more samples than its memory was chosen for: they go through the model
        in parts, whose gradients are summed up to those of all.
        """
        samples = self.counted
        parts = math.ceil(samples / (self._call.batch or samples))
        sizes = [len(share_of(part, parts, samples)) for part in range(parts)]
        with self._task.calling("dataset"):
            batches = [move(batch, self._device) for batch in self._stream.micro_batches(step, sizes)]
        value = 0.0
        for left, (size, batch) in zip(reversed(range(len(sizes))), zip(sizes, batches, strict=True), strict=True):
            loss = self._task.loss(self._module, batch)
            with self._task.calling("the loss"):
                if len(sizes) > 1:
                    loss = loss * (size / samples)
                value += float(loss.detach())
            if not left:
                checked_loss(value, step)
                self._merging.arm(step, samples)
            with self._task.calling("the backward pass"):
                loss.backward()  # type: ignore[no-untyped-call]
        return value

    def settle(self, step: int) -> None:
        self._merging.settle(step)

    def drain(self) -> None:
        """Nothing is sent beside the steps."""

    def evaluate(self, sequence: int, tries: int = 0) -> tuple[int, dict[str, float]]:
        if "test" not in self._data:
            return 0, {}
        with self._task.calling("dataset"):
            at_once = self._call.evaluation_batch or self._call.batch or self.share(1)
            at_once = max(1, at_once // _SMALLER**tries)
            sizes, batches = evaluation_batches(self._data["test"], self._call.worker, self._call.workers, at_once)
        # What the data draw must follow from the round alone, too, wherever the slice began.
        reseed(self._call.seed, zlib.crc32(self._call.region.encode()), self._call.worker, sequence, _EVALUATION)
        with self._task.calling("the model's eval()"):
            self._module.eval()
        with torch.no_grad():
            moved = (move(batch, self._device) for batch in batches)
            return sum(sizes), self._task.metrics(self._module, moved, sizes) if sizes else {}

    def offer(self, key: str) -> str:
        self.put(key, self.flat.vector())
        return key

    def withdraw(self, key: str) -> None:
        self._channel.delete(key)

    def put(self, key: str, vector: Vector) -> None:
        self._channel.put(key, framing.encode({"model": vector}))

    def own(self, key: str) -> Vector | None:
        value = self._channel.get(key)
        return None if value is None else np.asarray(framing.decode(value).tensors["model"], np.float32)

    def read(self, key: str, name: str) -> Vector:
        return np.asarray(self._require(key).tensors[name], np.float32)

    def dump_state(self) -> State:
        with self._task.calling("the optimiser's state_dict()"):
            return dump_state(self._optimizer)

    def load_state(self, state: State) -> None:
        with self._task.calling("the optimiser's load_state_dict()"):
            load_state(self._optimizer, *state)

    def put_state(self, key: str, state: State) -> None:
        self._channel.put(key, framing.encode(*state))

    def read_state(self, key: str) -> State:
        frame = self._require(key)
        return frame.tensors, frame.facts

    def left_key(self, step: int, broken: bool) -> str:
        return f"w/{self._call.attempt}/{self._call.worker}/{step}"

    def taken_over(self, key: str) -> str:
        # All workers hold the same, so any of them has left what all need.
        return key

    def keeps(self, step: int) -> bool:
        return False

    def keep(self, step: int, pieces: list[memoryview]) -> None:
        """Any worker that is left has it all."""

    def facts(self) -> dict[str, float]:
        return {}

    def recall(self, facts: dict[str, float]) -> None:
        """There is nothing more."""

    def merging_state(self) -> CollectiveState:
        return self._merging.state()

    def restore_merging(self, state: CollectiveState) -> None:
        self._merging.restore(state)

    def forget(self) -> None:
        """What it has left is the loop's to forget."""

    def close(self) -> None:
        self._merging.close()

    def _require(self, key: str) -> framing.Frame:
        value = self._channel.get(key)
        if value is None:
            raise GeofedError("FENCED", f"{key} has gone from the channel: a newer attempt has taken over")
        return framing.decode(value)
