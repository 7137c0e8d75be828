"""Measurement of the memory and time of each layer of a model, with one layer in memory at a time.

The planner of pipelines needs these numbers (FuncPipe, section 4.3 of the paper: parameters, activations, outputs, and
times that are linear in the micro-batch).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from geofed_pb.errors import GeofedError
from sync.device import finish
from sync.pipeline._layers import Layers
from sync.pipeline._stage_tensors import Carried, as_tuple, like, requiring

__all__ = ["LayerMeasure", "measure_layers"]

_ROUNDS = 5
"""Passes per measurement; the first one is not counted, because it allocates memory and plans kernels."""
_CACHE_FLUSH_BYTES = 64 << 20
"""Bytes written before each timed pass, to empty the CPU's caches: in a pipeline other layers and other workers run in
between, so that a layer's parameters and gradients are not in the caches."""
_CLOCK_ATTEMPTS = 10
"""Attempts to read two clocks at the same time."""
_SIMULTANEOUS_SECONDS = 0.001
"""Readings within this time count as simultaneous."""


@dataclass(frozen=True)
class LayerMeasure:
    """Measurements of one layer. A micro-batch of ``n`` samples takes ``alpha + beta * n`` seconds."""

    name: str
    """Name in the whole model."""
    kind: str
    """The module's class, for messages."""
    parameter_bytes: int
    """Size of the parameters that gradients train."""
    state_bytes: int
    """Size of all other state: frozen parameters and buffers."""
    activation_bytes: float
    """Per sample: what the forward pass stores for the backward pass. The layer's input is included unless the previous
    layer has stored it as its output, so the sum over layers is what a stage stores."""
    output_bytes: float
    """Per sample."""
    forward_alpha_seconds: float
    forward_beta_seconds: float
    """Per sample."""
    backward_alpha_seconds: float
    backward_beta_seconds: float
    """Per sample."""
    update_seconds: float = 0.0
    """Duration of the optimiser's step; 0: not measured."""
    optimizer_bytes: int = 0
    """Size of the optimiser's state; 0: none, or not measured."""
    make_seconds: float = 0.0
    """Time to create the layer and initialise its parameters."""


