"""Merges the gradients, or changes, of the workers of a partition in each step, so that all make the same step."""

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
from region_agent.worker.ranks.devices import devices_of
from region_agent.worker.task import TaskModule
from region_agent.worker.training.loss_scale import LossScale
from region_agent.worker.training.proximal import ProximalTerm
from region_agent.worker.training.update import OptimizerStep
from sync import framing
from sync.channel import Channel, RangedValue, channel_kind
from sync.channel_clients import fence_key
from sync.collective import (
    DEFAULT,
    ChannelCosts,
    Collective,
    CollectiveMethod,
    Merge,
    Settings,
    State,
    best_groups,
    choose,
    collective_named,
    owners_of_lists,
)
from sync.flat import FlatModel
from sync.mapped_files import windows
from sync.merging import MeanCollective, Member, PartedVector, open_collective
from sync.merging.gradients import GradientMerge

__all__ = ["FencedChannel", "Merging", "PeerTimeout", "group_settings", "merging_for"]

_PREFIX = "c"
"""Prefix of the keys of collectives; the attempt follows."""
_TIMEOUT_SECONDS = 120.0
"""Timeout for the part of a replica of a pipeline stage in a step; the replica is then considered lost."""
_MIN_TIMEOUT_SECONDS = 120.0
"""Shortest timeout for a worker's part of a step; the worker is then considered lost, and a new attempt begins."""
_TIMEOUT_STEPS = 20.0
"""The same timeout in multiples of the longest step so far; the larger of the two holds."""
_STORE_SECONDS = 20.0
"""Time that an invocation needs at its end to store its state in the channel."""
_FENCE_SECONDS = 5.0
"""Interval of checks for the attempt's fence in a channel without notifications; each check is billed."""
_SLACK = 0.1
"""A collective may take this fraction longer than the fastest one if it is cheaper."""
_MIN_USD = 1e-9
"""Assumed price of a free request, so that of two equally good collectives the one with fewer requests is chosen."""


class Merging(Protocol):
    """One worker's side of merging. All workers of the partition call ``step`` and ``settle`` for the same steps."""

    name: str
    """Text for users."""
    server_counts_steps: bool
    """Whether the parameter server takes part in every step."""
    between_steps: bool
    """Whether the model is that of a whole step; False after a step whose merge has failed, but which was made."""
    weights: tuple[float, ...]
    """In what proportion the workers divide the samples of a step; empty: equally."""

    def arm(self, step: int, samples: int) -> None:
        """Allow gradients to be sent during the next backward pass, which is the last one of the step."""

    def step(self, server: PsClient, step: int, samples: int, loss: float) -> None:
        """Merge after the backward pass, and make the optimiser's step."""

    def settle(self, step: int) -> None:
        """Make the models of all workers equal bit for bit, at the end of a WAN round after ``step``."""

    def state(self) -> State:
        """Return the state that the next invocation of this worker needs."""

    def restore(self, state: State) -> None:
        """Restore the result of `state`, before the first step."""

    def close(self) -> None:
        """End background threads."""


class SingleWorker:
    """A partition with one worker: nothing is merged."""

    name = "a worker alone"
    server_counts_steps = False
    between_steps = True
    weights: tuple[float, ...] = ()

    def __init__(self, update: OptimizerStep) -> None:
        self._update = update

    def arm(self, step: int, samples: int) -> None:
        """Do nothing: no gradient is sent during the backward pass."""

    def step(self, server: PsClient, step: int, samples: int, loss: float) -> None:
        """Make the optimiser's step with the worker's own gradients."""
        self._update()

    def settle(self, step: int) -> None:
        """Do nothing: there is no other worker."""

    def state(self) -> State:
        """Return the empty state."""
        return State()

    def restore(self, state: State) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Do nothing: there are no threads."""


class ServerReduce(SingleWorker):
    """`server-reduce`: the region's parameter server merges the gradients, weighted by samples."""

    name = DEFAULT
    server_counts_steps = True

    def __init__(self, update: OptimizerStep, flat: FlatModel, channel: Channel, call: Invocation) -> None:
        super().__init__(update)
        self._flat, self._channel, self._call = flat, channel, call

    def step(self, server: PsClient, step: int, samples: int, loss: float) -> None:
        """Have the server merge the gradients, and make the optimiser's step with their mean.

        Raises ``GeofedError("FENCED")`` if the merged gradients were deleted.
        """
        key = f"g/{self._call.attempt}/{step}/{self._call.worker}"
        self._channel.put(key, framing.encode({"gradient": self._flat.gradient_parts()}, {"samples": samples}))
        reply = server.reduce(worker_pb2.ReduceRequest(step=step, key=key, samples=samples, loss=loss))
        value = self._channel.get(reply.merged_key)
        if value is None:
            text = f"{reply.merged_key} is no longer in the channel: a newer attempt has taken over"
            raise GeofedError("FENCED", text)
        self._flat.load_gradient(np.asarray(framing.decode(value).tensors["gradient"], np.float32))
        self._update()


