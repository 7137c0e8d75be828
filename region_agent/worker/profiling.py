"""The profile mode of the worker function: what a task takes, measured on the region's own data.

Nothing of the data leaves: what goes out are sizes, seconds and norms of gradients.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from region_agent.worker.data.shard import BatchStream, evaluation_batches, move
from region_agent.worker.profile_call import LayerNumbers, NormNumbers, ProfileCall, Profiled, StepNumbers
from region_agent.worker.task import Task
from sync.device import device, finish
from sync.flat import FlatModel, layout_of
from sync.pipeline import Layers, measure_layers, model_input
from sync.seeding import seed_all

__all__ = ["probe", "profile"]

_REPEATS = 5
"""Of a step of each batch, the first not counted."""
_MOST_STEPS, _WANTED_SHARE = 200, 0.7
"""Of a pace: steps of one batch, as of a quick task so many say enough; and the job's own batch's part of the time."""
_LONG_SECONDS = 4.0
"""The first step of a process may load much, from a cold disk: up to here another one tells what a step is."""
_PARTS = 64
"""Batches, at most, whose mean gradient stands for the true one in the noise scale. A few would not tell it from noise:
early in training the scale is often some hundred samples, and grows."""
_NORM_STEPS = 8
"""Steps of training along which gradients are looked at: at its very start they are not what they become."""


_LAYER_ROUNDS, _FEWER_ROUNDS, _MANY_LAYERS = 5, 3, 24
"""Of each layer, the first not counted; fewer where there are many, as an invocation must come to its end."""
_COPIES = 8
"""Of a model, that measuring it whole may hold: parameters, gradients, the optimiser's state, vectors for norms."""


@dataclass
class _Bench:
    """A model and data, ready to make steps."""

    call: ProfileCall
    task: Task
    module: torch.nn.Module
    flat: FlatModel
    optimizer: torch.optim.Optimizer
    data: Any
    device: torch.device
    ends: float
    """When no new measurement may begin (monotonic seconds)."""

    def batch(self, size: int, step: int) -> Any:
        stream = BatchStream(self.data, self.call.seed, self.call.region, 0, 1, size)
        with self.task.calling("dataset"):
            return move(stream.batch(step), self.device)

    def gradient(self, batch: Any) -> float:
        """Forward and backward pass; the loss."""
        with self.task.calling("the model's train() and the optimiser's zero_grad()"):
            self.module.train()
            self.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.module, batch)
        with self.task.calling("the backward pass"):
            loss.backward()  # type: ignore[no-untyped-call]
            finish(self.device)
            value = float(loss.detach())
        if not np.isfinite(value):
            raise GeofedError("TASK_FAILED", f"the loss is {value}", hint="lower the learning rate")
        return value


def probe(call: ProfileCall, task: Task) -> Profiled:
    """How large the model is. Nothing of the data is looked at."""
    begun = time.monotonic()
    shell = _without_values(call, task)
    seed_all(call.seed)
    whole = shell is None or not call.memory_mb or _peak_mb() + _held_mb(shell) < call.memory_mb
    module = task.model(call.seed) if shell is None or whole else shell
    with task.calling("model"):
        size = 4 * (layout_of(module) if module is shell else FlatModel(module).layout).size
    made = time.monotonic() - begun
    return Profiled(status="done", parameters=_parameters(module), model_bytes=size, loaded_seconds=made)


def _without_values(call: ProfileCall, task: Task) -> torch.nn.Module | None:
    """The model as names and lengths of tensors, which takes no memory; None: it cannot be made so."""
    seed_all(call.seed)
    try:
        return task.layers(call.seed).shell()
    except GeofedError:
        # It is no chain of layers.
        pass
    try:
        with torch.device("meta"):
            return task.model(call.seed)
    except GeofedError:
        # It computes with values while it is made, or cannot be made: then nor with values.
        return None


