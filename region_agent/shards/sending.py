"""Sends this region's shard to another region, if the region's file allows it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import structlog

from geofed_pb.errors import GeofedError, unforeseen_as_internal
from geofed_pb.files.durable import write_durably
from geofed_pb.rpc import channel, error_of, region_name, to_proto
from geofed_pb.tasks import awaited, background
from geofed_pb.v1 import agent_pb2, sync_pb2, sync_pb2_grpc
from region_agent.config import RegionConfig
from region_agent.link.networks import resolved
from region_agent.partition.billing import egress, money_of
from region_agent.partition.events import RecordEvent
from region_agent.policy import check_sending
from region_agent.shards.listing import FileContent, Listed, ShardManifest, listed
from region_agent.shards.receiving import LIST_SEQUENCE
from region_agent.state.store import AgentStore
from sync.file_transfer.file_receiver import MAX_UPDATE_BYTES
from sync.file_transfer.manifest import Manifest, PeerAddress
from sync.file_transfer.peer_sender import PeerSender, SenderCallbacks
from sync.tcp_streams.sockets import Tls

__all__ = ["Sending", "SendingContext"]

_log = structlog.get_logger("geofed.shard")
_STALL_SECONDS = 30.0
"""Timeout of a request, and of a transfer without progress."""
_REPORT_SECONDS = 1.0
"""Interval of reports on the transfer."""
_FIRST_PAUSE_SECONDS = 0.5
"""Pause before the first retry; it doubles with each further one."""
_LONGEST_PAUSE_SECONDS = 10.0
"""Longest pause before a retry."""
_FATAL = frozenset({"RESIDENCY_VIOLATION", "CONFIG_INVALID", "FORBIDDEN", "LIMIT_EXCEEDED"})
"""Error codes that a retry cannot fix."""
_REFUSALS = frozenset({"LIMIT_EXCEEDED", "FRAME_INVALID", "SHARD_UNREADABLE"})
"""Errors of a file's transfer that the sender would repeat without end. FORBIDDEN is not among them, since the sender
then requests a new ticket."""
_MAX_FAILURES = 5
"""Failures in a row without progress after which the transfer fails, where the error is not retryable."""


@dataclass(frozen=True)
class SendingContext:
    """The parts of the region that sending a shard uses."""

    config: RegionConfig
    store: AgentStore
    identity: Callable[[], Tls]
    folder: Path
    """Folder for temporary files of transfers, by job."""
    report: Callable[[agent_pb2.PartitionReport, bool], None]
    record_event: Callable[[str, RecordEvent], None]


class _Progress:
    """What the other region still lacks of one transfer."""

    def __init__(self, left: set[int]) -> None:
        self.left = left
        """Sequence numbers of the files that it has not stored."""
        self.refused: GeofedError | None = None
        """The first error that the sender would repeat without end."""
        self._changed = asyncio.Event()

    def arrived(self, _: str, manifest: Manifest) -> None:
        self.left.discard(manifest.sequence)
        self._changed.set()

    def note(self, error: GeofedError) -> None:
        # If a file cannot be read, the list of files must be made again.
        if error.code in _REFUSALS:
            self.refused = self.refused or error
            self._changed.set()

    async def changed_within(self, seconds: float) -> None:
        """Wait for the next change, but no longer than this."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