class PeerTimeout:
    """Timeout of a wait for other workers in one exchange, in seconds.

    It is `_TIMEOUT_STEPS` times the longest step so far, waits included, and at least `_MIN_TIMEOUT_SECONDS`. Before
    the first step it is unknown how long the others need, which may still start or download data. Then, and at most,
    the timeout ends with the invocation, with time left to store its state.
    """

    def __init__(self, deadline: float) -> None:
        """``deadline``: time at which the invocation must stop waiting, in seconds of the monotonic clock."""
        self._deadline, self._longest, self._begun = deadline, 0.0, 0.0

    def begin_step(self) -> None:
        """Note the begin of this worker's part of a step."""
        self._begun = time.monotonic()

    def end_step(self) -> None:
        """Note the end of the step."""
        if self._begun:
            self._longest = max(self._longest, time.monotonic() - self._begun)

    def __call__(self) -> float:
        left = max(1.0, self._deadline - time.monotonic())
        return min(left, max(_MIN_TIMEOUT_SECONDS, _TIMEOUT_STEPS * self._longest)) if self._longest else left


class ChannelCollective(SingleWorker):
    """A collective through the channel: the workers merge without the parameter server."""

    def __init__(
        self,
        update: OptimizerStep,
        flat: FlatModel,
        collective: Collective,
        name: str,
        timeout: PeerTimeout,
        *,
        share: float = 1.0,
        weights: tuple[float, ...] = (),
    ) -> None:
        """``share``: for collectives of changes, by what a worker multiplies its own change before it shares it."""
        super().__init__(update)
        self._flat, self._collective, self.name, self._timeout = flat, collective, name, timeout
        self._share_of_change = share
        self.weights = weights
        self._before = flat.vector() if collective.shares == "changes" else None
        overlap = isinstance(collective, MeanCollective) and collective.in_parts
        self._gradients = GradientMerge(flat, collective, overlap=overlap)

    def arm(self, step: int, samples: int) -> None:
        """Allow gradients to be sent during the next backward pass, and start the clock of the step."""
        self._timeout.begin_step()
        self._gradients.arm(step, samples)

    def step(self, server: PsClient, step: int, samples: int, loss: float) -> None:
        """Merge the gradients, and make an optimiser's step for each merge that is complete; or share the local
        step."""
        if self._before is not None:
            self._share(step, samples)
        else:
            for _ in self._gradients.merged(step, samples):
                self._update()
        self._timeout.end_step()

    def _share(self, step: int, samples: int) -> None:
        """Make this worker's step, share the change, and add the changes of the other workers."""
        assert self._before is not None
        before = self._flat.vector(self._before)
        self.between_steps = False
        self._update()
        views = self._flat.views()
        after = PartedVector([self._flat.vector()] if views is None else views)
        if self._share_of_change != 1.0:
            # What gradients do not train, such as the statistics of a normalisation, is no part of the step.
            for part in windows(self._flat.layout.trainable_size):
                after[part] = before[part] + np.float32(self._share_of_change) * (after[part] - before[part])
            if views is None:
                self._flat.load(after[:])
        for part in windows(after.size):
            np.subtract(after[part], before[part], out=before[part])
        for merged in self._collective.merge(step, before, samples, after.parts):
            self._flat.add(merged.vector)
        self.between_steps = True

    def settle(self, step: int) -> None:
        """Apply the merges that are still pending, and load the common model if the collective returns one."""
        settled = self._collective.settle(step, None if self._before is None else self._flat.vector(self._before))
        for merged in settled.merged:
            self._flat.load_gradient(merged.vector)
            self._update()
        if settled.model is not None:
            self._flat.load(settled.model)

    def state(self) -> State:
        """Return the collective's state, for the next invocation."""
        return self._collective.state()

    def restore(self, state: State) -> None:
        """Restore the collective's state, before the first step."""
        self._collective.restore(state)

    def close(self) -> None:
        """Close the collective and end its threads."""
        self._collective.close()


