"""The sending side of the WAN: one sender per peer, which sends updates until they are durable there."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CHUNK_BYTES, error_of
from geofed_pb.tasks import awaited
from geofed_pb.v1 import sync_pb2
from sync.file_transfer.bulk import BulkConnection, BulkUnreachable
from sync.file_transfer.direct import ConnectionReplaced, DirectConnection, LinkMeter
from sync.file_transfer.manifest import Manifest, PeerAddress
from sync.file_transfer.wire import manifest_to_proto
from sync.mapped_files import locked
from sync.tcp_streams.outgoing import Content, ranges_of
from sync.tcp_streams.sockets import DIAL_FAULT, Tls

__all__ = ["PeerSender", "SenderCallbacks"]

_log = logging.getLogger("geofed.ps.link")
_MAX_UNOFFERED_BYTES = CHUNK_BYTES
"""Updates up to this size are sent without an offer while the link is good."""
_MAX_BURST_UPDATES = 8
"""Small updates that are sent concurrently, without waiting for the acknowledgement of the one before."""
_MIN_BURST_BYTES = 2 * CHUNK_BYTES
"""Total bytes of such updates, unless the link's bandwidth-delay product is larger. More would not be faster, and what
has been sent is not summed up when the link breaks."""
_MIN_BACKOFF_SECONDS = 0.2
"""Pause before the first retry; it doubles with each retry."""
_MAX_BACKOFF_SECONDS = 1.0
"""Longest pause between retries."""
_COLLECT_RETRY_SECONDS = 5.0
"""Pause before the Collect call to a peer is repeated."""
_REVOKED_SECONDS = 1.0
"""Interval at which open connections are checked for a revoked certificate."""
_BULK_RETRY_SECONDS = 60.0
"""How long large updates are sent through the exchange port after the bulk port could not be reached."""


@dataclass(frozen=True)
class SenderCallbacks:
    """Callbacks of a sender."""

    trying: Callable[[str, Manifest], None] = lambda peer, manifest: None
    """An update's bytes are about to be sent."""
    failed: Callable[[str], None] = lambda peer: None
    """The peer could not be reached, the connection broke, or a transfer is overdue."""
    has: Callable[[str, str, int], None] = lambda peer, region, sequence: None
    """The peer has all updates of that region up to this sequence."""
    missing: Callable[[Manifest], None] = lambda manifest: None
    """The bytes of an update are no longer stored here."""
    refused: Callable[[GeofedError], None] = lambda error: None
    """An update failed with an error that is not retryable by its code; it is retried nevertheless."""
    signed: Callable[[sync_pb2.UpdateManifest], None] = lambda proto: None
    """Signs the manifest of an update that is about to be offered or sent."""


class _Replaced(Exception):
    """Raised when the update that was about to be sent has been removed or replaced."""


