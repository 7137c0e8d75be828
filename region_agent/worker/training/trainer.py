"""The part of the model that one worker trains: the whole model here, or a stage (`stage.py`).

Rounds, slices and the state between invocations are the same for both; see `region_agent.worker.loop`.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from region_agent.worker.compiling import compile_calls
from region_agent.worker.data.batches import Batches
from region_agent.worker.data.loading import DrawnSamples, Loading
from region_agent.worker.data.shard import BatchStream, evaluation_batches, move, parts_of
from region_agent.worker.invocation import Invocation
from region_agent.worker.ps_client import PsClient
from region_agent.worker.ranks.devices import own_device, per_device
from region_agent.worker.ranks.group import Ranks
from region_agent.worker.ranks.steps import RankedSteps
from region_agent.worker.task import TaskModule
from region_agent.worker.training.base import constant_tensors
from region_agent.worker.training.learning_rate import LearningRateSchedule
from region_agent.worker.training.loss_scale import LossScale
from region_agent.worker.training.merging import Merging, merging_for
from region_agent.worker.training.optimizer_state import State, dump_state, load_state
from region_agent.worker.training.passes import accumulate
from region_agent.worker.training.private_steps import PrivateGradients
from region_agent.worker.training.proximal import ProximalTerm
from sync import framing
from sync.channel import Channel
from sync.collective import State as CollectiveState
from sync.device import finish
from sync.flat import FlatModel
from sync.histograms import Histogram
from sync.layout import LOCAL, Layout, Vector
from sync.local_tensors import local_names
from sync.seeding import kept_random, reseed, seed_all

__all__ = ["Model", "Trainer", "WholeModel", "checked_loss", "test_batches"]


_RETRY_DIVISOR = 8
"""Factor by which evaluation batches shrink after the worker was killed in an evaluation."""
_EVALUATION_SEED = 1
"""Extra seed, so that random numbers of an evaluation differ from those of a step."""
_SAMPLES_SEED = 2
"""Extra seed of the random numbers that `dataset` and `collate` draw. They do not depend on who makes the samples."""


Model = Vector | list[Vector]
"""A model, or part of one: a vector, or consecutive parts of it."""


class Trainer(Protocol):
    """The part of the model that one invocation trains. A round begins and ends at the same step in all workers."""

    flat: FlatModel
    """The part as one vector."""
    layout: Layout
    """Layout of the whole model."""
    counted: int
    """Samples of the last step that this worker reports to the server; no other worker reports them."""
    group: int
    """Number of the group; workers of one group hold the same parameters."""
    alone: bool
    """Whether this is the only worker of its group."""
    leads: bool
    """Whether this worker uploads the group's part at the end of a round."""
    reports_steps: bool
    """Whether this worker reports its steps to the server."""
    in_stages: bool
    """Whether the model is cut into pipeline stages."""

    @property
    def between_steps(self) -> bool:
        """Whether the model is that of a whole step, from which another attempt can continue."""

    name: str
    """How the workers merge, as text for users."""
    server_counts_steps: bool
    """Whether the server takes part in every step, so that no worker has to report it."""

    def share(self, step: int) -> int:
        """Return this worker's number of samples in a step; it is the same in all steps of a round."""

    def step(self, server: PsClient, step: int, more: bool) -> tuple[float, float]:
        """Make a step; returns its mean loss over `counted` samples, and the seconds of compute.

        ``more``: another step follows directly.
        """

    def drain(self) -> None:
        """Wait until all messages are sent. Raises ``GeofedError("CHANNEL_TIMEOUT")``."""

    def settle(self, step: int) -> None:
        """Make the parameters of all workers of a group equal bit for bit, at the end of a WAN round after ``step``."""

    @property
    def evaluation_may_fail(self) -> bool:
        """Whether this worker's evaluation may fail without the others, which do not wait for it."""

    def evaluate(self, sequence: int, tries: int = 0) -> tuple[int, Mapping[str, float | Histogram]]:
        """Evaluate this worker's part of the test data after a round; returns its samples and the metrics.

        ``tries``: how often this worker was killed in this evaluation before.
        """

    @property
    def needs_round_model(self) -> bool:
        """Whether `begin_round` has an effect, so that the model is worth reading."""

    def begin_round(self, model: Vector) -> None:
        """Note the model with which the open round has begun, with synchronous exchange."""

    def round_ended(self, completed: int) -> None:
        """Note that training continues from the model of so many completed rounds."""

    def put_initial(self, key: str) -> str:
        """Store the newly created model under a key; returns the key for the server, "" if another worker sends it.

        Completes the layout by the digests of the base.
        """

    def delete_initial(self, key: str) -> None:
        """Delete what `put_initial` has stored."""

    def present(self, *, lasting: bool = False) -> Model:
        """Return this worker's part of the model, for `put`: in the memory of its tensors, which the next step changes,
        or a copy. ``lasting``: a copy."""

    def put(self, key: str, model: Model) -> None:
        """Store this worker's part of the model under a key."""

    def read_own(self, key: str) -> Vector | None:
        """Return the vector that `put` has stored; None if it was deleted."""

    def read(self, key: str, name: str) -> Vector:
        """Return this worker's part of a vector in the channel; raises ``GeofedError("FENCED")`` if it was deleted."""

    def dump_state(self) -> State:
        """Return the optimiser's state; parameters have their numbers in the whole model."""

    def load_state(self, state: State) -> None:
        """Load a dumped state of this worker's parameters into the optimiser."""

    def names_of(self, key: str) -> list[str]:
        """Return the channel keys that `put` and `put_state` store a value under."""

    def put_state(self, key: str, state: State) -> None:
        """Store this worker's part of the optimiser's state under a key."""

    def read_state(self, key: str) -> State:
        """Return this worker's part of a stored state; raises ``GeofedError("FENCED")`` if it was deleted."""

    def resume_key_of(self, step: int, fenced: bool) -> str:
        """Return the key for the state that the next invocation continues from; ``fenced``: one of another attempt."""

    def inherited_key(self, key: str) -> str:
        """Return the key of this worker's part of the previous attempt's state; "": there is none.

        ``key``: the one that the furthest worker of that attempt has stored.
        """

    def store(self, step: int, pieces: list[memoryview]) -> None:
        """Store the state after a step for a later attempt, in the background."""

    def stores_after(self, step: int) -> bool:
        """Whether this worker has to store its state after this step."""

    def facts(self) -> dict[str, float]:
        """Return further numbers that the next invocation needs."""

    def restore_facts(self, facts: dict[str, float]) -> None:
        """Restore the result of `facts`."""

    def merging_state(self) -> CollectiveState:
        """Return the state of the collective, such as residuals."""

    def restore_merging(self, state: CollectiveState) -> None:
        """Restore the result of `merging_state`."""

    def delete_state(self) -> None:
        """Delete this worker's values in the channel at the end of the job."""

    def helpers(self) -> tuple[float, int]:
        """Return what this worker's own processes have used: CPU seconds, and bytes of memory that only they have."""

    def close(self) -> None:
        """End background threads, and processes."""


