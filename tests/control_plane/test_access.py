"""Every RPC by every role: what its rule allows is let through, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography import x509
from google.protobuf.empty_pb2 import Empty
from support.pki import Authority

from control_plane.server import ServeConfig
from control_plane.service import AGENT_RULES, CONTROL_RULES
from geofed_pb.rpc import CONTROL_PLANE_NAME, channel, error_of, region_name, reloading_credentials, with_token
from geofed_pb.security.access import AccessInterceptor, Check, Rule
from geofed_pb.v1 import agent_pb2, common_pb2, control_pb2, sync_pb2, sync_pb2_grpc, worker_pb2
from sync.file_transfer.access import EXCHANGE_RULES, PeerCheck
from sync.ps.server import WORKER_RULES, WorkerCheck
from sync.ps.tokens import WorkerIdentity, new_key, sign
from sync.tcp_streams.revoked import RevokedSerials
from sync.tcp_streams.sockets import Tls
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.scenario import bring_up, run

MODULES = (common_pb2, control_pb2, agent_pb2, sync_pb2, worker_pb2)
SERVICES = {
    **control_pb2.DESCRIPTOR.services_by_name,
    **agent_pb2.DESCRIPTOR.services_by_name,
    **sync_pb2.DESCRIPTOR.services_by_name,
    **worker_pb2.DESCRIPTOR.services_by_name,
}
METHODS = {f"/{one.full_name}/{method.name}": method for one in SERVICES.values() for method in one.methods}
DENIED = {"UNAUTHENTICATED", "FORBIDDEN"}
REFUSED = {*DENIED, "CERTIFICATE_INVALID", "UNAVAILABLE"}
"""Codes of a refusal, which TLS itself may make where no certificate is shown."""


def test_every_rpc_has_one_rule_and_every_rule_an_rpc() -> None:
    tables = (CONTROL_RULES, AGENT_RULES, EXCHANGE_RULES, WORKER_RULES)
    ruled = [method for table in tables for method in table]
    assert len(ruled) == len(set(ruled))
    assert {method for method in ruled if not method.startswith("/grpc.health.")} == set(METHODS)
    assert all(rule.callers for table in tables for rule in table.values())


def message_of(name: str, job: str = "") -> Any:
    kind = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    fields = kind.DESCRIPTOR.fields_by_name
    return kind(job=job) if job and "job" in fields else kind()


async def outcome(line: grpc.aio.Channel, method: str, metadata: Any = None, job: str = "") -> str:
    """The code with which a call ends; "answered" if it has a first answer."""
    described = METHODS[method]
    kind = (
        f"{'stream' if described.client_streaming else 'unary'}_{'stream' if described.server_streaming else 'unary'}"
    )
    output = next(getattr(m, described.output_type.name) for m in MODULES if hasattr(m, described.output_type.name))
    call = getattr(line, kind)(method, lambda message: message.SerializeToString(), output.FromString)
    request = message_of(described.input_type.name, job)
    given = iter([request]) if described.client_streaming else request
    try:
        if described.server_streaming:
            async for _ in call(given, metadata=metadata, timeout=10):
                return "answered"
        else:
            await call(given, metadata=metadata, timeout=10)
    except grpc.RpcError as error:
        return error_of(error).code
    return "answered"


# --- the control port, on the real server


OWN = {"StatBlob", "StatBlobs", "PutBlob", "Plan", "Submit", "Profile"}
ANY = {"Version", "ListJobs", "ListRegions", "ListUsers", "SignOut"}
READ = {"GetJob", "Watch", "Storage", "Attest"}
CONTENTS = {"Logs", "GetModel"}
CHANGE = {"Cancel", "Finish", "Replan", "Resume", "Scale", "Share", "Rename", "Delete"}
RULE = {"Invite", "ChangeRegion", "RotateAuthority", "AddUser", "ChangeUser", "RemoveUser"}
MAY = {
    "anonymous": set(), "region": set(),
    "other viewer": ANY, "viewer": ANY | READ | CONTENTS,
    "other member": ANY | OWN, "reader": ANY | OWN | READ | CONTENTS, "user": ANY | OWN | READ | CONTENTS | CHANGE,
    "demoted user": ANY | READ | CONTENTS,
    "other auditor": ANY | READ | {"Audit"}, "auditor": ANY | READ | CONTENTS | {"Audit"},
    "named operator": ANY | OWN | READ | CONTENTS | CHANGE | RULE | {"Audit"},
    "operator": ANY | OWN | READ | CONTENTS | CHANGE | RULE | {"Audit"},
}  # fmt: skip
"""What each may call for a job. It is the job of "user" and shared with all whose name does not begin with "other"."""


@pytest.mark.parametrize("role", MAY)
def test_the_control_port_by_every_role(serve_config: ServeConfig, job_file: Path, role: str) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents = await bring_up(stage)
            ann = (await stage.client.add_user("ann")).token
            job = (await _submitted_by(stage, ann, job_file)).id
            token = stage.context.token_file.read_text().strip()
            if role == "demoted user":
                await stage.client.change_user("ann", role="viewer")
            if role in ("user", "demoted user"):
                token = ann
            elif role not in ("operator", "anonymous", "region"):
                kind = {"reader": "member"}.get(role, role.split()[-1])
                token = (await stage.client.add_user("bob", role=kind)).token
                if not role.startswith("other"):
                    await stage.client.share(job, "bob")
            shown = None if role in ("anonymous", "region") else with_token(token)
            identity = agents[0].identity
            pems = (
                {"certificate_pem": identity.certificate_pem, "key_pem": identity.key_pem} if role == "region" else {}
            )
            ca_pem = stage.context.ca_file.read_bytes()
            async with channel(stage.context.address, ca_pem=ca_pem, name=CONTROL_PLANE_NAME, **pems) as line:
                for method, rule in CONTROL_RULES.items():
                    if method in METHODS:
                        code = await outcome(line, method, shown, job)
                        may = "anyone" in rule.callers or method.rpartition("/")[2] in MAY[role]
                        assert (code not in DENIED) == may, f"{method} by {role}: {code}"
            for agent in agents:
                await agent.close()

    run(scenario())


def test_each_rpc_of_users_has_its_place_in_the_table() -> None:
    of_users = {method.rpartition("/")[2] for method, rule in CONTROL_RULES.items() if "anyone" not in rule.callers}
    assert of_users == MAY["operator"]


async def _submitted_by(stage: Stage, token: str, job_file: Path) -> Any:
    from control_plane.client import ControlClient

    async with ControlClient(stage.context.address, stage.context.ca_file.read_bytes(), token) as client:
        return (await Stage(stage.config, stage.ports, client, stage.context).submit(job_file)).job


# --- the agent port, on the real server


@pytest.mark.parametrize("role", ["region", "other region", "revoked region", "anonymous", "user", "operator"])
def test_the_agent_port_by_every_role(serve_config: ServeConfig, role: str) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            region, other, revoked = [await stage.agent(name) for name in "abc"]
            await stage.client.change_region("c", "revoke")
            shown = {"region": region, "other region": other, "revoked region": revoked}
            token = stage.context.token_file.read_text().strip()
            if role == "user":
                token = (await stage.client.add_user("ann")).token
            if role in shown:
                line, metadata = shown[role].identity.open(), None
            else:
                ca_pem = stage.context.ca_file.read_bytes()
                line = channel(region.identity.address, ca_pem=ca_pem, name=CONTROL_PLANE_NAME)
                metadata = None if role == "anonymous" else with_token(token)
            async with line:
                for method in AGENT_RULES:
                    code = await outcome(line, method, metadata)
                    if role == "other region" and method.endswith("FetchBlob"):
                        assert code in ("FORBIDDEN", "FRAME_INVALID"), "code is for regions that run its job"
                    elif role in ("region", "other region"):
                        allowed = method.endswith("FetchBlob") or code not in DENIED
                        assert allowed, f"{method} by {role}: {code}"
                    else:
                        assert code in REFUSED, f"{method} by {role}: {code}"

    run(scenario())


# --- the servers of a region: the same rules and checks, before services that let everything through


@dataclass
class Door:
    """A server whose services answer whoever is let in."""

    port: int
    own: Tls
    authority: Authority


@asynccontextmanager
async def door(rules: Mapping[str, Rule], check: Check, authority: Authority, *, mutual: bool) -> AsyncIterator[Door]:
    server = grpc.aio.server(interceptors=[AccessInterceptor(rules, check)])
    handlers: dict[str, dict[str, Any]] = {}
    for method in (*rules, "/geofed.v1.Exchange/Undeclared"):
        service, _, name = method.removeprefix("/").rpartition("/")
        handlers.setdefault(service, {})[name] = _open_handler(METHODS.get(method))
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(service, each) for service, each in handlers.items())
    )
    own = authority.region("a")
    load: Callable[[], Any] = lambda: (own.key_pem, own.certificate_pem, own.ca_pem if mutual else None)  # noqa: E731
    port = server.add_secure_port("127.0.0.1:0", reloading_credentials(load))
    await server.start()
    try:
        yield Door(port, own, authority)
    finally:
        await server.stop(0)


def _open_handler(described: Any) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.INTERNAL, "let in")

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.INTERNAL, "let in")
        yield Empty()

    streams = bool(described and described.client_streaming), bool(described and described.server_streaming)
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler, (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler, (True, True): grpc.stream_stream_rpc_method_handler,
    }[streams]  # fmt: skip
    return make(stream if streams[1] else answer)


PEER_ROLES = {"own agent": "a", "peer": "b", "other region": "z", "revoked region": "b", "control plane": ""}


@pytest.mark.parametrize("role", [*PEER_ROLES, "anonymous", "worker", "operator"])
def test_the_exchange_port_by_every_role(tmp_path: Path, role: str) -> None:
    authority = Authority()
    revoked = RevokedSerials(tmp_path / "revoked.json")
    name = PEER_ROLES.get(role)
    tls = authority.issue("cp", CONTROL_PLANE_NAME) if name == "" else authority.region(name) if name else None
    if role == "revoked region":
        assert tls is not None
        serial = x509.load_pem_x509_certificate(tls.certificate_pem).serial_number
        (tmp_path / "revoked.json").write_text(f'["{serial:x}"]')
    check = PeerCheck("a", lambda: frozenset({"b", "c"}), revoked)

    async def scenario() -> None:
        async with door(EXCHANGE_RULES, check, authority, mutual=True) as opened:
            pems = {} if tls is None else {"certificate_pem": tls.certificate_pem, "key_pem": tls.key_pem}
            address = f"127.0.0.1:{opened.port}"
            async with channel(address, ca_pem=authority.pem, name=region_name("a"), **pems) as line:
                for method, rule in EXCHANGE_RULES.items():
                    code = await outcome(line, method, with_token("x"))
                    assert (code == "INTERNAL") == (role in rule.callers), f"{method} by {role}: {code}"
                    assert code == "INTERNAL" or code in REFUSED
                if role == "peer":
                    call = line.unary_unary("/geofed.v1.Exchange/Undeclared")
                    with pytest.raises(grpc.RpcError, match="no rule says"):
                        await call(b"", timeout=10)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "role", ["worker", "worker of another job", "worker by another key", "anonymous", "peer", "region"]
)
def test_the_workers_port_by_every_role(role: str) -> None:
    authority, key = Authority(), new_key()
    config: Any = SimpleNamespace(token_key=key, job="job", region="a")
    job = "other" if role == "worker of another job" else "job"
    token = sign(
        WorkerIdentity(job, "a", 0, 1, 2), new_key() if role == "worker by another key" else key, timedelta(minutes=5)
    )
    peer = authority.region("b")

    async def scenario() -> None:
        async with door(WORKER_RULES, WorkerCheck(config), authority, mutual=False) as opened:
            shown = peer if role in ("peer", "region") else None
            pems = {} if shown is None else {"certificate_pem": shown.certificate_pem, "key_pem": shown.key_pem}
            address = f"127.0.0.1:{opened.port}"
            async with channel(address, ca_pem=authority.pem, name=region_name("a"), **pems) as line:
                for method, rule in WORKER_RULES.items():
                    code = await outcome(line, method, with_token(token) if "worker" in role else None)
                    assert (code == "INTERNAL") == (role in rule.callers), f"{method} by {role}: {code}"
                    assert code == "INTERNAL" or code in REFUSED

    asyncio.run(scenario())


class Exchange(sync_pb2_grpc.ExchangeServicer):
    async def Offer(self, request: Any, context: Any) -> sync_pb2.OfferReply:
        return sync_pb2.OfferReply()

    async def Send(self, request_iterator: Any, context: Any) -> sync_pb2.OfferReply:
        async for _ in request_iterator:
            pass
        return sync_pb2.OfferReply()


@pytest.mark.parametrize("method", ["Offer", "Send"])
def test_bytes_that_are_no_message_are_refused_with_a_code(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """They leave no traceback in the log, which whoever reaches the port could fill."""
    authority = Authority()
    own, peer = authority.region("a"), authority.region("b")

    async def scenario() -> None:
        access = AccessInterceptor(EXCHANGE_RULES, PeerCheck("a", lambda: frozenset({"b"}), RevokedSerials()))
        server = grpc.aio.server(interceptors=[access])
        sync_pb2_grpc.add_ExchangeServicer_to_server(Exchange(), server)
        load: Callable[[], Any] = lambda: (own.key_pem, own.certificate_pem, own.ca_pem)  # noqa: E731
        port = server.add_secure_port("127.0.0.1:0", reloading_credentials(load))
        await server.start()
        pems = {"certificate_pem": peer.certificate_pem, "key_pem": peer.key_pem}
        try:
            async with channel(f"127.0.0.1:{port}", ca_pem=authority.pem, name=region_name("a"), **pems) as line:
                streams = method == "Send"
                call = (line.stream_unary if streams else line.unary_unary)(f"/geofed.v1.Exchange/{method}")
                await call(iter([b""]) if streams else b"", timeout=10)
                data = b"\xff" * 9
                with pytest.raises(grpc.RpcError) as refused:
                    await call(iter([data]) if streams else data, timeout=10)
                assert error_of(refused.value).code == "FRAME_INVALID"
        finally:
            await server.stop(0)

    asyncio.run(scenario())
    assert "DecodeError" not in caplog.text
