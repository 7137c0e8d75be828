"""The workers of a live pipeline, each in a process of its own, as functions are: no interpreter serves two of them."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.pipelines import Worker

from sync.channel import Channel
from sync.pipeline import Layers, Pipeline, StepDone

__all__ = ["Made", "Processes"]


@dataclass(frozen=True)
class Made:
    """A step of all workers."""

    seconds: float
    """Until the last had ended it."""
    core_seconds: float
    """What all of them together kept cores busy."""
    done: tuple[StepDone, ...]
    """By worker."""


class Processes:
    """A pipeline's workers. Use as a context manager; torch must have started no threads before."""

    def __init__(
        self,
        shape: Pipeline,
        layers: Layers,
        open_channel: Callable[[], Channel],
        loss: Callable[[nn.Module, Any], Any],
        **settings: Any,
    ) -> None:
        """``settings``: as `Worker.of` takes them. Returns when all are ready."""
        fork = multiprocessing.get_context("fork")
        self._lines: list[Connection] = []
        self._processes = []
        for number in range(shape.workers):
            line, other = fork.Pipe()
            make = partial(Worker.of, shape, number, layers, loss=loss, **settings)
            process = fork.Process(target=_serve, args=(make, open_channel, other), daemon=True)
            process.start()
            other.close()
            self._lines.append(line)
            self._processes.append(process)
        for line in self._lines:
            line.recv()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for line, process in zip(self._lines, self._processes, strict=True):
            if kind is None:
                line.send(None)
            else:
                process.terminate()
        for process in self._processes:
            process.join()

    def step(self, step: int, batch: Any) -> Made:
        """All workers make one step of the whole batch."""
        begun = time.monotonic()
        for line in self._lines:
            line.send((step, batch))
        told = [line.recv() for line in self._lines]
        ended, core_seconds, done = zip(*told, strict=True)
        return Made(max(ended) - begun, sum(core_seconds), done)


def _serve(make: Callable[..., Worker], open_channel: Callable[[], Channel], line: Connection) -> None:
    """One worker. An error ends it, and with it the line, at which the benchmark ends."""
    worker = make(channel=open_channel())
    line.send(None)
    while (asked := line.recv()) is not None:
        busy = time.process_time()
        done = worker.step(*asked)
        # One clock for all processes of a machine.
        line.send((time.monotonic(), time.process_time() - busy, done))
    worker.close()
