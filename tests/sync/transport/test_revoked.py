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
from support.pki import Authority

from geofed_pb.access import AccessInterceptor
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import channel, error_of, region_name, streaming
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc
from sync.transfer import access
from sync.transfer.access import EXCHANGE_RULES, PeerCheck, end_revoked
from sync.transfer.listening import credentials
from sync.transport.receiver import BulkPort
from sync.transport.revoked import RevokedSerials
from sync.transport.sockets import Tls, dial
from sync.transport.stream import hello

AUTHORITY = Authority()


def serial(tls: Tls) -> str:
    return f"{x509.load_pem_x509_certificate(tls.certificate_pem).serial_number:x}"


class Handler:
    """Admits whoever has a certificate."""

    def __init__(self) -> None:
        self.callers: list[str] = []

    def greeted(self, caller: str, greeting: sync_pb2.BulkHello) -> None:
        self.callers.append(caller)


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
                    await sync_pb2_grpc.ExchangeStub(line).Offer(sync_pb2.UpdateManifest(), timeout=5)
                assert error_of(caught.value).code == "FORBIDDEN"
        finally:
            ending.cancel()
            await server.stop(0)

    asyncio.run(scenario())
