"""The sending side of the WAN: one courier for each peer, which carries our updates there until they are durable."""

from __future__ import annotations

import asyncio
import logging
import mmap
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CHUNK_BYTES, channel, error_of, region_name
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc
from sync.ps.events import Manifest, Peer

__all__ = ["Courier", "LinkMeter", "Tls", "manifest_to_proto"]

_log = logging.getLogger("geofed.ps.link")
_UNASKED_BYTES = CHUNK_BYTES
_BACKOFF_FIRST_SECONDS = 0.2
_BACKOFF_MOST_SECONDS = 3.0


@dataclass(frozen=True)
class Tls:
    """The identity a parameter server shows and trusts."""

    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes


@dataclass
class LinkMeter:
    """What one directed link has carried, counted where it is written."""

    sent_bytes: int = 0
    rtt_ms: float = 0.0
    """Of the last offer, its answer included."""
    mbps: float = 0.0
    """Payload rate of the last update."""
    failures: int = 0
    up: bool = True
    """Whether the last attempt to speak to the peer succeeded."""
    fault: str = ""
    """Why the last attempt did not succeed, where ``up`` is false."""


def manifest_to_proto(job: str, manifest: Manifest) -> sync_pb2.UpdateManifest:
    return sync_pb2.UpdateManifest(
        job=job,
        region=manifest.region,
        epoch=manifest.epoch,
        sequence=manifest.sequence,
        digest=manifest.digest,
        total_bytes=manifest.total_bytes,
        weight=manifest.weight,
    )


