"""One worker of a pipeline: runs its stage's part of each step."""

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
from sync.pipeline._carried import Carried, as_tuple, decoded, encoded
from sync.pipeline._contract import Loss
from sync.pipeline._evaluation import Metrics, evaluate
from sync.pipeline._lanes import Lanes
from sync.pipeline._merge import GroupMerge
from sync.pipeline._order import Operation, operations
from sync.pipeline._replay import Logged, replay, value_key
from sync.pipeline._shape import Pipeline
from sync.pipeline._stage import Stage

__all__ = ["StageRunner", "StepDone"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepDone:
    """What a step was, for this worker."""

    loss: float | None
    """Mean over this replica's samples; None in all stages but the last."""
    compute_seconds: float
    """In the layers and the loss."""
    waited_seconds: float
    """For activations and gradients of other stages."""
    exposed_seconds: float
    """For the merge of gradients, after the last backward pass."""


class StageRunner:
    """Runs one stage for one replica. Afterwards the stage's parameters hold the step's merged gradients: those that a
    single process would have computed from all samples at once, but for rounding.

    All workers of the pipeline run the same steps. Keys follow from ``place``, which names the attempt, the step, the
    micro-batch, the stage and the replica. Raises what the channel raises, and ``GeofedError``: ``CHANNEL_TIMEOUT``
    where another stage does not give its part in time, ``TASK_INVALID`` for a loss that does not fit. After an error
    the runner must be closed.
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
        """``layers``: this stage's only, and ``device`` where they are. ``codec``: of activations and their gradients,
        "fp32" (as they are) or "bf16". ``seed``: what layers draw at random follows from it, the replica, the step and
        the micro-batch. ``logs``: what comes stays in the channel, for a `replay`; deleting it is the caller's
        (`logged_keys`). ``computing``: entered wherever layers run, with what they do, for whoever tells of their
        errors in another way."""
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
        self._lanes = Lanes(channel, timeout_seconds)
        self._place, self._codec, self._merge = place, codec, merge
        self._seed, self._logs = seed, logs
        self._told = computing
        self._compute_seconds = 0.0
        self._expected = 0
        """The step whose receives are queued."""
        self.loss: float | None = None
        """Of the step's samples, once nothing is left to compute; None in all stages but the last."""

    @property
    def reads_data(self) -> bool:
        """Whether this worker needs the samples: the first stage what goes in, the last what should come out."""
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
        """Make one step's gradients. ``samples``: of this replica. ``micro_batches``: those, cut by
        ``shape.sizes(samples)``, where this worker `reads_data`; else none. ``before_last``: called once nothing is
        left to compute, before this stage lets the ones before it come to their end. ``then``: samples of the step
        after this one, whose receives are then queued; it must be what this runner does next."""
        sizes = self.shape.sizes(samples)
        order = operations(self.shape.order, self.position.stage, len(self.shape.stages), len(sizes))
        waited, exposed = self._lanes.waited_seconds, self._merge.exposed_seconds
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
        self._lanes.flush()
        self._merge.finish()
        return StepDone(
            loss=self.loss,
            compute_seconds=self._compute_seconds,
            waited_seconds=self._lanes.waited_seconds - waited,
            exposed_seconds=self._merge.exposed_seconds - exposed,
        )

    def replay(self, logged: Logged, step: int, parts: Sequence[Sequence[Any]]) -> StepDone:
        """Make a step's gradients anew from what other stages have sent in an attempt that is over: of all replicas
        together, without any of them. Nothing is sent and nothing merged.

        ``parts``: by replica of that attempt, its micro-batches, where this worker `reads_data`; else none. The loss is
        the mean over the samples of all replicas.
        """
        waited = self._lanes.waited_seconds
        seconds = replay(self, self._stage, self._lanes, logged, step, parts, self._seed, self._computing)
        self.loss = self._stage.loss_sum if self.is_last else None
        return StepDone(self.loss, seconds, self._lanes.waited_seconds - waited, 0.0)

    @property
    def taken_bytes(self) -> int:
        """What has come from other stages so far."""
        return self._lanes.taken_bytes

    def evaluate(self, tag: str, batches: Iterable[Any], count: int, metrics: Metrics) -> dict[str, float]:
        """Metrics of ``count`` batches, forward only; empty in all stages but the last.

        ``tag``: no other evaluation of the attempt has it. ``metrics``: the task's, which calls the model once for
        every batch. Stages between the first and the last need neither.
        """
        self._lanes.drain()
        return evaluate(self, self._stage, self._lanes, f"{self._place}/{tag}", batches, count, metrics)

    def drain(self) -> None:
        """Wait until everything has been sent."""
        self._lanes.drain()

    def close(self) -> None:
        """End the threads; the merge is the caller's to close."""
        self._lanes.close()

    def encoded(self, value: Carried | None, facts: dict[str, float] | None = None) -> list[memoryview]:
        return encoded(value, self._codec, facts)

    def decoded(self, value: memoryview) -> tuple[Carried | None, dict[str, float]]:
        return decoded(value, self._device)

    @contextmanager
    def _computing(self, doing: str) -> Iterator[None]:
        """Around all that layers do, replays included: at its end it has been computed, or what went wrong is told."""
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
        self._lanes.expect(keys)

    def _forward(self, step: int, number: int, batch: Any) -> None:
        stage = self.position.stage
        given = None
        if not self.is_first:
            given, _ = self.decoded(self._lanes.take(self._key(step, "a", stage, number), keep=self._logs))
        begun = time.monotonic()
        with self._computing("the forward pass"):
            passed = self._stage.forward(number, given, batch)
        self._compute_seconds += time.monotonic() - begun
        if passed is not None:
            self._lanes.send(self._key(step, "a", stage + 1, number), self.encoded(passed))

    def _backward(
        self, step: int, operation: Operation, share: float, last: tuple[int, Callable[[], None]] | None
    ) -> None:
        stage, number = self.position.stage, operation.micro_batch
        given: tuple[torch.Tensor, ...] = ()
        if not self.is_last:
            value, _ = self.decoded(self._lanes.take(self._key(step, "g", stage, number), keep=self._logs))
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
            self._lanes.send(self._key(step, "g", stage - 1, number), self.encoded(passed))
