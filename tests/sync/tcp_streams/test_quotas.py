"""What one peer may ask of a receiver."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.damage import damaged
from support.pki import Authority

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import sync_pb2
from sync.file_transfer.quotas import CallQuotas
from sync.tcp_streams.receiver import BulkPort
from sync.tcp_streams.sockets import Tls, dial
from sync.tcp_streams.stream import hello
from sync.tcp_streams.wire import HEAD_BYTES, MAX_CHUNK_BYTES, FrameHead, FrameKind, parse


def test_a_burst_is_answered_at_once_and_a_flood_is_slowed_down() -> None:
    now = [0.0]
    quotas = CallQuotas(lambda: now[0])
    assert all(quotas.delay_seconds("mars") == 0 for _ in range(2000))
    flood = [quotas.delay_seconds("mars") for _ in range(400)]
    assert flood[0] > 0
    assert flood[-1] == pytest.approx(2.0)
    # Others are not slowed down, nor is the peer itself some time later.
    assert quotas.delay_seconds("west") == 0
    now[0] = 3.0
    assert quotas.delay_seconds("mars") == 0


def test_a_peer_has_a_limited_number_of_calls_under_way() -> None:
    async def many() -> None:
        quotas, ended = CallQuotas(), asyncio.Event()

        async def wait() -> None:
            async with quotas.call("mars"):
                await ended.wait()

        waiting = [asyncio.ensure_future(wait()) for _ in range(64)]
        await asyncio.sleep(0)
        with pytest.raises(GeofedError, match="mars has 64 calls under way"):
            async with quotas.call("mars"):
                pass
        async with quotas.call("west"):
            pass
        ended.set()
        await asyncio.gather(*waiting)
        async with quotas.call("mars"):
            pass

    asyncio.run(many())


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_damaged_heads_of_frames_are_read_or_refused() -> None:
    """Before memory is taken for a payload, its length is known to be within the limits."""
    outcomes = {"refused": 0, "read": 0}
    for data in damaged(FrameHead(FrameKind.CHUNK, 7, 1 << 20, 1 << 22, 99).pack(), 1_000_000):
        try:
            head = parse(data[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0"))
        except GeofedError as error:
            assert error.code == "FRAME_INVALID"  # noqa: PT017 - one of a million
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        assert head.payload_bytes <= (MAX_CHUNK_BYTES if head.kind is FrameKind.CHUNK else 1 << 20)
    assert min(outcomes.values()) > 1000, outcomes


class _Admitting:
    """Admits everybody, and wants nothing."""

    def __init__(self) -> None:
        self.admitted = threading.Semaphore(0)

    def greeted(self, caller: str, greeting: sync_pb2.BulkHello) -> None:
        self.admitted.release()

    def failed(self, error: GeofedError) -> None: ...


def test_a_peer_has_a_limited_number_of_connections() -> None:
    authority = Authority()
    own, mars, west = (authority.region(name) for name in ("east", "mars", "west"))
    handler = _Admitting()
    port = BulkPort("127.0.0.1", 0, "job", lambda: own, handler)  # type: ignore[arg-type]
    port.start()

    def connected(tls: Tls, seconds: float) -> bool:
        line = dial(("127.0.0.1", port.port), "east", tls, 30.0)
        lines.append(line)
        line.sendall(hello("job", collects=False))
        line.settimeout(seconds)
        try:
            # It is told why before its connection is closed; one that is accepted is told nothing.
            return not line.recv(1)
        except TimeoutError:
            return True

    lines: list[object] = []
    try:
        for _ in range(64):
            line = dial(("127.0.0.1", port.port), "east", mars, 30.0)
            lines.append(line)
            line.sendall(hello("job", collects=False))
            # Each has a thread of its own: without this, the last to be counted need not be the last that connected.
            assert handler.admitted.acquire(timeout=30)
        assert not connected(mars, 30)
        assert connected(west, 0.3)
    finally:
        for line in lines:
            line.close()  # type: ignore[attr-defined]
        port.close()
