"""Whole updates between two real sites over loopback: cuts, damage, strangers, restarts, and who dials."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from support.exchange_site import JOB, Site
from support.failures import filled
from support.pki import Authority
from support.relay import Relay
from support.small_disk import small_disk

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import channel, error_of, region_name
from geofed_pb.v1 import common_pb2, sync_pb2, sync_pb2_grpc
from sync.file_transfer.manifest import Manifest, PeerAddress
from sync.file_transfer.wire import manifest_to_proto
from sync.ps.core.actions import SendUpdates
from sync.tcp_streams import sockets
from sync.tcp_streams.sockets import Tls, dial
from sync.tcp_streams.stream import hello
from sync.tcp_streams.stream_count import StreamCount
from sync.tcp_streams.wire import HEAD_BYTES, FrameHead, FrameKind, frame, parse

KIB, MIB = 1 << 10, 1 << 20
REGIONS = ("east", "north", "west")
AUTHORITY = Authority()
Making = Callable[..., Coroutine[Any, Any, Site]]


def runs(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test with a way to make sites that are gone at its end."""

    def call(tmp_path: Path) -> None:
        async def within() -> None:
            async with _sites(tmp_path) as make:
                await test(make, tmp_path)

        asyncio.run(within())

    call.__name__, call.__doc__ = test.__name__, test.__doc__
    return call


@contextlib.asynccontextmanager
async def _sites(folder: Path) -> AsyncIterator[Making]:
    made: list[Site] = []

    async def make(region: str, where: Path | None = None, **ports: Any) -> Site:
        site = Site(region, REGIONS, where or folder / region, AUTHORITY.region(region))
        made.append(site)
        await site.start(**ports)
        return site

    try:
        yield make
    finally:
        for site in made:
            await site.stop()


def _same(site: Site, manifest: Manifest, data: bytes) -> bool:
    return site.path(manifest.region, manifest.sequence).read_bytes() == data


@runs
async def test_large_updates_take_bulk_streams_that_stay_warm(make: Making, folder: Path) -> None:
    east, west = await make("east"), await make("west")
    for sequence, size in ((1, 5 * MIB + 17), (2, 9 * MIB), (3, 1000)):
        data = os.urandom(size)
        manifest = east.make(sequence, data)
        await east.carry(west.peer(), manifest)
        assert _same(west, manifest, data)
        assert east.links.peer_senders["west"].meter.streams == (2 if size > MIB else 0)
    meter = east.links.peer_senders["west"].meter
    assert meter.payload_bytes == 14 * MIB + 1017
    assert meter.payload_bytes < meter.sent_bytes < meter.payload_bytes + 10_000
    assert west.links.received_bytes == {"east": meter.payload_bytes}
    assert not list((west.folder / "inbox" / "east").glob("*.part"))
    assert not list((west.folder / "inbox" / "east").glob("*.have"))


@pytest.mark.slow
@runs
async def test_an_update_is_spread_over_as_many_streams_as_it_is_told(make: Making, folder: Path) -> None:
    east, west = await make("east"), await make("west")
    east.links.set_peers([west.peer()])
    with mock.patch.object(StreamCount, "count", 5):
        for sequence in (1, 2):
            data = os.urandom(16 * MIB)
            manifest = east.make(sequence, data)
            await east.carry(west.peer(), manifest)
            assert _same(west, manifest, data)
    assert east.links.peer_senders["west"].meter.streams == 5


def _behind(relay: Relay, site: Site) -> None:
    """Let peers dial a site's bulk port through a relay."""
    relay.to = ("127.0.0.1", site.bulk_port)
    bulk = site.links.bulk
    assert bulk is not None
    bulk.port = int(relay.address.rpartition(":")[2])