class Courier:
    """Carries updates to one peer, one after the other, and tells when each is durable there.

    A cut link is tried again for ever, with back-off; a transfer is given up only after ``stall_seconds`` without
    progress, and goes on at the offset that the peer then names.
    """

    def __init__(
        self,
        job: str,
        identity: Callable[[], Tls],
        path_of: Callable[[int], Path],
        arrived: Callable[[str, int], None],
        stall: float,
        broke: Callable[[], None] = lambda: None,
    ) -> None:
        self._job, self._identity, self._path_of, self._arrived = job, identity, path_of, arrived
        self._stall_seconds, self._broke = stall, broke
        self.meter = LinkMeter()
        self._peer: Peer | None = None
        self._waiting: dict[int, Manifest] = {}
        self._news = asyncio.Event()
        self._trusted = False
        """The last update went through at its first try."""
        self._channel: grpc.aio.Channel | None = None
        self._shown: tuple[str, Tls] | None = None
        """Address and identity that the channel was opened with."""

    def ship(self, peer: Peer, manifests: tuple[Manifest, ...]) -> None:
        """Take over updates to carry; a new address or epoch is used from the next try on."""
        self._peer = peer
        self._waiting |= {manifest.sequence: manifest for manifest in manifests}
        self._news.set()

    async def run(self) -> None:
        """Work until cancelled."""
        backoff = _BACKOFF_FIRST_SECONDS
        try:
            while True:
                await self._news.wait()
                if not self._waiting:
                    self._news.clear()
                    continue
                sequence = min(self._waiting)
                try:
                    settled = await self._carry(self._waiting[sequence])
                except (grpc.RpcError, GeofedError, OSError) as error:
                    settled = False
                    self._note_failure(error)
                if settled:
                    del self._waiting[sequence]
                    self._arrived(self._require_peer().region, sequence)
                    backoff = _BACKOFF_FIRST_SECONDS
                else:
                    await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                    backoff = min(backoff * 2, _BACKOFF_MOST_SECONDS)
        finally:
            await self._close()

    def _require_peer(self) -> Peer:
        if self._peer is None:
            raise GeofedError("INTERNAL", "a courier without a peer")
        return self._peer

    def _note_failure(self, error: Exception) -> None:
        peer = self._require_peer()
        told = error_of(error) if isinstance(error, grpc.RpcError) else error
        if self.meter.up:
            _log.warning("link to %s is down: %s", peer.region, told)
        self.meter.up, self.meter.fault = False, str(told) or type(told).__name__
        self.meter.failures += 1
        self._broke()

    async def _carry(self, manifest: Manifest) -> bool:
        """Offer one update and send what is missing; True once it is durable there.

        While the link is good a small update is sent unasked: the round trip of the offer would cost more than the
        bytes that a peer may have already.
        """
        stub = await self._stub()
        proto = manifest_to_proto(self._job, manifest)
        if self._trusted and manifest.total_bytes <= _UNASKED_BYTES:
            self._trusted = False
            reply = await self._send(stub, manifest, proto, 0)
        else:
            begun = time.monotonic()
            reply = await stub.Offer(proto, timeout=self._stall_seconds)
            self.meter.rtt_ms = (time.monotonic() - begun) * 1e3
            self.meter.sent_bytes += proto.ByteSize()
            self.meter.up = True
            if reply.verdict == sync_pb2.OfferReply.VERDICT_WANT:
                reply = await self._send(stub, manifest, proto, reply.have_bytes)
        if reply.verdict == sync_pb2.OfferReply.VERDICT_FENCED:
            raise GeofedError("FENCED", f"{self._require_peer().region} knows a newer epoch of this region")
        self._trusted = bool(reply.verdict == sync_pb2.OfferReply.VERDICT_HAVE)
        return self._trusted

    async def _send(
        self, stub: sync_pb2_grpc.ExchangeStub, manifest: Manifest, proto: sync_pb2.UpdateManifest, offset: int
    ) -> sync_pb2.OfferReply:
        progress = _Progress()
        begun, first = time.monotonic(), offset
        # Opened here and not by the stream: what goes wrong inside a stream cancels this task.
        with self._path_of(manifest.sequence).open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), manifest.total_bytes, prot=mmap.PROT_READ))
        call = stub.Send(self._chunks(view, proto, offset, progress))
        watch = asyncio.ensure_future(progress.stalled(self._stall_seconds))
        try:
            await asyncio.wait({watch, asyncio.ensure_future(call.code())}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                raise GeofedError("TRANSFER_STALLED", f"no progress for {self._stall_seconds:.0f} s")
            reply: sync_pb2.OfferReply = await call
        finally:
            watch.cancel()
            call.cancel()
        seconds = time.monotonic() - begun
        self.meter.mbps = (manifest.total_bytes - first) * 8 / 1e6 / max(seconds, 1e-6)
        return reply

    async def _chunks(
        self, view: memoryview, proto: sync_pb2.UpdateManifest, offset: int, progress: _Progress
    ) -> AsyncIterator[sync_pb2.UpdateChunk]:
        head: sync_pb2.UpdateManifest | None = proto
        while offset < len(view) or head is not None:
            data = bytes(view[offset : offset + CHUNK_BYTES])
            yield sync_pb2.UpdateChunk(manifest=head, offset=offset, data=data)
            # The stream takes the next chunk only when the one before has left: flow control is the progress.
            self.meter.sent_bytes += len(data)
            progress.made()
            head, offset = None, offset + len(data)

    async def _stub(self) -> sync_pb2_grpc.ExchangeStub:
        peer, tls = self._require_peer(), self._identity()
        if self._channel is None or self._shown != (peer.address, tls):
            await self._close()
            self._channel = channel(
                peer.address,
                ca_pem=tls.ca_pem,
                name=region_name(peer.region),
                certificate_pem=tls.certificate_pem,
                key_pem=tls.key_pem,
            )
            self._shown = (peer.address, tls)
        return sync_pb2_grpc.ExchangeStub(self._channel)

    async def _close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None


class _Progress:
    """Tells a slow transfer from a dead one."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def made(self) -> None:
        self._last = time.monotonic()

    async def stalled(self, seconds: float) -> None:
        """Returns once nothing has moved for that long."""
        while (left := self._last + seconds - time.monotonic()) > 0:  # noqa: ASYNC110 - time passing is the event
            await asyncio.sleep(left)