class FencedChannel:
    """A channel whose waits raise FENCED when the attempt is over, so that no worker waits for others that are gone.

    Repeated calls of `get` without a result check for the attempt's fence at an interval.
    """

    def __init__(self, channel: Channel, attempt: int) -> None:
        self._channel, self._fence = channel, fence_key(attempt)
        self._check_at = 0.0
        """Time of the next check for the fence; 0: the last `get` has found a value."""

    def get(self, key: str) -> memoryview | None:
        """Return the value of a key; None: not there yet. Raises ``GeofedError("FENCED")`` once the attempt is over."""
        value = self._channel.get(key)
        now = time.monotonic()
        if value is not None or not self._check_at:
            self._check_at = 0.0 if value is not None else now + _FENCE_SECONDS
        elif now > self._check_at:
            self._check_at = now + _FENCE_SECONDS
            if self._channel.get(self._fence) is not None:
                raise GeofedError("FENCED", "a newer attempt has taken over")
        return value

    def wait(self, keys: Collection[str], timeout_seconds: float) -> Iterator[tuple[str, memoryview]]:
        """Yield keys with their values as they arrive. Raises ``GeofedError("FENCED")`` once the attempt is over."""
        found: Any = self.wait_ranged(keys, timeout_seconds, len(keys) + 1)  # all are whole
        return iter(found)

    def wait_ranged(
        self, keys: Collection[str], timeout_seconds: float, whole: int
    ) -> Iterator[tuple[str, memoryview | RangedValue]]:
        """As `wait`, with at most ``whole`` values that take memory; the others are read in ranges."""
        left = set(keys)
        watched = (*keys, self._fence) if left else ()
        for key, value in self._channel.wait_ranged(watched, timeout_seconds, whole):
            if key == self._fence:
                raise GeofedError("FENCED", "a newer attempt has taken over")
            left.discard(key)
            yield key, value
            del value  # so that it can be freed while the next one is awaited
            if not left:
                return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


def merging_for(
    call: Invocation,
    task: TaskModule,
    optimizer: torch.optim.Optimizer,
    flat: FlatModel,
    channel: Channel,
    begun: float,
    proximal: ProximalTerm | None = None,
    scale: LossScale | None = None,
) -> Merging:
    """Open the collective of the plan; for "auto", the fastest one by the channel's measured costs.

    All workers of a partition choose the same one, since all get the same costs. ``begun``: begin of the invocation, in
    seconds of the monotonic clock.
    """
    update = OptimizerStep(optimizer, task, call.clip_norm, proximal, scale)
    if call.workers == 1:
        return SingleWorker(update)
    settings = _settings(call, flat, _costs(call))
    if settings is None:
        return ServerReduce(update, flat, channel, call)
    member = Member(call.worker, call.workers, call.attempt)
    # Sending gradients in parts hides latency. In one machine's memory all cores are busy anyway, so it does not help;
    # with S3, which workers have to poll, it needs the measured duration of a request.
    timed = channel_kind(call.channel).announces or settings.asked is not None
    method = collective_named(settings.pattern)
    in_parts = method.shares == "mean" and not settings.staleness and not channel.in_memory and timed
    # With several devices a gradient is complete only after the pass.
    in_parts = in_parts and len(devices_of(call)) == 1
    settings = replace(settings, in_parts=in_parts)
    timeout = PeerTimeout(begun + call.slice_seconds + CALL_GRACE.total_seconds() - _STORE_SECONDS)
    fenced: Any = FencedChannel(channel, call.attempt)
    # What is shared are changes of the model, or gradients.
    size = flat.layout.size if method.shares == "changes" else flat.layout.gradient_size
    collective = open_collective(settings, member, fenced, _PREFIX, size, timeout)
    name = settings.pattern if settings.chunks is None else f"{settings.pattern} with K = {settings.chunks}"
    name += f" in {settings.groups} groups" if settings.groups > 1 else ""
    share = 1.0 / call.workers if call.merging.get("mean") else 1.0
    weights = _weights(call, collective)
    return ChannelCollective(update, flat, collective, name, timeout, share=share, weights=weights)