def measure_layers(
    layers: Layers | Sequence[Callable[[], nn.Module]],
    batch: Any,
    micro_batches: Sequence[int],
    *,
    rounds: int = _ROUNDS,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> list[LayerMeasure]:
    """Measure every layer on this machine, on the batch's device; layers are created, measured and freed one after the
    other.

    ``layers``: a model's, or functions that create one each. ``batch``: the first layer's input, a tensor or a tuple of
    tensors whose first dimension counts samples; at least as many as the largest of ``micro_batches``, for which times
    are measured (median of ``rounds`` - 1) and fitted. The time that this thread waits for a core, while others use
    them, is subtracted if the system reports it. Backward passes add to existing gradients, as all but the first of a
    step do. ``optimizer``: the task's, whose step is then measured, too. torch's current number of threads is used.

    Raises ``GeofedError``: ``CONFIG_INVALID`` for micro-batches that are larger than the batch, ``TASK_INVALID`` for
    layers that cannot be created or that pass on anything but tensors.
    """
    chain = layers if isinstance(layers, Layers) else Layers.declared(layers, seed=0)
    sizes = sorted(set(micro_batches))
    given = as_tuple(batch, "the batch")
    if not sizes or sizes[0] < 1 or any(one.shape[:1] < (sizes[-1],) for one in given):
        raise GeofedError("CONFIG_INVALID", f"micro-batches of {sizes} samples cannot be cut out of the batch")
    carried = like(batch, tuple(one[: sizes[-1]] for one in given))
    kept: set[int] = set()
    flush_caches = partial(torch.zeros(_CACHE_FLUSH_BYTES, dtype=torch.uint8, device=given[0].device).fill_, 1)
    measures = []
    for number, name in enumerate(chain.names):
        make = partial(chain.make, number)
        measure, carried, kept = _measure(make, name, carried, kept, sizes, rounds, optimizer, flush_caches)
        measures.append(measure)
    return measures


def _measure(
    make: Callable[[], nn.Module],
    name: str,
    given: Carried,
    kept_before: set[int],
    sizes: Sequence[int],
    rounds: int,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
    flush_caches: Callable[[], object],
) -> tuple[LayerMeasure, Carried, set[int]]:
    """Measure one layer; also return its output, and the memory of the output that the layer itself has stored."""
    where = as_tuple(given, "the batch")[0].device
    timer = _Timer(where)
    layer = make().to(where).train()
    made, largest = timer.seconds, sizes[-1]
    inputs = requiring(as_tuple(given, "the batch"))
    output, saved = _forward(layer, like(given, inputs))
    outputs = as_tuple(output, f"the output of layer {name}")
    held = {one.untyped_storage().data_ptr() for one in outputs} & set(saved)
    activations = sum(size for at, size in saved.items() if at not in kept_before)
    ahead, back = _pass_lines(layer, given, sizes, rounds, flush_caches)
    trained = [one for one in layer.parameters() if one.requires_grad]
    rest = [*(one for one in layer.parameters() if not one.requires_grad), *layer.buffers()]
    update, kept_by_it = (0.0, 0) if optimizer is None else _updating(layer, optimizer, rounds, flush_caches)
    measure = LayerMeasure(
        name=name,
        kind=type(layer).__name__,
        parameter_bytes=sum(one.nbytes for one in trained),
        state_bytes=sum(one.nbytes for one in rest),
        activation_bytes=activations / largest,
        output_bytes=sum(one.nbytes for one in outputs) / largest,
        forward_alpha_seconds=ahead[0],
        forward_beta_seconds=ahead[1],
        backward_alpha_seconds=back[0],
        backward_beta_seconds=back[1],
        update_seconds=update,
        optimizer_bytes=kept_by_it,
        make_seconds=made,
    )
    return measure, like(output, tuple(one.detach() for one in outputs)), held


def _forward(layer: nn.Module, given: Carried) -> tuple[Carried, dict[int, int]]:
    """Return the layer's output, and the size of each block of memory that is stored for the backward pass, by address;
    the layer's own parameters and buffers do not count."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> None:
        # The hook returns None: a tensor that its own graph holds through a hook would never be freed. There is no
        # backward pass here.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda nothing: nothing):
        output: Carried = layer(given)
    return output, saved


def _pass_lines(
    layer: nn.Module, given: Carried, sizes: Sequence[int], rounds: int, flush_caches: Callable[[], object]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the lines (constant, slope) of a forward and a backward pass over the number of samples."""
    forward, backward = [], []
    for size in sizes:
        times = [_timed(layer, given, size, flush_caches) for _ in range(rounds)][1 if rounds > 1 else 0 :]
        forward.append(statistics.median(ahead for ahead, _ in times))
        backward.append(statistics.median(back for _, back in times))
    return _line(sizes, forward), _line(sizes, backward)


def _timed(layer: nn.Module, given: Carried, samples: int, flush_caches: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of one forward and one backward pass."""
    inputs = requiring(tuple(one[:samples] for one in as_tuple(given, "the batch")))
    where = inputs[0].device
    flush_caches()
    timer = _Timer(where)
    outputs = as_tuple(layer(like(given, inputs)), "the output")
    forward_seconds = timer.seconds
    asking = [one for one in outputs if one.requires_grad]
    if not asking:
        return forward_seconds, 0.0
    gradients = [torch.ones_like(one) for one in asking]
    flush_caches()
    timer = _Timer(where)
    torch.autograd.backward(asking, gradients)
    return forward_seconds, timer.seconds


def _updating(
    layer: nn.Module,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    rounds: int,
    flush_caches: Callable[[], object],
) -> tuple[float, int]:
    """Return the seconds of a step over the layer's parameters, and the size of the state, which the first step
    creates."""
    parameters = [one for one in layer.parameters() if one.requires_grad]
    if not parameters:
        return 0.0, 0
    stepping, times = optimizer(iter(parameters)), []
    for _ in range(rounds):
        flush_caches()
        timer = _Timer(parameters[0].device)
        stepping.step()
        times.append(timer.seconds)
    kept = (value for held in stepping.state.values() for value in held.values() if isinstance(value, torch.Tensor))
    return statistics.median(times[1 if rounds > 1 else 0 :]), sum(one.nbytes for one in kept)


class _Timer:
    """Measures the seconds since its creation, without those in which this thread was ready to run but had no core.

    Other processes on the machine during the measurement are not part of the model; a plan accounts separately for
    stages that share cores.
    """

    def __init__(self, where: torch.device) -> None:
        finish(where)
        self._where = where
        _, self._waited, self._begun = _read_clocks()

    @property
    def seconds(self) -> float:
        finish(self._where)
        ended, waited, _ = _read_clocks()
        return max(0.0, ended - self._begun - (waited - self._waited))


def _read_clocks() -> tuple[float, float, float]:
    """Return `_waited_seconds` and the clock's readings before and after it, close to each other: time that this thread
    waits in between would count in one and not in the other."""
    before, waited, after = time.perf_counter(), _waited_seconds(), time.perf_counter()
    for _ in range(_CLOCK_ATTEMPTS - 1):
        if after - before < _SIMULTANEOUS_SECONDS:
            break
        before, waited, after = time.perf_counter(), _waited_seconds(), time.perf_counter()
    return before, waited, after


def _waited_seconds() -> float:
    """Return the seconds that this thread has waited for a core since it began. 0 if the system does not report them,
    or if a CPU quota is set, which delays every run alike."""
    if _quota():
        return 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


@cache
def _quota() -> bool:
    """Whether the process's control group has a CPU quota."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            for folder in (Path(f"/sys/fs/cgroup/{kinds}{path}"), Path(f"/sys/fs/cgroup/{kinds}")):
                for name, none in (("cpu.max", "max"), ("cpu.cfs_quota_us", "-1")):
                    if "cpu" in (kinds or "cpu").split(",") and (folder / name).exists():
                        return (folder / name).read_text().split()[0] != none
    return False


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return the constant and the slope, both at least 0, with the best relative fit."""
    if len(sizes) == 1:
        return 0.0, seconds[0] / sizes[0]
    x, y = np.array(sizes, float), np.maximum(np.array(seconds), 1e-9)
    rows = np.stack([1 / y, x / y], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(rows, np.ones_like(y), rcond=None)
    if alpha < 0:
        column = rows[:, 1]
        return 0.0, float(column.sum() / (column @ column))
    if beta < 0:
        column = rows[:, 0]
        return float(column.sum() / (column @ column)), 0.0
    return float(alpha), float(beta)
