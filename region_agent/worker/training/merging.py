"""What the workers of a partition make of each step together: one optimiser step, the same in all of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import worker_pb2
from region_agent.worker.invocation import CALL_GRACE, Invocation
from region_agent.worker.ps_client import PsClient
from region_agent.worker.task import Task
from sync import framing
from sync.channel import Channel, fence_key
from sync.collective import (
    ChannelCosts,
    Collective,
    Member,
    Merge,
    Reducing,
    Settings,
    State,
    best_groups,
    choose,
    open_collective,
)
from sync.flat import FlatModel
from sync.gradients import GradientMerge

__all__ = ["Fenced", "Merging", "Patience", "group_settings", "merging_for"]

_PLACE = "c"
"""What the keys of collectives begin with; the attempt follows."""
_TIMEOUT_SECONDS = 120.0
"""A replica of a pipeline's stage that gives its part of a step later than this is taken for lost."""
_LEAST_PATIENCE_SECONDS, _PATIENCE_STEPS = 120.0, 20.0
"""A worker that gives its part of a step later than this, and than so many of the longest steps so far, is taken for
lost, and a new attempt begins."""
_LEAVE_SECONDS = 20.0
"""What an invocation needs at its end, to leave what it holds in the channel."""
_FENCE_SECONDS = 5.0
"""Between two looks for the sign that the attempt is over, where the channel tells nobody: each is billed."""
_SLACK = 0.1
"""What takes a tenth longer than the fastest is as good, if it costs less."""
_LEAST_USD = 1e-9
"""Of a request that nothing is charged for: of two collectives that are as good, the one with fewer requests."""
_CHOICE = ("all-reduce", "pipelined-scatter-reduce", "k-reduce")


class Merging(Protocol):
    """One invocation's side of it. ``step`` and ``settle`` are called alike in all workers of the partition."""

    name: str
    """For people."""
    server_knows: bool
    """Whether the parameter server hears of every step."""

    def arm(self, step: int, samples: int) -> None:
        """The next backward pass is the last of the step, after all of its forward passes: gradients may leave."""

    def step(self, server: PsClient, step: int, samples: int, loss: float) -> None:
        """After the backward pass: merge, and make the optimiser's step."""

    def settle(self, step: int) -> None:
        """At the end of a WAN round, after ``step``: all workers then hold the same model, bit for bit."""

    def state(self) -> State:
        """What the next invocation of this worker needs."""

    def restore(self, state: State) -> None:
        """Continue from there; before the first step."""

    def close(self) -> None: ...


class Alone:
    """One worker."""

    name = "a worker alone"
    server_knows = False

    def __init__(self, optimizer: torch.optim.Optimizer, task: Task) -> None:
        self._optimizer, self._task = optimizer, task

    def arm(self, step: int, samples: int) -> None:
        """Nothing leaves before the pass is over."""

    def step(self, server: PsClient, step: int, samples: int, loss: float) -> None:
        self._make_step()

    def _make_step(self) -> None:
        with self._task.calling("the optimiser's step"):
            self._optimizer.step()

    def settle(self, step: int) -> None:
        """There is nobody to differ from."""

    def state(self) -> State:
        return State()

    def restore(self, state: State) -> None:
        """There is none."""

    def close(self) -> None:
        """Nothing is open."""


class AtServer(Alone):
    """`server-reduce`: the region's parameter server merges the gradients, weighted by samples."""

    name = "server-reduce"
    server_knows = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, task: Task, flat: FlatModel, channel: Channel, call: Invocation
    ) -> None:
        super().__init__(optimizer, task)
        self._flat, self._channel, self._call = flat, channel, call

    def step(self, server: PsClient, step: int, samples: int, loss: float) -> None:
        key = f"g/{self._call.attempt}/{step}/{self._call.worker}"
        self._channel.put(key, framing.encode({"gradient": self._flat.gradient()}, {"samples": samples}))
        reply = server.reduce(worker_pb2.ReduceRequest(step=step, key=key, samples=samples, loss=loss))
        value = self._channel.get(reply.merged_key)
        if value is None:
            text = f"{reply.merged_key} has gone from the channel: a newer attempt has taken over"
            raise GeofedError("FENCED", text)
        self._flat.load_gradient(np.asarray(framing.decode(value).tensors["gradient"], np.float32))
        self._make_step()


