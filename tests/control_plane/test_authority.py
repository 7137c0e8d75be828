"""Certificates over time: renewals whose answers are lost, a CA that is replaced, a CA of the operator's own."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from support.pki import Authority as OwnAuthority
from support.pki import write

from control_plane import server
from control_plane.client import ControlClient
from control_plane.pki import Authority, GivenAuthority
from control_plane.server import ServeConfig
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CONTROL_PLANE_NAME
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent, Identity, catalogue, make_request
from tests.control_plane.scenario import run
from tests.control_plane.test_shut_out import refused, told

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def test_lost_answers_to_renewals_lock_nobody_out(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agent = await stage.agent("a")
            await agent.connect()
            renewed = [await agent.renew() for _ in range(5)]
            await agent.close()
            await agent.connect()
            await agent.close()
            last = FakeAgent(replace(agent.identity, certificate_pem=renewed[-1], key_pem=agent.renewed_key), "new")
            await last.connect()
            await last.close()
            await agent.connect()
            assert len(agent.revoked) == 4, "what was issued and not asked for again is revoked"
            await agent.close()

    run(scenario())


def test_the_certificate_of_a_running_control_plane_is_renewed(
    serve_config: ServeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CERTIFICATE_SECONDS", 0.1)

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            ports = (stage.ports.control, stage.ports.metrics)
            before = [await asyncio.to_thread(serial_at, port) for port in ports]
            agent = await stage.agent("a")
            await agent.connect()
            (serve_config.state_dir / "pki" / "server.crt").unlink()
            async with asyncio.timeout(10):
                while set(before) & {await asyncio.to_thread(serial_at, port) for port in ports}:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            agent.heartbeat()
            await agent.close()
            await agent.connect()
            await agent.close()

    run(scenario())


def serial_at(port: int) -> int:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection(("127.0.0.1", port), 5) as plain, context.wrap_socket(plain) as secure:
        return x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"").serial_number


def test_a_replaced_authority_passes_through_two_stages_of_double_trust(tmp_path: Path) -> None:
    first = Authority.open(tmp_path, "fed", NOW)
    old = first.ca_pem
    assert first.advance("fed", NOW) == "prepared"
    assert first.ca_pem.startswith(old)
    for again in (first, Authority.open(tmp_path, "fed", NOW)):
        assert (again.stage, again.ca_pem) == ("prepared", first.ca_pem)
    key_file = first.server_certificate(["h"], NOW)[0]
    signed_by_old = key_file.read_bytes()
    assert first.advance("fed", NOW) == "switched"
    assert first.ca_pem.endswith(old)
    assert first.server_certificate(["h"], NOW)[0].read_bytes() != signed_by_old
    assert first.advance("fed", NOW) == "single"
    assert old not in first.ca_pem
    assert Authority.open(tmp_path, "fed", NOW).fingerprint == first.fingerprint


def test_a_crash_in_the_switch_leaves_a_whole_authority(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path, "fed", NOW)
    authority.advance("fed", NOW)
    os.replace(tmp_path / "ca-next.key", tmp_path / "ca.key")
    found = Authority.open(tmp_path, "fed", NOW)
    assert found.stage == "switched"
    assert found.trusts == authority.trusts[::-1]


def test_a_federation_goes_through_a_replacement_without_a_restart(
    serve_config: ServeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CERTIFICATE_SECONDS", 0.1)

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agent = await stage.agent("a")
            await agent.connect()
            old = agent.ca_pem
            assert (await stage.client.rotate_authority()).stage == "prepared"
            await agent._until(lambda: agent.ca_pem != old)
            assert agent.ca_pem.startswith(old)
            await refused(stage.client.rotate_authority(), "ILLEGAL_STATE", "of before this stage: a")
            assert (await stage.client.rotate_authority(force=True)).stage == "switched"
            renewed = await agent.renew()
            await agent.close()
            agent.identity = replace(
                agent.identity, certificate_pem=renewed, key_pem=agent.renewed_key, ca_pem=agent.ca_pem
            )
            await agent.connect()
            reply = await stage.client.rotate_authority(force=True)
            assert reply.stage == "single"
            await agent.close()
            async with asyncio.timeout(10):
                while not await connects(agent, reply.ca_pem.encode()):  # noqa: ASYNC110 - the certificate is renewed
                    await asyncio.sleep(0.2)
            joined = await again(stage, reply.ca_pem.encode()).agent("b")
            await joined.connect()
            await joined.close()
            await agent.close()
        async with staged(serve_config) as stage:
            assert {region.name for region in await stage.client.regions()} == {"a", "b"}

    run(scenario())


def again(stage: Stage, ca_pem: bytes) -> Stage:
    token = stage.context.token_file.read_text().strip()
    return replace(stage, client=ControlClient(stage.context.address, ca_pem, token))


async def connects(agent: FakeAgent, ca_pem: bytes) -> bool:
    agent.identity = replace(agent.identity, ca_pem=ca_pem)
    try:
        async with asyncio.timeout(3):
            await agent.connect()
    except (GeofedError, TimeoutError):
        return False
    return True


# --- the operator's own CA


def given(serve_config: ServeConfig, folder: Path, own: OwnAuthority) -> ServeConfig:
    files = write(own.issue("cp", CONTROL_PLANE_NAME), folder)
    return replace(serve_config, given=GivenAuthority(*files))


def of_region(own: OwnAuthority, stage: Stage, region: str, dns_name: str = "") -> FakeAgent:
    tls = own.issue("whatever", dns_name or f"{region}.region.geofed")
    address = f"127.0.0.1:{stage.ports.agent}"
    agent = FakeAgent(Identity(region, address, tls.ca_pem, tls.certificate_pem, tls.key_pem))
    agent.catalogue = catalogue(region)
    return agent


def test_who_stands_by_follows_each_step_of_a_replacement(
    serve_config: ServeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader replaces the files that both have."""
    monkeypatch.setattr(server, "CERTIFICATE_SECONDS", 0.05)
    now = datetime.now(UTC)
    leading = Authority.open(serve_config.state_dir / "pki", "geofed", now)

    async def scenario() -> None:
        async with AsyncExitStack() as standing:
            config = await server._stand_by(serve_config, "x", leading.fingerprint, standing)
            for _ in range(3):
                leading.advance("geofed", now)
                key_pem, csr_pem = make_request()
                issued = leading.sign_region(csr_pem, "a", now)
                identity = Identity("a", config.agent_listen, leading.ca_pem, issued.certificate_pem, key_pem)
                with pytest.raises(GeofedError, match="STANDBY"):
                    await FakeAgent(identity).connect()
                crt = x509.load_pem_x509_certificate((serve_config.state_dir / "pki" / "server.crt").read_bytes())
                port = int(config.metrics_listen.rpartition(":")[2])
                async with asyncio.timeout(10):
                    while await asyncio.to_thread(serial_at, port) != crt.serial_number:  # noqa: ASYNC110 - of a socket
                        await asyncio.sleep(0.05)

    run(scenario())


