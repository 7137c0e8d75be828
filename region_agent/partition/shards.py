"""The shards that a partition is trained on: the region's own, and those that other regions hand over for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from region_agent.config import RegionConfig
from region_agent.partition.events import Happened
from region_agent.shards.reading import shard_files
from region_agent.shards.receiving import ShardPort, ShardStore, open_port
from region_agent.worker.invocation import ShardFile
from sync.transport.sockets import Tls

__all__ = ["SHARDS", "PartitionShards"]

SHARDS = "shards"
"""Folder in the state directory for other regions' shards, by job. A job's workers may read its own."""
_TOLD_SECONDS = 1.0
_LINGER_SECONDS = 5.0
"""For which the last acknowledgements of shards may be asked for again."""


class PartitionShards:
    """What a plan says that is processed here, and how far it is."""

    def __init__(
        self,
        config: RegionConfig,
        identity: Callable[[], Tls],
        start: agent_pb2.StartPartition,
        folder: Path,
        tell: Callable[[bool], None],
        happened: Callable[[Happened], None],
    ) -> None:
        """``tell`` has the control plane told how the partition stands, durably or not."""
        self._config, self._identity, self._start = config, identity, start
        self._tell, self._happened = tell, happened
        self.folder = folder
        """Of the shards of others; it goes with the job."""
        self.address = ""
        """Where shards are taken, while they are waited for."""
        self.here = False
        """All that are processed here."""
        shards = start.plan.shards
        self._own = not shards or any(ref.region == config.name for ref in shards)
        self.foreign = [ref for ref in shards if ref.region != config.name]
        """Those of other regions."""
        self._stores: list[ShardStore] = []
        self._port: ShardPort | None = None
        """While shards are waited for."""

    @property
    def condition(self) -> str:
        """What it waits for, in words."""
        port = self._port
        if port is None:
            return ""
        lacking = [source for source, shard_store in port.stores.items() if not shard_store.complete]
        return "; ".join(f"waits for the shard of {source}: {port.progress(source)}" for source in lacking)

    @property
    def declared_samples(self) -> int | None:
        """Of the training split, by this region's file; None where other regions' files count as well."""
        dataset = self._config.datasets.get(self._start.task.dataset)
        return None if self.foreign or dataset is None else dataset.splits["train"].samples

    async def take(self, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """Wait until the shards of others are here; ``run`` does something beside.

        Raises ``GeofedError``: PORT_IN_USE, DISK_FULL, FRAME_INVALID, LIMIT_EXCEEDED.
        """
        dataset = self._start.task.dataset

        def look() -> bool:
            self._stores = [
                ShardStore(self.folder / ref.region, ref.region, dataset, ref.bytes) for ref in self.foreign
            ]
            return all(shard_store.complete for shard_store in self._stores)

        if await asyncio.to_thread(look):
            self.here = True
            return
        port = self._port = ShardPort(self._start.job, self._config.name, self._config.cloud, self._stores)
        opened, whole = contextlib.AsyncExitStack(), False
        try:
            self.address = await opened.enter_async_context(open_port(port, self._config, self._identity))
            self._tell(True)
            await self._complete(port)
            whole = True
        finally:
            self.address, self._port = "", None
            if not whole:
                await opened.aclose()
        self.here = True
        run(_closed_later(opened))
        self._tell(True)
        for shard_store in self._stores:
            self._happened(_received(self._config.name, shard_store))

    async def _complete(self, port: ShardPort) -> None:
        waiting = asyncio.create_task(port.complete())
        try:
            while not (await asyncio.wait({waiting}, timeout=_TOLD_SECONDS))[0]:
                self._tell(False)
            waiting.result()
        finally:
            waiting.cancel()

    def splits(self) -> dict[str, tuple[ShardFile, ...]]:
        """The files of each split, shard by shard. Blocking; raises ``GeofedError("SHARD_UNREADABLE")``."""
        found: dict[str, tuple[ShardFile, ...]] = {}
        if self._own:
            dataset = self._config.datasets.get(self._start.task.dataset)
            if dataset is None:
                raise GeofedError("SHARD_UNREADABLE", f"this region has no shard of {self._start.task.dataset}")
            found = shard_files(dataset, self._config.stores)
        for shard_store in self._stores:
            for split, files in shard_store.laid_out().items():
                found[split] = (*found.get(split, ()), *files)
        return found


def _received(region: str, shard_store: ShardStore) -> Happened:
    assert shard_store.list is not None
    size = shard_store.list.total_bytes
    data = {
        "from": shard_store.source,
        "digest": shard_store.list.digest,
        "bytes": size,
        "files": len(shard_store.list.files),
    }
    return Happened("shard.received", f"{region}: the shard of {shard_store.source} is here, {size:,} bytes", data)


async def _closed_later(opened: contextlib.AsyncExitStack) -> None:
    try:
        await asyncio.sleep(_LINGER_SECONDS)
    finally:
        await opened.aclose()
