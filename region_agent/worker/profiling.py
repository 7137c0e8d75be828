"""Profile mode of the worker function: measures a task's time and memory on the region's own data.

No data leaves the region: the answer contains sizes, seconds, norms of gradients and, if asked for, counts of labels.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from geofed_pb.bounds import MOST_BATCH_NORMS, NAME_BYTES, clean
from geofed_pb.errors import GeofedError
from region_agent.worker.clients.local import LocalTraining, held_bytes
from region_agent.worker.clients.sampling import ClientSampler
from region_agent.worker.compiling import compile_calls
from region_agent.worker.data.shard import BatchStream, evaluation_batches, move, parts_of
from region_agent.worker.invocation import ClientRounds
from region_agent.worker.labels import label_counts
from region_agent.worker.profile_call import LayerNumbers, NormNumbers, ProfileCall, Profiled, StepNumbers
from region_agent.worker.task import TaskModule
from region_agent.worker.training.passes import accumulate
from region_agent.worker.training.usage import peak_bytes
from sync.base import frozen_parameters
from sync.device import device, device_peak_bytes, finish, reset_device_peak
from sync.flat import FlatModel, layout_of
from sync.local_tensors import local_names
from sync.pipeline import Layers, measure_layers, model_input
from sync.seeding import seed_all

__all__ = ["probe", "profile"]

_REPEATS = 5
"""Steps measured for each batch; the first one is not counted."""
_CLIENTS_SHARE = 8
"""Part of the time left, as a divisor, for the clients of one batch; the noise scale takes most of the rest."""
_MAX_PACE_STEPS = 200
"""Most steps of one batch in measure "pace"; more would not make the result of a quick task better."""
_SMALLEST_BATCH = 2
"""Samples of the smallest batch that is measured where the job's is larger: BatchNorm cannot be trained with one."""
_JOB_BATCH_SHARE = 0.7
"""Fraction of the time of measure "pace" for the job's own batch; the rest is for a smaller one."""
_LONG_SECONDS = 4.0
"""A first step that takes longer is not repeated. A shorter one is, since the first step of a process may read much
from a cold disk."""
_STILL_RATE = 1e-6
"""Share of the task's learning rates that the optimiser's step is measured with, so that nothing is trained: with a
smaller batch than the job's, or without its schedule and clipping, a task may diverge that would not in the job. Not 0,
by which an optimiser may divide."""
_MAX_NORM_BATCHES = 64
"""Most batches whose mean gradient stands for the true gradient in the noise scale. A few would be too noisy: early in
training the scale is often some hundred samples, and it grows."""
_NORM_STEPS = 8
"""Training steps at which gradients are measured; those of the very first step are not typical."""


_OTHER_BATCH_FAILS = (GeofedError,)
"""What a task may raise with a batch that its job does not have, such as one that it cannot divide: that batch is then
not measured."""
_LAYER_REPEATS = 5
"""Measurements of each layer; the first one is not counted."""
_FEWER_LAYER_REPEATS = 3
"""The same for a model with more than `_MANY_LAYERS` layers, so that the invocation ends in time."""
_MANY_LAYERS = 24
"""Number of layers above which each is measured fewer times."""
_LABEL_SECONDS = 5.0
"""Most time for counting labels; the noise scale has the rest."""
_PROBED_LABEL_SECONDS = 2.0
"""The same in a probe, for which a plan waits."""
_COPIES = 8
"""Copies of the parameters that measuring a whole model may hold: parameters, gradients, optimiser state, vectors for
norms."""


