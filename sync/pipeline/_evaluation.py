"""Evaluation of a model in stages: forward passes only, batch after batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from geofed_pb.errors import GeofedError
from sync.pipeline._contract import ActivationCodec, Answering, model_input
from sync.pipeline._stage import Stage
from sync.pipeline._stage_tensors import Carried
from sync.pipeline._stage_transfers import StageTransfers

__all__ = ["Metrics", "evaluate"]

Metrics = Callable[[nn.Module, Iterable[Any]], dict[str, float]]

_WINDOW = 8
"""Batches of a window; a stage is at most two windows ahead of the next one, so that the channel never holds a whole
test set."""
_COUNT = "count"
"""Fact of a frame: the number of batches."""


class _Hop:
    """Receives from the previous stage, and sends to the next one."""

    def __init__(self, runner: ActivationCodec, transfers: StageTransfers, place: str) -> None:
        self._runner, self._stage_transfers, self._place = runner, transfers, place

    def receive(self, number: int) -> tuple[Carried | None, int]:
        """Receive the activations of a batch, and the number of batches; if that is 0, there are no activations."""
        key = self._key("a", self._runner.position.stage, number)
        self._stage_transfers.expect((key,))
        value, facts = self._runner.decoded(self._stage_transfers.take(key))
        count = int(facts[_COUNT])
        window, at = divmod(number + 1, _WINDOW)
        if at == 0 and (window + 1) * _WINDOW < count:
            self._stage_transfers.send(self._key("w", self._runner.position.stage, window - 1), [b"taken"])
        return value, count

    def send(self, number: int, value: Carried | None, count: int) -> None:
        into = self._runner.position.stage + 1
        window, at = divmod(number, _WINDOW)
        if at == 0 and window >= 2:
            taken = self._key("w", into, window - 2)
            self._stage_transfers.expect((taken,))
            self._stage_transfers.take(taken)
        self._stage_transfers.send(self._key("a", into, number), self._runner.encoded(value, {_COUNT: count}))

    def _key(self, kind: str, into: int, number: int) -> str:
        return f"{self._place}/s{into}-{self._runner.position.replica}/{kind}{number}"


def evaluate(
    runner: ActivationCodec,
    stage: Stage,
    transfers: StageTransfers,
    place: str,
    batches: Iterable[Any],
    count: int,
    metrics: Metrics,
) -> dict[str, float]:
    """Execute this stage's part of an evaluation; see `StageRunner.evaluate`."""
    stage.layers.eval()
    hop = _Hop(runner, transfers, place)
    found: dict[str, float] = {}
    failed: GeofedError | None = None
    with torch.no_grad():
        if runner.is_first and runner.is_last:
            found = metrics(stage.layers, batches) if count else {}
        elif runner.is_first:
            _begin(hop, stage, batches, count, metrics)
        elif runner.is_last:
            try:
                found = _end(hop, stage, batches, count, metrics)
            except GeofedError as error:
                if error.code != "TASK_FAILED":
                    raise
                failed = error
        else:
            _pass_on(hop, stage)
    transfers.flush()
    transfers.drain()
    if failed is not None:
        raise failed
    return found


def _begin(hop: _Hop, stage: Stage, batches: Iterable[Any], count: int, metrics: Metrics) -> None:
    for number, batch in enumerate(batches):
        given = model_input(lambda model, one: metrics(model, iter([one])), batch, training=False)
        hop.send(number, stage.evaluate(given), count)
    if not count:
        hop.send(0, None, 0)


def _pass_on(hop: _Hop, stage: Stage) -> None:
    for number in itertools.count():
        value, count = hop.receive(number)
        hop.send(number, None if value is None else stage.evaluate(value), count)
        if number + 1 >= count:
            return


def _end(hop: _Hop, stage: Stage, batches: Iterable[Any], count: int, metrics: Metrics) -> dict[str, float]:
    received = 0

    def answer() -> Carried:
        nonlocal received
        if received >= max(count, 1):
            text = f"the task's metrics call the model more than {count} times for {count} batches"
            raise GeofedError("TASK_INVALID", text, hint="call model(x) once for every batch")
        value, _ = hop.receive(received)
        received += 1
        if value is None:
            raise GeofedError("INTERNAL", "a batch came without activations")
        return stage.evaluate(value)

    def one_by_one() -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if received != number:
                text = f"the task's metrics have called the model {received} times for {number} batches"
                raise GeofedError("TASK_INVALID", text, hint="call model(x) once for every batch")
            yield batch

    if not count:
        hop.receive(0)
        return {}

    def take_the_rest() -> None:
        """Receive the remaining activations: the previous stage waits until they are taken."""
        nonlocal received
        while received < count:
            received += 1
            hop.receive(received - 1)

    try:
        found = metrics(Answering(answer).eval(), one_by_one())
    except GeofedError as error:
        if error.code == "TASK_FAILED":
            take_the_rest()
        raise
    take_the_rest()
    return found
