"""The agents' side of the protocol, played by a script: real sockets, real certificates, no training."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import scheduler
from control_plane.pki import InvitationToken
from geofed_pb.features import FEATURES
from geofed_pb.rpc import CONTROL_PLANE_NAME, channel, error_of
from geofed_pb.v1 import agent_pb2, agent_pb2_grpc, common_pb2, control_pb2, control_pb2_grpc


@dataclass(frozen=True)
class Identity:
    """What `join` leaves with an agent."""

    region: str
    address: str
    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes

    def open(self) -> grpc.aio.Channel:
        return channel(
            self.address,
            ca_pem=self.ca_pem,
            name=CONTROL_PLANE_NAME,
            certificate_pem=self.certificate_pem,
            key_pem=self.key_pem,
        )


def make_request(common_name: str = "anything") -> tuple[bytes, bytes]:
    """A key and a certificate request that claims a name it has no right to."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem, csr.public_bytes(serialization.Encoding.PEM)


async def join(token_text: str) -> Identity:
    """Turn an invitation into an identity."""
    token = InvitationToken.parse(token_text)
    key_pem, csr_pem = make_request()
    async with channel(token.address, ca_pem=token.ca_pem, name=CONTROL_PLANE_NAME) as open_channel:
        stub = control_pb2_grpc.EnrolmentStub(open_channel)
        try:
            reply = await stub.Join(control_pb2.JoinRequest(secret=token.secret, csr_pem=csr_pem), timeout=10)
        except grpc.RpcError as error:
            raise error_of(error) from None
    host = token.address.rpartition(":")[0]
    return Identity(reply.region, f"{host}:{reply.agent_port}", reply.ca_pem, reply.certificate_pem, key_pem)


def catalogue(region: str, samples: int = 100, workers: int = 2) -> scheduler.Region:
    """What an agent says it has."""
    return scheduler.Region(
        name=region,
        cloud="test",
        capacity=scheduler.Capacity(workers=workers, memory_mb=2048, samples_per_second=500.0),
        prices=scheduler.Prices("test", "2026-01-01", 1e-5, 1e-7, 0.05, 0.09),
        datasets=(scheduler.Dataset("digits", {"train": scheduler.Split(samples), "test": scheduler.Split(20)}),),
    )