def test_with_the_operators_ca_nothing_is_issued_and_its_word_admits(serve_config: ServeConfig, tmp_path: Path) -> None:
    own = OwnAuthority()
    config = given(serve_config, tmp_path / "own", own)

    async def scenario() -> None:
        async with staged(config) as stage:
            assert stage.context.ca_file == tmp_path / "own" / "ca.pem"
            assert [path.name for path in (config.state_dir / "pki").iterdir()] == ["audit.key"]
            await refused(stage.client.invite("a"), "CERTIFICATE_INVALID", "operator's own CA")
            await refused(stage.client.rotate_authority(), "CERTIFICATE_INVALID")
            a = of_region(own, stage, "a")
            await a.connect()
            with pytest.raises(Exception, match="own CA"):
                await a.renew()
            assert await stage.phase_is("a", "live")
            later = of_region(own, stage, "a")
            await later.connect()
            assert (await a.ended()).code == "FENCED"
            await refused(of_region(own, stage, "b", "b.example.org").connect(), "UNAUTHENTICATED")
            await stage.client.change_region("a", "revoke")
            assert (await later.ended()).code == "FORBIDDEN"
            for out in (a, later):
                await refused(told(out), "FORBIDDEN")
            fresh = of_region(own, stage, "a")
            await fresh.connect()
            assert await stage.phase_is("a", "live")
            assert len(fresh.revoked) == 2
            await fresh.close()

    run(scenario())


def test_the_operators_files_are_read_again_when_they_change(
    serve_config: ServeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CERTIFICATE_SECONDS", 0.1)
    own = OwnAuthority()
    config = given(serve_config, tmp_path / "own", own)

    async def scenario() -> None:
        async with staged(config) as stage:
            ports = (stage.ports.control, stage.ports.metrics)
            before = [await asyncio.to_thread(serial_at, port) for port in ports]
            write(own.issue("cp", CONTROL_PLANE_NAME), tmp_path / "own")
            async with asyncio.timeout(10):
                while set(before) & {await asyncio.to_thread(serial_at, port) for port in ports}:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

    run(scenario())


def test_a_certificate_without_the_servers_name_is_refused_at_the_start(tmp_path: Path) -> None:
    own = OwnAuthority()
    files = write(own.issue("cp", "fed.example.org"), tmp_path)
    with pytest.raises(GeofedError, match=CONTROL_PLANE_NAME):
        GivenAuthority(*files).server_certificate([], NOW + timedelta(0))