@runs
async def test_a_cut_costs_each_stream_one_chunk_at_most(make: Making, folder: Path) -> None:
    east, west = await make("east"), await make("west")
    data = os.urandom(32 * MIB)
    with Relay() as relay:
        _behind(relay, west)
        relay.cut_after, relay.shuts = 10 * MIB, True
        manifest = east.make(1, data)
        carrying = asyncio.create_task(east.carry(west.peer(), manifest))
        # What the broken connections still hold is read before anything new comes.
        bulk = west.links.bulk
        assert bulk is not None
        async with asyncio.timeout(30):
            while not relay.cuts or bulk.connections:  # noqa: ASYNC110 - threads end, which is no event here
                await asyncio.sleep(0.01)
        relay.opens.set()
        await carrying
    meter = east.links.peer_senders["west"].meter
    assert _same(west, manifest, data)
    # What had come, down to the byte, is not sent again.
    assert west.links.received_bytes["east"] == 32 * MIB
    # Nor is it more than the cut connections had in their buffers, of which this side cannot know.
    assert meter.sent_bytes <= 40 * MIB


@runs
async def test_a_port_that_cannot_be_reached_makes_updates_take_the_exchange_port(make: Making, folder: Path) -> None:
    east, west = await make("east"), await make("west")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert west.links.bulk is not None
        west.links.bulk.port = closed.getsockname()[1]
        data = os.urandom(4 * MIB)
        manifest = east.make(1, data)
        await east.carry(west.peer(), manifest)
    meter = east.links.peer_senders["west"].meter
    assert _same(west, manifest, data)
    assert meter.streams == 0
    assert meter.up
    assert "the bulk port cannot be reached" in meter.slow_path


@runs
async def test_a_peer_that_cannot_be_reached_dials(make: Making, folder: Path) -> None:
    """West reaches east, and not the other way round: east's updates travel over streams that west has dialled."""
    east, west = await make("east"), await make("west")
    west.links.set_peers([east.peer()])
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = PeerAddress("west", 1, f"127.0.0.1:{closed.getsockname()[1]}")
        for sequence, size in ((1, 6 * MIB), (2, 10_000), (3, 6 * MIB)):
            data = os.urandom(size)
            manifest = east.make(sequence, data)
            await east.carry(nowhere, manifest)
            assert _same(west, manifest, data)
    meter = east.links.peer_senders["west"].meter
    assert meter.up
    assert "the peer opens the streams" in meter.slow_path


@runs
async def test_an_update_of_another_region_is_passed_on_and_told_of(make: Making, folder: Path) -> None:
    east, west = await make("east"), await make("west")
    large, small = os.urandom(3 * MIB), os.urandom(300)
    for sequence, data in ((1, large), (2, small)):
        manifest = east.make(sequence, data, region="north")
        await east.carry(west.peer(), manifest)
        assert _same(west, manifest, data)
    assert east.relayed == [("west", "north", 1), ("west", "north", 2)]
    assert east.arrived == []
    for region in ("west", "mars"):
        manifest = replace(east.make(3, small), region=region)
        assert (await _refusal(east.identity, west, manifest)).code == "FORBIDDEN"


async def _refusal(identity: Tls, site: Site, manifest: Manifest) -> GeofedError:
    keys = {"ca_pem": identity.ca_pem, "certificate_pem": identity.certificate_pem, "key_pem": identity.key_pem}
    async with channel(f"127.0.0.1:{site.port}", name=region_name(site.region), **keys) as line:
        with pytest.raises(grpc.RpcError) as raised:
            await sync_pb2_grpc.ExchangeStub(line).Offer(manifest_to_proto(JOB, manifest), timeout=10)
        return error_of(raised.value)


@runs
async def test_a_restart_of_the_receiver_sends_nothing_again_that_was_here(make: Making, folder: Path) -> None:
    east, west = await make("east"), await make("west")
    data = os.urandom(24 * MIB)
    manifest = east.make(1, data)
    with Relay() as relay:
        _behind(relay, west)
        relay.cut_after = 12 * MIB
        relay.stays_cut = True
        carrying = asyncio.ensure_future(east.carry(west.peer(), manifest, 40))
        while not (relay.cuts and west.links.received_bytes):  # noqa: ASYNC110 - threads cut and receive
            await asyncio.sleep(0.01)
        port = west.port
        await west.stop()
    received = west.links.received_bytes["east"]
    again = await make("west", port=port)
    await carrying
    assert _same(again, manifest, data)
    # The record is written after each chunk.
    assert received + again.links.received_bytes["east"] <= 24 * MIB + 2 * MIB