def profile_of(region: str, batch: int = 10) -> dict[str, Any]:
    """What an agent tells of a task: a small model on a quick channel."""
    return {
        "region": region, "samples": 100, "batch": batch, "parameters": 25_000, "model_bytes": 100_000,
        "steps": [
            {"batch": size, "memory_mb": 1024, "seconds": 0.002 + 0.001 * size, "peak_mb": 200.0 + size}
            for size in (batch // 2, batch, 2 * batch)
        ],
        "update_seconds": 0.001,
        "norms": [{"small_batch": 1, "small_norm2": 11.0, "large_batch": 10, "large_norm2": 2.0}],
        "channel": {
            "name": "redis", "put_seconds": 0.001, "get_seconds": 0.001, "up_bytes_per_second": 1e8,
            "down_bytes_per_second": 1e8,
        },
        "evaluation_peak_mb": 210.0, "start_seconds": 1.5, "again_seconds": 0.05, "gb_seconds": 3.0, "usd": 3e-5,
        "layers": [], "layers_note": "the model is one block",
    }  # fmt: skip


class FakeAgent:
    """One region. Keeps over connections what an agent keeps on disk: its cursor, and reports not acknowledged."""

    def __init__(self, identity: Identity, boot_id: str = "boot-1") -> None:
        self.identity = identity
        self.region = identity.region
        self.boot_id = boot_id
        self.features: tuple[str, ...] = FEATURES
        """What it says that it can do; an agent of an earlier version says nothing."""
        self.cursor = 0
        self.catalogue = catalogue(identity.region)
        self.commands: list[agent_pb2.ToAgent] = []
        self.unacknowledged: list[agent_pb2.FromAgent] = []
        self.welcome: agent_pb2.Welcome | None = None
        self.failure: Any = None
        self.strict = True
        self.revoked: list[str] = []
        """Serial numbers of revoked certificates, as told last."""
        self.ca_pem = b""
        """The trusted CAs, as told last."""
        self.renewed_key = b""
        """Key of the last renewal."""
        self.probes = False
        """Whether what it is to probe is a command that a test answers; otherwise it cannot, and says so."""
        self.labels: dict[int, int] | None = {}
        """What it counts where it is asked for labels alone, with `probes`; None: the test answers."""
        self._seq = 0
        self._news = asyncio.Condition()

    # --- the connection

    async def connect(self) -> agent_pb2.Welcome:
        """Open a session and resend what was not acknowledged."""
        self._channel = self.identity.open()
        self._stub = agent_pb2_grpc.AgentHubStub(self._channel)
        self._out: asyncio.Queue[agent_pb2.FromAgent | None] = asyncio.Queue()
        self.failure = None
        self.welcome = None
        hello = agent_pb2.Hello(
            agent_version="test",
            boot_id=self.boot_id,
            command_cursor=self.cursor,
            catalogue_json=json.dumps(asdict(self.catalogue)),
            features=self.features,
        )
        self._out.put_nowait(agent_pb2.FromAgent(hello=hello))
        self._task = asyncio.create_task(self._receive(self._stub.Session(self._outgoing(), wait_for_ready=True)))
        await self._until(lambda: self.welcome is not None or self.failure is not None)
        if self.failure is not None:
            failure = self.failure
            await self.close()
            raise failure
        assert self.welcome is not None
        self._seq = max(self._seq, self.welcome.report_cursor)
        self._drop_acknowledged(self.welcome.report_cursor)
        for message in self.unacknowledged:
            self._out.put_nowait(message)
        return self.welcome

    async def close(self) -> None:
        """Break the connection off."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close(None)

    async def __aenter__(self) -> FakeAgent:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _outgoing(self) -> AsyncIterator[agent_pb2.FromAgent]:
        while (message := await self._out.get()) is not None:
            yield message

    async def _receive(self, call: Any) -> None:
        try:
            async for message in call:
                async with self._news:
                    self._take(message)
                    self._news.notify_all()
        except grpc.RpcError as error:
            self.failure = error_of(error)
        async with self._news:
            self.failure = self.failure or EOFError("the session ended")
            self._news.notify_all()

    def _take(self, message: agent_pb2.ToAgent) -> None:
        kind = message.WhichOneof("body")
        if kind == "welcome":
            self.welcome = message.welcome
            self._take_certificates(message.welcome.revoked)
        elif kind == "revoked":
            self._take_certificates(message.revoked)
        elif kind == "report_ack":
            self._drop_acknowledged(message.report_ack.seq)
        elif message.seq:
            assert message.seq == self.cursor + 1 or not self.strict, "commands come in order, each once"
            self.cursor = message.seq
            self.commands.append(message)
            self._out.put_nowait(agent_pb2.FromAgent(command_ack=agent_pb2.CommandAck(seq=message.seq)))
        elif kind == "probe" and message.probe.labels_only and self.probes and self.labels is not None:
            told = agent_pb2.TaskWeight(last=True, samples=sum(self.labels.values()), labels=self.labels, usd=1e-6)
            self.tell_profile(message.probe.id, weight=told)
        elif kind in ("profile", "stop") or (kind == "probe" and self.probes):
            self.commands.append(message)
        elif kind == "probe":
            error = common_pb2.Error(code="FUNCTION_FAILED", message="this agent runs nothing")
            self.tell_profile(message.probe.id, error=error)
        else:
            self.lease = message.lease.lease_seconds

    def _take_certificates(self, told: agent_pb2.RevokedCertificates) -> None:
        self.revoked, self.ca_pem = list(told.serials), told.ca_pem

    def _drop_acknowledged(self, seq: int) -> None:
        self.unacknowledged = [message for message in self.unacknowledged if message.seq > seq]

    async def _until(self, condition: Callable[[], bool], seconds: float = 15) -> None:
        async with asyncio.timeout(seconds), self._news:
            await self._news.wait_for(condition)

    # --- speech

    def send(self, message: agent_pb2.FromAgent) -> None:
        """Send something durable."""
        self._seq += 1
        message.seq = self._seq
        self.unacknowledged.append(message)
        self._out.put_nowait(message)

    def send_raw(self, message: agent_pb2.FromAgent) -> None:
        """Send something as it is."""
        self._out.put_nowait(message)

    def heartbeat(self) -> None:
        self._out.put_nowait(agent_pb2.FromAgent(heartbeat=agent_pb2.Heartbeat(at=0)))

    def report(self, job: str, state: str, epoch: int = 1, **fields: Any) -> None:
        report = agent_pb2.PartitionReport(job=job, epoch=epoch, state=state, **fields)
        self.send(agent_pb2.FromAgent(partition=report))

    def tell_profile(self, job: str, **fields: Any) -> None:
        """How far a profile is, or what came of it; not durable."""
        self.send_raw(agent_pb2.FromAgent(profile=agent_pb2.ProfileReport(id=job, **fields)))

    async def settled(self) -> None:
        """All that was sent is applied."""
        await self._until(lambda: not self.unacknowledged or self.failure is not None)
        if self.failure is not None:
            raise self.failure

    async def ended(self) -> Any:
        """The session is over; returns why."""
        await self._until(lambda: self.failure is not None)
        return self.failure

    async def told_to_stop(self, job: str) -> None:
        """A command to stop this job's partition is here."""
        await self._until(lambda: any(c.stop.job == job for c in self.commands) or self.failure is not None)
        if self.failure is not None:
            raise self.failure

    async def command(self, kind: str, count: int = 1) -> Any:
        """The `count`-th command of a kind."""

        def of_kind() -> list[Any]:
            return [getattr(c, kind) for c in self.commands if c.WhichOneof("body") == kind]

        await self._until(lambda: len(of_kind()) >= count or self.failure is not None)
        if len(of_kind()) < count:
            raise self.failure
        return of_kind()[count - 1]

    # --- bytes

    async def fetch(self, digest: str) -> bytes:
        content = b""
        try:
            async for chunk in self._stub.FetchBlob(common_pb2.BlobRequest(digest=digest)):
                content += chunk.data
        except grpc.RpcError as error:
            raise error_of(error) from None
        return content

    async def put(self, content: bytes, *, claim: bytes | None = None, upto: int | None = None) -> common_pb2.BlobAck:
        """Upload, from where the other side stands; `upto` breaks off there, `claim` sends other bytes."""
        digest = digest_of(content)
        have = await self._stub.StatBlob(common_pb2.BlobRequest(digest=digest))

        async def chunks() -> AsyncIterator[common_pb2.BlobChunk]:
            data = (claim or content)[have.have_bytes : upto]
            yield common_pb2.BlobChunk(digest=digest, total_bytes=len(content), offset=have.have_bytes, data=data)

        try:
            return await self._stub.PutBlob(chunks())  # type: ignore[no-any-return]
        except grpc.RpcError as error:
            raise error_of(error) from None

    async def renew(self) -> bytes:
        self.renewed_key, csr_pem = make_request()
        return bytes((await self._stub.Renew(agent_pb2.RenewRequest(csr_pem=csr_pem))).certificate_pem)


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
