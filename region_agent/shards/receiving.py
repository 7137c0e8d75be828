"""Receives shards of other regions: files are stored by digest, verified, and then linked under their original
names."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import disk_full_as_error, write_durably
from geofed_pb.rpc import answering, peer_region, server_options
from geofed_pb.security.access import AccessInterceptor
from geofed_pb.tasks import background
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc
from region_agent.config import RegionConfig
from region_agent.partition.server.process import free_ports
from region_agent.shards.listing import MAX_LIST_BYTES, ShardManifest, read_list
from region_agent.worker.invocation import ShardFile
from sync.file_transfer.access import EXCHANGE_RULES, PeerCheck, end_revoked
from sync.file_transfer.arrival import Tickets
from sync.file_transfer.file_receiver import MAX_UPDATE_BYTES, FileReceiver
from sync.file_transfer.listening import credentials, listen
from sync.file_transfer.manifest import Manifest, Verdict
from sync.file_transfer.wire import manifest_of
from sync.tcp_streams.sockets import Tls

__all__ = ["LIST_SEQUENCE", "ShardPort", "ShardStore", "open_port"]

LIST_SEQUENCE = 1
"""Sequence number of the list of files; file n of it, counted from 0, has n + 2."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_GROWTH = 1.5
"""Factor by which a shard may be larger than the plan states, since it may have grown after its region's report."""
_SMALL_BYTES = 64 << 20
"""Bytes by which a shard may be larger in any case."""
_STOP_GRACE_SECONDS = 1.0
"""Time for open requests to end when the port is closed."""


class ShardStore:
    """Folder of one region's shard for one job: complete files by digest, the list of files, and finally the splits."""

    def __init__(self, folder: Path, source: str, dataset: str, planned_bytes: int) -> None:
        self.source, self._dataset = source, dataset
        self._max_bytes = max(int(planned_bytes * _MAX_GROWTH), planned_bytes + _SMALL_BYTES)
        self._folder = folder
        self._blobs, self._splits, self._list_file = folder / "blobs", folder / "splits", folder / "list"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self.list: ShardManifest | None = None
        self._through = LIST_SEQUENCE
        self.failed: GeofedError | None = None
        """Error of a list that cannot be used, also if it is sent again."""
        with contextlib.suppress(FileNotFoundError, GeofedError):
            self._set_list(read_list(self._list_file.read_bytes()))

    def _set_list(self, shard: ShardManifest) -> None:
        if shard.dataset != self._dataset:
            raise GeofedError("FRAME_INVALID", f"received a shard of {shard.dataset} instead of {self._dataset}")
        if shard.total_bytes > self._max_bytes:
            text = f"the shard of {self.source} has {shard.total_bytes} bytes, the plan allows {self._max_bytes}"
            hint = "restart its agent, so that it reports the present size, and submit the job again"
            raise GeofedError("LIMIT_EXCEEDED", text, hint=hint)
        self.list, self._through = shard, LIST_SEQUENCE

    # Receiving

    def verdict(self, manifest: Manifest) -> Verdict:
        """Whether a file is wanted, already stored, or not wanted now."""
        if manifest.sequence == LIST_SEQUENCE:
            known = self.list is not None and self.list.digest == manifest.digest
            return Verdict.HAVE if known else Verdict.WANT
        files, number = () if self.list is None else self.list.files, manifest.sequence - LIST_SEQUENCE - 1
        if number >= len(files) or (files[number].digest, files[number].size) != (
            manifest.digest,
            manifest.total_bytes,
        ):
            # This also refuses one file under many numbers, each of which would take disk space.
            return Verdict.LATER
        return Verdict.HAVE if self._blob(manifest.digest).exists() else Verdict.WANT

    def place_of(self, manifest: Manifest) -> Path:
        """Return the path for a received file."""
        if manifest.sequence == LIST_SEQUENCE:
            return self._folder / f"list-{manifest.digest.removeprefix('sha256:')}"
        return self._blob(manifest.digest)

    def stored(self, manifest: Manifest) -> None:
        """Handle a file that was stored; of the list this sets `list`, or `failed`."""
        if manifest.sequence != LIST_SEQUENCE:
            return
        path = self.place_of(manifest)
        try:
            content = path.read_bytes()
            self._set_list(read_list(content))
            write_durably(self._list_file, [content])
        except GeofedError as error:
            self.list, self.failed = None, error
        for file in (path, path.with_suffix(".json")):
            file.unlink(missing_ok=True)

    def _blob(self, digest: str) -> Path:
        return self._blobs / digest.removeprefix("sha256:")

    # Progress

    @property
    def have_bytes(self) -> int:
        """Bytes of the completely received files, up to the first that is missing."""
        files = () if self.list is None else self.list.files
        return sum(file.size for file in files[: self.through - LIST_SEQUENCE])

    @property
    def through(self) -> int:
        """Sequence number up to which all files are received; 0: not even the list."""
        if self.list is None:
            return 0
        files = self.list.files
        while (at := self._through - LIST_SEQUENCE) < len(files):
            if files[at].size and not self._blob(files[at].digest).exists():
                break
            self._through += 1
        return self._through

    @property
    def complete(self) -> bool:
        """Whether the list and all of its files are stored."""
        return self.list is not None and self.through == LIST_SEQUENCE + len(self.list.files)

    def link_splits(self) -> dict[str, tuple[ShardFile, ...]]:
        """Link the received files into folders of splits; returns the files of each split. Blocks.

        Raises ``GeofedError("DISK_FULL")``.
        """
        assert self.list is not None
        found: dict[str, list[ShardFile]] = {}
        with disk_full_as_error(self._splits):
            for file in self.list.files:
                path = self._splits / file.split / file.name
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if file.size:
                        os.link(self._blob(file.digest), path)
                    else:
                        path.touch()
                entry = ShardFile(name=file.name, folder=file.folder, path=str(path), shard=self.source)
                found.setdefault(file.split, []).append(entry)
        return {split: tuple(files) for split, files in found.items()}