def profile(call: ProfileCall, task: Task, data: dict[str, Any], begun: float) -> Profiled:
    """Measure; ``begun``: when the invocation did (monotonic seconds)."""
    seed_all(call.seed)
    if not len(data["train"]):
        raise GeofedError("SHARD_UNREADABLE", "the training split is empty")
    looked = time.monotonic()
    layers = _too_large(call, task)
    # No worker of a job looks first.
    begun += time.monotonic() - looked
    if layers is not None:
        if call.measure == "pace":
            text = f"the model does not fit a function of {call.memory_mb} MB, and `control-plane profile` takes longer"
            raise GeofedError("FUNCTION_OUT_OF_MEMORY", text)
        return _in_layers(call, task, layers, data["train"], begun)
    where = device()
    module = task.model(call.seed)
    with task.calling("model"):
        flat = FlatModel(module, calling=task.calling)
        module.to(where)
    optimizer = task.optimizer(module.parameters())
    bench = _Bench(call, task, module, flat, optimizer, data["train"], where, begun + call.limit_seconds)
    loaded = time.monotonic() - begun
    if call.measure == "pace":
        return Profiled(status="done", samples=len(bench.data), loaded_seconds=loaded, steps=tuple(_pace(bench)))
    steps = list(_steps(bench)) if call.measure == "all" else []
    update = _update_seconds(bench) if call.measure == "all" else 0.0
    norms = list(_norms(bench, steps[0])) if call.measure == "all" else []
    measured, note = _layers(bench) if call.measure == "all" else ((), "")
    return Profiled(
        status="done",
        parameters=_parameters(module),
        model_bytes=4 * flat.layout.size,
        samples=len(bench.data),
        loaded_seconds=loaded,
        steps=tuple(steps),
        update_seconds=update,
        norms=tuple(norms),
        evaluation_peak_mb=_evaluation_peak_mb(bench, data) if call.measure == "all" else 0.0,
        layers=measured,
        layers_note=note,
    )