@runs
async def test_a_restart_of_the_sender_sends_nothing_again_that_arrived(make: Making, folder: Path) -> None:
    east, west = await make("east"), await make("west")
    data = os.urandom(24 * MIB)
    manifest = east.make(1, data)
    with Relay() as relay:
        _behind(relay, west)
        relay.cut_after = 12 * MIB
        carrying = asyncio.ensure_future(east.carry(west.peer(), manifest, 40))
        while not relay.cuts:  # noqa: ASYNC110 - a thread cuts
            await asyncio.sleep(0.01)
        carrying.cancel()
        await east.stop()
        again = await make("east")
        await again.carry(west.peer(), manifest)
    assert _same(west, manifest, data)
    assert west.links.received_bytes["east"] <= 24 * MIB + 2 * MIB


async def _told_of_a_full_disk(make: Making, folder: Path, size: int) -> None:
    east = await make("east")
    with small_disk(folder / "small", bytes_=8 * MIB) as small:
        west = await make("west", small / "west")
        data = os.urandom(size)
        manifest = east.make(1, data)
        with filled(small):
            east.links.set_peers([west.peer()])
            carrying = asyncio.ensure_future(east.carry(west.peer(), manifest))
            await east.until(lambda: "no space left" in east.links.peer_senders["west"].meter.fault)
            await west.until(lambda: west.links.store_fault.startswith("DISK_FULL: no space left for"))
        await carrying
        assert not west.links.store_fault
        assert _same(west, manifest, data)
        await west.stop()


@pytest.mark.processes
@runs
async def test_a_full_disk_is_told_and_a_large_update_goes_through_once_there_is_room(
    make: Making, folder: Path
) -> None:
    await _told_of_a_full_disk(make, folder, 4 * MIB)


@pytest.mark.processes
@runs
async def test_a_full_disk_is_told_and_a_small_update_goes_through_once_there_is_room(
    make: Making, folder: Path
) -> None:
    await _told_of_a_full_disk(make, folder, 32 << 10)


# Who is let in, and what is taken


class _Line:
    """A bulk stream spoken by hand."""

    def __init__(self, line: ssl.SSLSocket) -> None:
        self.line = line
        line.settimeout(20)

    def offer(self, manifest: Manifest, ticket: bytes) -> Any:
        proto = sync_pb2.BulkOffer(manifest=manifest_to_proto(JOB, manifest), ticket=ticket)
        self.line.sendall(frame(FrameKind.OFFER, 1, proto.SerializeToString()))
        return self.answer()

    def chunk(self, offset: int, data: bytes, crc: int | None = None) -> None:
        head = FrameHead(FrameKind.CHUNK, 1, len(data), offset, zlib.crc32(data) if crc is None else crc)
        self.line.sendall(head.pack() + data)

    def answer(self) -> Any:
        head = parse(self._read(HEAD_BYTES))
        payload = self._read(head.payload_bytes)
        if head.kind is FrameKind.REPLY:
            return sync_pb2.OfferReply.FromString(payload)
        return common_pb2.Error.FromString(payload).code if head.kind is FrameKind.FAULT else head

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.line.recv(count - len(data))
            assert piece, "the stream has ended"
            data += piece
        return data


def _dialled(site: Site, identity: Tls, job: str = JOB) -> _Line:
    line = dial(("127.0.0.1", site.bulk_port), site.region, identity, 10)
    try:
        line.sendall(hello(job, collects=False))
    except OSError:
        line.close()
        raise
    return _Line(line)


@runs
async def test_a_damaged_chunk_is_asked_for_again(make: Making, folder: Path) -> None:
    east, west = await make("east"), await make("west")
    data = os.urandom(2 * MIB)
    manifest = east.make(1, data)
    ticket = west.links.tickets.issue("east", None)

    def talk() -> None:
        line = _dialled(west, east.identity)
        assert line.offer(manifest, ticket).verdict == sync_pb2.OfferReply.VERDICT_WANT
        line.chunk(0, b"x" * MIB, crc=1)
        bad = line.answer()
        assert (bad.kind, bad.offset, bad.length) == (FrameKind.BAD, 0, MIB)
        line.chunk(MIB, data[MIB:])
        assert line.answer().kind is FrameKind.ACK
        line.chunk(0, data[:MIB])
        assert line.answer().kind is FrameKind.ACK
        assert line.answer().verdict == sync_pb2.OfferReply.VERDICT_HAVE
        line.line.close()

    await asyncio.to_thread(talk)
    assert _same(west, manifest, data)


