"""A pipeline worker: it holds one stage of the model, and never the whole model."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from geofed_pb.bounds import MOST_METRICS
from geofed_pb.errors import GeofedError
from region_agent.worker.data.shard import BatchStream, evaluation_batches, move, share_of
from region_agent.worker.invocation import Invocation
from region_agent.worker.measures import numbers
from region_agent.worker.ps_client import PsClient
from region_agent.worker.ranks.devices import own_device
from region_agent.worker.task import TaskModule
from region_agent.worker.training.learning_rate import LearningRateSchedule
from region_agent.worker.training.merging import FencedChannel, group_settings
from region_agent.worker.training.optimizer_state import State, dump_state, load_state
from region_agent.worker.training.stage_checkpoints import StageCheckpoints, state_key
from region_agent.worker.training.trainer import Model, checked_loss
from sync import chunked_values, framing
from sync.base import frozen_parameters
from sync.channel import Channel
from sync.collective import State as CollectiveState
from sync.flat import FlatModel, layout_of
from sync.layout import Layout, Vector
from sync.merging import Member
from sync.pipeline import GroupMerge, Layers, Pipeline, ReplayLog, StageRunner
from sync.seeding import seed_all

__all__ = ["ModelStage", "pipeline_of"]

_TIMEOUT_SECONDS = 90.0
"""Timeout for another stage's part of a step; the stage is then considered lost, and a new attempt begins. It is less
than the time that an invocation has after its slice, so that the invocation can still store its state."""
_EVALUATION_MICRO_BATCHES = 4
"""Micro-batches in one forward pass of an evaluation: without a backward pass a stage holds the outputs of one layer
only, instead of all activations."""


def pipeline_of(call: Invocation) -> Pipeline:
    """Return the pipeline of an invocation; raises ``GeofedError("CONFIG_INVALID")`` if the workers do not fit it."""
    shape = Pipeline(call.stages, call.degree, call.micro_batch, call.order, call.rematerialise)
    if shape.workers != call.workers:
        text = f"{len(shape.stages)} stages of {shape.degree} replicas do not match {call.workers} workers"
        raise GeofedError("CONFIG_INVALID", text)
    return shape


class ModelStage:
    """One replica of one pipeline stage. A new attempt continues from the checkpoints: see `StageCheckpoints`."""

    in_stages = True
    server_counts_steps = False

    def __init__(self, call: Invocation, task: TaskModule, data: dict[str, Any], channel: Channel) -> None:
        self._call, self._task, self._data, self._channel = call, task, data, channel
        self._shape, self._device = pipeline_of(call), own_device(call)
        self._place = self._shape.position(call.worker)
        stage, replica = self._place.stage, self._place.replica
        self._samples = len(share_of(replica, call.degree, call.region_batch))
        if not self._samples:
            text = f"{call.region_batch} samples a step are too few for {call.degree} replicas"
            raise GeofedError("CONFIG_INVALID", text)
        module = self._make_module()
        # Optimisers refuse an empty list, so a stage without parameters gets one that never has a gradient.
        parameters = list(module.parameters()) or [torch.nn.Parameter(torch.zeros(1))]
        self._optimizer = task.optimizer(iter(parameters))
        with task.calling("optimizer"):
            self._rate = LearningRateSchedule(
                self._optimizer,
                call.schedule,
                call.rounds * call.steps_per_round,
                own=lambda: task.schedule(parameters),
            )
        self._fenced = FencedChannel(channel, call.attempt)
        settings, member = group_settings(call, self.flat), Member(replica, call.degree, call.attempt)
        merge_channel = channel if settings.asked is not None else self._fenced
        # Each group has its own prefix in the attempt's tree of keys.
        self._merge = GroupMerge(self.flat, settings, member, merge_channel, f"p/{call.attempt}/c{stage}")
        self._region = zlib.crc32(call.region.encode())
        self._runner = self._make_runner(module)
        self.counted = self._samples if self._runner.is_last else 0
        self._stream: BatchStream | None = None
        if self._runner.reads_data:
            with task.calling("dataset"):
                self._stream = self._stream_of(replica, call.degree)
        self.group, self.alone = stage, call.degree == 1
        self.leads, self.reports_steps = replica == 0, replica == 0 and self._runner.is_last
        self.name = f"a pipeline of {len(self._shape.stages)} stages, {call.order}"
        if call.degree > 1:
            self.name += f", and {settings.pattern} among {call.degree} replicas of each"
        self._checkpoints = StageCheckpoints(call, self._shape, self._fenced, 4 * self.flat.layout.size)
        self._made = 0
        """Last step made."""
        self._evaluated: tuple[int, int, dict[str, float]] = (-1, 0, {})
        """Last evaluation: round, samples, metrics."""

    def _make_module(self) -> torch.nn.Sequential:
        """Create this stage's layers, the only ones that this process ever holds, on its device."""
        with self._task.calling("layers"):
            layers = self._task.layers(self._call.seed)
            self._cut(layers)
            module = layers.stage(*self._shape.stages[self._place.stage])
            base = frozen_parameters(module) if self._call.keeps_base else ()
            self.flat = FlatModel(module, part=True, base=base, calling=self._task.calling)
            module.to(self._device)
        return module

    def _make_runner(self, module: torch.nn.Sequential) -> StageRunner:
        call = self._call
        return StageRunner(
            self._shape,
            call.worker,
            module,
            self._task.loss,
            self._fenced,
            f"p/{call.attempt}",
            self._merge,
            device=self._device,
            codec=call.activation_codec,
            seed=(call.seed, self._region),
            timeout_seconds=_TIMEOUT_SECONDS,
            logs=True,
            computing=self._task.calling,
        )

    def _cut(self, layers: Layers) -> None:
        """Compute the ranges of the stages in the flat model, and the stage of each parameter."""
        if self._shape.layers != len(layers):
            text = f"the stages have {self._shape.layers} layers, the model {len(layers)}"
            raise GeofedError("CONFIG_INVALID", text, hint="profile the task again: it has changed since")
        shell = layers.shell()
        self.layout: Layout = layout_of(shell, frozen_parameters(shell) if self._call.keeps_base else ())
        stage_of = {
            name: stage
            for stage, (first, last) in enumerate(self._shape.stages)
            for name in layers.names[first : last + 1]
        }
        self._spans: list[chunked_values.Span] = []
        at = 0
        for slot in self.layout.slots:
            stage = stage_of[slot.name.split(".", 1)[0]]
            if self._spans and self._spans[-1][0] == stage and self._spans[-1][2] == at:
                self._spans[-1] = (stage, self._spans[-1][1], at + slot.size)
            else:
                self._spans.append((stage, at, at + slot.size))
            at += slot.size
        own = self._place.stage
        self._slices = [slice(start, stop) for stage, start, stop in self._spans if stage == own]
        owners = [stage_of[name.split(".", 1)[0]] for name, _ in shell.named_parameters()]
        self._owners = tuple(enumerate(owners))
        first = sum(1 for stage in owners if stage < own)
        self._parameters = range(first, first + owners.count(own))

    # Steps

    def share(self, step: int) -> int:
        """Return the samples of this replica in a step, the same in all steps."""
        return self._samples

    def step(self, server: PsClient, step: int, more: bool) -> tuple[float, float]:
        """Run this stage's part of a step, or replay an earlier attempt's, and make the optimiser's step.

        Returns the loss, 0 except in the last stage, and seconds of compute.
        """
        taken, logged = self._runner.taken_bytes, self._checkpoints.replayed(step)
        if logged is not None:
            done = self._runner.replay(logged, step, self._draw_logged(logged, step))
            self._check_loss(step)
            if logged.shape.degree > 1:
                # Merged gradients are dense, also for parameters that no sample's loss depends on.
                self.flat.load_gradient(self.flat.gradient())
        else:
            batches = self._draw(self._stream, self._place.replica, step, self._shape.sizes(self._samples))
            then = self._samples if more else None
            check = lambda: self._check_loss(step)  # noqa: E731
            done = self._runner.step(step, self._samples, batches, before_last=check, then=then)
        # The state that is being stored is a view of the parameters that the optimiser changes next.
        self._checkpoints.settle()
        self._rate.set(step)
        with self._task.calling("the optimiser's step"):
            self._optimizer.step()
        self._made = step
        self._checkpoints.made(step, done.compute_seconds, self._runner.taken_bytes - taken)
        return done.loss or 0.0, done.compute_seconds

    def _draw(self, stream: BatchStream | None, replica: int, step: int, sizes: Sequence[int]) -> list[Any]:
        """Return a replica's micro-batches; empty if this stage needs no samples."""
        if stream is None:
            return []
        # The first stage uses the inputs of these samples and the last one their labels, so both draw the same.
        seed_all(self._call.seed, self._region, replica, step)
        with self._task.calling("dataset"):
            drawn = stream.micro_batches(step, sizes)
        return [move(batch, self._device) for batch in drawn]

    def _draw_logged(self, logged: ReplayLog, step: int) -> list[list[Any]]:
        """Return the micro-batches of all replicas of an earlier attempt."""
        if self._stream is None:
            return []
        parts = []
        for replica, samples in enumerate(logged.samples):
            stream = self._stream_of(replica, logged.shape.degree)
            parts.append(self._draw(stream, replica, step, logged.shape.sizes(samples)))
        return parts

    def _stream_of(self, replica: int, degree: int) -> BatchStream:
        call = self._call
        return BatchStream(
            self._data["train"], call.seed, call.region, replica, degree, call.region_batch, self._task.collate
        )

    def _check_loss(self, step: int) -> None:
        if self._runner.loss is not None:
            checked_loss(self._runner.loss, step)

    def settle(self, step: int) -> None:
        """Do nothing: the replicas of a stage hold the same parameters after every step."""

    @property
    def evaluation_may_fail(self) -> bool:
        """Whether this is the last stage, for whose evaluation no other stage waits."""
        return self._runner.is_last

    def evaluate(self, sequence: int, tries: int = 0) -> tuple[int, Mapping[str, float]]:
        """Run this stage's part of an evaluation; returns samples, 0 except in the last stage, and metrics.

        A result for `sequence` is returned again.
        """
        if "test" not in self._call.splits:
            return 0, {}
        if self._evaluated[0] != sequence:
            sizes: list[int] = []
            batches: Iterator[Any] = iter(())
            if self._runner.reads_data:
                batch = min(
                    self._call.evaluation_batch or self._samples, _EVALUATION_MICRO_BATCHES * self._shape.micro_batch
                )
                replica, degree = self._place.replica, self._shape.degree
                with self._task.calling("dataset"):
                    sizes, batches = evaluation_batches(self._data["test"], replica, degree, batch, self._task.collate)
            moved = (move(batch, self._device) for batch in batches)

            def measure(module: torch.nn.Module, batches: Iterable[Any]) -> dict[str, float]:
                return numbers(self._task.metrics(module, batches, sizes))

            metrics = self._runner.evaluate(f"e{sequence}", moved, len(sizes), measure)
            # One more than the limit, so that the loop can report that metrics were dropped.
            kept = dict(itertools.islice(metrics.items(), MOST_METRICS + 1))
            self._evaluated = (sequence, sum(sizes) if self._runner.is_last else 0, kept)
        return self._evaluated[1], self._evaluated[2]

    needs_round_model = False
    between_steps = True

    def begin_round(self, model: Vector) -> None:
        """Do nothing: no policy with a proximal term is used with stages."""

    def round_ended(self, completed: int) -> None:
        """Do nothing: no worker holds the whole model."""

    # This stage's part of the model

    def put_initial(self, key: str) -> str:
        """Store this stage's part; the first worker waits for all parts and returns their key."""
        self._checkpoints.begin_first()
        model_key = f"init/{self._call.attempt}/model"
        digests = self.flat.base.digests()
        if self.leads:
            self.put(model_key, self.flat.vector())
            self._channel.put(f"{model_key}-{self.group}", [json.dumps(digests).encode()])
        self.layout = self.layout.with_digests(digests)
        if self._call.worker:
            return ""
        marks = self._await_all([f"{model_key}-{stage}" for stage in range(len(self._shape.stages))])
        for mark in marks.values():
            self.layout = self.layout.with_digests(json.loads(bytes(mark)))
        return model_key

    def delete_initial(self, key: str) -> None:
        """Delete this stage's part of the initial model; the first worker also deletes the index and the marks."""
        model_key = f"init/{self._call.attempt}/model"
        if self.leads:
            self._channel.delete(chunked_values.part_key(model_key, self.group))
        if self._call.worker == 0:
            # Only the first worker deletes the marks, since it waits for them; a server that has the federation's model
            # already may answer the other workers earlier.
            marks = [f"{model_key}-{stage}" for stage in range(len(self._shape.stages))]
            self._channel.delete_many([model_key, *marks])

    def present(self, *, lasting: bool = False) -> Model:
        """Return a copy of this stage's part of the model."""
        return self.flat.vector()

    def put(self, key: str, model: Model) -> None:
        """Store this stage's part of the model, by one replica; the first worker stores the index of all parts."""
        if self.leads:
            self._channel.put(chunked_values.part_key(key, self.group), framing.encode({"model": model}))
        if self._call.worker == 0:
            chunked_values.put_index(self._channel, key, self._spans, parts=len(self._shape.stages))

    def names_of(self, key: str) -> list[str]:
        """Return the channel keys of the index and of all parts that the stages store."""
        return [key, *(chunked_values.part_key(key, stage) for stage in range(len(self._shape.stages)))]

    def read_own(self, key: str) -> Vector | None:
        """Return this stage's part of a stored model, float32 of shape (n,); None if it was deleted."""
        return chunked_values.read_slices(self._channel, key, "model", self._slices)

    def read(self, key: str, name: str) -> Vector:
        """Return this stage's part of a stored vector, float32 of shape (n,).

        Raises ``GeofedError("FENCED")`` if it was deleted.
        """
        vector = chunked_values.read_slices(self._channel, key, name, self._slices)
        if vector is None:
            raise GeofedError("FENCED", f"{key} is no longer in the channel: a newer attempt has taken over")
        return vector

    def dump_state(self) -> State:
        """Return the state of the optimiser; parameters have their numbers in the whole model."""
        with self._task.calling("the optimiser's state_dict()"):
            tensors, numbers = dump_state(self._optimizer)
        return _renumbered(tensors, self._parameters.start), _renumbered(numbers, self._parameters.start)

    def load_state(self, state: State) -> None:
        """Load a dumped state of this stage's parameters into the optimiser."""
        tensors, numbers = state
        by = -self._parameters.start
        with self._task.calling("the optimiser's load_state_dict()"):
            load_state(self._optimizer, _renumbered(tensors, by), _renumbered(numbers, by))

    def put_state(self, key: str, state: State) -> None:
        """Store this stage's part of a state; the first worker stores which stage owns which parameter."""
        self._channel.put(chunked_values.part_key(key, self.group), framing.encode(*state))
        if self._call.worker == 0:
            chunked_values.put_owners(self._channel, key, self._owners, parts=len(self._shape.stages))

    def read_state(self, key: str) -> State:
        """Return the state of this stage's parameters, however the model was cut.

        Raises ``GeofedError("FENCED")`` if it was deleted.
        """
        frame = chunked_values.read_state(self._channel, key, self._parameters)
        if frame is None:
            raise GeofedError("FENCED", f"{key} is no longer in the channel: a newer attempt has taken over")
        return frame.tensors, frame.facts

    # Checkpoints for a later attempt

    def resume_key_of(self, step: int, fenced: bool) -> str:
        """Return the key of the state at the end of an invocation: the group's when fenced, else the worker's own."""
        if fenced:
            return state_key(self._call.attempt, self.group, step)
        return f"w/{self._call.attempt}/{self._call.worker}/{step}"

    def inherited_key(self, key: str) -> str:
        """Return the key of the checkpoint that this stage continues from; "": the server has the state."""
        return self._checkpoints.inherit(key, _TIMEOUT_SECONDS)

    def stores_after(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        return self._checkpoints.due()

    def store(self, step: int, pieces: list[memoryview]) -> None:
        """Store the state after `step` in the background, as a checkpoint."""
        self._checkpoints.store(step, pieces)

    def facts(self) -> dict[str, float]:
        """Return the facts that the next invocation needs: the last evaluation, and those of the checkpoints."""
        sequence, samples, metrics = self._evaluated
        return {
            "found": sequence,
            "found_samples": samples,
            **self._checkpoints.facts(),
            **{f"found/{name}": value for name, value in metrics.items()},
        }

    def restore_facts(self, facts: dict[str, float]) -> None:
        """Restore the result of `facts`."""
        metrics = {name.removeprefix("found/"): value for name, value in facts.items() if name.startswith("found/")}
        self._evaluated = int(facts["found"]), int(facts["found_samples"]), metrics
        self._made = int(facts["step"])
        self._checkpoints.restore_facts(facts)

    def merging_state(self) -> CollectiveState:
        """Return the state of the merge among the replicas."""
        return self._merge.state()

    def restore_merging(self, state: CollectiveState) -> None:
        """Restore the state of the merge, before the first step."""
        self._merge.restore(state)

    def delete_state(self) -> None:
        """Delete all checkpoints and logs of this attempt."""
        self._checkpoints.delete_all(self._made)

    def drain(self) -> None:
        """Wait until all messages are sent. Raises ``GeofedError("CHANNEL_TIMEOUT")``."""
        self._runner.drain()

    def helpers(self) -> tuple[float, int]:
        """Return zeros: there are no such processes."""
        return 0.0, 0

    def close(self) -> None:
        """End the threads of the runner, the merge and the checkpoints."""
        self._runner.close()
        self._merge.close()
        self._checkpoints.close()

    def _await_all(self, keys: list[str]) -> dict[str, memoryview]:
        waited: Iterator[tuple[str, memoryview]] = self._fenced.wait(keys, _TIMEOUT_SECONDS)
        return dict(waited)


def _renumbered(named: Any, by: int) -> dict[str, Any]:
    """Add ``by`` to the index of each name ``index/key``."""
    out = {}
    for name, value in named.items():
        index, key = name.split("/", 1)
        # State of the whole optimiser has a negative index, which is kept.
        out[f"{int(index) + by if int(index) >= 0 else index}/{key}"] = value
    return out
