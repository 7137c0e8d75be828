"""A worker of a pipeline: it holds one stage of the model, and never more."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from geofed_pb.bounds import MOST_METRICS
from geofed_pb.errors import GeofedError
from region_agent.worker.data.shard import BatchStream, evaluation_batches, move, share_of
from region_agent.worker.invocation import Invocation
from region_agent.worker.ps_client import PsClient
from region_agent.worker.task import Task
from region_agent.worker.training.learning_rate import LearningRate
from region_agent.worker.training.merging import Fenced, group_settings
from region_agent.worker.training.optimizer_state import State, dump_state, load_state
from region_agent.worker.training.stage_checkpoints import StageCheckpoints, state_key
from region_agent.worker.training.trainer import checked_loss
from sync import chunked, framing
from sync.channel import Channel
from sync.collective import Member
from sync.collective import State as CollectiveState
from sync.device import device
from sync.flat import FlatModel, layout_of
from sync.layout import Layout, Vector
from sync.pipeline import GroupMerge, Layers, Logged, Pipeline, StageRunner
from sync.seeding import seed_all

__all__ = ["ModelStage", "pipeline_of"]

_TIMEOUT_SECONDS = 90.0
"""A stage that gives its part of a step later than this is taken for lost, and a new attempt begins. Less than the time
that an invocation has after its slice: it must be able to leave what it holds."""
_EVALUATION_STRETCH = 4
"""Forward only, a stage keeps the outputs of a layer instead of all activations: so many micro-batches at once."""


def pipeline_of(call: Invocation) -> Pipeline:
    """The pipeline that an invocation tells of; raises ``GeofedError("CONFIG_INVALID")`` where it is none."""
    shape = Pipeline(call.stages, call.degree, call.micro_batch, call.order, call.rematerialise)
    if shape.workers != call.workers:
        text = f"{len(shape.stages)} stages of {shape.degree} replicas have not {call.workers} workers"
        raise GeofedError("CONFIG_INVALID", text)
    return shape


class ModelStage:
    """One replica of one stage. What a broken attempt has done is not lost: see `StageCheckpoints`."""

    in_stages = True
    server_knows = False

    def __init__(self, call: Invocation, task: Task, data: dict[str, Any], channel: Channel) -> None:
        self._call, self._task, self._data, self._channel = call, task, data, channel
        self._shape, self._device = pipeline_of(call), device(call.worker)
        self._place = self._shape.position(call.worker)
        stage, replica = self._place.stage, self._place.replica
        self._samples = len(share_of(replica, call.degree, call.region_batch))
        if not self._samples:
            text = f"{call.region_batch} samples a step are too few for {call.degree} replicas"
            raise GeofedError("CONFIG_INVALID", text)
        with task.calling("layers"):
            layers = task.layers(call.seed)
            self._cut(layers)
            module = layers.stage(*self._shape.stages[stage])
            self.flat = FlatModel(module, part=True, calling=task.calling)
            module.to(self._device)
        # Optimisers refuse to have nothing to do: a stage of layers without parameters gets one that has no gradient.
        parameters = list(module.parameters()) or [torch.nn.Parameter(torch.zeros(1))]
        self._optimizer = task.optimizer(iter(parameters))
        self._rate = LearningRate(self._optimizer, call.schedule, call.rounds * call.steps_per_round)
        self._fenced = Fenced(channel, call.attempt)
        settings, member = group_settings(call, self.flat), Member(replica, call.degree, call.attempt)
        told = channel if settings.asked is not None else self._fenced
        # Under the attempt's tree, each group in a place of its own.
        self._merge = GroupMerge(self.flat, settings, member, told, f"p/{call.attempt}/c{stage}")
        self._region = zlib.crc32(call.region.encode())
        self._runner = StageRunner(
            self._shape,
            call.worker,
            module,
            task.loss,
            self._fenced,
            f"p/{call.attempt}",
            self._merge,
            device=self._device,
            codec=call.activation_codec,
            seed=(call.seed, self._region),
            timeout_seconds=_TIMEOUT_SECONDS,
            logs=True,
            computing=task.calling,
        )
        self.counted = self._samples if self._runner.is_last else 0
        self._stream: BatchStream | None = None
        if self._runner.reads_data:
            with task.calling("dataset"):
                self._stream = self._stream_of(replica, call.degree)
        self.group, self.alone = stage, call.degree == 1
        self.leads, self.tells = replica == 0, replica == 0 and self._runner.is_last
        self.name = f"a pipeline of {len(self._shape.stages)} stages, {call.order}"
        if call.degree > 1:
            self.name += f", and {settings.pattern} among {call.degree} replicas of each"
        self._checkpoints = StageCheckpoints(call, self._shape, self._fenced, 4 * self.flat.layout.size)
        self._made = 0
        """The last step."""
        self._found: tuple[int, int, dict[str, float]] = (-1, 0, {})
        """The last round that was evaluated, with what was found."""

    def _cut(self, layers: Layers) -> None:
        """Where the stages lie in the flat model, and which parameters are whose."""
        if self._shape.layers != len(layers):
            text = f"the stages have {self._shape.layers} layers, the model {len(layers)}"
            raise GeofedError("CONFIG_INVALID", text, hint="profile the task again: it has changed since")
        shell = layers.shell()
        self.layout: Layout = layout_of(shell)
        stage_of = {
            name: stage
            for stage, (first, last) in enumerate(self._shape.stages)
            for name in layers.names[first : last + 1]
        }
        self._spans: list[chunked.Span] = []
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
        return self._samples

    def step(self, server: PsClient, step: int, more: bool) -> tuple[float, float]:
        taken, logged = self._runner.taken_bytes, self._checkpoints.replayed(step)
        if logged is not None:
            done = self._runner.replay(logged, step, self._drawn_anew(logged, step))
            self._check_loss(step)
            if logged.shape.degree > 1:
                # Merged gradients have a value everywhere, also where no sample's loss depends on a parameter.
                self.flat.load_gradient(self.flat.gradient())
        else:
            batches = self._drawn(self._stream, self._place.replica, step, self._shape.sizes(self._samples))
            then = self._samples if more else None
            check = lambda: self._check_loss(step)  # noqa: E731
            done = self._runner.step(step, self._samples, batches, before_last=check, then=then)
        # What is being stored is a view of what the optimiser is about to change.
        self._checkpoints.settle()
        self._rate.set(step)
        with self._task.calling("the optimiser's step"):
            self._optimizer.step()
        self._made = step
        self._checkpoints.made(step, done.compute_seconds, self._runner.taken_bytes - taken)
        return done.loss or 0.0, done.compute_seconds

    def _drawn(self, stream: BatchStream | None, replica: int, step: int, sizes: Sequence[int]) -> list[Any]:
        """A replica's micro-batches, where this stage needs samples."""
        if stream is None:
            return []
        # The first stage takes the inputs of these samples and the last one their labels, so both draw the same.
        seed_all(self._call.seed, self._region, replica, step)
        with self._task.calling("dataset"):
            drawn = stream.micro_batches(step, sizes)
        return [move(batch, self._device) for batch in drawn]

    def _drawn_anew(self, logged: Logged, step: int) -> list[list[Any]]:
        """Those of all replicas of an attempt that is over."""
        if self._stream is None:
            return []
        parts = []
        for replica, samples in enumerate(logged.samples):
            stream = self._stream_of(replica, logged.shape.degree)
            parts.append(self._drawn(stream, replica, step, logged.shape.sizes(samples)))
        return parts

    def _stream_of(self, replica: int, degree: int) -> BatchStream:
        call = self._call
        return BatchStream(self._data["train"], call.seed, call.region, replica, degree, call.region_batch)

    def _check_loss(self, step: int) -> None:
        if self._runner.loss is not None:
            checked_loss(self._runner.loss, step)

    def settle(self, step: int) -> None:
        """Replicas of a stage hold the same after every step."""

    @property
    def may_not_measure(self) -> bool:
        return self._runner.is_last

    def evaluate(self, sequence: int, tries: int = 0) -> tuple[int, dict[str, float]]:
        if "test" not in self._call.splits:
            return 0, {}
        if self._found[0] != sequence:
            sizes: list[int] = []
            batches: Iterator[Any] = iter(())
            if self._runner.reads_data:
                at_once = min(
                    self._call.evaluation_batch or self._samples, _EVALUATION_STRETCH * self._shape.micro_batch
                )
                replica, degree = self._place.replica, self._shape.degree
                with self._task.calling("dataset"):
                    sizes, batches = evaluation_batches(self._data["test"], replica, degree, at_once)
            moved = (move(batch, self._device) for batch in batches)
            measure = partial(self._task.metrics, sizes=sizes)
            metrics = self._runner.evaluate(f"e{sequence}", moved, len(sizes), measure)
            # One more than are kept, so that it is known that there were more.
            kept = dict(itertools.islice(metrics.items(), MOST_METRICS + 1))
            self._found = (sequence, sum(sizes) if self._runner.is_last else 0, kept)
        return self._found[1], self._found[2]

    # The model, of which this is a part

    def offer(self, key: str) -> str:
        """Every stage puts its part; the first worker tells of them once all are there."""
        self._checkpoints.begin_anew()
        place = f"init/{self._call.attempt}/model"
        if self.leads:
            self.put(place, self.flat.vector())
            self._channel.put(f"{place}-{self.group}", [b"there"])
        if self._call.worker:
            return ""
        self._await_all([f"{place}-{stage}" for stage in range(len(self._shape.stages))])
        return place

    def withdraw(self, key: str) -> None:
        place = f"init/{self._call.attempt}/model"
        if self.leads:
            self._channel.delete(chunked.part_key(place, self.group))
        if self._call.worker == 0:
            # The first worker waits for these, also where the server, which has the federation's model already, has
            # answered the others meanwhile.
            marks = [f"{place}-{stage}" for stage in range(len(self._shape.stages))]
            self._channel.delete_many([place, *marks])

    def put(self, key: str, vector: Vector) -> None:
        if self.leads:
            self._channel.put(chunked.part_key(key, self.group), framing.encode({"model": vector}))
        if self._call.worker == 0:
            chunked.put_index(self._channel, key, self._spans, parts=len(self._shape.stages))

    def own(self, key: str) -> Vector | None:
        return chunked.read_slices(self._channel, key, "model", self._slices)

    def read(self, key: str, name: str) -> Vector:
        vector = chunked.read_slices(self._channel, key, name, self._slices)
        if vector is None:
            raise GeofedError("FENCED", f"{key} has gone from the channel: a newer attempt has taken over")
        return vector

    def dump_state(self) -> State:
        with self._task.calling("the optimiser's state_dict()"):
            tensors, numbers = dump_state(self._optimizer)
        return _renumbered(tensors, self._parameters.start), _renumbered(numbers, self._parameters.start)

    def load_state(self, state: State) -> None:
        tensors, numbers = state
        by = -self._parameters.start
        with self._task.calling("the optimiser's load_state_dict()"):
            load_state(self._optimizer, _renumbered(tensors, by), _renumbered(numbers, by))

    def put_state(self, key: str, state: State) -> None:
        self._channel.put(chunked.part_key(key, self.group), framing.encode(*state))
        if self._call.worker == 0:
            chunked.put_owners(self._channel, key, self._owners, parts=len(self._shape.stages))

    def read_state(self, key: str) -> State:
        frame = chunked.read_state(self._channel, key, self._parameters)
        if frame is None:
            raise GeofedError("FENCED", f"{key} has gone from the channel: a newer attempt has taken over")
        return frame.tensors, frame.facts

    # What another attempt continues from

    def left_key(self, step: int, broken: bool) -> str:
        if broken:
            return state_key(self._call.attempt, self.group, step)
        return f"w/{self._call.attempt}/{self._call.worker}/{step}"

    def taken_over(self, key: str) -> str:
        return self._checkpoints.take_over(key, _TIMEOUT_SECONDS)

    def keeps(self, step: int) -> bool:
        return self._checkpoints.due()

    def keep(self, step: int, pieces: list[memoryview]) -> None:
        self._checkpoints.store(step, pieces)

    def facts(self) -> dict[str, float]:
        sequence, samples, metrics = self._found
        return {
            "found": sequence,
            "found_samples": samples,
            **self._checkpoints.facts(),
            **{f"found/{name}": value for name, value in metrics.items()},
        }

    def recall(self, facts: dict[str, float]) -> None:
        metrics = {name.removeprefix("found/"): value for name, value in facts.items() if name.startswith("found/")}
        self._found = int(facts["found"]), int(facts["found_samples"]), metrics
        self._made = int(facts["step"])
        self._checkpoints.recall(facts)

    def merging_state(self) -> CollectiveState:
        return self._merge.state()

    def restore_merging(self, state: CollectiveState) -> None:
        self._merge.restore(state)

    def forget(self) -> None:
        self._checkpoints.forget(self._made)

    def drain(self) -> None:
        self._runner.drain()

    def close(self) -> None:
        self._runner.close()
        self._merge.close()
        self._checkpoints.close()

    def _await_all(self, keys: list[str]) -> dict[str, memoryview]:
        waited: Iterator[tuple[str, memoryview]] = self._fenced.wait(keys, _TIMEOUT_SECONDS)
        return dict(waited)


def _renumbered(named: Any, by: int) -> dict[str, Any]:
    """Names ``index/key`` with another index."""
    out = {}
    for name, value in named.items():
        index, key = name.split("/", 1)
        # What belongs to no parameter has a number below 0.
        out[f"{int(index) + by if int(index) >= 0 else index}/{key}"] = value
    return out
