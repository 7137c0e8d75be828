"""Methods of the ISP benchmark, played: production roles and real gradients over a modelled channel, in virtual time.

Bytes are those of the frames that the roles put and get. Time is MODELLED: a channel of 1 ms and 1 Gbit/s a worker, and
the measured compute of a gradient; coding and adding up take no time. `isp_processes` measures time.
"""

from __future__ import annotations

import itertools
import pickle
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from isp_data import Flat, Task, batches
from support.memory_channel import MemoryChannel
from support.virtual_channel import Meter, Program, Virtual

from sync.codec import Tensors
from sync.collective import ChannelCosts, Settings
from sync.layout import Vector
from sync.merging import ChangeCollective, MeanCollective, Member
from sync.merging.lists import AsPublished, Places

__all__ = ["CHANNEL", "METHODS", "Curve", "Method", "learn"]

CHANNEL = ChannelCosts(0.001, 0.001, 1.25e8, 1.25e8, 0.0, 0.001, 16)
"""1 ms, 1 Gbit/s a worker, a store that tells; as the redis profile of `collectives.py`."""
SYNCHRONOUS_STEPS = 6
"""Whose merges are played for bytes and time; what they merge to is the mean of the gradients, which is computed."""


@dataclass(frozen=True)
class Method:
    """How workers merge."""

    name: str
    settings: Settings
    """`chunks` of 0 stands for as many as there are workers."""
    significance: bool = True
    """Whether the filter is on."""

    @property
    def synchronous(self) -> bool:
        return self.name.endswith("synchronous")

    @property
    def means(self) -> bool:
        """Whether gradients are merged, in a form that loses something."""
        return self.settings.pattern != "isp" and self.settings.codec != "fp32"

    def at(self, workers: int, significance: float) -> Settings:
        from dataclasses import replace

        chunks = workers if self.settings.chunks == 0 else self.settings.chunks
        return replace(
            self.settings, chunks=chunks, significance=significance if self.significance else 0.0, poll_seconds=0.001
        )


METHODS = [
    Method("dense synchronous", Settings("k-reduce", chunks=0)),
    Method("sparse synchronous", Settings("isp", chunks=0), significance=False),
    Method("ISP as published", Settings("isp", faithful=True)),
    Method("ISP all to all", Settings("isp", codec="int4")),
    Method("ISP over K-REDUCE", Settings("isp", chunks=0, codec="int4")),
    Method("K-REDUCE of lists", Settings("k-reduce", chunks=0, codec="int4")),
    Method("over K-REDUCE, bf16 values", Settings("isp", chunks=0, codec="bf16")),
    Method("over K-REDUCE, fp8 values", Settings("isp", chunks=0, codec="fp8")),
    Method("K-REDUCE of lists, fp8 values", Settings("k-reduce", chunks=0, codec="fp8")),
    # One mechanism alone, and all but one.
    Method("ranges alone", Settings("isp", chunks=0, faithful=True)),
    Method("as published, no filter", Settings("isp", faithful=True), significance=False),
    Method("over K-REDUCE, fp32 values", Settings("isp", chunks=0)),
    Method("over K-REDUCE, no filter", Settings("isp", chunks=0, codec="int4"), significance=False),
]


@dataclass
class Curve:
    """One run."""

    task: str
    method: str
    workers: int
    seed: int
    lr: float
    significance: float
    steps: list[int] = field(default_factory=list)
    """Of which the following lists tell."""
    quality: list[float] = field(default_factory=list)
    """Held out, of the mean of the workers' models."""
    written: list[float] = field(default_factory=list)
    """Bytes into the channel up to then, all workers together."""
    read: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """MODELLED."""
    density: float = 0.0
    """Share of the coordinates that a worker sends in a step, on average."""
    union: float = 0.0
    """Share of the coordinates that any worker sends."""
    zlib_ratio: float | None = None
    """Bytes after zlib, as published, against 16 an entry."""
    wall_seconds: float = 0.0

    @property
    def final(self) -> float:
        """The mean of the last three."""
        return float(np.mean(self.quality[-3:]))

    def reached(self, target: float) -> int | None:
        """Which of the entries is the first to reach a loss."""
        return next((index for index, one in enumerate(self.quality) if one <= target), None)


