"""Small updates on their way at once, between two real sites: in order, once, and again after a cut."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.exchange_site import Site
from support.pki import Authority
from support.relay import Relay

from sync.file_transfer.arrival import Arrival
from sync.file_transfer.manifest import Manifest, PeerAddress
from sync.file_transfer.peer_sender import PeerSender
from sync.ps.core.actions import SendUpdates
from sync.tcp_streams.sockets import Tls

AUTHORITY = Authority()
NOBODY = Tls(b"", b"", b"")
COUNT = 24
REGIONS = ("east", "west")


def _ship(east: Site, peer: PeerAddress, first: int, count: int) -> list[bytes]:
    data = [os.urandom(1000 + number) for number in range(count)]
    made = tuple(east.make(first + number, content) for number, content in enumerate(data))
    east.links.ship(SendUpdates(peer, made))
    return data


async def _carry(
    folder: Path,
    befalls: Callable[[Relay], None],
    count: int = COUNT,
    stall_seconds: float = 5.0,
    late_seconds: float = 0.0,
    sees: Callable[[PeerSender], None] = lambda peer_sender: None,
) -> tuple[int, PeerSender]:
    """One update, and then many, while something befalls the link; how often it was cut, and who carried them."""
    east, west = (Site(name, REGIONS, folder / name, AUTHORITY.region(name), stall_seconds) for name in REGIONS)
    await east.start()
    await west.start()
    try:
        with Relay() as relay:
            relay.to, relay.late_seconds = ("127.0.0.1", west.port), late_seconds
            peer = PeerAddress("west", 1, relay.address)
            data = _ship(east, peer, 1, 1)
            await east.until(lambda: east.arrived)
            sees(east.links.peer_senders["west"])
            befalls(relay)
            data += _ship(east, peer, 2, count)
            await east.until(lambda: len(east.arrived) == 1 + count)
        assert [sequence for _, sequence in east.arrived] == list(range(1, count + 2))
        assert [west.path("east", number).read_bytes() for number in range(1, count + 2)] == data
        assert len(west.stored) == 1 + count, "none is stored twice"
        return relay.cuts, east.links.peer_senders["west"]
    finally:
        await east.stop()
        await west.stop()


def test_updates_that_wait_do_not_wait_for_each_others_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of three is made durable before all of them are there."""
    complete, meeting = Arrival.complete, threading.Barrier(3, timeout=20)

    def completed(self: Arrival, inspect: Callable[[Manifest, Path], None]) -> None:
        if 2 <= self.manifest.sequence <= 4:
            meeting.wait()
        complete(self, inspect)

    monkeypatch.setattr(Arrival, "complete", completed)
    cuts, _ = asyncio.run(_carry(tmp_path, lambda relay: None))
    assert cuts == 0


def test_a_cut_between_them_loses_and_doubles_none(tmp_path: Path) -> None:
    def cut(relay: Relay) -> None:
        relay.cut_after = relay.passed + 9000

    cuts, _ = asyncio.run(_carry(tmp_path, cut))
    assert cuts == 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_a_connection_that_has_fallen_silent_is_not_waited_for_as_long_as_a_transfer_may_stall(
    tmp_path: Path, count: int
) -> None:
    """After cuts time and again the kernel sends nothing for long, though the link is there."""

    _, peer_sender = asyncio.run(_carry(tmp_path, Relay.silence, count, stall_seconds=60.0))
    assert peer_sender.meter.failures == 1
    assert peer_sender._direct._stalls_in_row == 0, "it has carried something since"


@pytest.mark.slow
def test_what_is_offered_over_a_connection_that_has_fallen_silent_is_not_waited_for_as_long_either(
    tmp_path: Path,
) -> None:
    def distrusts(peer_sender: PeerSender) -> None:
        peer_sender._link_is_good = False

    _, peer_sender = asyncio.run(_carry(tmp_path, Relay.silence, 1, stall_seconds=60.0, sees=distrusts))
    assert peer_sender.meter.failures == 1


@pytest.mark.slow
def test_a_connection_is_not_given_up_where_a_new_one_does_not_come_about_either(tmp_path: Path) -> None:
    """The link may only have become slow: what is on its way comes sooner than what is sent again."""

    def slows(relay: Relay) -> None:
        relay.flows.clear()
        threading.Timer(4.0, relay.flows.set).start()

    async def carry() -> tuple[int, PeerSender, list[float]]:
        rates: list[float] = []

        async def look() -> None:
            while True:
                await asyncio.sleep(0.5)
                rates.extend(peer_sender.mbps for peer_sender in seen)

        seen: list[PeerSender] = []
        watch = asyncio.ensure_future(look())
        try:
            cuts, peer_sender = await _carry(tmp_path, slows, 1, stall_seconds=60.0, sees=seen.append)
        finally:
            watch.cancel()
        return cuts, peer_sender, rates

    _, peer_sender, rates = asyncio.run(carry())
    assert peer_sender.meter.failures == 0
    assert peer_sender.meter.up
    assert min(rates) < 1000 * 8 / 1e6 / 2.0, "while it is on its way it shows what the link carries at most"


@pytest.mark.slow
def test_the_time_of_an_answer_does_not_count_the_dialling(tmp_path: Path) -> None:
    """Only the first of many small updates is offered."""

    async def first() -> float:
        _, peer_sender = await _carry(tmp_path, lambda relay: None, 0, late_seconds=0.4)
        return peer_sender.meter.rtt_ms

    assert 400 <= asyncio.run(first()) < 1150, "twice at most, for a head and a body; to dial takes it three times"


def test_each_time_in_a_row_a_silent_connection_gets_twice_as_long() -> None:
    async def waits() -> tuple[float, float, list[float]]:
        peer_sender = PeerSender("j", lambda: NOBODY, lambda manifest: Path("/nonexistent"), lambda *_: None, 30.0)
        unknown = peer_sender._direct.quiet_seconds()
        peer_sender.meter.mbps, peer_sender.meter.rtt_ms, peer_sender._direct._carrying = 8.0, 500.0, (0.0, 1_000_000)
        slow, fast = peer_sender._direct.quiet_seconds(), []
        peer_sender.meter.mbps, peer_sender.meter.rtt_ms = 800.0, 5.0
        for _ in range(6):
            fast.append(peer_sender._direct.quiet_seconds())
            peer_sender._direct._stalls_in_row += 1
        await peer_sender.close()
        return unknown, slow, fast

    unknown, slow, fast = asyncio.run(waits())
    assert unknown == 30.0, "nothing is known of the link"
    assert slow == pytest.approx(16.0), "eight times a second and two round trips of half a second"
    assert fast == pytest.approx([2.0, 4.0, 8.0, 16.0, 30.0, 30.0])