def checked_loss(value: float, step: int) -> float:
    """Return the loss; raises ``GeofedError("TASK_FAILED")`` if it is not finite."""
    if not np.isfinite(value):
        text = f"the loss is {value} at step {step}"
        raise GeofedError("TASK_FAILED", text, hint="training diverged: lower the learning rate")
    return value


def test_batches(
    call: Invocation, data: Any, loading: Loading, seeds: tuple[int, ...], at_once: int
) -> tuple[list[int], Iterable[Any]]:
    """Return the samples of each batch of a worker's part of the test data, and the batches, which are made when they
    are asked for."""

    def made(parts: list[list[int]], place: int) -> tuple[int, Any]:
        coming = enumerate(parts[place : place + loading.ahead + 1], place)
        drawn = [DrawnSamples("test", (tuple(part),), (*seeds, _SAMPLES_SEED, at)) for at, part in coming]
        with kept_random():
            (found,) = loading.take(drawn)
        return found

    return evaluation_batches(data, call.worker, call.workers, at_once, made=made)


class WholeModel:
    """Data parallelism: every worker holds the whole model."""

    group = 0
    in_stages = False
    evaluation_may_fail = True

    def __init__(
        self,
        call: Invocation,
        task: TaskModule,
        data: dict[str, Any],
        channel: Channel,
        begun: float,
        ranks: Ranks | None = None,
    ) -> None:
        """``begun``: begin of the invocation, in seconds of the monotonic clock. ``ranks``: the processes of the
        worker's further devices, which stay open; None: it has one."""
        self._call, self._task, self._data, self._channel = call, task, data, channel
        self._device = own_device(call)
        batches = Batches(call.region_batch, call.stretches)
        with task.calling("dataset"):
            self._stream = BatchStream(
                data["train"], call.seed, call.region, call.worker, call.workers, batches, task.collate
            )
        self._loading, self._last = Loading(task, data), call.rounds * call.steps_per_round
        self._module = self._created()
        local = local_names(self._module, call.local)
        base = self._constant(local)
        with task.calling("model"):
            self.flat = FlatModel(self._module, base=base, local=local, calling=task.calling)
            # The region's workers merge what stays in the region, too.
            merged = FlatModel(self._module, base=base, calling=task.calling) if local else self.flat
            self._parameters = list(self._module.parameters())
            self._place(call, ranks)
        self.layout = self.flat.layout
        self._optimizer = self._made_optimizer()
        with task.calling("optimizer"):
            steps, own = call.rounds * call.steps_per_round, partial(task.schedule, self._parameters)
            self._rate = LearningRateSchedule(self._optimizer, call.schedule, steps, batches, own)
        self.counted = 0
        self._proximal = ProximalTerm(self.flat, call.proximal) if call.proximal else None
        self._private = (
            PrivateGradients(call.private, task, self._module, call.workers, call.batch) if call.private else None
        )
        self._scale = LossScale(self._module) if call.precision == "fp16" else None
        self._devices = len(ranks.devices) if ranks is not None else 1
        self._ranked = self._with_ranks(ranks) if ranks is not None else None
        self._merging = self._made_merging(merged, begun)
        self._stream.divide(self._merging.weights)
        self.name, self.server_counts_steps = self._merging.name, self._merging.server_counts_steps
        self.alone = call.workers == 1
        self.leads = self.reports_steps = call.worker == 0

    def _constant(self, local: frozenset[str]) -> frozenset[str]:
        """Return the names of the tensors that never change. ``local``: names of tensors that do not count."""
        call, task = self._call, self._task
        base, used = constant_tensors(call, task, self._module, self._stream, self._channel, local)
        if used:
            self._module = self._created()
        return base

    def _place(self, call: Invocation, ranks: Ranks | None) -> None:
        """Move the model to where it is computed."""
        self._module.to(self._device)
        if call.compile:
            compile_calls(self._module)

    def _made_optimizer(self) -> torch.optim.Optimizer:
        return self._task.optimizer(self._module.parameters())

    def _made_merging(self, merged: FlatModel, begun: float) -> Merging:
        """Open what merges the steps of the region's workers. ``merged``: the model with all that they merge."""
        return merging_for(
            self._call, self._task, self._optimizer, merged, self._channel, begun, self._proximal, self._scale
        )

    def _with_ranks(self, ranks: Ranks) -> RankedSteps:
        never = frozenset(slot.name for slot in self.layout.base)
        return RankedSteps(ranks, self._call, self._task, self._module, self._stream, self._loading, self._scale, never)

    def _created(self) -> torch.nn.Module:
        """Create the model; with the same seed all workers of the partition create the same one."""
        seed_all(self._call.seed)
        return self._task.model(self._call.seed)

    def share(self, step: int) -> int:
        """Return this worker's samples in a step."""
        return self._stream.count(step)

    def step(self, server: PsClient, step: int, more: bool) -> tuple[float, float]:
        """Compute the gradients of this worker's batch, merge them, and make the optimiser's step; returns mean loss
        and seconds."""
        begun = time.monotonic()
        self.counted = self.share(step)
        with self._task.calling("the model's train() and the optimiser's zero_grad()"):
            self._module.train()
            self._optimizer.zero_grad(set_to_none=True)
        value = self._pass(step) if self._private is None else self._private_pass(step, self._private)
        finish(self._device)
        seconds = time.monotonic() - begun
        with self._task.calling("the optimiser's groups"):
            self._rate.set(step)
        self._merging.step(server, step, self.counted, value)
        return value, seconds

    def _pass(self, step: int) -> float:
        """Make the forward and backward pass; returns the mean loss. Gradients may be sent during the last backward
        pass.

        With `train.accumulate`, and in a worker that computes the samples of missing workers, which are more than its
        memory was chosen for, the samples are processed in parts, and the gradients added up.
        """
        coming = range(step, step + 1 + max(0, min(self._loading.ahead, self._last - step)))
        if self._ranked is not None:
            return self._ranked_pass(self._ranked, coming)
        sizes = parts_of(self.counted, self._call.batch)
        with self._task.calling("dataset"):
            made = self._loading.take([self._drawn(one) for one in coming])
            # Random numbers of a step depend only on the step: not on steps that this invocation has made before, and
            # not on whether the samples were made in this process.
            reseed(*self._seeds(step))
            drawn = [(size, move(batch, self._device)) for size, batch in self._stream.kept(step, sizes, made)]
        # Less than the share if dataset has given None.
        self.counted = samples = sum(size for size, _ in drawn)

        def ready(value: float) -> None:
            checked_loss(value, step)
            self._merging.arm(step, samples)

        return accumulate(self._task, self._module, drawn, ready, self._scale)

    def _ranked_pass(self, ranked: RankedSteps, coming: range) -> float:
        """Make the passes of a step together with the ranks of the worker's other devices; returns the mean loss."""
        step = coming[0]

        def ready(part: float, samples: int) -> None:
            checked_loss(part, step)
            self._merging.arm(step, samples)

        self.counted, value = ranked.step(coming, self._seeds, ready)
        return checked_loss(value, step)

    def _drawn(self, step: int) -> DrawnSamples:
        """Return this worker's samples of a step."""
        groups = self._stream.groups(step, parts_of(self.share(step), self._call.batch))
        return DrawnSamples("train", groups, (*self._seeds(step), _SAMPLES_SEED))

    def _seeds(self, number: int) -> tuple[int, ...]:
        return self._call.seed, zlib.crc32(self._call.region.encode()), self._call.worker, number

    def _private_pass(self, step: int, gradients: PrivateGradients) -> float:
        """Compute the gradients of a step with differential privacy of samples; returns the mean loss.

        How many samples are drawn is not told: the sum is divided by their expected number.
        """
        wanted = self._call.private
        assert wanted is not None
        reseed(*self._seeds(step))
        with self._task.calling("dataset"):
            drawn = self._stream.sampled(step, wanted.rate, bytes.fromhex(wanted.key))
        value = gradients.set((move(batch, self._device) for batch in drawn), self.counted)
        checked_loss(value, step)
        self._merging.arm(step, self.counted)
        return value

    def settle(self, step: int) -> None:
        """Make the models of all workers equal bit for bit, at the end of a WAN round after `step`."""
        self._merging.settle(step)

    def drain(self) -> None:
        """Do nothing: no message is sent in the background."""

    def evaluate(self, sequence: int, tries: int = 0) -> tuple[int, Mapping[str, float | Histogram]]:
        """Evaluate this worker's part of the test data, in smaller batches the more `tries` have failed; returns its
        samples and metrics."""
        if "test" not in self._data:
            return 0, {}
        with self._task.calling("dataset"):
            at_once = self._call.evaluation_batch or per_device(self._call.batch or self.share(1), self._devices)
        seeds = *self._seeds(sequence), _EVALUATION_SEED
        return self._evaluated(seeds, max(1, at_once // _RETRY_DIVISOR**tries))

    def _evaluated(self, seeds: tuple[int, ...], at_once: int) -> tuple[int, Mapping[str, float | Histogram]]:
        with self._task.calling("dataset"):
            sizes, batches = test_batches(self._call, self._data["test"], self._loading, seeds, at_once)
        # Random numbers of an evaluation depend only on the round, wherever the slice began.
        reseed(*seeds)
        with self._task.calling("the model's eval()"):
            self._module.eval()
        with torch.no_grad():
            moved = (move(batch, self._device) for batch in batches)
            metrics = self._metrics(moved, sizes) if sizes else {}
            # Without the samples that are None, which are known now.
            return sum(sizes), metrics

    def _metrics(self, batches: Iterable[Any], sizes: list[int]) -> dict[str, float | Histogram]:
        return self._task.metrics(self._module, batches, sizes)

    @property
    def between_steps(self) -> bool:
        """Whether the model is that of a whole step."""
        return self._merging.between_steps

    @property
    def needs_round_model(self) -> bool:
        """Whether the steps have a proximal term."""
        return self._proximal is not None

    def begin_round(self, model: Vector) -> None:
        """Set the model that the proximal term draws to."""
        if self._proximal is not None:
            self._proximal.begin_round(model)

    def round_ended(self, completed: int) -> None:
        """Call the task's `on_round`, in one worker of the region."""
        if self.leads:
            self._task.on_round(self._module, completed)

    def put_initial(self, key: str) -> str:
        """Store the whole model under the key, and return the key."""
        self.layout = self.layout.with_digests(self.flat.base.digests())
        self.put(key, self.present())
        return key

    def delete_initial(self, key: str) -> None:
        """Delete what `put_initial` has stored."""
        self._channel.delete(key)

    def present(self, *, lasting: bool = False) -> Model:
        """Return the whole model, in the memory of its tensors where that is possible."""
        views = None if lasting else self.flat.views()
        return self.flat.vector() if views is None else views

    def put(self, key: str, model: Model) -> None:
        """Store the whole model under a key."""
        self._channel.put(key, framing.encode({"model": model}))

    def names_of(self, key: str) -> list[str]:
        """Return the channel keys that `put` and `put_state` store a value under."""
        return [key]

    def read_own(self, key: str) -> Vector | None:
        """Return the model that `put` has stored, float32 of shape (n,); None if it was deleted."""
        value = self._channel.get(key)
        return None if value is None else np.asarray(framing.decode(value).tensors["model"], np.float32)

    def read(self, key: str, name: str) -> Vector:
        """Return a vector of a stored frame, float32 of shape (n,).

        Raises ``GeofedError("FENCED")`` if it was deleted.
        """
        return np.asarray(self._require(key).tensors[name], np.float32)

    def dump_state(self) -> State:
        """Return the state of the optimiser, the tensors that stay in the region, and the scale of the loss."""
        with self._task.calling("the optimiser's state_dict()"):
            tensors, numbers = self._dumped()
        tensors |= {f"{LOCAL}{name}": content for name, content in self.flat.local.contents().items()}
        return tensors, numbers | (self._scale.state() if self._scale is not None else {})

    def load_state(self, state: State) -> None:
        """Load a dumped state into the optimiser."""
        tensors = dict(state[0])
        local = {name: tensors.pop(name) for name in state[0] if name.startswith(LOCAL)}
        self.flat.local.load({name.removeprefix(LOCAL): content for name, content in local.items()})
        with self._task.calling("the optimiser's load_state_dict()"):
            self._load(tensors, state[1])
        if self._scale is not None:
            self._scale.restore(state[1])

    def _dumped(self) -> State:
        return dump_state(self._optimizer)

    def _load(self, tensors: Mapping[str, framing.Array], numbers: Mapping[str, float]) -> None:
        load_state(self._optimizer, tensors, numbers)

    def put_state(self, key: str, state: State) -> None:
        """Store a dumped state under a key."""
        self._channel.put(key, framing.encode(*state))

    def read_state(self, key: str) -> State:
        """Return the state that `put_state` has stored. Raises ``GeofedError("FENCED")`` if it was deleted."""
        frame = self._require(key)
        return frame.tensors, frame.facts

    def resume_key_of(self, step: int, fenced: bool) -> str:
        """Return the key under which this worker's state is stored at the end of an invocation."""
        return f"w/{self._call.attempt}/{self._call.worker}/{step}"

    def inherited_key(self, key: str) -> str:
        """Return the key of the state that a new attempt continues from."""
        # All workers hold the same state, so one key serves all.
        return key

    def stores_after(self, step: int) -> bool:
        """Return False: the state is stored only at the end of an invocation."""
        return False

    def store(self, step: int, pieces: list[memoryview]) -> None:
        """Do nothing: every other worker holds the same state."""

    def facts(self) -> dict[str, float]:
        """Return no facts: the next invocation needs only the state."""
        return {}

    def restore_facts(self, facts: dict[str, float]) -> None:
        """Do nothing: there are no further numbers."""

    def merging_state(self) -> CollectiveState:
        """Return the state of the merge, for the next invocation."""
        return self._merging.state()

    def restore_merging(self, state: CollectiveState) -> None:
        """Restore the state of the merge, before the first step."""
        self._merging.restore(state)

    def delete_state(self) -> None:
        """Do nothing: the loop deletes the stored state."""

    def helpers(self) -> tuple[float, int]:
        """Return what the processes that make samples, and those of further devices, have used."""
        ranks = self._ranked.ranks if self._ranked is not None else None
        cpu_seconds, memory_bytes = (ranks.cpu_seconds, ranks.memory_bytes) if ranks is not None else (0.0, 0)
        return self._loading.cpu_seconds + cpu_seconds, self._loading.memory_bytes + memory_bytes

    def close(self) -> None:
        """End the threads of the merge and the processes that make samples, and log how many samples and steps were
        left out."""
        self._loading.close()
        self._merging.close()
        if self._scale is not None:
            self._scale.close()
        # With noise at the level of samples the number would tell what was drawn.
        if self._stream.skipped and self._private is None:
            text = f"{self._stream.skipped} samples of this invocation were None, and were left out"
            print(text, file=sys.stderr, flush=True)

    def _require(self, key: str) -> framing.Frame:
        value = self._channel.get(key)
        if value is None:
            raise GeofedError("FENCED", f"{key} is no longer in the channel: a newer attempt has taken over")
        return framing.decode(value)
