"""What a sender says of its link while it has nothing to carry."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import grpc.aio
import pytest

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import sync_pb2
from sync.file_transfer.direct import LinkMeter
from sync.file_transfer.manifest import Manifest, PeerAddress
from sync.file_transfer.peer_sender import PeerSender, SenderCallbacks
from sync.tcp_streams.sockets import Tls

NOBODY = Tls(b"", b"", b"")


def test_an_idle_link_is_as_fast_as_it_was() -> None:
    """The update was forgotten, because the peer's own updates have told that it has it."""

    async def idle() -> tuple[int, float]:
        peer_sender = PeerSender("j", lambda: NOBODY, lambda manifest: Path("/nonexistent"), lambda *_: None, 5.0)

        async def carry(manifest: Manifest) -> bool:
            raise FileNotFoundError

        peer_sender._carry = carry  # type: ignore[method-assign]
        peer_sender.meter.mbps = 20.0
        running = asyncio.create_task(peer_sender.run())
        peer_sender.ship(PeerAddress("b", 1, "127.0.0.1:1"), (Manifest("a", 1, 1, "d", 100_000, 1.0),))
        await asyncio.sleep(0.3)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await peer_sender.close()
        return len(peer_sender._waiting), peer_sender.mbps

    assert asyncio.run(idle()) == (0, 20.0)


@pytest.mark.slow
def test_what_takes_far_longer_than_its_link_explains_is_told(tmp_path: Path) -> None:
    """Nothing has broken: the other side stands still."""
    update = tmp_path / "update"
    update.write_bytes(b"1234")

    async def told(mbps: float, seconds: float) -> list[str]:
        failed: list[str] = []
        notices = SenderCallbacks(failed=failed.append)
        peer_sender = PeerSender("j", lambda: NOBODY, lambda manifest: update, lambda *_: None, 5.0, callbacks=notices)

        async def carry(manifest: Manifest) -> bool:
            await asyncio.sleep(seconds)
            return True

        peer_sender._carry = carry  # type: ignore[method-assign]
        peer_sender.meter.mbps = mbps
        running = asyncio.create_task(peer_sender.run())
        peer_sender.ship(PeerAddress("b", 1, "127.0.0.1:1"), (Manifest("a", 1, 1, "d", 1_000_000, 1.0),))
        await asyncio.sleep(2.0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await peer_sender.close()
        return failed

    async def all_told() -> list[list[str]]:
        return await asyncio.gather(told(100.0, 60.0), told(100.0, 0.1), told(1.0, 60.0), told(0.0, 60.0))

    overdue, in_time, slow_link, unknown_link = asyncio.run(all_told())
    assert overdue == ["b"]
    assert in_time == []
    assert slow_link == [], "8 s of sending are as usual there"
    assert unknown_link == [], "nothing is known of the link"


def test_a_peer_that_was_restarted_is_dialled_again_before_it_is_taken_for_out_of_reach(tmp_path: Path) -> None:
    """It collects from us at once, while our old connection to it has not come to itself."""
    update = tmp_path / "update"
    update.write_bytes(b"x" * 100)
    have = sync_pb2.OfferReply(verdict=sync_pb2.OfferReply.VERDICT_HAVE)

    async def carried(fails: int) -> tuple[list[str], str]:
        took: list[str] = []
        peer_sender = PeerSender(
            "j", lambda: NOBODY, lambda manifest: update, lambda *_: None, 5.0, bulk_port=lambda: 7
        )

        async def directly(manifest: Manifest) -> sync_pb2.OfferReply:
            took.append("direct")
            if len(took) <= fails:
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "refused")
            return have

        async def collected(proto: sync_pb2.UpdateManifest, view: memoryview) -> sync_pb2.OfferReply:
            took.append("collected")
            peer_sender._bulk.peer_dials = True
            return have

        peer_sender._carry_directly, peer_sender._direct.reached = directly, True  # type: ignore[method-assign]
        peer_sender._bulk.send_collected = collected  # type: ignore[method-assign]
        collecting = peer_sender.calls()
        waiting = asyncio.ensure_future(anext(collecting))
        running = asyncio.create_task(peer_sender.run())
        peer_sender.ship(PeerAddress("b", 1, "127.0.0.1:1"), (Manifest("a", 1, 1, "d", 100, 1.0),))
        async with asyncio.timeout(10):
            while peer_sender._waiting:  # noqa: ASYNC110 - what is waited for knows of no event loop
                await asyncio.sleep(0.01)
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        await peer_sender.close()
        return took, peer_sender.meter.slow_path

    assert asyncio.run(carried(fails=1)) == (["direct", "direct"], "")
    took, slow_path = asyncio.run(carried(fails=2))
    assert took == ["direct", "direct", "collected"]
    assert slow_path, "it cannot be reached by a new connection either"


