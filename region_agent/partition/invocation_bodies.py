"""What the invocations of a partition's workers need: data, the job's channel, and what they may use."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import structlog

from geofed_pb.v1 import agent_pb2
from region_agent.config import RegionConfig
from region_agent.gateway.device_blocks import DeviceBlocks
from region_agent.gateway.functions import Grants, Isolation
from region_agent.isolation import SERVER_ADDRESS, grants_of
from region_agent.link.identity import Identity
from region_agent.partition.calls import WorkerInputs, bundle_key, gpus_of, invocation_of
from region_agent.partition.channel import RegionChannel
from region_agent.partition.events import Invoke
from region_agent.partition.report import PartitionMeter
from region_agent.partition.shards import PartitionShards
from region_agent.privacy import PrivacyGuard, is_private
from region_agent.shards.reading import SIGNATURE_LIFE
from region_agent.state.store import PartitionRow
from region_agent.tasks.folder import TaskFolder
from region_agent.worker.data.spec import Stream
from region_agent.worker.invocation import ShardFile
from sync.channel import channel_kind
from sync.channel_clients import fence_key
from sync.collective import DEFAULT, collective_named

__all__ = ["HeldDevices", "Invocations"]

_log = structlog.get_logger("geofed.partition")
_DEVICES_SECONDS = 60.0
"""Longest wait for devices that workers of other jobs still have: they store their state at their next exchange. It is
half of the time that the attempt's other workers may wait for one (`CALL_GRACE`)."""
_LOOK_SECONDS = 0.2
"""Interval at which a worker looks whether devices are free."""


class HeldDevices:
    """The machine's devices that a job's workers have: each its own, as long as it is wanted or a call of it is open.

    Not thread-safe: call it on the event loop.
    """

    def __init__(self, blocks: DeviceBlocks, job: str, each: int, wanted: Callable[[], int]) -> None:
        """``each``: devices of a worker. ``wanted``: returns the present number of workers."""
        self._blocks, self._job, self._each, self._wanted = blocks, job, each, wanted
        self._open: Counter[int] = Counter()
        """Open calls of each worker."""
        self._shares = False
        """The last wait was in vain: there is no further one before devices are free."""

    @asynccontextmanager
    async def of(self, worker: int) -> AsyncIterator[tuple[int, ...]]:
        """Keep a worker's devices during a call; yields their numbers. Empty: the agent does not place workers, or not
        enough are free even after a while."""
        self._open[worker] += 1
        try:
            yield await self._taken(worker)
        finally:
            self._open[worker] -= 1
            self.settle()

    def settle(self) -> None:
        """Free the devices of the workers that are wanted no more and have no open call."""
        for worker in self._blocks.workers(self._job):
            if worker >= self._wanted() and not self._open[worker]:
                self._blocks.release(self._job, worker)

    def release(self) -> None:
        """Free the devices of all workers, whose function is gone."""
        for worker in self._blocks.workers(self._job):
            self._blocks.release(self._job, worker)

    async def _taken(self, worker: int) -> tuple[int, ...]:
        if not 0 < self._each <= self._blocks.devices:
            return ()
        until = time.monotonic() + (0.0 if self._shares else _DEVICES_SECONDS)
        while not (numbers := self._blocks.take(self._job, worker, self._each)):
            if time.monotonic() >= until:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        self._shares = not numbers
        if self._shares:
            _log.warning("a worker shares devices with others: too few are free", job=self._job, worker=worker)
        return numbers