class _File:
    """The bytes of a file, read when they are sent: mapped, they would count as memory of this process once a peer. The
    file is closed with the last reference, since a connection may still read from it after an interruption."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._file, self._size = path, -1, size
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if not locked(self._file, path):
            raise FileNotFoundError(path)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, piece: slice) -> memoryview:
        begin, end, _ = piece.indices(self._size)
        data = os.pread(self._file, end - begin, begin)
        if len(data) < end - begin:
            raise OSError(f"{self._path} has become shorter")
        return memoryview(data)


class PeerSender:
    """Sends updates of any region to one peer, in order, and reports when each is durable there.

    It retries forever, with back-off. A transfer is aborted only after ``stall`` seconds without progress, or earlier
    if a new connection could be opened; the next attempt continues with what the peer lacks. Large updates are sent
    over bulk streams, which the peer opens if it cannot be reached from here.
    """

    def __init__(
        self,
        job: str,
        identity: Callable[[], Tls],
        path_of: Callable[[Manifest], Path | Content],
        arrived: Callable[[str, Manifest], None],
        stall: float,
        broke: Callable[[], None] = lambda: None,
        dial_back: Callable[[str, tuple[str, int], int], None] = lambda region, address, streams: None,
        bulk_port: Callable[[], int] = lambda: 0,
        callbacks: SenderCallbacks = SenderCallbacks(),
    ) -> None:
        """``dial_back`` opens streams to a peer that asks for them; ``bulk_port`` returns our own port, for the peer.

        ``path_of`` returns the file or the bytes of an update. A file must not change.
        """
        self._job, self._path_of, self._arrived, self._identity = job, path_of, arrived, identity
        self._broke = broke
        self._dial_back, self._callbacks = dial_back, callbacks
        self.meter = LinkMeter()
        self._direct = DirectConnection(identity, stall, self.meter)
        self._bulk = BulkConnection(job, identity, stall, self._count_sent, bulk_port)
        self._bulk_refused_until = 0.0
        self._met = asyncio.Event()
        self._waiting: dict[tuple[int, str], Manifest] = {}
        """Updates to send, in order."""
        self._news = asyncio.Event()
        self._link_is_good = False
        """Whether the last update was delivered at its first attempt."""

    def set_peer(self, peer: PeerAddress) -> None:
        """Set the peer; a new address or epoch is used from the next attempt on."""
        self._direct.set_peer(peer)
        self._bulk.set_peer(peer)
        self._met.set()

    def ship(self, peer: PeerAddress, manifests: tuple[Manifest, ...]) -> None:
        """Set the updates to send, in place of those before."""
        self.set_peer(peer)
        # Sorted once: there may be hundreds of thousands.
        self._waiting = dict(sorted((((item.sequence, item.region), item) for item in manifests), key=itemgetter(0)))
        if not manifests:
            # Nothing is sent any more, so a failure would never be cleared.
            self.meter.up, self.meter.fault = True, ""
        self._news.set()

    @property
    def backlog_bytes(self) -> int:
        """Bytes of updates that are not durable at the peer yet."""
        return sum(manifest.total_bytes for manifest in self._waiting.values())

    @property
    def mbps(self) -> float:
        """Payload rate in Mbit/s (`mbps_of`), of updates of any size."""
        return self.mbps_of(0)

    def mbps_of(self, update_bytes: int) -> float:
        """Return the payload rate of updates of a size in Mbit/s; less if the current transfer already takes longer
        than that rate explains."""
        return self._direct.mbps_of(update_bytes)

    async def run(self) -> None:
        """Send updates until cancelled."""
        works = {awaited(self._send_waiting()), awaited(self._end_revoked())}
        try:
            done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            for work in done:
                work.result()
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _end_revoked(self) -> None:
        """End what is open to the peer once its certificate is revoked, until cancelled. `DirectConnection` opens
        nothing to it again."""
        known: frozenset[str] = frozenset()
        while True:
            await asyncio.sleep(_REVOKED_SECONDS)
            serials = self._identity().revoked.serials
            if serials != known:
                known = serials
                self._bulk.end_revoked(serials)
                await self._direct.close()

    async def _send_waiting(self) -> None:
        backoff = _MIN_BACKOFF_SECONDS
        while True:
            await self._news.wait()
            if not self._waiting:
                self._news.clear()
                continue
            manifest = next(iter(self._waiting.values()))
            settled, burst = False, self._burst()
            total = sum(item.total_bytes for item in burst or [manifest])
            try:
                with self._direct.carrying(total):
                    settled = await self._carry_all(burst or [manifest], total)
            except FileNotFoundError:
                # The update was deleted: the peer's own updates show that it has this one, whose acknowledgement was
                # lost. If it was part of a burst, the next attempts send one update each and find out which one it was.
                if len(burst) <= 1:
                    self._waiting.pop((manifest.sequence, manifest.region), None)
                    if manifest.first:
                        self._callbacks.missing(manifest)
                await asyncio.sleep(_MIN_BACKOFF_SECONDS)
                continue
            except _Replaced:
                continue
            if settled:
                backoff = _MIN_BACKOFF_SECONDS
            else:
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)

    async def _carry_all(self, burst: list[Manifest], total_bytes: int) -> bool:
        """Send updates; return whether all are durable at the peer. Failures are recorded."""
        try:
            with _ignoring_closed_channel(), self._reporting_overdue(total_bytes):
                if len(burst) > 1:
                    return await self._carry_burst(burst)
                if await self._carry(burst[0]):
                    self._settled(burst[0])
                    return True
        except FileNotFoundError:
            raise
        except (grpc.RpcError, GeofedError, OSError) as error:
            await self._note_failure(error)
        return False

    @contextlib.contextmanager
    def _reporting_overdue(self, total_bytes: int) -> Iterator[None]:
        """Report a transfer that is overdue. An unstable link or a stalled server may break no connection for a while;
        the updates that pile up behind it can then be summed up nevertheless."""
        if not self.meter.mbps:
            yield
            return
        overdue = self._direct.overdue_seconds(total_bytes)
        timer = asyncio.get_running_loop().call_later(overdue, self._callbacks.failed, self._region)
        try:
            yield
        finally:
            timer.cancel()

    def _begin_to_send(self, manifest: Manifest) -> None:
        """Report that an update is about to be sent. Raises ``_Replaced`` if it was removed or replaced since it was
        picked: the peer must not get part of an update that it is also sent in a sum."""
        waiting = self._waiting.get((manifest.sequence, manifest.region))
        if waiting is None or waiting.digest != manifest.digest:
            raise _Replaced
        self._callbacks.trying(self._region, manifest)

    def _settled(self, manifest: Manifest) -> None:
        self._direct.arrived()
        self._waiting.pop((manifest.sequence, manifest.region), None)
        self.meter.payload_bytes += manifest.total_bytes
        self._arrived(self._region, manifest)

    async def close(self) -> None:
        """Close all connections. `run` and `collect` must have been cancelled before."""
        await self._bulk.close()
        await self._direct.close()

    @property
    def _region(self) -> str:
        """Name of the peer's region."""
        return self._direct.require_peer().region

    def _count_sent(self, count: int) -> None:
        self.meter.sent_bytes += count

    async def _note_failure(self, error: Exception) -> None:
        reason = error_of(error) if isinstance(error, grpc.RpcError) else error
        if isinstance(reason, ConnectionReplaced):
            _log.info("%s: connection to %s replaced by a new one: %s", DIAL_FAULT, self._region, reason)
            self._direct.note_stall()
        elif self._waiting:
            if self.meter.up:
                _log.warning("%s: link to %s is down: %s", DIAL_FAULT, self._region, reason)
            self.meter.up, self.meter.fault = False, str(reason) or type(reason).__name__
        self.meter.failures += 1
        self._link_is_good = False
        self._callbacks.failed(self._region)
        if isinstance(reason, GeofedError) and not reason.retryable:
            self._callbacks.refused(reason)
        if self._direct.has_replacement or not isinstance(error, grpc.RpcError):
            # After an interruption, a new connection works sooner than the old one recovers.
            await self._direct.use_replacement()
        self._broke()

    # One update

    async def _carry(self, manifest: Manifest) -> bool:
        """Send one update; return True once it is durable at the peer.

        While the link is good a small update is sent without an offer: the round trip of the offer would cost more than
        bytes that the peer may have already.
        """
        try:
            reply = await self._carry_directly(manifest)
        except (grpc.RpcError, BulkUnreachable, GeofedError) as error:
            if not (self._bulk.can_call_peer and _is_unavailable(error)):
                raise
            if self._direct.reached and isinstance(error, grpc.RpcError):
                # The peer was reachable before, so it may only have restarted, and the old connection not have
                # recovered yet.
                self._direct.reached = False
                await self._direct.close()
                raise
            view = self._content(manifest)
            self._begin_to_send(manifest)
            reply = await self._bulk.send_collected(self._signed(manifest), view)
            self.meter.slow_path = "the peer opens the streams, since it cannot be reached from here"
            self._note_bulk()
        if reply.verdict == sync_pb2.OfferReply.VERDICT_FENCED:
            raise GeofedError("FENCED", f"{self._region} knows a newer epoch of {manifest.region}")
        self._bulk.learn(reply)
        self.meter.up = True
        if reply.verdict == sync_pb2.OfferReply.VERDICT_UNKNOWN and reply.next:
            self._callbacks.has(self._region, manifest.region, reply.next - 1)
        self._link_is_good = bool(reply.verdict == sync_pb2.OfferReply.VERDICT_HAVE)
        return self._link_is_good

    def _burst(self) -> list[Manifest]:
        """Return the next small updates that can be sent concurrently; none unless the link is good."""
        burst: list[Manifest] = []
        if self._link_is_good and not self._bulk.peer_dials:
            budget = max(_MIN_BURST_BYTES, 2 * self.meter.mbps * 1e6 / 8 * self.meter.rtt_ms / 1e3)
            for manifest in itertools.islice(self._waiting.values(), _MAX_BURST_UPDATES):
                budget -= manifest.total_bytes
                if manifest.total_bytes > _MAX_UNOFFERED_BYTES or (burst and budget < 0):
                    break
                burst.append(manifest)
        return burst

    async def _carry_burst(self, burst: list[Manifest]) -> bool:
        """Send several updates concurrently, because one after the other each would take a round trip. Return True if
        all are durable at the peer.

        They are acknowledged in order, since an acknowledgement covers all updates before it.
        """
        self._link_is_good = False
        sends = [awaited(self._send_whole(manifest)) for manifest in burst]
        try:
            for manifest, send in zip(burst, sends, strict=True):
                verdict = (await send).verdict
                if verdict == sync_pb2.OfferReply.VERDICT_FENCED:
                    raise GeofedError("FENCED", f"{self._region} knows a newer epoch of {manifest.region}")
                if verdict != sync_pb2.OfferReply.VERDICT_HAVE:
                    return False
                self._settled(manifest)
        finally:
            for send in sends:
                send.cancel()
            await asyncio.gather(*sends, return_exceptions=True)
        self.meter.up = self._link_is_good = True
        return True

    async def _send_whole(self, manifest: Manifest) -> sync_pb2.OfferReply:
        view = self._content(manifest)
        self._begin_to_send(manifest)
        return await self._direct.send(self._signed(manifest), view, ())

    def _signed(self, manifest: Manifest) -> sync_pb2.UpdateManifest:
        proto = manifest_to_proto(self._job, manifest)
        self._callbacks.signed(proto)
        return proto

    async def _carry_directly(self, manifest: Manifest) -> sync_pb2.OfferReply:
        proto = self._signed(manifest)
        large = manifest.total_bytes > _MAX_UNOFFERED_BYTES
        link_is_good, self._link_is_good = self._link_is_good, False
        if self._bulk.peer_dials:
            # A route that is blocked in one direction mostly stays so; it is tried again once the peer's streams have
            # closed.
            raise BulkUnreachable("the peer could not be reached at the last attempt")
        bulk = large and time.monotonic() >= self._bulk_refused_until
        view = self._content(manifest)
        if link_is_good and bulk and self._bulk.can_dial:
            self._begin_to_send(manifest)
            reply = await self._bulk.send(proto, view, have=())
            self._note_bulk()
            return reply
        if link_is_good and not large:
            self._begin_to_send(manifest)
            return await self._direct.send(proto, view, ())
        reply = await self._direct.offer(proto)
        if reply.verdict != sync_pb2.OfferReply.VERDICT_WANT:
            return reply
        self._bulk.learn(reply)
        have = ranges_of(reply, manifest.total_bytes)
        self._begin_to_send(manifest)
        if bulk and self._bulk.can_dial:
            try:
                reply = await self._bulk.send(proto, view, have)
            except BulkUnreachable as error:
                self._fall_back(error)
            else:
                self._note_bulk()
                return reply
        return await self._direct.send(proto, view, have)

    def _note_bulk(self) -> None:
        self.meter.mbps, self.meter.streams = self._bulk.mbps, self._bulk.used_streams
        self.meter.rtt_ms = self._bulk.rtt_seconds * 1e3 or self.meter.rtt_ms
        if not self._bulk.peer_dials:
            self.meter.slow_path = ""

    def _fall_back(self, error: Exception) -> None:
        """Send large updates through the exchange port for a while."""
        self._bulk_refused_until = time.monotonic() + _BULK_RETRY_SECONDS
        self.meter.slow_path = "one stream, since the bulk port cannot be reached"
        path = self.meter.slow_path
        _log.warning("%s: large updates to %s are sent over %s: %s", DIAL_FAULT, self._region, path, error)
        self._broke()

    def _content(self, manifest: Manifest) -> Content:
        """Return the bytes of an update; a file is read piece by piece."""
        found = self._path_of(manifest)
        return _File(found, manifest.total_bytes) if isinstance(found, Path) else found

    # Peers that cannot be reached in one direction

    async def collect(self) -> None:
        """Hold a Collect call open at the peer, over which it can ask this side to open streams. Runs until
        cancelled."""
        await self._met.wait()
        while True:
            with contextlib.suppress(grpc.RpcError), _ignoring_closed_channel():
                calls = (await self._direct.stub()).Collect(sync_pb2.CollectRequest(job=self._job))
                async for call in calls:
                    peer = self._direct.require_peer()
                    if 0 < call.bulk_port < 1 << 16 and 0 < call.streams <= 16:
                        self._dial_back(peer.region, (_host(peer.address), call.bulk_port), call.streams)
            await asyncio.sleep(_COLLECT_RETRY_SECONDS)

    async def calls(self) -> AsyncIterator[sync_pb2.CollectCall]:
        """Yield requests to open streams, for the peer's Collect call."""
        async for call in self._bulk.calls():
            yield call

    def adopt(self, ticket: bytes, connection: ssl.SSLSocket) -> None:
        """Use a stream that the peer has opened."""
        self._bulk.adopt(ticket, connection)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _is_cancelled() -> bool:
    """Whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextlib.contextmanager
def _ignoring_closed_channel() -> Iterator[None]:
    """Suppress the CancelledError of a call whose channel was closed, unless the task itself is cancelled."""
    try:
        yield
    except asyncio.CancelledError:
        if _is_cancelled():
            raise


def _is_unavailable(error: Exception) -> bool:
    reason = error_of(error) if isinstance(error, grpc.RpcError) else error
    return isinstance(reason, BulkUnreachable) or (isinstance(reason, GeofedError) and reason.code == "UNAVAILABLE")