class ShardPort(FileReceiver, sync_pb2_grpc.ShardPortServicer):
    """Service that receives the shards that a job's plan assigns to this region, each only from its own region."""

    def __init__(self, job: str, region: str, cloud: str, stores: Iterable[ShardStore]) -> None:
        super().__init__(job, Tickets())
        self._region, self._cloud = region, cloud
        self.stores = {shard_store.source: shard_store for shard_store in stores}
        self.changed = asyncio.Event()
        """Set when a file was stored."""

    def admit(self, caller: str | None, job: str | None = None) -> str:
        """Return the name of the caller if its shard is expected here, for this job.

        Raises ``GeofedError("FORBIDDEN")``.
        """
        if caller is None or caller not in self.stores:
            raise GeofedError("FORBIDDEN", f"{self._region} expects no shard of {caller}")
        if job is not None and job != self._job:
            raise GeofedError("FORBIDDEN", f"{self._region} expects no shard for {job} on this port")
        return caller

    def check(self, proto: sync_pb2.UpdateManifest, caller: str | None) -> Manifest:
        """Check that a manifest is valid and comes from the region of the shard."""
        if self.admit(caller, proto.job) != proto.region:
            raise GeofedError("FORBIDDEN", f"{caller} may not send a shard of {proto.region}")
        limit = MAX_LIST_BYTES if proto.sequence == LIST_SEQUENCE else MAX_UPDATE_BYTES
        if not 0 < proto.total_bytes <= limit:
            raise GeofedError("LIMIT_EXCEEDED", f"a file of {proto.total_bytes} bytes exceeds the limit of {limit}")
        if proto.sequence < LIST_SEQUENCE or not _DIGEST.fullmatch(proto.digest):
            raise GeofedError("FRAME_INVALID", "a file without a number or a digest")
        return manifest_of(proto)

    def judge(self, job: str, manifest: Manifest, via: str = "") -> Verdict:
        """Whether the shard's store wants a file."""
        return self.stores[manifest.region].verdict(manifest)

    def path_for(self, manifest: Manifest) -> Path:
        """Path of a file in the shard's store."""
        return self.stores[manifest.region].place_of(manifest)

    def stored(self, manifest: Manifest) -> None:
        """Tell the store that a file is durable, and wake those who wait for a change."""
        self.stores[manifest.region].stored(manifest)
        self.changed.set()

    def count_received(self, caller: str, count: int) -> None:
        """Do nothing: the sending region pays for traffic and counts it."""

    @answering
    async def Introduce(
        self, request: sync_pb2.IntroduceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> sync_pb2.Introduction:
        """Answer with this region's cloud and the files that it has already."""
        shard_store = self.stores[self.admit(peer_region(context), request.job)]
        return sync_pb2.Introduction(
            region=self._region,
            cloud=self._cloud,
            list_digest=shard_store.list.digest if shard_store.list is not None else "",
            have_through=shard_store.through,
        )

    def progress(self, source: str) -> str:
        """Return a text about the progress of a region's shard."""
        shard_store = self.stores[source]
        if shard_store.list is None:
            return "nothing received yet"
        arriving = (arrival.file.have for (region, _), arrival in self._incoming.items() if region == source)
        received = shard_store.have_bytes + sum(end - begin for have in arriving for begin, end in have)
        return f"received {min(received, shard_store.list.total_bytes):,} of {shard_store.list.total_bytes:,} bytes"

    def fail(self, error: GeofedError) -> None:
        """Have `complete` raise an error."""
        for shard_store in self.stores.values():
            shard_store.failed = error
        self.changed.set()

    async def complete(self) -> None:
        """Wait until all shards are received; raises ``GeofedError`` for a list that cannot be used."""
        while True:
            self.changed.clear()
            for shard_store in self.stores.values():
                if shard_store.failed is not None:
                    raise shard_store.failed
            if all(shard_store.complete for shard_store in self.stores.values()):
                return
            await self.changed.wait()


@contextlib.asynccontextmanager
async def open_port(port: ShardPort, config: RegionConfig, identity: Callable[[], Tls]) -> AsyncIterator[str]:
    """Listen for other regions' agents; yields the address that they connect to.

    Raises ``GeofedError("PORT_IN_USE")``.
    """
    host = config.server.exchange_host
    _, exchange, bulk = free_ports(host, _upper_half(config.server.ports), (0, 0, 0))
    revoked = identity().revoked
    access = AccessInterceptor(EXCHANGE_RULES, PeerCheck(config.name, lambda: frozenset(port.stores), revoked))
    server = grpc.aio.server(interceptors=[access], options=server_options())
    sync_pb2_grpc.add_ExchangeServicer_to_server(port, server)
    sync_pb2_grpc.add_ShardPortServicer_to_server(port, server)
    try:
        listens = listen(server, f"{host}:{exchange}", credentials(identity, mutual=True))
        if bulk is not None:
            try:
                port.open_bulk(host, bulk, identity)
            except OSError:
                raise GeofedError("PORT_IN_USE", f"cannot listen on {host}:{bulk}") from None
        await server.start()
        ending = background(end_revoked(revoked, access, lambda: port.bulk), port.fail)
        try:
            yield f"{config.advertise}:{listens}"
        finally:
            ending.cancel()
    finally:
        try:
            await server.stop(_STOP_GRACE_SECONDS)
        finally:
            if port.bulk is not None:
                await asyncio.to_thread(port.bulk.close)


def _upper_half(ports: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the upper half of a range of ports: the same partition's parameter server searches it from below at the
    same time."""
    return None if ports is None else (min(ports[1] - 1, max(ports[0], (ports[0] + ports[1]) // 2)), ports[1])
