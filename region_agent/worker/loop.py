"""The training loop of one invocation.

A worker attaches to its parameter server, goes on from the round that the server names, and makes steps: its own
batch, gradients merged with the other workers of the partition, one optimiser step that is the same in all of them.
At the end of a round it hands over the model, waits for the federation's, and goes on from that; with background
exchange it makes the next step meanwhile, and then adds the correction that it is given. When its slice of time is over
it leaves what it needs in the channel and returns; the next invocation takes it up at the same step.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import worker_pb2
from region_agent.worker.data import BatchStream, evaluation_batches, move
from region_agent.worker.invocation import Invocation, Outcome
from region_agent.worker.merging import merging_for
from region_agent.worker.optimizer_state import State, dump_state, load_state
from region_agent.worker.ps_client import PsClient, SliceOver
from region_agent.worker.task import Task, task_errors
from sync import framing
from sync.channel import Channel
from sync.collective import State as CollectiveState
from sync.flat import FlatModel
from sync.layout import Vector

__all__ = ["WorkerLoop"]

_BROKEN = ("FENCED", "CHANNEL_TIMEOUT")
"""Codes with which an attempt ends for a worker that is itself well: others can go on from where it is."""
_Value = TypeVar("_Value")
_NEWS_SECONDS = 1.0
"""Between two news of steps."""
_STATE_SECONDS = 10.0
"""With background exchange the optimiser's state is handed over this often: only a new attempt asks for it."""


@dataclass
class _Round:
    """What a worker sums up within a round."""

    samples: float = 0.0
    loss_sum: float = 0.0
    """Loss times samples."""
    compute_seconds: float = 0.0

    def rescale(self, factor: float) -> None:
        """What it would be with so many times the samples in each step."""
        self.samples, self.loss_sum = self.samples * factor, self.loss_sum * factor

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples if self.samples else 0.0


