"""A revoked certificate opens no server of a region, and what it holds open ends."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from support.exchange_site import Site
from support.pki import Authority
from support.relay import Relay

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import channel, error_of, region_name, streaming
from geofed_pb.security.access import AccessInterceptor
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc
from sync.file_transfer import access, peer_sender
from sync.file_transfer.access import EXCHANGE_RULES, PeerCheck, end_revoked
from sync.file_transfer.listening import credentials
from sync.ps.core.actions import SendUpdates
from sync.tcp_streams.receiver import BulkPort
from sync.tcp_streams.revoked import RevokedSerials
from sync.tcp_streams.sockets import Tls, dial
from sync.tcp_streams.stream import hello

AUTHORITY = Authority()


def serial(tls: Tls) -> str:
    return f"{x509.load_pem_x509_certificate(tls.certificate_pem).serial_number:x}"


class Handler:
    """Admits whoever has a certificate."""

    def __init__(self) -> None:
        self.callers: list[str] = []

    def greeted(self, caller: str, greeting: sync_pb2.BulkHello) -> None:
        self.callers.append(caller)

    def failed(self, error: GeofedError) -> None:
        raise AssertionError(error)


@pytest.fixture
def revoked(tmp_path: Path) -> RevokedSerials:
    return RevokedSerials(tmp_path / "revoked.json")


def test_no_bulk_stream_is_left_to_a_revoked_certificate(tmp_path: Path, revoked: RevokedSerials) -> None:
    own, peer, other = (AUTHORITY.region(name) for name in ("a", "b", "c"))
    handler: Any = Handler()
    port = BulkPort("127.0.0.1", 0, "job", lambda: replace(own, revoked=revoked), handler)
    port.start()
    at = ("127.0.0.1", port.port)
    try:
        streams = [dial(at, "a", tls, 5) for tls in (peer, other)]
        for stream in streams:
            stream.sendall(hello("job", collects=False, ticket=b""))
            stream.settimeout(10)
        while len(handler.callers) < 2:
            pass
        (tmp_path / "revoked.json").write_text(json.dumps([serial(peer)]))
        port.end_revoked()
        assert ended(streams[0]), "the open stream ends"
        with dial(at, "a", peer, 5) as late:
            late.settimeout(10)
            assert ended(late), "a new one is refused"
        assert port.connections == 1
        streams[1].close()
        streams[0].close()
        with pytest.raises(GeofedError, match="is revoked"):
            dial(at, "a", replace(other, revoked=revoking(tmp_path, own)), 5)
    finally:
        port.close()


def revoking(folder: Path, tls: Tls) -> RevokedSerials:
    (folder / "others.json").write_text(json.dumps([serial(tls)]))
    return RevokedSerials(folder / "others.json")


def ended(stream: ssl.SSLSocket) -> bool:
    try:
        return stream.recv(1) == b""
    except OSError:
        return True


class Exchange(sync_pb2_grpc.ExchangeServicer):
    @streaming
    async def Collect(self, request: sync_pb2.CollectRequest, context: Any) -> AsyncIterator[sync_pb2.CollectCall]:
        yield sync_pb2.CollectCall(streams=1)
        await asyncio.Event().wait()


def test_no_call_is_left_to_a_revoked_certificate(
    tmp_path: Path, revoked: RevokedSerials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_POLL_SECONDS", 0.02)
    own, peer = AUTHORITY.region("a"), AUTHORITY.region("b")

    async def scenario() -> None:
        check = AccessInterceptor(EXCHANGE_RULES, PeerCheck("a", lambda: frozenset({"b"}), revoked))
        server = grpc.aio.server(interceptors=[check])
        sync_pb2_grpc.add_ExchangeServicer_to_server(Exchange(), server)
        port = server.add_secure_port("127.0.0.1:0", credentials(lambda: own, mutual=True))
        await server.start()
        ending = asyncio.create_task(end_revoked(revoked, check, lambda: None))
        try:
            pems = {"certificate_pem": peer.certificate_pem, "key_pem": peer.key_pem}
            async with channel(f"127.0.0.1:{port}", ca_pem=peer.ca_pem, name=region_name("a"), **pems) as line:
                call = sync_pb2_grpc.ExchangeStub(line).Collect(sync_pb2.CollectRequest(job="job"))
                assert (await call.read()).streams == 1
                (tmp_path / "revoked.json").write_text(json.dumps([serial(peer)]))
                with pytest.raises(grpc.RpcError) as caught:
                    await asyncio.wait_for(call.read(), 10)
                assert "is revoked" in error_of(caught.value).message
                with pytest.raises(grpc.RpcError) as caught:
                    await sync_pb2_grpc.ExchangeStub(line).Offer(sync_pb2.UpdateManifest(), timeout=30)
                assert error_of(caught.value).code == "FORBIDDEN"
        finally:
            ending.cancel()
            await server.stop(0)

    asyncio.run(scenario())


@pytest.mark.parametrize("bulk", [True, False], ids=["bulk streams", "exchange port"])
def test_a_revoked_region_gets_nothing_more_over_what_was_opened_to_it(
    tmp_path: Path, revoked: RevokedSerials, monkeypatch: pytest.MonkeyPatch, bulk: bool
) -> None:
    """Neither the rest of an update that is on its way nor the next one, although its server still runs."""
    monkeypatch.setattr(peer_sender, "_REVOKED_SECONDS", 0.02)
    own, peer = AUTHORITY.region("east"), AUTHORITY.region("west")

    async def scenario(relay: Relay) -> None:
        east = Site("east", ("east", "west"), tmp_path / "east", replace(own, revoked=revoked))
        west = Site("west", ("east", "west"), tmp_path / "west", peer)
        await east.start()
        await west.start(bulk_port=0 if bulk else None)
        relay.to = ("127.0.0.1", west.bulk_port if bulk else west.port)
        port = int(relay.address.rpartition(":")[2])
        if west.links.bulk is not None:
            west.links.bulk.port = port
        try:
            to, large = west.peer(port=0 if bulk else port), bytes(16 << 20)
            east.links.ship(SendUpdates(to, (east.make(1, large),)))
            sender = east.links.peer_senders["west"]
            async with asyncio.timeout(20):
                while relay.passed < 1 << 20:  # noqa: ASYNC110 - a thread passes it on
                    await asyncio.sleep(0.01)
                (tmp_path / "revoked.json").write_text(json.dumps([serial(peer)]))
                while "is revoked" not in sender.meter.fault:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            sent = sender.meter.sent_bytes
            east.links.ship(SendUpdates(to, (east.make(2, b"small"),)))
            failures = sender.meter.failures
            async with asyncio.timeout(20):
                while sender.meter.failures < failures + 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert (west.stored, east.arrived) == ([], [])
            assert sender.meter.sent_bytes == sent < 16 << 20
        finally:
            await east.stop()
            await west.stop()

    with Relay() as relay:
        relay.late_seconds = 0.02
        asyncio.run(scenario(relay))