def _weights(call: Invocation, collective: Collective) -> tuple[float, ...]:
    """Return the workers' weights by FasDL's unequal partition: those that merge no chunk, and with staleness do not
    wait for the ones that do, process more samples. Empty: all process as many."""
    ratio = call.merging.get("ratio")
    if ratio is None or not call.merging.get("staleness") or not isinstance(collective, MeanCollective):
        return ()
    return tuple(1.0 if worker in collective.plan.owners else ratio for worker in range(call.workers))


def group_settings(call: Invocation, flat: FlatModel) -> Settings:
    """Return the settings with which the replicas of a pipeline stage merge: without server, without staleness."""
    alike = call.model_copy(update={"workers": call.degree})
    costs = _costs(call)
    means = call.collective == "auto" or collective_named(call.collective).shares == "mean"
    settings = _settings(alike, flat, costs) if means else None
    if settings is None:
        asked = None if channel_kind(call.channel).announces else costs
        settings = Settings("pipelined-scatter-reduce", timeout_seconds=_TIMEOUT_SECONDS, asked=asked)
    return replace(settings, staleness=0, codec=call.merging_codec, trained=flat.layout.trainable_size)


def _costs(call: Invocation) -> ChannelCosts | None:
    measured = dict(call.channel_costs)
    return ChannelCosts(**{**measured, "parallel": int(measured["parallel"])}) if measured else None  # type: ignore[arg-type]


def _chosen(workers: int, size: float, costs: ChannelCosts, patterns: Sequence[str] | None = None) -> Merge:
    priced = replace(costs, put_usd=max(costs.put_usd, _MIN_USD), get_usd=max(costs.get_usd, _MIN_USD))
    return choose(workers, size, priced, slack=_SLACK, patterns=patterns).merge


def _owners(method: CollectiveMethod, workers: int, size: float, costs: ChannelCosts | None) -> int:
    """Return K where the job file leaves it open."""
    if method.shares == "changes":
        if costs is None or method.cost is None:
            # In shared memory bytes are work. All lists of two workers are no more bytes than their parts of two ranges
            # and the ranges' unions; with more workers they are soon more.
            return 0 if method.to_all and workers == 2 else workers
        return owners_of_lists(method.name, workers, size, costs, slack=_SLACK)
    return _chosen(workers, size, costs, (method.name,)).owners if costs and method.cost else workers


def _settings(call: Invocation, flat: FlatModel, costs: ChannelCosts | None) -> Settings | None:
    """Return the collective's settings; None: the parameter server merges."""
    pattern, k = call.collective, int(call.merging["k"]) if "k" in call.merging else None
    size = 4.0 * flat.layout.size
    if pattern == "auto" and costs is not None and not channel_kind(call.channel).in_memory:
        chosen = _chosen(call.workers, size, costs)
        pattern, k = chosen.pattern, chosen.owners if collective_named(chosen.pattern).takes_k else None
    if pattern == "auto" or not collective_named(pattern).worker:
        return None
    method = collective_named(pattern)
    if method.takes_k and k is None:
        k = _owners(method, call.workers, size, costs)
    staleness = int(call.merging.get("staleness", 0))
    groups = 1
    if method.takes_groups and costs is not None and not staleness:
        groups = best_groups(Merge(pattern, call.workers, size, k), costs)
    return Settings(
        pattern=pattern,
        chunks=min(k, call.workers) if k else None,
        groups=groups,
        staleness=staleness,
        codec=call.merging_codec,
        significance=call.merging.get("significance", method.significance or 0.0),
        trained=flat.layout.trainable_size,
        timeout_seconds=_TIMEOUT_SECONDS,
        asked=None if channel_kind(call.channel).announces else costs,
    )