class Patience:
    """How long a worker waits for the others in one exchange, in seconds.

    So many of the longest steps so far, the waits for the others among them, and at least two minutes. Until it has
    made one nothing is known of how long the others need (they start, or fetch their data): then, and at most, as long
    as its invocation lives, which must be able to leave what it holds.
    """

    def __init__(self, ends: float) -> None:
        """``ends``: when the invocation must have stopped waiting, on the monotonic clock."""
        self._ends, self._longest, self._begun = ends, 0.0, 0.0

    def begin(self) -> None:
        """This worker's own part of a step is begun."""
        self._begun = time.monotonic()

    def made(self) -> None:
        """The step is made."""
        if self._begun:
            self._longest = max(self._longest, time.monotonic() - self._begun)

    def __call__(self) -> float:
        left = max(1.0, self._ends - time.monotonic())
        return min(left, max(_LEAST_PATIENCE_SECONDS, _PATIENCE_STEPS * self._longest)) if self._longest else left


class ThroughChannel(Alone):
    """A collective: the workers merge among themselves."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        task: Task,
        flat: FlatModel,
        collective: Collective,
        name: str,
        patience: Patience,
    ) -> None:
        super().__init__(optimizer, task)
        self._flat, self._collective, self.name, self._patience = flat, collective, name, patience
        self._before = flat.vector() if collective.shares == "changes" else None
        overlap = isinstance(collective, Reducing) and collective.in_parts
        self._gradients = GradientMerge(flat, collective, overlap=overlap)

    def arm(self, step: int, samples: int) -> None:
        self._patience.begin()
        self._gradients.arm(step, samples)

    def step(self, server: PsClient, step: int, samples: int, loss: float) -> None:
        if self._before is not None:
            self._share(step, samples)
        else:
            for merged in self._gradients.merged(step, samples):
                self._flat.load_gradient(merged.vector)
                self._make_step()
        self._patience.made()

    def _share(self, step: int, samples: int) -> None:
        """The own change first; then what the others tell of theirs."""
        assert self._before is not None
        before = self._flat.vector(self._before)
        self._make_step()
        after = self._flat.vector()
        for merged in self._collective.merge(step, after - before, samples, after):
            self._flat.add(merged.vector)

    def settle(self, step: int) -> None:
        settled = self._collective.settle(step, self._flat.vector())
        for merged in settled.merged:
            self._flat.load_gradient(merged.vector)
            self._make_step()
        if settled.model is not None:
            self._flat.load(settled.model)

    def state(self) -> State:
        return self._collective.state()

    def restore(self, state: State) -> None:
        self._collective.restore(state)

    def close(self) -> None:
        self._collective.close()


class Fenced:
    """A channel whose waits end when the attempt is over, so that nobody waits for workers that are gone.

    Whoever looks in vain for a value, again and again, looks now and then for the sign, too.
    """

    def __init__(self, channel: Channel, attempt: int) -> None:
        self._channel, self._fence = channel, fence_key(attempt)
        self._look_at = 0.0
        """When to look for the sign; 0: nobody has looked in vain since something was found."""

    def get(self, key: str) -> memoryview | None:
        value = self._channel.get(key)
        now = time.monotonic()
        if value is not None or not self._look_at:
            self._look_at = 0.0 if value is not None else now + _FENCE_SECONDS
        elif now > self._look_at:
            self._look_at = now + _FENCE_SECONDS
            if self._channel.get(self._fence) is not None:
                raise GeofedError("FENCED", "a newer attempt has taken over")
        return value

    def wait(self, keys: Collection[str], timeout_seconds: float) -> Iterator[tuple[str, memoryview]]:
        left = set(keys)
        for key, value in self._channel.wait((*keys, self._fence) if left else (), timeout_seconds):
            if key == self._fence:
                raise GeofedError("FENCED", "a newer attempt has taken over")
            left.discard(key)
            yield key, value
            if not left:
                return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


def merging_for(
    call: Invocation, task: Task, optimizer: torch.optim.Optimizer, flat: FlatModel, channel: Channel, begun: float
) -> Merging:
    """What the plan says; where it leaves it open, what is fastest by the channel's measured constants.

    All workers of a partition choose alike, since all are told the same constants. ``begun``: when the invocation was,
    on the monotonic clock.
    """
    if call.workers == 1:
        return Alone(optimizer, task)
    settings = _settings(call, flat, _costs(call))
    if settings is None:
        return AtServer(optimizer, task, flat, channel, call)
    member = Member(call.worker, call.workers, call.attempt)
    # In the memory of one machine the cores are at work either way. A store that has to be asked is only asked in time
    # where it is known how long it takes.
    told = call.channel != "s3" or settings.asked is not None
    in_parts = settings.pattern != "isp" and not settings.staleness and not channel.in_memory and told
    settings = replace(settings, in_parts=in_parts)
    patience = Patience(begun + call.slice_seconds + CALL_GRACE.total_seconds() - _LEAVE_SECONDS)
    fenced: Any = Fenced(channel, call.attempt)
    # What is shared are changes of the model, or gradients.
    size = flat.layout.size if settings.pattern == "isp" else flat.layout.gradient_size
    collective = open_collective(settings, member, fenced, _PLACE, size, patience)
    name = settings.pattern if settings.chunks is None else f"{settings.pattern} with K = {settings.chunks}"
    name += f" in {settings.groups} groups" if settings.groups > 1 else ""
    return ThroughChannel(optimizer, task, flat, collective, name, patience)


def group_settings(call: Invocation, flat: FlatModel) -> Settings:
    """How the replicas of one stage of a pipeline merge: always among themselves, and always the present step."""
    alike = call.model_copy(update={"workers": call.degree})
    costs = _costs(call)
    settings = _settings(alike, flat, costs) if call.collective != "isp" else None
    if settings is None:
        asked = costs if call.channel == "s3" else None
        settings = Settings("pipelined-scatter-reduce", timeout_seconds=_TIMEOUT_SECONDS, asked=asked)
    return replace(settings, staleness=0, codec=call.merging_codec, trained=flat.layout.trainable_size)


def _costs(call: Invocation) -> ChannelCosts | None:
    measured = dict(call.channel_costs)
    return ChannelCosts(**{**measured, "parallel": int(measured["parallel"])}) if measured else None  # type: ignore[arg-type]


def _chosen(workers: int, size: float, costs: ChannelCosts, patterns: Sequence[str]) -> Merge:
    priced = replace(costs, put_usd=max(costs.put_usd, _LEAST_USD), get_usd=max(costs.get_usd, _LEAST_USD))
    return choose(workers, size, priced, slack=_SLACK, patterns=patterns).merge


def _settings(call: Invocation, flat: FlatModel, costs: ChannelCosts | None) -> Settings | None:
    """None: the parameter server merges."""
    pattern, k = call.collective, int(call.merging.get("k", 0)) or None
    size = 4.0 * flat.layout.size
    if pattern == "auto" and costs is not None and call.channel != "file":
        chosen = _chosen(call.workers, size, costs, _CHOICE)
        pattern, k = chosen.pattern, chosen.owners if chosen.pattern == "k-reduce" else None
    if pattern in ("auto", "server-reduce"):
        return None
    if pattern in ("k-reduce", "isp") and k is None:
        k = _chosen(call.workers, size, costs, ("k-reduce",)).owners if costs else call.workers
    staleness = int(call.merging.get("staleness", 0))
    groups = 1
    if pattern == "k-reduce" and costs is not None and not staleness:
        groups = best_groups(Merge(pattern, call.workers, size, k), costs)
    return Settings(
        pattern=pattern,  # type: ignore[arg-type]  # checked by `open_collective`
        chunks=min(k, call.workers) if k is not None else None,
        groups=groups,
        staleness=staleness,
        codec=call.merging_codec,
        significance=call.merging.get("significance", Settings.significance),
        trained=flat.layout.trainable_size,
        timeout_seconds=_TIMEOUT_SECONDS,
        asked=costs if call.channel == "s3" else None,
    )