class _Counting(AsPublished):
    """As published, and what zlib makes of every so many-th list."""

    def __init__(self) -> None:
        self.raw = self.packed = 0
        self._turns = itertools.count()

    def encode_entries(self, size: int, places: Places, values: Vector) -> tuple[Tensors, Vector]:
        tensors, read = super().encode_entries(size, places, values)
        if next(self._turns) % 37 == 0:
            self.raw += sum(np.asarray(array).nbytes for array in tensors.values())
            self.packed += len(zlib.compress(pickle.dumps(tuple(tensors.values()))))
        return tensors, read


def learn(
    task: Task,
    method: Method,
    workers: int,
    seed: int,
    lr: float,
    significance: float,
    steps: int,
    every: int,
    compute: float,
) -> Curve:
    """Train for some steps; ``compute``: seconds of a gradient."""
    curve = Curve(task.kind.name, method.name, workers, seed, lr, significance if method.significance else 0.0)
    begun = time.monotonic()
    if method.means:
        _Means(task, method, curve, steps, every, compute).run()
    elif method.synchronous:
        _synchronous(task, method, curve, steps, every, compute)
    else:
        _Isp(task, method, curve, steps, every, compute).run()
    curve.wall_seconds = time.monotonic() - begun
    return curve


def _moved(virtual: Virtual) -> tuple[float, float]:
    meters: list[Meter] = [worker.meter for worker in virtual.workers]
    return float(sum(meter.bytes_in for meter in meters)), float(sum(meter.bytes_out for meter in meters))


def _synchronous(task: Task, method: Method, curve: Curve, steps: int, every: int, compute: float) -> None:
    """One model, since all have the same; the merges of the first steps are played."""
    flat = Flat(task.model(curve.seed))
    optimizer = task.optimizer(flat.model, curve.lr)
    streams = [batches(task, worker, curve.workers, curve.seed) for worker in range(curve.workers)]
    gradients: list[list[Vector]] = []
    _note(curve, 0, task.quality(flat.model))
    for step in range(1, steps + 1):
        total = torch.zeros_like(flat.gradient)
        for number, stream in enumerate(streams):
            flat.gradient.zero_()
            task.module.loss(flat.model, next(stream)).backward()
            if step <= SYNCHRONOUS_STEPS:
                gradients += [[]] if number == 0 else []
                gradients[-1].append(flat.gradient.numpy().copy())
            total += flat.gradient
        flat.gradient.copy_(total / curve.workers)
        optimizer.step()
        if step % every == 0:
            _note(curve, step, task.quality(flat.model))
    virtual = Virtual(CHANNEL)
    settings, ones = method.at(curve.workers, 0.0), np.ones(flat.vector.size, np.float32)

    def program(worker: int) -> Program:
        member = Member(worker, curve.workers, 1)
        kind = ChangeCollective if settings.pattern == "isp" else MeanCollective
        role: Any = kind(settings, member, MemoryChannel(), "c", flat.vector.size)
        for step, vectors in enumerate(gradients, 1):
            yield compute
            more = (ones,) if settings.pattern == "isp" else ()
            yield role.part(step, vectors[worker], 1.0, *more)

    for worker in range(curve.workers):
        virtual.add(program(worker))
    seconds, moved = virtual.run() / len(gradients), [one / len(gradients) for one in _moved(virtual)]
    curve.density = float(np.mean([np.count_nonzero(vector) for row in gradients for vector in row])) / ones.size
    curve.union = float(np.mean([np.count_nonzero(np.any(row, axis=0)) for row in gradients])) / ones.size
    for step in curve.steps:
        curve.seconds.append(step * seconds)
        curve.written.append(step * moved[0])
        curve.read.append(step * moved[1])


def _note(curve: Curve, step: int, quality: float) -> None:
    curve.steps.append(step)
    curve.quality.append(quality)


