"""A machine whose clock is wrong is told that, whatever fails by it first."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from support.pki import Authority

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CONTROL_PLANE_NAME, answering, server_options
from geofed_pb.v1 import agent_pb2_grpc, common_pb2
from region_agent import doctor
from region_agent.config import RegionConfig
from region_agent.doctor import Finding, examine
from region_agent.link.identity import Identity, JoinedFederation
from sync.tcp_streams.sockets import Tls


class _Hub(agent_pb2_grpc.AgentHubServicer):
    @answering
    async def StatBlob(self, request: common_pb2.BlobRequest, context: Any) -> common_pb2.BlobAck:
        return common_pb2.BlobAck()


@pytest.fixture(autouse=True)
def _isolation_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would start a gateway."""

    async def tried(config: RegionConfig) -> str:
        return "not tried"

    monkeypatch.setattr(doctor, "_isolation", tried)


def _found(folder: Path, authority: Authority, server_tls: Tls, own: Tls) -> dict[str, Finding]:
    """What the doctor says beside a control plane that shows such a certificate."""

    async def look() -> list[Finding]:
        server = grpc.aio.server(options=server_options())
        agent_pb2_grpc.add_AgentHubServicer_to_server(_Hub(), server)
        pairs = [(server_tls.key_pem, server_tls.certificate_pem)]
        credentials = grpc.ssl_server_credentials(pairs, authority.pem, require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        identity = Identity(folder)
        federation = JoinedFederation("east", f"127.0.0.1:{port}", "test")
        identity.store(federation, own.key_pem, own.certificate_pem, authority.pem)
        config = RegionConfig.model_validate(
            {
                "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
                "capacity": {"workers": 1},
            }
        )  # fmt: skip
        try:
            return await examine(config, folder)
        finally:
            await server.stop(None)

    return {finding.name: finding for finding in asyncio.run(look())}


@pytest.mark.parametrize(("ahead", "says"), [(0, ""), (-240, "240 s behind"), (3600, "3600 s ahead of")])
def test_the_doctor_compares_the_clock_with_the_control_planes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float, says: str
) -> None:
    authority = Authority()
    monkeypatch.setattr(
        doctor, "time", SimpleNamespace(time=lambda: time.time() + ahead, monotonic=time.monotonic)
    )  # fmt: skip
    server_tls = authority.issue("control plane", CONTROL_PLANE_NAME)
    found = _found(tmp_path, authority, server_tls, authority.region("east", life=timedelta(hours=9)))
    assert found["control plane"].ok
    assert found["clock"].ok == (not says)
    assert says in found["clock"].text
    assert says == "" or "correct the wrong clock" in found["clock"].hint


def test_a_clock_before_the_control_planes_certificate_is_named(tmp_path: Path) -> None:
    authority = Authority()
    server_tls = authority.issue("control plane", CONTROL_PLANE_NAME, begins=timedelta(minutes=50))
    found = _found(tmp_path, authority, server_tls, authority.region("east"))
    for name in ("control plane", "clock"):
        assert not found[name].ok
        assert "not yet valid" in found[name].text
        assert "this machine's clock says" in found[name].hint


@pytest.mark.parametrize(
    ("begins", "code", "says"), [(1, "CERTIFICATE_INVALID", "begins"), (-9, "CERTIFICATE_EXPIRED", "ended")]
)
def test_the_regions_own_certificate_is_looked_at_by_the_clock(
    tmp_path: Path, begins: int, code: str, says: str
) -> None:
    authority = Authority()
    own = authority.region("east", begins=timedelta(hours=begins))
    identity = Identity(tmp_path)
    identity.store(JoinedFederation("east", "127.0.0.1:1", "test"), own.key_pem, own.certificate_pem, authority.pem)
    with pytest.raises(GeofedError, match=says) as raised:
        identity.check()
    assert raised.value.code == code
    assert "clock" in raised.value.message + raised.value.hint
