"""One worker of a pipeline: executes its stage's part of each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sync.channel import Channel
from sync.device import finish
from sync.pipeline._contract import Loss
from sync.pipeline._evaluation import Metrics, evaluate
from sync.pipeline._merge import GroupMerge
from sync.pipeline._order import Operation, operations
from sync.pipeline._replay import ReplayLog, replay, value_key
from sync.pipeline._shape import Pipeline
from sync.pipeline._stage import Stage
from sync.pipeline._stage_tensors import Carried, as_tuple, decoded, encoded
from sync.pipeline._stage_transfers import StageTransfers

__all__ = ["StageRunner", "StepDone"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepDone:
    """Measurements of one step of this worker."""

    loss: float | None
    """Mean over this replica's samples; None in all stages but the last."""
    compute_seconds: float
    """Computing time in the layers and the loss."""
    waited_seconds: float
    """Time spent waiting for activations and gradients of other stages."""
    exposed_seconds: float
    """Time spent waiting for the merge of gradients after the last backward pass."""


class StageRunner:
    """Runs one stage for one replica. After a step, the stage's parameters hold the step's merged gradients: those that
    a single process would have computed from all samples, except for rounding.

    All workers of the pipeline run the same steps. Keys begin with ``place``, which identifies the attempt, and name
    the step, the micro-batch, the stage and the replica. Raises the channel's errors, and ``GeofedError``:
    ``CHANNEL_TIMEOUT`` if another stage does not deliver its part in time, ``TASK_INVALID`` for an invalid loss. After
    an error the runner must be closed.
    """

    def __init__(
        self,
        shape: Pipeline,
        worker: int,
        layers: nn.Sequential,
        loss: Loss,
        channel: Channel,
        place: str,
        merge: GroupMerge,
        *,
        device: torch.device = _CPU,
        codec: str = "fp32",
        seed: tuple[int, ...] = (0,),
        timeout_seconds: float = 120.0,
        logs: bool = False,
        computing: Callable[[str], AbstractContextManager[None]] = lambda doing: nullcontext(),
    ) -> None:
        """``layers``: those of this stage only, on ``device``. ``codec``: of activations and their gradients, "fp32"
        (unchanged) or "bf16". ``seed``: together with the replica, the step and the micro-batch it determines the
        layers' random numbers. ``logs``: received values stay in the channel for a `replay`; the caller must delete
        them (`logged_keys`). ``computing``: returns a context manager that is entered wherever layers run, given what
        they do; it can report their errors in its own way."""
        self.shape, self.position = shape, shape.position(worker)
        stage, count = self.position.stage, len(shape.stages)
        self.is_first, self.is_last = stage == 0, stage == count - 1
        self._stage = Stage(
            layers,
            loss,
            first_layer=shape.stages[stage][0],
            is_first=self.is_first,
            is_last=self.is_last,
            rematerialise=shape.rematerialises(stage),
        )
        self._device = device
        self._stage_transfers = StageTransfers(channel, timeout_seconds)
        self._place, self._codec, self._merge = place, codec, merge
        self._seed, self._logs = seed, logs
        self._told = computing
        self._compute_seconds = 0.0
        self._expected = 0
        """The step whose receives are queued."""
        self.loss: float | None = None
        """Loss of the step's samples, once all passes are computed; None in all stages but the last."""

    @property
    def reads_data(self) -> bool:
        """Whether this worker needs the samples: the first stage needs the inputs, the last one the targets."""
        return self.is_first or self.is_last

    def step(
        self,
        step: int,
        samples: int,
        micro_batches: Sequence[Any],
        *,
        before_last: Callable[[], None] = lambda: None,
        then: int | None = None,
    ) -> StepDone:
        """Compute one step's gradients.

        ``samples``: of this replica. ``micro_batches``: these samples, divided by ``shape.sizes(samples)``, if this
        worker `reads_data`, else empty. ``before_last``: called when all passes are computed, before the last gradient
        is sent to the previous stage. ``then``: samples of the following step, whose receives are then queued; it must
        be the next call.
        """
        sizes = self.shape.sizes(samples)
        order = operations(self.shape.order, self.position.stage, len(self.shape.stages), len(sizes))
        waited, exposed = self._stage_transfers.waited_seconds, self._merge.exposed_seconds
        self._compute_seconds = 0.0
        if self._expected != step:
            self._expect(step, len(sizes))
        self._stage.begin((*self._seed, self.position.replica, step))
        for operation in order:
            number = operation.micro_batch
            if operation.kind == "forward":
                self._forward(step, number, micro_batches[number] if micro_batches else None)
                continue
            last = operation == order[-1]
            share = sizes[number] / samples
            self._backward(step, operation, share, (samples, before_last) if last else None)
        if then:
            self._expect(step + 1, len(self.shape.sizes(then)))
        self._stage_transfers.flush()
        self._merge.finish()
        return StepDone(
            loss=self.loss,
            compute_seconds=self._compute_seconds,
            waited_seconds=self._stage_transfers.waited_seconds - waited,
            exposed_seconds=self._merge.exposed_seconds - exposed,
        )

    def replay(self, logged: ReplayLog, step: int, parts: Sequence[Sequence[Any]]) -> StepDone:
        """Compute a step's gradients again from the values that other stages sent in an earlier attempt: those of all
        replicas together, without any of them. Nothing is sent or merged.

        ``parts``: the micro-batches of each replica of that attempt, if this worker `reads_data`, else empty. The loss
        is the mean over the samples of all replicas.
        """
        waited = self._stage_transfers.waited_seconds
        seconds = replay(self, self._stage, self._stage_transfers, logged, step, parts, self._seed, self._computing)
        self.loss = self._stage.loss_sum if self.is_last else None
        return StepDone(self.loss, seconds, self._stage_transfers.waited_seconds - waited, 0.0)

    @property
    def taken_bytes(self) -> int:
        """Bytes received from other stages so far."""
        return self._stage_transfers.taken_bytes

    def evaluate(self, tag: str, batches: Iterable[Any], count: int, metrics: Metrics) -> dict[str, float]:
        """Return the metrics of ``count`` batches, with forward passes only; empty in all stages but the last.

        ``tag`` must be unique among the evaluations of the attempt. ``metrics`` is the task's function, which calls the
        model once per batch. Stages between the first and the last need neither batches nor metrics.
        """
        self._stage_transfers.drain()
        return evaluate(self, self._stage, self._stage_transfers, f"{self._place}/{tag}", batches, count, metrics)

    def drain(self) -> None:
        """Wait until everything has been sent."""
        self._stage_transfers.drain()

    def close(self) -> None:
        """End the threads; the caller must close the merge."""
        self._stage_transfers.close()

    def encoded(self, value: Carried | None, facts: dict[str, float] | None = None) -> list[memoryview]:
        """Encode an activation or a gradient, with optional facts, as buffers to send."""
        return encoded(value, self._codec, facts)

    def decoded(self, value: memoryview) -> tuple[Carried | None, dict[str, float]]:
        """Decode a received buffer to tensors on this stage's device, and its facts."""
        return decoded(value, self._device)

    @contextmanager
    def _computing(self, doing: str) -> Iterator[None]:
        """Enter ``computing`` around all computations of layers, replays included, and wait until they are complete."""
        with self._told(doing):
            yield
            finish(self._device)

    def _key(self, step: int, kind: str, into: int, number: int) -> str:
        return value_key(self._place, step, kind, into, self.position.replica, number)

    def _expect(self, step: int, count: int) -> None:
        """Queue all receives of a step, in the order in which they are needed."""
        self._expected, stage = step, self.position.stage
        keys = []
        for operation in operations(self.shape.order, stage, len(self.shape.stages), count):
            forward = operation.kind == "forward"
            if not (self.is_first if forward else self.is_last):
                keys.append(self._key(step, "a" if forward else "g", stage, operation.micro_batch))
        self._stage_transfers.expect(keys)

    def _forward(self, step: int, number: int, batch: Any) -> None:
        stage = self.position.stage
        given = None
        if not self.is_first:
            given, _ = self.decoded(self._stage_transfers.take(self._key(step, "a", stage, number), keep=self._logs))
        begun = time.monotonic()
        with self._computing("the forward pass"):
            passed = self._stage.forward(number, given, batch)
        self._compute_seconds += time.monotonic() - begun
        if passed is not None:
            self._stage_transfers.send(self._key(step, "a", stage + 1, number), self.encoded(passed))

    def _backward(
        self, step: int, operation: Operation, share: float, last: tuple[int, Callable[[], None]] | None
    ) -> None:
        stage, number = self.position.stage, operation.micro_batch
        given: tuple[torch.Tensor, ...] = ()
        if not self.is_last:
            value, _ = self.decoded(self._stage_transfers.take(self._key(step, "g", stage, number), keep=self._logs))
            given = () if value is None else as_tuple(value, "the gradient of a stage's output")
        if last is not None:
            self._merge.arm(step, last[0])
        begun = time.monotonic()
        with self._computing("the backward pass"):
            passed = self._stage.backward(number, given, share)
        self._compute_seconds += time.monotonic() - begun
        if last is not None:
            self.loss = self._stage.loss_sum if self.is_last else None
            last[1]()
        if not self.is_first:
            self._stage_transfers.send(self._key(step, "g", stage - 1, number), self.encoded(passed))
