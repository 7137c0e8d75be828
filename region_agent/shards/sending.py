"""This region's shard on its way to another one: only where the region's own file allows it, whatever was asked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import channel, error_of, region_name, to_proto
from geofed_pb.v1 import agent_pb2, common_pb2, sync_pb2, sync_pb2_grpc
from region_agent.config import RegionConfig
from region_agent.partition.billing import egress
from region_agent.partition.events import Happened
from region_agent.policy import check_sending
from region_agent.shards.listing import FileContent, Listed, ShardList, listed
from region_agent.shards.receiving import LIST_SEQUENCE
from region_agent.state.store import AgentStore
from sync.durable import write_durably
from sync.transfer.intake import MAX_UPDATE_BYTES
from sync.transfer.manifest import Manifest, Peer
from sync.transfer.peer_sender import PeerSender, SenderCallbacks
from sync.transport.sockets import Tls

__all__ = ["Hands", "Sending"]

_log = logging.getLogger("geofed.shard")
_STALL_SECONDS = 30.0
_TOLD_SECONDS = 1.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 10.0
_GIVEN_UP = frozenset({"RESIDENCY_VIOLATION", "CONFIG_INVALID", "FORBIDDEN", "LIMIT_EXCEEDED"})
"""Codes that trying again does not mend."""
_REFUSALS = frozenset({"LIMIT_EXCEEDED", "FRAME_INVALID", "SHARD_UNREADABLE"})
"""Of a file on its way: the sender would meet it for ever. FORBIDDEN is none: that asks for a new ticket by itself."""
_PATIENCE = 5
"""Tries in a row, with no progress, to read a shard that cannot be read."""


@dataclass(frozen=True)
class Hands:
    """What sending a shard has around it in its region."""

    config: RegionConfig
    store: AgentStore
    identity: Callable[[], Tls]
    folder: Path
    """For what is needed while shards travel, by job."""
    report: Callable[[agent_pb2.PartitionReport, bool], None]
    happened: Callable[[str, Happened], None]


class Sending:
    """One job's shard, until the other region has all of it and then until the job ends: it may ask for it again."""

    def __init__(self, hands: Hands, order: agent_pb2.SendShard, *, sent: bool = False) -> None:
        """``sent``: in an earlier life of the agent."""
        self._hands, self.order, self.job = hands, order, order.job
        self.state, self.condition = "sent" if sent else "sending", ""
        self._error: GeofedError | None = None
        self._peer_sender: PeerSender | None = None
        self._carrying: asyncio.Task[None] | None = None
        """The sender's work."""
        self._counted, self._sent = 0, 0
        """Bytes of the present sender, and of all."""
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._enter(self.state)
        if self.state == "sent":
            return
        self._task = asyncio.create_task(self._work(), name=f"shard of {self.job}")

    async def close(self) -> None:
        """End it here; the other region keeps what it has."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        # It may have been cancelled while it was putting it down itself.
        await self._put_down()
        if self.state == "stopped":
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def stopped(self) -> None:
        """The job has ended: the last word on what this has cost. What is still on its way is not counted any more."""
        if self._peer_sender is not None:
            self._count(self._peer_sender)
        self._enter("stopped")

    async def _work(self) -> None:
        pause, setbacks = _FIRST_PAUSE_SECONDS, 0
        while True:
            before = self._sent
            try:
                await self._send()
                return
            except (GeofedError, grpc.RpcError, OSError) as raised:
                error = _told(raised)
            except Exception as raised:  # noqa: BLE001 - the task's edge: what it broke on is told to the control plane
                _log.exception("the shard of %s", self.job)
                error = GeofedError("INTERNAL", f"{type(raised).__name__}: {raised}")
            moved = self._sent > before
            setbacks = 1 if moved else setbacks + 1
            pause = _FIRST_PAUSE_SECONDS if moved else min(pause * 2, _LONGEST_PAUSE_SECONDS)
            if error.code in _GIVEN_UP or (setbacks >= _PATIENCE and not error.retryable):
                self._error = error
                self._enter("refused" if error.code in _GIVEN_UP else "failed", error.message)
                return
            self.condition = f"{error.code}: {error.message}; trying again"
            self._report(durable=False)
            await asyncio.sleep(pause)

    @property
    def _folder(self) -> Path:
        """For the list, and for what is in an object store."""
        return self._hands.folder / self.job

    # One try

    async def _send(self) -> None:
        order, config = self.order, self._hands.config
        check_sending(config, order, None)
        there = await self._introduced()
        check_sending(config, order, there.cloud)
        self.condition = "reading the shard"
        self._report(durable=False)
        dataset = config.datasets[order.dataset]
        shard = await asyncio.to_thread(listed, order.dataset, dataset, config.stores, self._folder / "objects")
        begun, before = time.monotonic(), self._sent
        self._happened("shard.sending", f"{shard.shard.total_bytes:,} bytes to {order.to}", shard.shard)
        if (largest := max(file.size for file in shard.shard.files)) > MAX_UPDATE_BYTES:
            raise GeofedError("LIMIT_EXCEEDED", f"a file of {largest} bytes; {MAX_UPDATE_BYTES} at most are taken")
        await self._carry(shard, there)
        seconds, sent = time.monotonic() - begun, self._sent - before
        text = f"{order.to} has all of it: {sent:,} bytes in {seconds:.1f} s"
        self._happened("shard.sent", text, shard.shard, sent_bytes=sent, seconds=seconds)
        self._hands.store.keep_sent(self.job)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        self._enter("sent")

    async def _introduced(self) -> sync_pb2.Introduction:
        """Who is there, by its own word and the federation's certificate."""
        order, tls = self.order, self._hands.identity()
        async with channel(
            order.address,
            ca_pem=tls.ca_pem,
            name=region_name(order.to),
            certificate_pem=tls.certificate_pem,
            key_pem=tls.key_pem,
        ) as line:
            request = sync_pb2.IntroduceRequest(job=order.job)
            told: sync_pb2.Introduction = await sync_pb2_grpc.ShardPortStub(line).Introduce(
                request, timeout=_STALL_SECONDS
            )
            return told

    async def _carry(self, shard: Listed, there: sync_pb2.Introduction) -> None:
        """Until all of it is durable there."""
        order, place = self.order, self._folder / "list"
        place.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(write_durably, place, [shard.shard.to_bytes()])
        manifests = self._manifests(shard.shard, there)
        left = {manifest.sequence for manifest in manifests}
        changed, refused = asyncio.Event(), list[GeofedError]()

        def arrived(_: str, manifest: Manifest) -> None:
            left.discard(manifest.sequence)
            changed.set()

        def content_of(manifest: Manifest) -> Path | FileContent:
            index = manifest.sequence - LIST_SEQUENCE - 1
            return place if index < 0 else shard.content(index)

        def note(error: GeofedError) -> None:
            # Where a file cannot be read, all must be listed anew.
            if error.code in _REFUSALS:
                refused.append(error)
                changed.set()

        peer_sender = self._peer_sender = PeerSender(
            order.job,
            self._hands.identity,
            content_of,
            arrived,
            _STALL_SECONDS,
            callbacks=SenderCallbacks(refused=note),
        )
        carrying = self._carrying = asyncio.create_task(
            peer_sender.run(), name=f"the shard of {order.job} to {order.to}"
        )
        self._counted = 0
        try:
            peer = Peer(order.to, order.epoch, order.address)
            peer_sender.ship(peer, tuple(m for m in manifests if m.sequence == LIST_SEQUENCE) or manifests)
            listed_there = LIST_SEQUENCE not in left
            while left:
                changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TOLD_SECONDS):
                        await changed.wait()
                if carrying.done():
                    carrying.result()
                if refused:
                    raise refused[0]
                if not listed_there and LIST_SEQUENCE not in left:
                    # Before the list is there nothing else is wanted.
                    listed_there = True
                    peer_sender.ship(peer, tuple(m for m in manifests if m.sequence in left))
                self._tell(peer_sender, shard.shard)
        finally:
            await self._put_down()

    async def _put_down(self) -> None:
        """Let go of the lines to the other region. Does no harm if it is done twice."""
        if self._carrying is not None:
            self._carrying.cancel()
            await asyncio.gather(self._carrying, return_exceptions=True)
        if self._peer_sender is not None:
            await self._peer_sender.close()
            self._count(self._peer_sender)

    def _manifests(self, shard: ShardList, there: sync_pb2.Introduction) -> tuple[Manifest, ...]:
        """What the other region lacks, in order."""
        known = there.have_through if there.list_digest == shard.digest else 0
        data = shard.to_bytes()
        sizes = [(shard.digest, len(data)), *((file.digest, file.size) for file in shard.files)]
        return tuple(
            Manifest(self._hands.config.name, self.order.epoch, number, digest, size, 0.0)
            for number, (digest, size) in enumerate(sizes, LIST_SEQUENCE)
            if size and number > known
        )

    # What is told

    def _tell(self, peer_sender: PeerSender, shard: ShardList) -> None:
        self._count(peer_sender)
        meter = peer_sender.meter
        self.condition = f"{meter.sent_bytes:,} bytes are sent, {shard.total_bytes:,} is the whole"
        if not meter.up:
            self.condition += f"; the way there is down: {meter.fault}"
        elif meter.slow_path:
            self.condition += f"; a slower way is taken: {meter.slow_path}"
        self._report(durable=False)

    def _count(self, peer_sender: PeerSender) -> None:
        grown = peer_sender.meter.sent_bytes - self._counted
        if grown and self.state != "stopped":
            self._counted, self._sent = self._counted + grown, self._sent + grown
            self._hands.store.add_to_meters(self.job, {f"sent_bytes:{self.order.to}": float(grown)})

    def _happened(self, kind: str, text: str, shard: ShardList, **more: float) -> None:
        data: dict[str, object] = {
            "to": self.order.to, "digest": shard.digest, "files": len(shard.files), "bytes": shard.total_bytes, **more
        }  # fmt: skip
        self._hands.happened(self.job, Happened(kind, f"{self._hands.config.name}: {text}", data))

    def _enter(self, state: str, condition: str = "") -> None:
        self.state, self.condition = state, condition
        self._report(durable=True)

    def _report(self, *, durable: bool) -> None:
        hands, meters = self._hands, self._hands.store.meters(self.job)
        sent = {name.removeprefix("sent_bytes:"): n for name, n in meters.items() if name.startswith("sent_bytes:")}
        message = agent_pb2.PartitionReport(
            job=self.job,
            epoch=self.order.epoch,
            state=self.state,
            condition=self.condition,
            sent_bytes={to: int(count) for to, count in sent.items()},
            money=[
                common_pb2.Money(item=i.item, quantity=i.quantity, unit=i.unit, usd=i.usd, source=i.source)
                for i in (egress(meters, hands.config.prices) if hands.config.prices else [])
            ],
            error=to_proto(self._error) if self._error else None,
            meter=hands.store.meter_id,
        )
        if self._peer_sender is not None:
            meter = self._peer_sender.meter
            message.link_rtt_ms[self.order.to], message.link_mbps[self.order.to] = meter.rtt_ms, self._peer_sender.mbps
        hands.report(message, durable)


def _told(error: Exception) -> GeofedError:
    if isinstance(error, GeofedError):
        return error
    return error_of(error) if isinstance(error, grpc.RpcError) else GeofedError("UNAVAILABLE", str(error))