@dataclass
class _Bench:
    """A model and data, ready to make steps."""

    call: ProfileCall
    task: TaskModule
    module: torch.nn.Module
    flat: FlatModel
    merged: FlatModel
    """With what stays in the region."""
    optimizer: torch.optim.Optimizer
    data: Any
    device: torch.device
    ends: float
    """Time after which no new measurement begins (monotonic seconds)."""

    def batch(self, size: int, step: int) -> Any:
        stream = BatchStream(self.data, self.call.seed, self.call.region, 0, 1, size, self.task.collate)
        with self.task.calling("dataset"):
            return move(stream.batch(step), self.device)

    def gradient(self, size: int, step: int) -> float:
        """Make the forward and backward passes of a step; returns the loss, which may be no finite number."""
        stream = BatchStream(self.data, self.call.seed, self.call.region, 0, 1, size, self.task.collate)
        with self.task.calling("dataset"):
            sizes = parts_of(size, self.call.at_once)
            drawn = [(count, move(batch, self.device)) for count, batch in stream.parts(step, sizes)]
        with self.task.calling("the model's train() and the optimiser's zero_grad()"):
            self.module.train()
            self.optimizer.zero_grad(set_to_none=True)
        value = accumulate(self.task, self.module, drawn, lambda _: None)
        finish(self.device)
        return value

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Steps of the optimiser meanwhile hardly change the model (`_STILL_RATE`)."""
        number = int | float | torch.Tensor
        groups = [group for group in self.optimizer.param_groups if isinstance(group.get("lr"), number)]
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * _STILL_RATE
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def _require_finite(loss: float) -> None:
    if not math.isfinite(loss):
        hint = "look for data that are not finite, and for an overflow in loss(model, batch)"
        raise GeofedError("TASK_FAILED", f"the loss is {loss} before anything is trained", hint=hint)


def probe(call: ProfileCall, task: TaskModule) -> Profiled:
    """Measure the size of the model, without reading data, and where it can be without values, which would take some
    seconds for a large one: plans wait for its size."""
    begun = time.monotonic()
    module = _shell(call, task)
    if module is None:
        seed_all(call.seed)
        module = task.model(call.seed)
    if call.sharding != "none":
        _check_shards(task, module)
    with task.calling("model"):
        frozen, local = frozen_parameters(module), local_names(module, call.local)
        made = layout_of(module, frozen, local)
        size = 4 * made.size
        # The region's workers merge what stays in the region, too.
        rounds = held_bytes(layout_of(module, frozen) if local else made) if call.clients is not None else 0
    seconds = time.monotonic() - begun
    return Profiled(
        status="done",
        parameters=_parameters(module),
        model_bytes=size,
        held_bytes=_held_bytes(module) + rounds,
        batch_norms=_batch_norms(module),
        loaded_seconds=seconds,
    )


def _check_shards(task: TaskModule, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Raise ``GeofedError("TASK_INVALID")`` for what cannot be divided among devices."""
    # Imported here: workers that hold the whole model start without it.
    from region_agent.worker.ranks.sharding import check_shardable
    from region_agent.worker.ranks.state import check_optimizer

    check_shardable(task, module)
    if optimizer is not None:
        check_optimizer(optimizer)


def _batch_norms(module: torch.nn.Module) -> tuple[str, ...]:
    kinds = (torch.nn.modules.batchnorm._BatchNorm,)  # the common base of all of torch's
    found = (name for name, one in module.named_modules() if isinstance(one, kinds) and one.track_running_stats)
    return tuple(clean(name, NAME_BYTES) for name in itertools.islice(found, MOST_BATCH_NORMS))


def _shell(call: ProfileCall, task: TaskModule) -> torch.nn.Module | None:
    """Create the model without values, on torch's meta device, which takes no memory; None: it cannot be created so."""
    seed_all(call.seed)
    try:
        return task.layers(call.seed).shell()
    except GeofedError:
        # The model is not a chain of layers.
        pass
    try:
        with torch.device("meta"):
            return task.model(call.seed)
    except GeofedError:
        # The model computes with values while it is created, or its creation fails in any case.
        return None


