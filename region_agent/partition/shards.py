"""Shards that a partition is trained on: the region's own, and those that other regions send."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from geofed_pb.errors import GeofedError
from geofed_pb.tasks import awaited
from geofed_pb.v1 import agent_pb2
from region_agent.config import RegionConfig
from region_agent.partition.events import RecordEvent
from region_agent.shards.indexing import Indexes, streams_of
from region_agent.shards.reading import shard_files
from region_agent.shards.receiving import ShardPort, ShardStore, open_port
from region_agent.worker.data.index import join_indexes
from region_agent.worker.data.spec import Stream
from region_agent.worker.invocation import ShardFile
from sync.tcp_streams.sockets import Tls

__all__ = ["SHARDS", "PartitionShards"]

SHARDS = "shards"
"""Folder in the state directory for other regions' shards, with a folder for each job, which its workers may read."""
_REPORT_SECONDS = 1.0
"""Interval of the reports while shards are received."""
_LINGER_SECONDS = 5.0
"""Time for which the port stays open after the last shard, so that a sender can request a lost acknowledgement."""


class PartitionShards:
    """The shards that the plan assigns to this region, and the progress of receiving them."""

    def __init__(
        self,
        config: RegionConfig,
        identity: Callable[[], Tls],
        start: agent_pb2.StartPartition,
        folder: Path,
        indexes: Indexes,
        report: Callable[[bool], None],
        record_event: Callable[[RecordEvent], None],
    ) -> None:
        """``report(durable)`` sends a report on the partition to the control plane."""
        self._config, self._identity, self._start, self._indexes = config, identity, start, indexes
        self._report, self._record_event = report, record_event
        self._dataset = config.datasets.get(start.task.dataset)
        """The region's own shard, as it was when the job began, also if the region file changes."""
        self.folder = folder
        """Folder for the shards of other regions; it is deleted with the job."""
        self.address = ""
        """Address at which shards are received; empty unless the partition waits for some."""
        self.complete = False
        """All shards that are processed here are present."""
        shards = start.plan.shards
        self.own = not shards or any(ref.region == config.name for ref in shards)
        """Whether the region's own shard is processed."""
        self.foreign = [ref for ref in shards if ref.region != config.name]
        """Shards of other regions."""
        self._stores: list[ShardStore] = []
        self._port: ShardPort | None = None
        """Receiver of shards; None unless the partition waits for some."""

    @property
    def condition(self) -> str:
        """Text that names the shards that are still missing, with their progress, and why they cannot be stored; empty
        if there are none."""
        port = self._port
        if port is None:
            return ""
        lacking = [source for source, shard_store in port.stores.items() if not shard_store.complete]
        notes = [f"waiting for the shard of {source}: {port.progress(source)}" for source in lacking]
        return "; ".join([*notes, *([port.store_fault] if port.store_fault else [])])

    @property
    def declared_samples(self) -> int | None:
        """Samples of the training split by this region's file; None if other regions' shards are used as well."""
        return None if self.foreign or self._dataset is None else self._dataset.splits["train"].samples

    @property
    def declared_clients(self) -> int | None:
        """Clients of the training split by this region's file; None if unknown, or if other shards are used as well."""
        return None if self.foreign or self._dataset is None else self._dataset.splits["train"].clients

    async def receive(self, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """Wait until the shards of other regions are complete; ``run`` starts a background task.

        Raises ``GeofedError``: PORT_IN_USE, DISK_FULL, FRAME_INVALID, LIMIT_EXCEEDED.
        """
        dataset = self._start.task.dataset

        def open_stores() -> bool:
            self._stores = [
                ShardStore(self.folder / ref.region, ref.region, dataset, ref.bytes) for ref in self.foreign
            ]
            return all(shard_store.complete for shard_store in self._stores)

        if await asyncio.to_thread(open_stores):
            self.complete = True
            return
        port = self._port = ShardPort(self._start.job, self._config.name, self._config.cloud, self._stores)
        opened, done = contextlib.AsyncExitStack(), False
        try:
            self.address = await opened.enter_async_context(open_port(port, self._config, self._identity))
            self._report(True)
            await self._receive_all(port)
            done = True
        finally:
            self.address, self._port = "", None
            if not done:
                await opened.aclose()
        self.complete = True
        run(_close_later(opened))
        self._report(True)
        for shard_store in self._stores:
            self._record_event(_received(self._config.name, shard_store))

    async def _receive_all(self, port: ShardPort) -> None:
        waiting = awaited(port.complete())
        try:
            while not (await asyncio.wait({waiting}, timeout=_REPORT_SECONDS))[0]:
                self._report(False)
            waiting.result()
        finally:
            waiting.cancel()

    def splits(self) -> dict[str, tuple[ShardFile, ...]]:
        """Return the files of each split, shard by shard. Blocks; raises ``GeofedError("SHARD_UNREADABLE")``."""
        found: dict[str, tuple[ShardFile, ...]] = {}
        if self.own:
            if self._dataset is None:
                raise GeofedError("SHARD_UNREADABLE", f"this region has no shard of {self._start.task.dataset}")
            found = shard_files(self._dataset, self._config.stores)
        for shard_store in self._stores:
            for split, files in shard_store.link_splits().items():
                found[split] = (*found.get(split, ()), *files)
        return found

    def streams(self, splits: Mapping[str, tuple[ShardFile, ...]]) -> tuple[dict[str, Stream], dict[str, bytes]]:
        """Return the splits that workers read block by block, and the channel's keys for it with their content. Blocks.

        Raises ``GeofedError``: SHARD_UNREADABLE, also if two shards have different formats, columns or types;
        LIMIT_EXCEEDED, CONFIG_INVALID.
        """
        own = self._dataset
        formats = {self._config.name: own.format if own is not None else None} if self.own else {}
        formats |= {one.source: one.list.format for one in self._stores if one.list is not None}
        told = list(formats.values())
        if any(one != told[0] for one in told):
            text = f"the shards of {' and '.join(formats)} have different formats"
            raise GeofedError("SHARD_UNREADABLE", text, hint="state the same `format` in the regions' files")
        spec = told[0] if told else None
        if spec is None:
            return {}, {}
        indexes = {}
        for split, files in splits.items():
            by_shard = [(shard, tuple(of_one)) for shard, of_one in itertools.groupby(files, lambda file: file.shard)]
            indexes[split] = join_indexes(
                [(shard or self._config.name, len(part), self._indexes.of(spec, part)) for shard, part in by_shard]
            )
        return streams_of(spec, indexes)


def _received(region: str, shard_store: ShardStore) -> RecordEvent:
    assert shard_store.list is not None
    size = shard_store.list.total_bytes
    data = {
        "from": shard_store.source,
        "digest": shard_store.list.digest,
        "bytes": size,
        "files": len(shard_store.list.files),
    }
    return RecordEvent("shard.received", f"{region}: received the shard of {shard_store.source}, {size:,} bytes", data)


async def _close_later(opened: contextlib.AsyncExitStack) -> None:
    try:
        await asyncio.sleep(_LINGER_SECONDS)
    finally:
        await opened.aclose()