def _parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _pace(bench: _Bench) -> Iterator[StepNumbers]:
    """Whole steps, as one worker alone makes them: of the job's batch, and where time is left of a smaller one, from
    which those of other batches follow."""
    limit, begun = bench.call.limit_seconds, time.monotonic()
    wanted = min(bench.call.batch, len(bench.data))
    yield (first := _timed(bench, wanted, begun + _WANTED_SHARE * limit))
    smaller = max(1, wanted // 4)
    if smaller < wanted and time.monotonic() + first.seconds < begun + limit:
        yield _timed(bench, smaller, begun + limit)


def _timed(bench: _Bench, size: int, until: float) -> StepNumbers:
    """One step in any case, another unless that was very long, and so many more as are made by a time; the first does
    not count where there are more."""
    took: list[float] = []

    def more() -> bool:
        if len(took) < 2:
            return not took or took[0] < _LONG_SECONDS
        return len(took) < _MOST_STEPS and time.monotonic() + took[-1] < until

    while more():
        begun = time.monotonic()
        bench.gradient(bench.batch(size, len(took) + 1))
        with bench.task.calling("the optimiser's step"):
            bench.optimizer.step()
        finish(bench.device)
        took.append(time.monotonic() - begun)
    return StepNumbers(batch=size, seconds=statistics.median(took[1:] or took), peak_mb=0.0)


def _too_large(call: ProfileCall, task: Task) -> Layers | None:
    """The layers of a model that is measured without ever being made whole; None: it is made whole."""
    if not call.memory_mb:
        return None
    try:
        layers = task.layers(call.seed)
        shell = layers.shell()
    except GeofedError:
        # It is no chain of layers, and can be measured in one way only.
        return None
    return layers if _peak_mb() + _COPIES * _held_mb(shell) > call.memory_mb else None


def _held_mb(module: torch.nn.Module) -> float:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return sum(one.numel() * one.element_size() for one in tensors) / 2**20


def _in_layers(call: ProfileCall, task: Task, layers: Layers, data: Any, begun: float) -> Profiled:
    """What the sum of all layers would take, where each is made, measured and let go of before the next."""
    base_mb, loaded = _peak_mb(), time.monotonic() - begun
    if call.measure == "nothing":
        return Profiled(status="done", samples=len(data), loaded_seconds=loaded)
    # No micro-batch is larger than a replica's batch.
    sizes = [size for size in _sizes(call, data) if size <= call.batch]
    with task.calling("dataset"):
        batch = move(BatchStream(data, call.seed, call.region, 0, 1, sizes[-1]).batch(1), device())
    rounds = _LAYER_ROUNDS if len(layers) <= _MANY_LAYERS else _FEWER_ROUNDS
    given = model_input(task.loss, batch)
    with task.calling("layers"):
        told = measure_layers(layers, given, sizes, rounds=rounds, optimizer=task.optimizer)
    held = sum(one.parameter_bytes + one.state_bytes for one in told)

    def step(size: int) -> StepNumbers:
        alpha = sum(one.forward_alpha_seconds + one.backward_alpha_seconds for one in told)
        beta = sum(one.forward_beta_seconds + one.backward_beta_seconds for one in told)
        # Parameters and gradients, as they are held while other models are measured.
        whole_mb = (2 * held + size * sum(one.activation_bytes for one in told)) / 2**20
        return StepNumbers(batch=size, seconds=alpha + beta * size, peak_mb=base_mb + whole_mb)

    return Profiled(
        status="done",
        parameters=sum(one.parameter_bytes for one in told) // 4,
        model_bytes=held,
        samples=len(data),
        loaded_seconds=loaded,
        steps=tuple(step(size) for size in sizes),
        update_seconds=sum(one.update_seconds for one in told),
        layers=tuple(LayerNumbers(**asdict(one)) for one in told),
    )


def _sizes(call: ProfileCall, data: Any) -> list[int]:
    """The batches that are measured."""
    wanted = call.batch
    return sorted({min(len(data), max(1, size)) for size in (wanted // 4, wanted // 2, wanted, 2 * wanted)})


def _steps(bench: _Bench) -> Iterator[StepNumbers]:
    """Small batches first, so that each one's peak of memory is its own."""
    wanted = bench.call.batch
    for size in _sizes(bench.call, bench.data):
        if time.monotonic() > bench.ends and size > wanted:
            return
        _forget_peak()
        took = []
        for repeat in range(_REPEATS):
            seed_all(bench.call.seed, size, repeat)
            begun = time.monotonic()
            bench.gradient(bench.batch(size, repeat + 1))
            took.append(time.monotonic() - begun)
            if time.monotonic() > bench.ends and repeat:
                break
        yield StepNumbers(batch=size, seconds=statistics.median(took[1:] or took), peak_mb=_peak_mb())


def _update_seconds(bench: _Bench) -> float:
    """Of the optimiser's step; the first one makes its state."""
    took = []
    for _ in range(3):
        begun = time.monotonic()
        with bench.task.calling("the optimiser's step"):
            bench.optimizer.step()
        finish(bench.device)
        took.append(time.monotonic() - begun)
    return statistics.median(took[1:])


def _norms(bench: _Bench, quickest: StepNumbers) -> Iterator[NormNumbers]:
    """Squared norms of the mean gradient of many batches, and of each, at a few models along the first steps.

    The batches are the smallest whose seconds are known, and as many as there are data and time for.
    """
    small = quickest.batch
    in_time = int((bench.ends - time.monotonic()) / _NORM_STEPS / max(1e-6, quickest.seconds))
    parts = min(_PARTS, len(bench.data) // small, max(in_time, 2))
    if parts < 2:
        return
    trained = bench.flat.layout.trainable_size
    for step in range(1, _NORM_STEPS + 1):
        mean, norms = np.zeros(trained, np.float64), []
        for part in range(parts):
            bench.gradient(bench.batch(small, (step - 1) * parts + part + 1))
            one = bench.flat.gradient()[:trained].astype(np.float64)
            norms.append(float(one @ one))
            mean += one / parts
        yield NormNumbers(
            small_batch=small, small_norm2=statistics.fmean(norms), large_batch=small * parts,
            large_norm2=float(mean @ mean),
        )  # fmt: skip
        vector = bench.flat.gradient()
        vector[:trained] = mean
        bench.flat.load_gradient(vector)
        with bench.task.calling("the optimiser's step"):
            bench.optimizer.step()
        if time.monotonic() > bench.ends:
            return


def _evaluation_peak_mb(bench: _Bench, data: dict[str, Any]) -> float:
    """Of one batch of the test split: an evaluation's are larger than a step's."""
    if "test" not in data or not len(data["test"]):
        return 0.0
    _forget_peak()
    with bench.task.calling("dataset"):
        _, batches = evaluation_batches(data["test"], 0, 1, bench.call.evaluation_batch or bench.call.batch)
    with bench.task.calling("the model's eval()"):
        bench.module.eval()
    with torch.no_grad():
        bench.task.metrics(bench.module, (move(batch, bench.device) for batch in itertools.islice(batches, 1)))
    return _peak_mb()


def _layers(bench: _Bench) -> tuple[tuple[LayerNumbers, ...], str]:
    """Of a model that can be made layer by layer; else why it cannot."""
    sizes = sorted({min(len(bench.data), max(1, size)) for size in (bench.call.batch // 4, bench.call.batch)})
    batch = bench.batch(sizes[-1], 1)
    try:
        given = model_input(bench.task.loss, batch)
        measured = measure_layers(bench.task.layers(bench.call.seed), given, sizes, optimizer=bench.task.optimizer)
    except GeofedError as error:
        return (), error.message
    except Exception as error:  # noqa: BLE001 - the task's model was not written to be run so; the rest stays valid
        return (), f"{type(error).__name__}: {error}"[:200]
    return tuple(LayerNumbers(**asdict(one)) for one in measured), ""


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        # The peak then is that of all steps so far, which grow with the batch.
        return


def _peak_mb() -> float:
    """Largest resident memory of this process; 0: the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)