def profile(call: ProfileCall, task: TaskModule, data: dict[str, Any], begun: float) -> Profiled:
    """Measure the task. ``begun``: begin of the invocation (monotonic seconds).

    Raises ``GeofedError``: SHARD_UNREADABLE for an empty training split; FUNCTION_OUT_OF_MEMORY if the model is too
    large for measure "pace".
    """
    seed_all(call.seed)
    if not len(data["train"]):
        raise GeofedError("SHARD_UNREADABLE", "the training split is empty")
    if call.measure == "labels":
        labels = _labels(call, task, data["train"], time.monotonic() + _PROBED_LABEL_SECONDS)
        return Profiled(status="done", samples=len(data["train"]), labels=labels)
    checked = time.monotonic()
    # Clients train the whole model, however large.
    layers = _layers_if_too_large(call, task) if call.clients is None else None
    # A worker of a job does not make this check, so its time is not part of loading.
    begun += time.monotonic() - checked
    if layers is not None:
        if call.measure == "pace":
            text = f"the model does not fit a function of {call.memory_mb} MB, and `geofed profile` takes longer"
            raise GeofedError("FUNCTION_OUT_OF_MEMORY", text)
        return _profile_by_layer(call, task, layers, data["train"], begun)
    bench = _prepared(call, task, data, begun)
    loaded = time.monotonic() - begun
    if call.measure == "pace":
        paced = tuple(_pace(bench))
        labels = _labels(call, task, bench.data, time.monotonic() + _PROBED_LABEL_SECONDS)
        return Profiled(status="done", samples=len(bench.data), loaded_seconds=loaded, steps=paced, labels=labels)
    steps = list(_steps(bench)) if call.measure == "all" else []
    update = _update_seconds(bench) if call.measure == "all" and call.clients is None else 0.0
    labels = _labels(call, task, bench.data, bench.ends)
    norms = list(_norms(bench, steps[0])) if call.measure == "all" else []
    whole = call.measure != "all" or call.clients is not None
    measured, note = ((), "") if whole else _layers(bench)
    return Profiled(
        status="done",
        parameters=_parameters(bench.module),
        model_bytes=4 * bench.flat.layout.size,
        samples=len(bench.data),
        loaded_seconds=loaded,
        steps=tuple(steps),
        update_seconds=update,
        norms=tuple(norms),
        evaluation_peak_mb=_evaluation_peak_mb(bench, data) if call.measure == "all" else 0.0,
        layers=measured,
        layers_note=note,
        labels=labels,
    )


def _prepared(call: ProfileCall, task: TaskModule, data: dict[str, Any], begun: float) -> _Bench:
    """Create the model and its optimiser, as a worker of a job does."""
    where = device(call.gpu)
    module = task.model(call.seed)
    with task.calling("model"):
        local = local_names(module, call.local)
        flat = FlatModel(module, base=frozen_parameters(module), local=local, calling=task.calling)
        module.to(where)
        if call.compile:
            compile_calls(module)
    optimizer = task.optimizer(module.parameters())
    if call.sharding != "none":
        _check_shards(task, module, optimizer)
    # A schedule that cannot be created is found before the plan, too.
    task.schedule(module.parameters())
    merged = flat
    if call.clients is not None and local:
        merged = FlatModel(module, base=frozen_parameters(module), calling=task.calling)
    return _Bench(call, task, module, flat, merged, optimizer, data["train"], where, begun + call.limit_seconds)


def _held_bytes(module: torch.nn.Module) -> int:
    trained = (one for one in module.parameters() if one.requires_grad)
    tensors = itertools.chain(module.parameters(), module.buffers(), trained)
    return sum(one.numel() * one.element_size() for one in tensors)