@dataclass
class Invocations:
    """Makes the bodies of a partition's invocations, and prepares what they refer to."""

    start: agent_pb2.StartPartition
    config: RegionConfig
    identity: Identity
    channel: RegionChannel
    isolation: Isolation
    shards: PartitionShards
    meter: PartitionMeter
    privacy: PrivacyGuard
    packages: Path | None = None
    """Folder with the packages that the task requires; None: it requires none."""
    _splits: dict[str, tuple[ShardFile, ...]] = field(default_factory=dict)
    _streams: dict[str, Stream] = field(default_factory=dict)
    """Splits that workers read block by block."""
    _indexes: dict[str, bytes] = field(default_factory=dict)
    """Contents of the channel's keys that the streams name."""
    _signed_at: float = 0.0
    """Time at which the URLs in the splits were signed; they are valid for `SIGNATURE_LIFE`."""
    _opening_channel: asyncio.Lock = field(default_factory=asyncio.Lock)
    _worker_channel: str = ""
    """Address of the channel for the workers; empty: not requested yet."""
    _costs: dict[str, float] = field(default_factory=dict)
    """Measured costs of requests to the channel, where the workers choose a collective by them."""

    async def sign_splits(self) -> None:
        """Sign the URLs of the partition's data."""
        self._splits = await asyncio.to_thread(self.shards.splits)
        if not self._streams:
            # Once: what a worker reads at a step must not change while the job runs.
            self._streams, self._indexes = await asyncio.to_thread(self.shards.streams, self._splits)
        self._signed_at = time.monotonic()

    def grants(self) -> Grants:
        """Return what the workers may use outside of their sandboxes. Blocks."""
        dataset = self.start.task.dataset
        shards = self.shards.folder if self.shards.foreign else None
        own = self.config.datasets.get(dataset) if self.shards.own else None
        return grants_of(self.config, self.channel, self.start.job, own, shards, self._splits, self.packages)

    def prepare_channel(self, folder: TaskFolder) -> None:
        """Put the code into the job's channel, and measure the channel where the workers need it. Blocks."""
        channel = self.channel.open(self.start.job)
        try:
            folder.put_into(channel, bundle_key(self.start))
            for key, content in self._indexes.items():
                channel.put(key, [content])
        finally:
            self.meter.channel_used(channel.usage)
            channel.close()
        plan = self.start.plan
        kind = channel_kind(self.channel.kind)
        # By the duration of a request workers choose K, and the times at which they ask a store that announces nothing.
        method = None if plan.collective == "auto" else collective_named(plan.collective or DEFAULT)
        needed = method is None or method.takes_k or (not kind.announces and bool(method.worker))
        if plan.workers > 1 and not kind.in_memory and needed and not self._costs:
            costs, usage = self.channel.costs(self.start.job)
            self._costs = {name: float(value) for name, value in asdict(costs).items()}
            if (prices := self.config.channel.prices) is not None:
                self._costs |= {"put_usd": prices.usd_per_put, "get_usd": prices.usd_per_get}
            self.meter.channel_used(usage)

    def end_attempt(self, attempt: int) -> None:
        """Write the fence of an attempt to the channel, so that workers that wait for each other there stop. Blocks."""
        channel = self.channel.open(self.start.job)
        try:
            channel.put(fence_key(attempt), [b"over"])
        finally:
            self.meter.channel_used(channel.usage)
            channel.close()

    async def body(self, action: Invoke, row: PartitionRow, gpu_numbers: tuple[int, ...] = ()) -> bytes:
        """Return the body of an invocation, with URLs that stay valid while it runs.

        ``gpu_numbers``: those of the machine's GPUs that the worker has; empty: the agent does not say.
        """
        if time.monotonic() - self._signed_at > SIGNATURE_LIFE.total_seconds() / 2:
            await self.sign_splits()
        async with self._opening_channel:
            # Requested only once, since each request sets another password for the workers' Redis user.
            if not self._worker_channel:
                self._worker_channel = await asyncio.to_thread(self.channel.worker_address, self.start.job)
        rate = await asyncio.to_thread(self.privacy.rate, self.start.job) if is_private(self.start.plan) else 1.0
        inputs = WorkerInputs(
            self.identity, self.config.server, row, self.channel.kind, self._worker_channel,
            splits=self._splits, streams=self._streams, samples=self.shards.declared_samples,
            clients=self.shards.declared_clients, channel_costs=self._costs,
            server_address=self._server_address(row), packages=self.packages, sampling_rate=rate,
            billed_gpus=self.config.worker_devices(gpus_of(self.start.task)), gpu_numbers=gpu_numbers,
        )  # fmt: skip
        return invocation_of(self.start, action, inputs).model_dump_json().encode()

    def _server_address(self, row: PartitionRow) -> str:
        """Return the address of the parameter server for this region's workers."""
        if self.isolation.kind == "bubblewrap" and not self.config.functions.network.host_network:
            return SERVER_ADDRESS
        return f"{self.config.server.worker_host}:{row.worker_port}"