@dataclass
class _Ended:
    """A round whose end is told to the server while the next one has begun."""

    request: worker_pb2.BoundaryRequest
    sums: _Round
    reply: Future[tuple[worker_pb2.BoundaryReply, Vector | None]]
    """With the correction, if there is one."""


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
                invocation.region_batch,
            )  # fmt: skip
        self._attached = False
        self._completed = 0
        """Rounds whose federated model this worker goes on from."""
        self._step = 0
        self._until = 0
        """Where the open round ends."""
        self._background = False
        self._ended: _Ended | None = None
        self._state_given = 0.0
        self._snapshot: Vector | None = None
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="boundary")
        self._merging = merging_for(invocation, task, self._optimizer, self._flat, channel)
        self._told = time.monotonic()
        self._settled = 0
        """The last step after which the workers have made sure that they hold the same."""
        self._round = _Round()
        self._outcome_steps, self._outcome_samples, self._compute_seconds = 0, 0, 0.0

    def run(self) -> Outcome:
        """Train until the job's end or the slice's, or until the attempt is over."""
        broken: GeofedError | None = None
        finished = False
        with PsClient(self._call, self._slice_ends) as server, self._beside, closing(self._merging):
            try:
                finished = self._train(server)
            except SliceOver:
                pass
            except GeofedError as error:
                if error.code not in _BROKEN or not self._attached or self._background:
                    raise
                broken = error
            resume_key = self._forget_left() if finished else self._leave(broken is not None)
        return Outcome(
            status="done" if finished else "left" if broken else "continue",
            resume_key=resume_key,
            step=self._step,
            code=broken.code if broken else "",
            message=broken.message if broken else "",
            channel=asdict(self._channel.usage),
            merged_by=self._merging.name,
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
            while not awaited and self._step < self._until:
                if self._slice_over():
                    return False
                self._make_step(server, self._step + 1)
                if self._ended is not None:
                    self._hear_of_round(server)
            if self._background and not awaited and self._step < self._call.rounds * self._call.steps_per_round:
                self._begin_end_of_round(server, self._completed + 1)
                continue
            reply = self._end_round(server, self._completed + 1, known=awaited)
            self._go_on(reply)
            if awaited and reply.state_key and not self._background:
                self._load_optimizer(self._require(reply.state_key))
            awaited, finished = False, reply.finished
            self._completed, self._round = reply.round, _Round()
            if not self._background:
                self._step = self._completed * self._call.steps_per_round
            if reply.evaluate:
                self._evaluate(server)
            if self._slice_over() and not finished:
                return False
        return True

    def _go_on(self, reply: worker_pb2.BoundaryReply) -> None:
        if reply.model_key:
            self._load_model(reply.model_key)
        elif reply.correction_key:
            self._flat.add(self._correction(reply.correction_key))
        self._until = reply.until_step

    def _correction(self, key: str) -> Vector:
        return np.asarray(self._require(key).tensors["correction"], np.float32)

    # The end of a round, with background exchange

    def _begin_end_of_round(self, server: PsClient, sequence: int) -> None:
        """Take the model of now and hand it over beside the next step."""
        self._settle()
        self._snapshot = self._flat.vector(self._snapshot)
        request, state = self._boundary_of(sequence, self._snapshot), None
        if self._call.worker == 0 and time.monotonic() - self._state_given > _STATE_SECONDS:
            self._state_given = time.monotonic()
            tensors, numbers = dump_state(self._optimizer)
            # The next step changes what they are views of.
            state = {name: np.array(array) for name, array in tensors.items()}, numbers
        reply = self._beside.submit(self._tell_end, server, request, self._snapshot, state)
        self._ended = _Ended(request, self._round, reply)
        self._round = _Round()
        # Until the answer says where the next round ends, it has one step.
        self._until = self._step + 1

    def _tell_end(
        self, server: PsClient, request: worker_pb2.BoundaryRequest, vector: Vector, state: State | None
    ) -> tuple[worker_pb2.BoundaryReply, Vector | None]:
        self._put_end(request, vector, state)
        return self._ask_end(server, request)

    def _ask_end(
        self, server: PsClient, request: worker_pb2.BoundaryRequest
    ) -> tuple[worker_pb2.BoundaryReply, Vector | None]:
        reply = server.boundary(request)
        # Copied here, beside a step, so that the step's end does not wait for the pages.
        return reply, np.array(self._correction(reply.correction_key)) if reply.correction_key else None

    def _hear_of_round(self, server: PsClient) -> None:
        """One step after the end of a round, in all workers of the partition: its answer counts from here on."""
        if self._ended is None:
            return
        reply, correction = self._ended.reply.result()
        if correction is not None:
            self._flat.add(correction)
        self._until = reply.until_step
        self._completed, self._ended = reply.round, None
        if reply.evaluate:
            self._evaluate(server)

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
        self._attached, self._completed, self._until = True, start.round, start.until_step
        self._background = start.background
        if not self._resume(server, start) and not (start.background and start.boundary):
            if not start.model_key:
                raise GeofedError("FENCED", "what the last slice left has gone from the channel")
            self._step = start.step
            self._load_model(start.model_key)
            if start.state_key:
                self._load_optimizer(self._require(start.state_key))
        return start

    def _end_round(self, server: PsClient, sequence: int, *, known: bool) -> worker_pb2.BoundaryReply:
        """Hand the round's model over and wait for the federation's; ``known``: it was handed over before."""
        request = worker_pb2.BoundaryRequest(round=sequence, step=self._step)
        if not known:
            self._settle()
            vector = self._flat.vector()
            request = self._boundary_of(sequence, vector)
            # All workers hold the same model and optimiser state, so one hands them over for all.
            self._put_end(request, vector, dump_state(self._optimizer) if self._call.worker == 0 else None)
        reply = server.boundary(request)
        if not self._background:
            self._channel.delete_tree(f"b/{self._call.attempt}/{sequence - 1}")
        return reply

    def _settle(self) -> None:
        if self._settled < self._step:
            self._merging.settle(self._step)
            self._settled = self._step

    def _boundary_of(self, sequence: int, vector: Vector) -> worker_pb2.BoundaryRequest:
        place = f"b/{self._call.attempt}/{sequence}"
        # A worker alone has nobody to differ from.
        digest = framing.digest_of([vector.data.cast("B")]) if self._call.workers > 1 else "alone"
        return worker_pb2.BoundaryRequest(
            round=sequence,
            step=self._step,
            digest=digest,
            model_key=f"{place}/model" if self._call.worker == 0 else "",
            samples=self._round.samples,
            loss=self._round.loss,
            compute_seconds=self._round.compute_seconds,
        )

    def _put_end(self, request: worker_pb2.BoundaryRequest, vector: Vector, state: State | None) -> None:
        if request.model_key:
            self._channel.put(request.model_key, framing.encode({"model": vector}))
        if state is not None:
            request.state_key = f"{request.model_key.removesuffix('model')}state"
            self._channel.put(request.state_key, framing.encode(*state))

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
        value, samples = float(loss.detach()), self._stream.count
        seconds = time.monotonic() - begun
        if not np.isfinite(value):
            text = f"the loss is {value} at step {step}"
            raise GeofedError("TASK_FAILED", text, hint="training diverged: lower the learning rate")
        self._merging.step(server, step, samples, value)
        self._step = step
        self._round.samples += samples
        self._round.loss_sum += value * samples
        self._round.compute_seconds += seconds
        self._outcome_steps += 1
        self._outcome_samples += samples
        self._compute_seconds += seconds
        if self._call.worker == 0 and not self._merging.server_knows and time.monotonic() - self._told > _NEWS_SECONDS:
            # Last, as it may be told that the attempt is over: the step is made by then, with all that counts it.
            self._told = time.monotonic()
            server.stepped(worker_pb2.SteppedRequest(step=step, loss=value))

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

    def _leave(self, broken: bool = False) -> str:
        """Store model, optimiser and the round's sums where the next slice finds them, or the next attempt."""
        if not self._attached:
            return self._call.resume_key
        tensors, numbers = dump_state(self._optimizer)
        facts = {"round": self._completed, "step": self._step, "settled": self._settled, **_sums("", self._round)}
        facts |= {"attempt": self._call.attempt, "worker": self._call.worker, "batch": self._stream.count}
        if self._ended is not None:
            # The slice ends in the wait for an answer, which the next one will ask for again.
            facts |= {"ended_step": self._ended.request.step, **_sums("ended_", self._ended.sums)}
        key = f"w/{self._call.attempt}/{self._call.worker}/{self._step}"
        prefixed = {f"o/{name}": array for name, array in tensors.items()}
        facts |= {f"o/{name}": value for name, value in numbers.items()}
        if not broken:
            # What was sent of a merge that broke off is not known: what is held back goes with the attempt.
            state = self._merging.state()
            prefixed |= {f"c/{name}": array for name, array in state.tensors.items()}
            facts |= {f"c/{name}": value for name, value in state.facts.items()}
        self._channel.put(key, framing.encode({"model": self._flat.vector(), **prefixed}, facts))
        if self._call.resume_key.startswith(f"w/{self._call.attempt}/") and self._call.resume_key != key:
            self._channel.delete(self._call.resume_key)
        return key

    def _forget_left(self) -> str:
        if self._call.resume_key:
            self._channel.delete(self._call.resume_key)
        return ""

    def _resume(self, server: PsClient, start: worker_pb2.AttachReply) -> bool:
        """Take up what the last slice left, unless the federation has a newer model: then that one counts."""
        left = self._channel.get(self._call.resume_key) if self._call.resume_key else None
        if left is None or start.boundary or start.finished:
            return False
        frame = framing.decode(left)
        facts = frame.facts
        behind = start.round - int(facts["round"])
        # With background exchange the model is not the federation's; only the answer to the last end was missed.
        missed = self._background and behind == 1 and (facts.get("ended_step") or facts["step"]) == start.step
        if behind and not missed:
            return False
        other_attempt = facts["attempt"] != self._call.attempt
        if other_attempt and self._background:
            # There an attempt begins from the server's model, since the server must know where.
            return False
        self._step = int(facts["step"])
        self._round = _read_sums("", facts)
        if other_attempt:
            # Of another worker, whose share of a step may have been another.
            self._round.rescale(self._stream.count / facts["batch"])
        self._flat.load(np.asarray(frame.tensors["model"], np.float32))
        load_state(self._optimizer, _under("o/", frame.tensors), _under("o/", facts))
        if not other_attempt:
            self._settled = int(facts["settled"])
            held = CollectiveState(_under("c/", frame.tensors), _under("c/", facts))
            if held.tensors or held.facts:
                self._merging.restore(held)
        if missed:
            if "ended_step" not in facts:
                self._round = _Round()
            if start.correction_key:
                self._flat.add(self._correction(start.correction_key))
        elif "ended_step" in facts:
            self._tell_end_again(server, facts)
        return True

    def _tell_end_again(self, server: PsClient, facts: dict[str, float]) -> None:
        """The last slice had handed the model over, but the server has not taken it."""
        sums, open_round = _read_sums("ended_", facts), self._round
        step, self._step, self._round = self._step, int(facts["ended_step"]), sums
        key = f"b/{self._call.attempt}/{self._completed + 1}/model"
        value = self._channel.get(key) if self._call.worker == 0 or self._call.workers > 1 else None
        if value is None:
            raise GeofedError("FENCED", f"{key} has gone from the channel: a newer attempt has taken over")
        vector: Vector = np.asarray(framing.decode(value).tensors["model"], np.float32)
        request = self._boundary_of(self._completed + 1, vector)
        self._step, self._round = step, open_round
        self._ended = _Ended(request, sums, self._beside.submit(self._ask_end, server, request))
        self._hear_of_round(server)

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


def _under(prefix: str, named: Mapping[str, _Value]) -> dict[str, _Value]:
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def _sums(prefix: str, sums: _Round) -> dict[str, float]:
    names = ("samples", "loss_sum", "compute_seconds")
    return {f"{prefix}{name}": float(getattr(sums, name)) for name in names}


def _read_sums(prefix: str, facts: dict[str, float]) -> _Round:
    return _Round(facts[f"{prefix}samples"], facts[f"{prefix}loss_sum"], facts[f"{prefix}compute_seconds"])


def _seed(*numbers: int) -> None:
    """Seed every source of randomness that job code may draw from."""
    mixed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