def _parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _pace(bench: _Bench) -> Iterator[StepNumbers]:
    """Measure whole steps of a single worker, with the job's batch and, if time is left, with a smaller one.

    Durations of other batches can be computed from these two. Rounds of clients have the job's batch alone, so that as
    many clients as possible are trained.
    """
    limit, begun = bench.call.limit_seconds, time.monotonic()
    wanted = min(bench.call.batch, len(bench.data))
    smaller = max(_SMALLEST_BATCH, wanted // 4) if bench.call.clients is None else wanted
    yield (first := _timed(bench, wanted, begun + limit * (_JOB_BATCH_SHARE if smaller < wanted else 1.0)))
    if smaller < wanted and time.monotonic() + first.seconds < begun + limit:
        with contextlib.suppress(*_OTHER_BATCH_FAILS):
            yield _timed(bench, smaller, begun + limit)


def _timed(bench: _Bench, size: int, until: float) -> StepNumbers:
    """Measure steps of one batch until a time (monotonic seconds); returns their median.

    At least one step is made, a second one unless the first took very long, which it may while the model is
    compiled; with several the first one is not counted.
    """
    reset_device_peak(bench.device)
    if bench.call.clients is not None:
        seconds = _client_seconds(bench, bench.call.clients, size, until)
        return StepNumbers(batch=size, seconds=seconds, peak_mb=0.0, device_bytes=device_peak_bytes(bench.device))
    durations: list[float] = []

    def more() -> bool:
        if len(durations) < 2:
            return not durations or durations[0] < _LONG_SECONDS or bench.call.compile
        return len(durations) < _MAX_PACE_STEPS and time.monotonic() + durations[-1] < until

    while more():
        begun = time.monotonic()
        _require_finite(bench.gradient(size, len(durations) + 1))
        with bench.still(), bench.task.calling("the optimiser's step"):
            bench.optimizer.step()
        finish(bench.device)
        durations.append(time.monotonic() - begun)
    seconds = statistics.median(durations[1:] or durations)
    return StepNumbers(batch=size, seconds=seconds, peak_mb=0.0, device_bytes=device_peak_bytes(bench.device))


def _client_seconds(bench: _Bench, rounds: ClientRounds, size: int, until: float) -> float:
    """Measure a round of clients, in local steps of a batch: as many of the first round's clients as a time allows
    (monotonic seconds), one local step at least. Returns the share of so many samples in the round's seconds.

    Raises ``GeofedError("TASK_INVALID")`` if all of their samples are None.
    """
    call, task = bench.call, bench.task
    with task.calling("dataset"):
        clients = ClientSampler(
            bench.data, call.seed, call.region, rounds.model_copy(update={"batch": size}), task.collate
        )
    drawn = clients.drawn(1)
    # However few the time allows, they have few and many samples. The first one is trained twice, as its first time is
    # not counted: what a process has not done before takes longer.
    order = _spread(sorted(drawn, key=clients.trained_samples))
    with task.calling("the model's train()"):
        bench.module.train()
    local = LocalTraining(
        task, bench.module, bench.merged, clients, seed=call.seed, region=call.region, at_once=call.at_once,
        where=bench.device, scheduled=bench.optimizer,
    )  # fmt: skip
    begun = time.monotonic()
    with bench.still():
        trained = local.round(1, [order[0], *order], until)
    around = time.monotonic() - begun - sum(trained.seconds)
    bench.optimizer.zero_grad(set_to_none=True)
    if not trained.samples:
        raise GeofedError("TASK_INVALID", "all samples that dataset gives for a round of clients are None")
    counted = slice(1, None) if any(trained.each[1:]) else slice(None)
    # Clients of the region have other numbers of samples than the few that were trained.
    kept = trained.samples / (trained.samples + clients.skipped)
    mean = kept * clients.mean_trained_samples()
    each = _seconds_at(mean, trained.each[counted], trained.seconds[counted])
    # Begin and end of a round are the same for few clients and for many.
    return (each + around / len(drawn)) * size / mean


def _spread(ordered: Sequence[int]) -> list[int]:
    """Return all of a sequence, from the middle on, so that any first few lie evenly (van der Corput's sequence)."""
    bits = len(ordered).bit_length()
    places = (int(f"{number:0{bits}b}"[::-1], 2) * len(ordered) >> bits for number in range(1, 1 << bits))
    return [ordered[place] for place in dict.fromkeys([*places, 0])]


def _seconds_at(samples: float, counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds of a client with some samples, from those of others with ``counts`` samples, not all 0: on the
    line of least squares of which neither a client's own part nor a sample's is negative."""
    mean, spent = statistics.fmean(counts), statistics.fmean(seconds)
    slope = spent / mean
    if len(set(counts)) > 1:
        slope = min(max(0.0, statistics.linear_regression(counts, seconds).slope), slope)
    return spent + slope * (samples - mean)


def _layers_if_too_large(call: ProfileCall, task: TaskModule) -> Layers | None:
    """Return the layers of a model that is too large to be created whole; None: it can be, or it has no layers."""
    if not call.memory_mb:
        return None
    try:
        layers = task.layers(call.seed)
        shell = layers.shell()
    except GeofedError:
        # The model is not a chain of layers, so it can only be measured whole.
        return None
    return layers if _peak_mb() + _COPIES * _held_mb(shell) > call.memory_mb else None


def _held_mb(module: torch.nn.Module) -> float:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return sum(one.numel() * one.element_size() for one in tensors) / 2**20


def _profile_by_layer(call: ProfileCall, task: TaskModule, layers: Layers, data: Any, begun: float) -> Profiled:
    """Estimate a whole model from its layers: each is created, measured and freed before the next."""
    base_mb, loaded = _peak_mb(), time.monotonic() - begun
    if call.measure == "nothing":
        return Profiled(status="done", samples=len(data), loaded_seconds=loaded)
    # No micro-batch is larger than a replica's batch.
    sizes = [size for size in _sizes(call, data) if size <= call.batch]
    with task.calling("dataset"):
        stream = BatchStream(data, call.seed, call.region, 0, 1, sizes[-1], task.collate)
        batch = move(stream.batch(1), device(call.gpu))
    rounds = _LAYER_REPEATS if len(layers) <= _MANY_LAYERS else _FEWER_LAYER_REPEATS
    given = model_input(task.loss, batch)
    with task.calling("layers"):
        measured = measure_layers(layers, given, sizes, rounds=rounds, optimizer=task.optimizer)
    held = sum(one.parameter_bytes + one.state_bytes for one in measured)

    def step(size: int) -> StepNumbers:
        alpha = sum(one.forward_alpha_seconds + one.backward_alpha_seconds for one in measured)
        beta = sum(one.forward_beta_seconds + one.backward_beta_seconds for one in measured)
        # Parameters and gradients, which the measurement of a whole model holds as well.
        whole_mb = (2 * held + size * sum(one.activation_bytes for one in measured)) / 2**20
        return StepNumbers(batch=size, seconds=alpha + beta * size, peak_mb=base_mb + whole_mb)

    return Profiled(
        status="done",
        parameters=sum(one.parameter_bytes for one in measured) // 4,
        model_bytes=held,
        samples=len(data),
        loaded_seconds=loaded,
        steps=tuple(step(size) for size in sizes),
        update_seconds=sum(one.update_seconds for one in measured),
        layers=tuple(LayerNumbers(**asdict(one)) for one in measured),
        labels=_labels(call, task, data, begun + call.limit_seconds),
    )


def _sizes(call: ProfileCall, data: Any) -> list[int]:
    """Return the batch sizes that are measured, in ascending order."""
    wanted = call.batch
    least = min(wanted, _SMALLEST_BATCH)
    return sorted({min(len(data), max(least, size)) for size in (wanted // 4, wanted // 2, wanted, 2 * wanted)})


def _steps(bench: _Bench) -> Iterator[StepNumbers]:
    """Measure steps of each batch size, small ones first, so that each one's peak memory is its own."""
    wanted = min(bench.call.batch, len(bench.data))
    for size in _sizes(bench.call, bench.data):
        if time.monotonic() > bench.ends and size > wanted:
            return
        with contextlib.suppress(*() if size == wanted else _OTHER_BATCH_FAILS):
            yield _step(bench, size)


def _step(bench: _Bench, size: int) -> StepNumbers:
    """Measure forward and backward passes of one batch size: their median, and the peak memory."""
    _reset_peak()
    if bench.call.clients is not None:
        until = time.monotonic() + max(0.0, bench.ends - time.monotonic()) / _CLIENTS_SHARE
        seconds = _client_seconds(bench, bench.call.clients, size, until)
        return StepNumbers(batch=size, seconds=seconds, peak_mb=_peak_mb())
    durations: list[float] = []
    for repeat in range(_REPEATS):
        seed_all(bench.call.seed, size, repeat)
        begun = time.monotonic()
        _require_finite(bench.gradient(size, repeat + 1))
        durations.append(time.monotonic() - begun)
        if time.monotonic() > bench.ends and repeat:
            break
    return StepNumbers(batch=size, seconds=statistics.median(durations[1:] or durations), peak_mb=_peak_mb())


def _labels(call: ProfileCall, task: TaskModule, data: Any, ends: float) -> dict[int, int]:
    """Count labels, if asked for, until a time (monotonic seconds)."""
    if not call.labels or call.measure == "nothing":
        return {}
    with task.calling("dataset"):
        return label_counts(data, call.seed, call.batch, task.collate, min(ends, time.monotonic() + _LABEL_SECONDS))


def _update_seconds(bench: _Bench) -> float:
    """Measure the optimiser's step; the first one, which creates its state, is not counted."""
    durations = []
    for _ in range(3):
        begun = time.monotonic()
        with bench.still(), bench.task.calling("the optimiser's step"):
            bench.optimizer.step()
        finish(bench.device)
        durations.append(time.monotonic() - begun)
    return statistics.median(durations[1:])


def _norms(bench: _Bench, quickest: StepNumbers) -> Iterator[NormNumbers]:
    """Measure squared norms of the mean gradient of many batches, and of each, along the first steps of training.

    The batches have the smallest measured size; their number is limited by the data and the time left. Nothing more is
    measured once training diverges, which says nothing of the job: it may have a schedule, or clip gradients.
    """
    small = quickest.batch
    in_time = int((bench.ends - time.monotonic()) / _NORM_STEPS / max(1e-6, quickest.seconds))
    parts = min(_MAX_NORM_BATCHES, len(bench.data) // small, max(in_time, 2))
    if parts < 2:
        return
    trained = bench.flat.layout.trainable_size
    for step in range(1, _NORM_STEPS + 1):
        mean, norms = np.zeros(trained, np.float64), []
        for part in range(parts):
            if not math.isfinite(bench.gradient(small, (step - 1) * parts + part + 1)):
                return
            one = bench.flat.gradient()[:trained].astype(np.float64)
            norms.append(float(one @ one))
            mean += one / parts
        whole = float(mean @ mean)
        if not math.isfinite(whole):
            return
        yield NormNumbers(
            small_batch=small, small_norm2=statistics.fmean(norms), large_batch=small * parts, large_norm2=whole
        )
        vector = bench.flat.gradient()
        vector[:trained] = mean
        bench.flat.load_gradient(vector)
        with bench.task.calling("the optimiser's step"):
            bench.optimizer.step()
        if time.monotonic() > bench.ends:
            return


def _evaluation_peak_mb(bench: _Bench, data: dict[str, Any]) -> float:
    """Measure the peak memory of evaluating one batch of the test split; 0: there is none."""
    if "test" not in data or not len(data["test"]):
        return 0.0
    _reset_peak()
    with bench.task.calling("dataset"):
        at_once = bench.call.evaluation_batch or bench.call.at_once or bench.call.batch
        _, batches = evaluation_batches(data["test"], 0, 1, at_once, bench.task.collate)
    with bench.task.calling("the model's eval()"):
        bench.module.eval()
    with torch.no_grad():
        bench.task.metrics(bench.module, (move(batch, bench.device) for batch in itertools.islice(batches, 1)))
    return _peak_mb()


def _layers(bench: _Bench) -> tuple[tuple[LayerNumbers, ...], str]:
    """Measure the layers of a model that can be created layer by layer; otherwise return the reason why it cannot."""
    sizes = sorted({min(len(bench.data), max(1, size)) for size in (bench.call.batch // 4, bench.call.batch)})
    batch = bench.batch(sizes[-1], 1)
    try:
        given = model_input(bench.task.loss, batch)
        measured = measure_layers(bench.task.layers(bench.call.seed), given, sizes, optimizer=bench.task.optimizer)
    except GeofedError as error:
        return (), error.message
    except Exception as error:  # noqa: BLE001 - a model may not work layer by layer; the rest of the profile stays valid
        return (), f"{type(error).__name__}: {error}"[:200]
    return tuple(LayerNumbers(**asdict(one)) for one in measured), ""


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        # Without a reset the peak is that of all steps so far, which grow with the batch.
        return


def _peak_mb() -> float:
    """Return the largest resident memory of this process in MiB."""
    return peak_bytes() / 2**20
