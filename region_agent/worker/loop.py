"""The training loop of one invocation.

A worker attaches to its parameter server, goes on from the round that the server names, and makes steps: its own
batch, gradients merged with the other workers of the partition, one optimiser step that is the same in all of them.
At the end of a round it hands over the model, waits for the federation's, and goes on from that. When its slice of
time is over it leaves what it needs in the channel and returns; the next invocation takes it up at the same step.
"""

from __future__ import annotations

import random
import time
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import worker_pb2
from region_agent.worker.data import BatchStream, evaluation_batches, move
from region_agent.worker.invocation import Invocation, Outcome
from region_agent.worker.optimizer_state import dump_state, load_state
from region_agent.worker.ps_client import PsClient, SliceOver
from region_agent.worker.task import Task, task_errors
from sync import framing
from sync.channel import Channel
from sync.flat import FlatModel
from sync.layout import Vector

__all__ = ["WorkerLoop"]


@dataclass
class _Round:
    """What a worker sums up within a round."""

    samples: float = 0.0
    loss_sum: float = 0.0
    """Loss times samples."""
    compute_seconds: float = 0.0

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples if self.samples else 0.0


class WorkerLoop:
    """One invocation's training; `run` returns how it ended."""

    def __init__(
        self, invocation: Invocation, task: Task, data: dict[str, Any], channel: Channel, begun: float
    ) -> None:
        self._call, self._task, self._data, self._channel = invocation, task, data, channel
        self._slice_ends = begun + invocation.slice_seconds
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # Seeded alike everywhere: all workers of the partition make the same model.
        _seed(invocation.seed)
        self._module = task.model().to(self._device)
        with task_errors(task.folder, "model"):
            self._flat = FlatModel(self._module)
        self._optimizer = task.optimizer(self._module.parameters())
        with task_errors(task.folder, "dataset"):
            self._stream = BatchStream(
                data["train"], invocation.seed, invocation.region, invocation.worker, invocation.workers,
                invocation.batch,
            )  # fmt: skip
        self._attached = False
        self._completed = 0
        """Rounds whose federated model this worker goes on from."""
        self._step = 0
        self._round = _Round()
        self._outcome_steps, self._outcome_samples, self._compute_seconds = 0, 0, 0.0

    def run(self) -> Outcome:
        """Train until the job's end or the slice's."""
        with PsClient(self._call, self._slice_ends) as server:
            try:
                finished = self._train(server)
            except SliceOver:
                finished = False
            resume_key = self._forget_left() if finished else self._leave()
        return Outcome(
            status="done" if finished else "continue",
            resume_key=resume_key,
            steps=self._outcome_steps,
            samples=self._outcome_samples,
            compute_seconds=self._compute_seconds,
        )

    # Rounds

    def _train(self, server: PsClient) -> bool:
        """True when the job is at its end, False when the slice is."""
        start = self._attach(server)
        awaited, finished = start.boundary, start.finished
        if start.evaluate:
            self._evaluate(server)
        while not finished:
            target = (self._completed + 1) * self._call.steps_per_round
            while not awaited and self._step < target:
                if self._slice_over():
                    return False
                self._make_step(server, self._step + 1)
            reply = self._end_round(server, self._completed + 1, known=awaited)
            self._load_model(reply.model_key)
            if awaited and reply.state_key:
                self._load_optimizer(self._require(reply.state_key))
            awaited, finished = False, reply.finished
            self._completed, self._round = reply.round, _Round()
            self._step = self._completed * self._call.steps_per_round
            if reply.evaluate:
                self._evaluate(server)
            if self._slice_over() and not finished:
                return False
        return True

    def _slice_over(self) -> bool:
        # However short the slice, an invocation makes a step: a chain of them must come to its end.
        return self._outcome_steps > 0 and time.monotonic() > self._slice_ends

    def _attach(self, server: PsClient) -> worker_pb2.AttachReply:
        call = self._call
        initial_key = f"init/{call.attempt}/{call.worker}"
        if not call.resume_key:
            self._channel.put(initial_key, framing.encode({"model": self._flat.vector()}))
        request = worker_pb2.AttachRequest(layout_json=self._flat.layout.to_json(), initial_key=initial_key)
        start = server.attach(request)
        self._channel.delete(initial_key)
        self._attached, self._completed = True, start.round
        if not self._resume(start):
            self._step = start.step
            self._load_model(start.model_key)
            if start.state_key:
                self._load_optimizer(self._require(start.state_key))
        return start

    def _end_round(self, server: PsClient, sequence: int, *, known: bool) -> worker_pb2.BoundaryReply:
        """Hand the round's model over and wait for the federation's; ``known``: it was handed over before."""
        request = worker_pb2.BoundaryRequest(round=sequence, step=self._step)
        if not known:
            request = self._hand_over(sequence)
        reply = server.boundary(request)
        self._channel.delete_tree(f"b/{self._call.attempt}/{sequence - 1}")
        return reply

    def _hand_over(self, sequence: int) -> worker_pb2.BoundaryRequest:
        vector = self._flat.vector()
        request = worker_pb2.BoundaryRequest(
            round=sequence,
            step=self._step,
            digest=framing.digest_of([vector.data.cast("B")]),
            samples=self._round.samples,
            loss=self._round.loss,
            compute_seconds=self._round.compute_seconds,
        )
        if self._call.worker == 0:
            # All workers hold the same model and optimiser state, so one hands them over for all.
            place = f"b/{self._call.attempt}/{sequence}"
            tensors, numbers = dump_state(self._optimizer)
            self._channel.put(f"{place}/model", framing.encode({"model": vector}))
            self._channel.put(f"{place}/state", framing.encode(tensors, numbers))
            request.model_key, request.state_key = f"{place}/model", f"{place}/state"
        return request

    # Steps

    def _make_step(self, server: PsClient, step: int) -> None:
        begun = time.monotonic()
        # What a step does must follow from the step alone, not from the steps that this invocation made before.
        _seed(self._call.seed, zlib.crc32(self._call.region.encode()), self._call.worker, step)
        with task_errors(self._task.folder, "dataset"):
            batch = move(self._stream.batch(step), self._device)
        self._module.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._task.loss(self._module, batch)
        with task_errors(self._task.folder, "the backward pass"):
            loss.backward()  # type: ignore[no-untyped-call]
        value, samples = float(loss.detach()), self._call.batch
        seconds = time.monotonic() - begun
        if not np.isfinite(value):
            text = f"the loss is {value} at step {step}"
            raise GeofedError("TASK_FAILED", text, hint="training diverged: lower the learning rate")
        if self._call.workers > 1:
            self._merge(server, step, samples, value)
        with task_errors(self._task.folder, "the optimiser's step"):
            self._optimizer.step()
        self._step = step
        self._round.samples += samples
        self._round.loss_sum += value * samples
        self._round.compute_seconds += seconds
        self._outcome_steps += 1
        self._outcome_samples += samples
        self._compute_seconds += seconds

    def _merge(self, server: PsClient, step: int, samples: int, loss: float) -> None:
        """Replace the gradients by the partition's sample-weighted mean."""
        key = f"g/{self._call.attempt}/{step}/{self._call.worker}"
        self._channel.put(key, framing.encode({"gradient": self._flat.gradient()}, {"samples": samples}))
        reply = server.reduce(worker_pb2.ReduceRequest(step=step, key=key, samples=samples, loss=loss))
        merged = self._require(reply.merged_key).tensors["gradient"]
        self._flat.load_gradient(np.asarray(merged, np.float32))

    def _evaluate(self, server: PsClient) -> None:
        samples, metrics = 0, {}
        if "test" in self._data:
            samples, batches = evaluation_batches(self._data["test"], self._call.worker, self._call.workers)
            self._module.eval()
            with torch.no_grad():
                metrics = (
                    self._task.metrics(self._module, (move(batch, self._device) for batch in batches))
                    if samples
                    else {}
                )
        server.evaluated(worker_pb2.EvaluatedRequest(round=self._completed, samples=samples, metrics=metrics))

    # What passes from one invocation to the next

    def _leave(self) -> str:
        """Store model, optimiser and the round's sums where the next slice finds them."""
        if not self._attached:
            return self._call.resume_key
        tensors, numbers = dump_state(self._optimizer)
        facts = {
            "round": self._completed,
            "step": self._step,
            "samples": self._round.samples,
            "loss_sum": self._round.loss_sum,
            "compute_seconds": self._round.compute_seconds,
        }
        key = f"w/{self._call.attempt}/{self._call.worker}/{self._step}"
        prefixed = {f"o/{name}": array for name, array in tensors.items()}
        facts |= {f"o/{name}": value for name, value in numbers.items()}
        self._channel.put(key, framing.encode({"model": self._flat.vector(), **prefixed}, facts))
        if self._call.resume_key and self._call.resume_key != key:
            self._channel.delete(self._call.resume_key)
        return key

    def _forget_left(self) -> str:
        if self._call.resume_key:
            self._channel.delete(self._call.resume_key)
        return ""

    def _resume(self, start: worker_pb2.AttachReply) -> bool:
        """Take up what the last slice left, unless the federation has a newer model: then that one counts."""
        left = self._channel.get(self._call.resume_key) if self._call.resume_key else None
        if left is None or start.boundary or start.finished:
            return False
        frame = framing.decode(left)
        facts = frame.facts
        if int(facts["round"]) != start.round:
            return False
        self._step = int(facts["step"])
        self._round = _Round(facts["samples"], facts["loss_sum"], facts["compute_seconds"])
        self._flat.load(np.asarray(frame.tensors["model"], np.float32))
        tensors = {name.removeprefix("o/"): array for name, array in frame.tensors.items() if name.startswith("o/")}
        numbers = {name.removeprefix("o/"): value for name, value in facts.items() if name.startswith("o/")}
        load_state(self._optimizer, tensors, numbers)
        return True

    def _require(self, key: str) -> framing.Frame:
        value = self._channel.get(key)
        if value is None:
            raise GeofedError("FENCED", f"{key} has gone from the channel: a newer attempt has taken over")
        return framing.decode(value)

    def _load_model(self, key: str) -> None:
        vector: Vector = np.asarray(self._require(key).tensors["model"], np.float32)
        self._flat.load(vector)

    def _load_optimizer(self, frame: framing.Frame) -> None:
        load_state(self._optimizer, frame.tensors, frame.facts)


def _seed(*numbers: int) -> None:
    """Seed every source of randomness that job code may draw from."""
    mixed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