@runs
async def test_chunks_have_a_crc_for_a_receiver_that_asks_for_it_alone(make: Making, folder: Path) -> None:
    """Receivers of earlier versions compare it."""
    east, west, found = await make("east"), await make("west"), list[int]()
    real = FrameHead.pack

    def pack(head: FrameHead) -> bytes:
        if head.kind is FrameKind.CHUNK:
            found.append(head.crc)
        return real(head)

    answered = west.service._answer

    def as_before(*arguments: Any) -> sync_pb2.OfferReply:
        reply = answered(*arguments)
        reply.unchecked = False
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameHead, "pack", pack)
        await east.carry(west.peer(), first := east.make(1, data := os.urandom(2 * MIB)))
        assert _same(west, first, data)
        assert found
        assert not any(found)
        found.clear()
        patch.setattr(west.service, "_answer", as_before)
        east.links.peer_senders["west"]._link_is_good = False
        await east.carry(west.peer(), second := east.make(2, data := os.urandom(2 * MIB)))
        assert _same(west, second, data)
        assert found
        assert all(found)


@runs
async def test_a_chunk_of_any_length_is_taken_whole_however_it_trickles_in(make: Making, folder: Path) -> None:
    """The kernel wakes the receiver for many packets at once; the last of a chunk must not wait for more to come."""
    east, west = await make("east"), await make("west")
    lengths = [1, 32 * KIB, 48 * KIB, 48 * KIB + 1, 64 * KIB, 100_003, 304 * KIB, 304 * KIB + 1]
    data = os.urandom(sum(lengths))
    manifest = east.make(1, data)
    ticket = west.links.tickets.issue("east", None)
    pause = threading.Event()

    def talk() -> None:
        line, at = _dialled(west, east.identity), 0
        line.offer(manifest, ticket)
        for length in lengths:
            piece = data[at : at + length]
            line.line.sendall(FrameHead(FrameKind.CHUNK, 1, length, at, zlib.crc32(piece)).pack())
            for start in range(0, length, 5_000):
                line.line.sendall(piece[start : start + 5_000])
                pause.wait(0.001)
            assert line.answer() == FrameHead(FrameKind.ACK, 1, length, at)
            at += length
        assert line.answer().verdict == sync_pb2.OfferReply.VERDICT_HAVE
        line.line.close()

    await asyncio.to_thread(talk)
    assert _same(west, manifest, data)


@runs
async def test_an_update_that_is_not_what_its_digest_says_is_dropped(make: Making, folder: Path) -> None:
    east, west = await make("east"), await make("west")
    manifest = east.make(1, os.urandom(MIB))
    ticket = west.links.tickets.issue("east", None)

    def talk() -> None:
        line = _dialled(west, east.identity)
        line.offer(manifest, ticket)
        line.chunk(0, bytes(MIB))
        assert line.answer().kind is FrameKind.ACK
        assert line.answer() == "DIGEST_MISMATCH"
        line.line.close()
        line = _dialled(west, east.identity)
        assert list(line.offer(manifest, ticket).have) == []
        line.line.close()

    await asyncio.to_thread(talk)
    assert west.stored == []


@runs
async def test_a_ticket_is_good_for_one_peer_and_one_update(make: Making, folder: Path) -> None:
    east, west = await make("east"), await make("west")
    first, second = east.make(1, os.urandom(MIB)), east.make(2, os.urandom(MIB))
    ticket = west.links.tickets.issue("east", None)

    def talk() -> None:
        for identity, manifest, shown, answer in (
            (east.identity, first, b"0" * 16, "FORBIDDEN"),
            (AUTHORITY.region("north"), first, ticket, "FORBIDDEN"),
            (east.identity, first, ticket, None),
            (east.identity, first, ticket, None),
            (east.identity, second, ticket, "FORBIDDEN"),
        ):
            line = _dialled(west, identity)
            told = line.offer(manifest, shown)
            assert told == answer or (answer is None and told.verdict == sync_pb2.OfferReply.VERDICT_WANT)
            line.line.close()

    await asyncio.to_thread(talk)