def test_what_was_picked_is_not_sent_once_others_have_taken_its_place(tmp_path: Path) -> None:
    """While an offer is answered all that wait are summed up: a part of that must not arrive beside it."""
    update = tmp_path / "update"
    update.write_bytes(b"1234")

    async def sent() -> list[tuple[int, int]]:
        begun: list[tuple[int, int]] = []
        notices = SenderCallbacks(trying=lambda peer, manifest: begun.append((manifest.begins, manifest.sequence)))
        arrived = asyncio.Event()
        peer_sender = PeerSender(
            "j", lambda: NOBODY, lambda manifest: update, lambda *_: arrived.set(), 5.0, callbacks=notices
        )
        answered, peer = asyncio.Event(), PeerAddress("b", 1, "127.0.0.1:1")

        async def offer(proto: sync_pb2.UpdateManifest) -> sync_pb2.OfferReply:
            await answered.wait()
            return sync_pb2.OfferReply(verdict=sync_pb2.OfferReply.VERDICT_WANT)

        async def send(*_: object) -> sync_pb2.OfferReply:
            return sync_pb2.OfferReply(verdict=sync_pb2.OfferReply.VERDICT_HAVE)

        peer_sender._direct.offer, peer_sender._direct.send = offer, send  # type: ignore[method-assign,assignment]
        peer_sender.ship(peer, tuple(Manifest("a", 1, sequence, f"d{sequence}", 4, 1.0) for sequence in range(4, 9)))
        running = asyncio.create_task(peer_sender.run())
        await asyncio.sleep(0.05)
        peer_sender.ship(peer, (Manifest("a", 1, 8, "sum", 4, 5.0, first=4),))
        answered.set()
        await asyncio.wait_for(arrived.wait(), 10)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await peer_sender.close()
        return begun

    assert asyncio.run(sent()) == [(4, 8)]


def test_what_waits_goes_in_order_and_a_refusal_is_told(tmp_path: Path) -> None:
    """An update that is refused for good is tried again, but not in silence."""
    update = tmp_path / "update"
    update.write_bytes(b"1234")

    async def sent() -> tuple[list[int], list[str]]:
        told, offered, enough = list[str](), list[int](), asyncio.Event()

        def refused(error: GeofedError) -> None:
            told.append(error.code)
            if len(told) == 2:
                enough.set()

        peer_sender = PeerSender(
            "j",
            lambda: NOBODY,
            lambda manifest: update,
            lambda *_: None,
            5.0,
            callbacks=SenderCallbacks(refused=refused),
        )

        async def offer(proto: sync_pb2.UpdateManifest) -> sync_pb2.OfferReply:
            offered.append(proto.sequence)
            if proto.sequence < 3:
                return sync_pb2.OfferReply(verdict=sync_pb2.OfferReply.VERDICT_HAVE)
            raise GeofedError("UNAVAILABLE" if len(offered) == 3 else "LIMIT_EXCEEDED", "no")

        peer_sender._direct.offer = offer  # type: ignore[method-assign]
        peer_sender.ship(
            PeerAddress("b", 1, "127.0.0.1:1"), tuple(Manifest("a", 1, n, f"d{n}", 9 << 20, 1.0) for n in (3, 1, 2))
        )
        update.write_bytes(bytes(9 << 20))
        running = asyncio.create_task(peer_sender.run())
        await asyncio.wait_for(enough.wait(), 20)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await peer_sender.close()
        return offered, told

    offered, told = asyncio.run(sent())
    assert offered == [1, 2, 3, 3, 3]
    assert told == ["LIMIT_EXCEEDED", "LIMIT_EXCEEDED"]


@pytest.mark.parametrize(
    ("size", "mbps", "rtt_ms", "at_once"),
    [(1000, 0.0, 0.0, 8), (1 << 20, 100.0, 30.0, 2), (700_000, 100.0, 30.0, 2), (1 << 20, 500.0, 150.0, 8),
     ((1 << 20) + 1, 500.0, 150.0, 0)],
)  # fmt: skip
def test_of_small_updates_no_more_is_on_its_way_at_once_than_the_link_holds(
    size: int, mbps: float, rtt_ms: float, at_once: int
) -> None:
    """Two megabytes in any case; what has been tried cannot be summed up when the link falls."""

    async def trains() -> tuple[list[Manifest], list[Manifest]]:
        peer_sender = PeerSender("j", lambda: NOBODY, lambda manifest: Path("/nonexistent"), lambda *_: None, 5.0)
        peer_sender.ship(
            PeerAddress("b", 1, "127.0.0.1:1"), tuple(Manifest("a", 1, n, f"d{n}", size, 1.0) for n in range(1, 20))
        )
        before = peer_sender._burst()
        peer_sender._link_is_good, peer_sender.meter.mbps, peer_sender.meter.rtt_ms = True, mbps, rtt_ms
        train = peer_sender._burst()
        await peer_sender.close()
        return before, train

    before, train = asyncio.run(trains())
    assert before == []
    assert [manifest.sequence for manifest in train] == [*range(1, at_once + 1)]


def test_an_update_of_a_few_bytes_tells_no_rate_of_its_link() -> None:
    """What a filter passes varies: most of a small one's time is the round trip."""
    meter = LinkMeter(rtt_ms=100.0)
    meter.carried(100_000, 0.2)
    meter.carried(400, 0.1)
    assert meter.mbps_of(50_000) == meter.mbps_of(200_000) == 4.0
    assert meter.mbps_of(400) == 0.032, "of those as small"
    for _ in range(8):
        meter.carried(400, 0.1)
    assert meter.mbps_of(100_000) == 8.0, "a large one takes no less time"
    meter.carried(100_000, 2.0)
    assert meter.mbps_of(100_000) == 0.4, "a link that has become slower shows at once"