class Sending:
    """The transfer of one job's shard. It lasts until the job ends, since the other region may ask for the shard
    again."""

    def __init__(self, context: SendingContext, order: agent_pb2.SendShard, *, sent: bool = False) -> None:
        """``sent``: the shard was sent completely before the agent's restart."""
        self._context, self.order, self.job = context, order, order.job
        self.state, self.condition = "sent" if sent else "sending", ""
        self._error: GeofedError | None = None
        self._peer_sender: PeerSender | None = None
        self._address = ""
        """Address of the other region's agent, as resolved for the present attempt."""
        self._transfer_task: asyncio.Task[None] | None = None
        """The sender's background task."""
        self._counted, self._sent = 0, 0
        """Bytes sent by the present sender, and by all of them."""
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Report the state, and start the transfer in the background unless it is complete."""
        self._enter(self.state)
        if self.state == "sent":
            return
        self._task = background(self._work(), self._unforeseen, name=f"shard of {self.job}")

    def _unforeseen(self, error: GeofedError) -> None:
        self._error = error
        self._enter("failed", error.message)

    async def close(self) -> None:
        """End the transfer here; the other region keeps the files that it has."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        # The task may have been cancelled while it was closing the sender.
        await self._close_sender()
        if self.state == "stopped":
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def stopped(self) -> None:
        """Send the last account at the end of the job. Bytes sent later are not counted."""
        if self._peer_sender is not None:
            self._count(self._peer_sender)
        self._enter("stopped")

    async def _work(self) -> None:
        pause, failures = _FIRST_PAUSE_SECONDS, 0
        log = partial(_log.exception, "a shard could not be sent", job=self.job)
        while True:
            before = self._sent
            try:
                # Every failure is reported to the control plane.
                with unforeseen_as_internal(log, grpc.RpcError, OSError):
                    await self._send()
                    return
            except (GeofedError, grpc.RpcError, OSError) as raised:
                error = _error_from(raised, self.order)
            moved = self._sent > before
            failures = 1 if moved else failures + 1
            pause = _FIRST_PAUSE_SECONDS if moved else min(pause * 2, _LONGEST_PAUSE_SECONDS)
            if error.code in _FATAL or (failures >= _MAX_FAILURES and not error.retryable):
                self._error = error
                self._enter("refused" if error.code in _FATAL else "failed", error.message)
                return
            self.condition = f"{error.code}: {error.message}; retrying"
            self._report(durable=False)
            await asyncio.sleep(pause)

    @property
    def _folder(self) -> Path:
        """Folder for the list, and for files downloaded from an object store."""
        return self._context.folder / self.job

    # One attempt

    async def _send(self) -> None:
        order, config = self.order, self._context.config
        check_sending(config, order, None)
        self._address = await resolved(order.address, order.to, order.seen, config.policy.peer_networks)
        peer = await self._introduction()
        check_sending(config, order, peer.cloud)
        self.condition = "reading the shard"
        self._report(durable=False)
        dataset = config.datasets[order.dataset]
        shard = await asyncio.to_thread(listed, order.dataset, dataset, config.stores, self._folder / "objects")
        begun, before = time.monotonic(), self._sent
        text = f"{shard.shard.total_bytes:,} bytes to {order.to}"
        self._record_event("shard.sending", text, shard.shard, epoch=order.epoch)
        if (largest := max(file.size for file in shard.shard.files)) > MAX_UPDATE_BYTES:
            text = f"a file has {largest} bytes, which exceeds the limit of {MAX_UPDATE_BYTES}"
            raise GeofedError("LIMIT_EXCEEDED", text)
        await self._transfer(shard, peer)
        seconds, sent = time.monotonic() - begun, self._sent - before
        text = f"{order.to} has the whole shard: {sent:,} bytes in {seconds:.1f} s"
        self._record_event("shard.sent", text, shard.shard, sent_bytes=sent, seconds=seconds)
        self._context.store.keep_sent(self.job)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        self._enter("sent")

    async def _introduction(self) -> sync_pb2.Introduction:
        """Ask the other region for its cloud and the files that it has; its certificate proves its name."""
        order, tls = self.order, self._context.identity()
        async with channel(
            self._address,
            ca_pem=tls.ca_pem,
            name=region_name(order.to),
            certificate_pem=tls.certificate_pem,
            key_pem=tls.key_pem,
        ) as connection:
            request = sync_pb2.IntroduceRequest(job=order.job)
            introduction: sync_pb2.Introduction = await sync_pb2_grpc.ShardPortStub(connection).Introduce(
                request, timeout=_STALL_SECONDS
            )
            return introduction

    async def _transfer(self, shard: Listed, receiver: sync_pb2.Introduction) -> None:
        """Send the list, then the files, until the other region has stored all of them."""
        order, list_file = self.order, self._folder / "list"
        list_file.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(write_durably, list_file, [shard.shard.to_bytes()])
        manifests = self._manifests(shard.shard, receiver)
        progress = _Progress({manifest.sequence for manifest in manifests})

        def content_of(manifest: Manifest) -> Path | FileContent:
            index = manifest.sequence - LIST_SEQUENCE - 1
            return list_file if index < 0 else shard.content(index)

        peer_sender = self._peer_sender = PeerSender(
            order.job,
            self._context.identity,
            content_of,
            progress.arrived,
            _STALL_SECONDS,
            callbacks=SenderCallbacks(refused=progress.note),
        )
        transfer_task = self._transfer_task = awaited(peer_sender.run(), name=f"the shard of {order.job} to {order.to}")
        self._counted = 0
        try:
            peer = PeerAddress(order.to, order.epoch, self._address)
            peer_sender.ship(peer, tuple(m for m in manifests if m.sequence == LIST_SEQUENCE) or manifests)
            list_stored = LIST_SEQUENCE not in progress.left
            while progress.left:
                await progress.changed_within(_REPORT_SECONDS)
                if transfer_task.done():
                    transfer_task.result()
                if progress.refused is not None:
                    raise progress.refused
                if not list_stored and LIST_SEQUENCE not in progress.left:
                    # The receiver accepts files only after the list.
                    list_stored = True
                    peer_sender.ship(peer, tuple(m for m in manifests if m.sequence in progress.left))
                self._report_progress(peer_sender, shard.shard)
        finally:
            await self._close_sender()

    async def _close_sender(self) -> None:
        """Close the connections to the other region. May be called twice."""
        if self._transfer_task is not None:
            self._transfer_task.cancel()
            await asyncio.gather(self._transfer_task, return_exceptions=True)
        if self._peer_sender is not None:
            await self._peer_sender.close()
            self._count(self._peer_sender)

    def _manifests(self, shard: ShardManifest, receiver: sync_pb2.Introduction) -> tuple[Manifest, ...]:
        """Return manifests of the files that the other region lacks, in order."""
        known = receiver.have_through if receiver.list_digest == shard.digest else 0
        data = shard.to_bytes()
        sizes = [(shard.digest, len(data)), *((file.digest, file.size) for file in shard.files)]
        return tuple(
            Manifest(self._context.config.name, self.order.epoch, number, digest, size, 0.0)
            for number, (digest, size) in enumerate(sizes, LIST_SEQUENCE)
            if size and number > known
        )

    # Reports

    def _report_progress(self, peer_sender: PeerSender, shard: ShardManifest) -> None:
        self._count(peer_sender)
        meter = peer_sender.meter
        self.condition = f"sent {meter.sent_bytes:,} of {shard.total_bytes:,} bytes"
        if not meter.up:
            self.condition += "; the link is down"
        elif meter.slow_path:
            self.condition += f"; a slower path is used: {meter.slow_path}"
        self._report(durable=False)

    def _count(self, peer_sender: PeerSender) -> None:
        grown = peer_sender.meter.sent_bytes - self._counted
        if grown and self.state != "stopped":
            self._counted, self._sent = self._counted + grown, self._sent + grown
            self._context.store.add_to_meters(self.job, {f"sent_bytes:{self.order.to}": float(grown)})

    def _record_event(self, kind: str, text: str, shard: ShardManifest, **more: float) -> None:
        data: dict[str, object] = {
            "to": self.order.to, "digest": shard.digest, "files": len(shard.files), "bytes": shard.total_bytes, **more
        }  # fmt: skip
        self._context.record_event(self.job, RecordEvent(kind, f"{self._context.config.name}: {text}", data))

    def _enter(self, state: str, condition: str = "") -> None:
        self.state, self.condition = state, condition
        self._report(durable=True)

    def _report(self, *, durable: bool) -> None:
        context, meters = self._context, self._context.store.meters(self.job)
        sent = {name.removeprefix("sent_bytes:"): n for name, n in meters.items() if name.startswith("sent_bytes:")}
        message = agent_pb2.PartitionReport(
            job=self.job,
            epoch=self.order.epoch,
            state=self.state,
            condition=self.condition,
            error=to_proto(self._error) if self._error else None,
            meter=context.store.meter_id,
            totals=agent_pb2.MeterTotals(
                money=money_of(egress(meters, context.config.prices) if context.config.prices else []),
                sent_bytes={to: int(count) for to, count in sent.items()},
            ),
        )
        if self._peer_sender is not None:
            link = message.links[self.order.to]
            link.rtt_ms, link.mbps = self._peer_sender.meter.rtt_ms, self._peer_sender.mbps
        context.report(message, durable)


def _error_from(error: Exception, order: agent_pb2.SendShard) -> GeofedError:
    found = error_of(error) if isinstance(error, grpc.RpcError) else error
    if isinstance(found, GeofedError) and found.code not in ("UNAVAILABLE", "CERTIFICATE_INVALID", "INTERNAL"):
        return found
    # What answers at the other region's address is not for users.
    _log.warning("a shard could not be sent", job=order.job, error=str(found))
    text = f"the servers of {order.to} cannot be reached"
    return GeofedError("UNAVAILABLE", text, hint="the logs of both regions' agents have the reason")