class _Isp:
    """Workers with a model each."""

    def __init__(self, task: Task, method: Method, curve: Curve, steps: int, every: int, compute: float) -> None:
        self._task, self._method, self._curve = task, method, curve
        self._steps, self._every, self._compute = steps, every, compute
        self._settings = method.at(curve.workers, curve.significance)
        self._virtual = Virtual(CHANNEL)
        self._counting = _Counting()
        self._sums: dict[int, Vector] = {}
        self._models: dict[int, int] = {}
        self._sent: dict[int, tuple[int, Vector]] = {}
        self._shown = Flat(task.model(curve.seed))
        self._sent_entries: list[int] = []
        self._union_entries: list[int] = []

    def run(self) -> None:
        curve = self._curve
        _note(curve, 0, self._task.quality(self._shown.model))
        curve.seconds.append(0.0)
        curve.written.append(0.0)
        curve.read.append(0.0)
        for worker in range(curve.workers):
            self._virtual.add(self._program(worker), serial=self._settings.faithful)
        self._virtual.run()
        size = self._shown.vector.size
        curve.density = float(np.mean(self._sent_entries)) / size
        curve.union = float(np.mean(self._union_entries)) / size
        if self._settings.faithful:
            curve.zlib_ratio = self._counting.packed / self._counting.raw

    def _program(self, worker: int) -> Program:
        curve, task = self._curve, self._task
        flat = Flat(task.model(curve.seed))
        optimizer = task.optimizer(flat.model, curve.lr)
        member = Member(worker, curve.workers, 1)
        sharing = ChangeCollective(self._settings, member, MemoryChannel(), "c", flat.vector.size)
        if self._settings.faithful:
            sharing._codec = self._counting
            if sharing._ranges is not None:
                sharing._ranges._codec = self._counting
        for step, batch in self._batches(worker):
            before = flat.vector.copy()
            flat.gradient.zero_()
            task.module.loss(flat.model, batch).backward()
            optimizer.step()
            yield self._compute
            change = flat.vector - before
            before, held = change.copy(), sharing._held.held.copy()
            part = sharing.part(step, change, 1.0, flat.vector)
            merged = yield part
            for each in sharing.merged(merged):
                flat.vector += each.vector
            # What is neither sent nor held back is nothing.
            self._told(step, held + before - sharing._held.held)
            if step % self._every == 0:
                self._ended(step, flat.vector)

    def _batches(self, worker: int) -> Iterator[tuple[int, Any]]:
        """A worker's steps, counted from 1, each with what it draws."""
        drawn = batches(self._task, worker, self._curve.workers, self._curve.seed)
        return zip(range(1, self._steps + 1), drawn, strict=False)

    def _told(self, step: int, sent: Vector) -> None:
        self._sent_entries.append(int(np.count_nonzero(sent)))
        count, union = self._sent.setdefault(step, (0, np.zeros(sent.size, np.bool_)))
        union |= sent != 0
        self._sent[step] = count + 1, union
        if count + 1 == self._curve.workers:
            self._union_entries.append(int(np.count_nonzero(union)))
            del self._sent[step]

    def _ended(self, step: int, model: Vector) -> None:
        """A worker has made a step; the last one to do so looks at the mean model."""
        sums = self._sums.setdefault(step, np.zeros(model.size, np.float32))
        sums += model / self._curve.workers
        self._models[step] = self._models.get(step, 0) + 1
        if self._models[step] == self._curve.workers:
            self._shown.vector[:] = self._sums.pop(step)
            _note(self._curve, step, self._task.quality(self._shown.model))
            self._curve.seconds.append(self._virtual.now)
            written, read = _moved(self._virtual)
            self._curve.written.append(written)
            self._curve.read.append(read)


class _Means(_Isp):
    """Workers whose gradients are merged by a lossy codec: each makes its optimiser's step with the mean."""

    def _program(self, worker: int) -> Program:
        curve, task = self._curve, self._task
        flat = Flat(task.model(curve.seed))
        optimizer = task.optimizer(flat.model, curve.lr)
        member = Member(worker, curve.workers, 1)
        reducing = MeanCollective(self._settings, member, MemoryChannel(), "c", flat.vector.size)
        for step, batch in self._batches(worker):
            flat.gradient.zero_()
            task.module.loss(flat.model, batch).backward()
            yield self._compute
            gradient = flat.gradient.numpy()
            (mean,) = yield reducing.part(step, gradient.copy(), 1.0)
            self._told(step, gradient)
            gradient[:] = mean.vector
            optimizer.step()
            if step % self._every == 0:
                self._ended(step, flat.vector)
