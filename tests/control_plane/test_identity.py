"""Who may speak: certificates, tokens, invitations, and what is refused."""

from __future__ import annotations

import asyncio
import socket
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from control_plane.client import ControlClient
from control_plane.pki import SERVER_LIFE, Authority, InvitationToken
from control_plane.server import ServeConfig
from control_plane.service import CONTROL_RULES
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CONTROL_PLANE_NAME, channel, error_of, with_token
from geofed_pb.v1 import common_pb2, control_pb2, control_pb2_grpc
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent, Identity, join, make_request

NOW = datetime(2030, 1, 1, tzinfo=UTC)


# --- the authority


def test_keys_are_private_and_the_authority_stays_the_same(tmp_path: Path) -> None:
    first = Authority.open(tmp_path / "pki", "fed", NOW)
    first.server_certificate(["localhost"], NOW)
    assert Authority.open(tmp_path / "pki", "fed", NOW).ca_pem == first.ca_pem
    for name in ("ca.key", "server.key"):
        assert stat.S_IMODE((tmp_path / "pki" / name).stat().st_mode) == 0o600


def test_the_server_certificate_is_renewed_at_half_its_life_or_for_a_new_name(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path, "fed", NOW)

    def serial(hosts: list[str], now: datetime) -> int:
        return x509.load_pem_x509_certificate(authority.server_certificate(hosts, now)[0].read_bytes()).serial_number

    first = serial(["localhost", "127.0.0.1", "::1"], NOW)
    assert serial(["localhost"], NOW + SERVER_LIFE * 0.4) == first
    assert serial(["localhost"], NOW + SERVER_LIFE * 0.6) != first
    assert serial(["localhost", "hub.example"], NOW) != first
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert CONTROL_PLANE_NAME in names.get_values_for_type(x509.DNSName)


def test_a_request_cannot_choose_its_name(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path, "fed", NOW)
    _, csr_pem = make_request("control-plane.geofed")
    issued = authority.sign_region(csr_pem, "a", NOW, timedelta(days=1))
    certificate = x509.load_pem_x509_certificate(issued.certificate_pem)
    assert certificate.subject.rfc4514_string() == "CN=a"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a.region.geofed"]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert certificate.not_valid_before_utc == NOW - timedelta(minutes=5)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.ca_pem))


def test_bad_requests_and_damaged_folders_are_refused(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path, "fed", NOW)
    with pytest.raises(GeofedError, match="CERTIFICATE_INVALID"):
        authority.sign_region(b"nonsense", "a", NOW)
    (tmp_path / "ca.key").unlink()
    with pytest.raises(GeofedError, match="STATE_INVALID"):
        Authority.open(tmp_path, "fed", NOW)


def test_an_invitation_survives_its_text(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path, "fed", NOW)
    token = InvitationToken("hub.example:7443", authority.ca_pem, "a", "s3cret")
    assert InvitationToken.parse(f" {token}\n") == token
    assert str(token).startswith("geofed1.")
    for text in ("", "geofed1.xyz", str(token)[:-40]):
        with pytest.raises(GeofedError, match="TOKEN_INVALID"):
            InvitationToken.parse(text)


# --- the doors