@runs
async def test_a_stranger_is_not_let_in(make: Making, folder: Path) -> None:
    east, west = await make("east"), await make("west")
    manifest = east.make(1, os.urandom(MIB))

    def offer(identity: Tls) -> None:
        line = _dialled(west, identity)
        with line.line:
            line.offer(manifest, b"")

    def talk() -> None:
        other = Authority("another federation").region("east")
        mixed = Tls(east.identity.ca_pem, other.certificate_pem, other.key_pem)
        # The refusal comes after the caller's side of the handshake: any of its next steps may meet it.
        with pytest.raises((OSError, AssertionError)):
            offer(mixed)
        with pytest.raises(ssl.SSLError):
            dial(("127.0.0.1", west.bulk_port), "north", east.identity, 10)
        for identity, job in ((AUTHORITY.region("mars"), JOB), (west.identity, JOB), (east.identity, "job-2")):
            refused = _dialled(west, identity, job)
            assert refused.answer() == "FORBIDDEN"
            refused.line.close()

    await asyncio.to_thread(talk)


@pytest.mark.slow
@runs
async def test_a_slow_receiver_holds_the_sender_back(make: Making, folder: Path) -> None:
    """Nobody reads: what has left the sender is what fits the connection's buffers, not the update."""
    east, west = await make("east"), await make("west")
    size = 96 * MIB
    manifest = east.make(1, os.urandom(size))
    assert west.links.bulk is not None
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(desk, name)

        def received(self, caller: str, count: int) -> None:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
            desk.received(caller, count)

    desk = west.links.bulk._handler
    west.links.bulk._handler = Slow()
    east.links.set_peers([west.peer()])
    carrying = asyncio.ensure_future(east.carry(west.peer(), manifest))
    sent = -1
    while sent < 1 or sent != east.links.peer_senders["west"].meter.sent_bytes:
        sent = east.links.peer_senders["west"].meter.sent_bytes
        await asyncio.sleep(0.4)
    assert sent < size // 2
    gate.set()
    await carrying


@pytest.mark.slow
@runs
async def test_a_transfer_without_progress_is_given_up_and_tried_again(make: Making, folder: Path) -> None:
    """A peer that accepts connections and then says nothing."""
    east, west = await make("east"), await make("west")
    east.links.set_peers([west.peer()])
    peer_sender = east.links.peer_senders["west"]
    peer_sender._bulk._stall_seconds = 0.5
    with socket.create_server(("127.0.0.1", 0)) as silent:
        threads = []

        def swallow() -> None:
            with contextlib.suppress(OSError):
                plain, _ = silent.accept()
                threads.append(sockets.accept_tls(plain, west.identity, 10))

        swallowing = asyncio.ensure_future(asyncio.to_thread(swallow))
        assert west.links.bulk is not None
        truth, west.links.bulk.port = west.links.bulk.port, silent.getsockname()[1]
        data = os.urandom(32 * MIB)
        manifest = east.make(1, data)
        carrying = asyncio.ensure_future(east.carry(west.peer(), manifest))
        await east.until(lambda: "no progress" in peer_sender.meter.fault)
        west.links.bulk.port = truth
        await carrying
        await swallowing
        for line in threads:
            line.close()
    assert _same(west, manifest, data)


@runs
async def test_an_update_that_was_forgotten_does_not_hold_up_the_next(make: Making, folder: Path) -> None:
    """Its acknowledgement was lost, but the peer's own updates have told that it is there."""
    east, west = await make("east"), await make("west")
    forgotten, next_one = east.make(1, b"one" * 100), east.make(2, b"two" * 100)
    east.path("east", 1).unlink()
    east.links.ship(SendUpdates(west.peer(), (forgotten, next_one)))
    await west.until(lambda: [manifest.sequence for manifest in west.stored] == [2])
    assert east.links.peer_senders["west"].meter.up