def test_the_wrong_token_opens_nothing(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            ca_pem = stage.context.ca_file.read_bytes()
            async with channel(stage.context.address, ca_pem=ca_pem, name=CONTROL_PLANE_NAME) as open_channel:
                for metadata in ((), with_token("wrong"), (("authorization", "Basic x"),)):
                    for name, kind, streams in METHODS:
                        code = await refused(open_channel, name, kind, streams, metadata)
                        assert code == "UNAUTHENTICATED", name
            async with ControlClient(stage.context.address, ca_pem, "wrong") as client:
                with pytest.raises(GeofedError, match="UNAUTHENTICATED"):
                    await client.jobs()

    asyncio.run(scenario())


METHODS = [
    (
        method.name,
        getattr(control_pb2, method.input_type.name, getattr(common_pb2, method.input_type.name, None)),
        method,
    )
    for method in control_pb2.DESCRIPTOR.services_by_name["Control"].methods
    if "anyone" not in CONTROL_RULES[f"/geofed.v1.Control/{method.name}"].callers
]


async def refused(open_channel: Any, name: str, kind: Any, method: Any, metadata: Any) -> str:
    call = getattr(control_pb2_grpc.ControlStub(open_channel), name)
    request = iter([kind()]) if method.client_streaming else kind()
    try:
        if method.server_streaming:
            async for _ in call(request, metadata=metadata, timeout=30):
                return "answered"
        else:
            await call(request, metadata=metadata, timeout=30)
    except grpc.RpcError as error:
        return error_of(error).code
    return "answered"


@pytest.mark.slow
def test_an_invitation_works_once_and_for_its_time(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            token = (await stage.client.invite("a")).token
            identity = await join(token)
            assert identity.region == "a"
            with pytest.raises(GeofedError, match="has been used"):
                await join(token)
            forged = replace(InvitationToken.parse(token), secret="guess")
            with pytest.raises(GeofedError, match="TOKEN_INVALID"):
                await join(str(forged))
            short = (await stage.client.invite("b", timedelta(seconds=1))).token
            await asyncio.sleep(1.1)  # the invitation's own time is what is tested
            with pytest.raises(GeofedError, match="has expired"):
                await join(short)
            with pytest.raises(GeofedError, match="is not a valid region name"):
                await stage.client.invite("Not A Name")
            secret = InvitationToken.parse(token).secret.encode()
            assert all(secret not in path.read_bytes() for path in serve_config.state_dir.glob("state.db*"))

    asyncio.run(scenario())


def test_only_the_present_certificate_of_a_region_is_taken(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            old, new = await stage.agent("a"), await stage.agent("a")
            with pytest.raises(GeofedError, match="FORBIDDEN"):
                await old.connect()
            await new.connect()
            renewed = await new.renew()
            assert x509.load_pem_x509_certificate(renewed).subject.rfc4514_string() == "CN=a"
            await new.close()
            await new.connect()
            await new.close()

    asyncio.run(scenario())


def test_a_later_session_ends_an_earlier_one(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            first = await stage.agent("a")
            second = FakeAgent(first.identity, "boot-2")
            assert (await first.connect()).session == 1
            assert (await second.connect()).session == 2
            assert (await first.ended()).code == "FENCED"
            assert await stage.phase_is("a", "live")
            second.heartbeat()
            await second.close()
            await first.close()

    with capture_logs() as logs:
        asyncio.run(scenario())
    assert not [entry for entry in logs if entry["log_level"] == "error"]


def test_an_expired_certificate_is_refused(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agent = await stage.agent("a")
            authority = Authority.open(serve_config.state_dir / "pki", "geofed", NOW)
            key_pem, csr_pem = make_request()
            past = datetime.now(UTC) - timedelta(days=40)
            issued = authority.sign_region(csr_pem, "a", past, timedelta(days=30))
            await session_refused(replace(agent.identity, certificate_pem=issued.certificate_pem, key_pem=key_pem))

    asyncio.run(scenario())


def test_a_foreign_certificate_and_none_are_refused(serve_config: ServeConfig, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agent = await stage.agent("a")
            other = Authority.open(tmp_path / "other", "geofed", datetime.now(UTC))
            key_pem, csr_pem = make_request()
            issued = other.sign_region(csr_pem, "a", datetime.now(UTC))
            await session_refused(replace(agent.identity, certificate_pem=issued.certificate_pem, key_pem=key_pem))
            await session_refused(replace(agent.identity, certificate_pem=None, key_pem=None))  # type: ignore[arg-type]

    asyncio.run(scenario())


async def session_refused(identity: Identity) -> None:
    from geofed_pb.v1 import agent_pb2_grpc

    async with identity.open() as open_channel:
        stub = agent_pb2_grpc.AgentHubStub(open_channel)
        with pytest.raises(grpc.RpcError) as caught:
            await stub.StatBlob(common_pb2.BlobRequest(digest="x"), timeout=5)
    assert error_of(caught.value).code in ("CERTIFICATE_EXPIRED", "CERTIFICATE_INVALID", "UNAVAILABLE")


def test_plaintext_is_refused_on_every_port(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            for port in (stage.ports.control, stage.ports.agent):
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as plain:
                    stub = control_pb2_grpc.ControlStub(plain)
                    with pytest.raises(grpc.RpcError):
                        await stub.Version(control_pb2.VersionRequest(), timeout=2)
            async with httpx2.AsyncClient() as plain_http:
                with pytest.raises(httpx2.HTTPError):
                    await plain_http.get(f"http://127.0.0.1:{stage.ports.metrics}/healthz")

    asyncio.run(scenario())


@pytest.mark.slow
def test_health_and_metrics_answer_over_tls(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agent = await stage.agent("a")
            await agent.connect()
            ca_pem = stage.context.ca_file.read_bytes()
            async with channel(stage.context.address, ca_pem=ca_pem, name=CONTROL_PLANE_NAME) as open_channel:
                stub = health_pb2_grpc.HealthStub(open_channel)
                reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
            text = await scrape(stage)
            assert 'geofed_region_up{region="a"} 1.0' in text
            assert "geofed_sessions 1.0" in text
            assert 'geofed_rpc_calls_total{method="/geofed.v1.Control/Invite",outcome="ok"} 1.0' in text
            await agent.close()

    asyncio.run(scenario())


async def scrape(stage: Stage) -> str:
    import ssl

    trust = ssl.create_default_context(cafile=str(stage.context.ca_file))
    async with httpx2.AsyncClient(verify=trust, trust_env=False) as client:
        base = f"https://127.0.0.1:{stage.ports.metrics}"
        assert (await client.get(f"{base}/healthz")).json() == {"status": "ok"}
        token = (stage.config.state_dir / "metrics.token").read_text()
        for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": token}):
            assert (await client.get(f"{base}/metrics", headers=wrong)).status_code == 401
        operators = stage.context.token_file.read_text().strip()
        for known in (operators, token):
            dashboard = await client.get(f"{base}/", headers={"authorization": f"Bearer {known}"})
            assert dashboard.status_code == (200 if known == operators else 401), "it opens nothing else"
        return (await client.get(f"{base}/metrics", headers={"authorization": f"Bearer {token}"})).text


def test_ports_are_free_again_after_the_end(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            ports = stage.ports
        for port in (ports.control, ports.agent, ports.metrics):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))

    asyncio.run(scenario())
