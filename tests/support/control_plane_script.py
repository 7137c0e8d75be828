"""The control plane's end of an agent's session, spoken by the test itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from cryptography.hazmat.primitives import serialization
from support.pki import Authority

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CONTROL_PLANE_NAME, answering, peer_region, server_options, streaming
from geofed_pb.v1 import agent_pb2, agent_pb2_grpc, common_pb2
from region_agent.link.control_plane_stream import ControlPlaneStream
from region_agent.link.identity import Identity, JoinedFederation, make_request
from region_agent.state.store import AgentStore

_PATIENCE_SECONDS = 15.0
_Value = TypeVar("_Value")


async def soon(work: Awaitable[_Value]) -> _Value:
    """The result of what must not take long."""
    return await asyncio.wait_for(work, _PATIENCE_SECONDS)


class Session:
    """One stream, seen from the control plane."""

    def __init__(self, agent: str | None) -> None:
        self.agent = agent
        self._in: asyncio.Queue[agent_pb2.FromAgent] = asyncio.Queue()
        self._out: asyncio.Queue[agent_pb2.ToAgent | GeofedError | None] = asyncio.Queue()

    async def heard(self, kind: str) -> agent_pb2.FromAgent:
        """The next message of a kind; others before it are passed over."""
        while (message := await soon(self._in.get())).WhichOneof("body") != kind:
            pass
        return message

    def heard_so_far(self) -> list[agent_pb2.FromAgent]:
        return [self._in.get_nowait() for _ in range(self._in.qsize())]

    def say(self, seq: int = 0, **body: Any) -> None:
        self._out.put_nowait(agent_pb2.ToAgent(seq=seq, **body))

    async def welcome(self, *, report_cursor: int = 0, lease_seconds: float = 30.0) -> agent_pb2.Hello:
        hello = (await self.heard("hello")).hello
        self.say(welcome=agent_pb2.Welcome(lease_seconds=lease_seconds, report_cursor=report_cursor, session=1))
        return hello

    def end(self, error: GeofedError | None = None) -> None:
        self._out.put_nowait(error)


class ControlPlane(agent_pb2_grpc.AgentHubServicer):
    """Serves agents with what a test says."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.sessions: asyncio.Queue[Session] = asyncio.Queue()
        self.blobs: dict[str, bytes] = {}
        self.partial: dict[str, bytearray] = {}
        self.offsets: list[int] = []
        self.fetched: list[int] = []
        """Offsets that blobs were asked for from."""
        self.hold_blobs = asyncio.Event()
        self.hold_blobs.set()
        self.renewals = 0
        self._server = grpc.aio.server(options=server_options())
        self.address = ""

    async def __aenter__(self) -> ControlPlane:
        agent_pb2_grpc.add_AgentHubServicer_to_server(self, self._server)
        tls = self.authority.issue(CONTROL_PLANE_NAME, CONTROL_PLANE_NAME)
        credentials = grpc.ssl_server_credentials(
            [(tls.key_pem, tls.certificate_pem)], self.authority.pem, require_client_auth=True
        )
        self.address = f"127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', credentials)}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    async def next_session(self) -> Session:
        return await soon(self.sessions.get())

    @streaming
    async def Session(self, request: AsyncIterator[agent_pb2.FromAgent], context: Any) -> AsyncIterator[Any]:
        session = Session(peer_region(context))

        async def read() -> None:
            async for message in request:
                session._in.put_nowait(message)

        reading = asyncio.create_task(read())
        self.sessions.put_nowait(session)
        try:
            while isinstance(message := await session._out.get(), agent_pb2.ToAgent):
                yield message
            if message is not None:
                raise message
        finally:
            reading.cancel()

    @streaming
    async def FetchBlob(self, request: common_pb2.BlobRequest, context: Any) -> AsyncIterator[common_pb2.BlobChunk]:
        if request.digest not in self.blobs:
            raise GeofedError("MODEL_NOT_FOUND", "no such blob")
        data = self.blobs[request.digest]
        self.fetched.append(request.offset)
        for offset in range(request.offset, len(data), 1000):
            yield common_pb2.BlobChunk(digest=request.digest, offset=offset, data=data[offset : offset + 1000])
            await self.hold_blobs.wait()

    @answering
    async def StatBlob(self, request: common_pb2.BlobRequest, context: Any) -> common_pb2.BlobAck:
        if request.digest in self.blobs:
            return common_pb2.BlobAck(digest=request.digest, complete=True)
        return common_pb2.BlobAck(digest=request.digest, have_bytes=len(self.partial.get(request.digest, b"")))

    @answering
    async def PutBlob(self, request: AsyncIterator[common_pb2.BlobChunk], context: Any) -> common_pb2.BlobAck:
        async for chunk in request:
            held = self.partial.setdefault(chunk.digest, bytearray())
            self.offsets.append(chunk.offset)
            held += chunk.data
            await self.hold_blobs.wait()
            if len(held) == chunk.total_bytes:
                self.blobs[chunk.digest] = bytes(held)
                return common_pb2.BlobAck(digest=chunk.digest, have_bytes=len(held), complete=True)
        return common_pb2.BlobAck()

    @answering
    async def Renew(self, request: agent_pb2.RenewRequest, context: Any) -> agent_pb2.RenewReply:
        self.renewals += 1
        region = peer_region(context) or ""
        return agent_pb2.RenewReply(
            certificate_pem=self.authority.sign_request(request.csr_pem, region), ca_pem=self.authority.pem
        )


class Agent:
    """A hub with its store and identity, whose commands are stored and written down."""

    def __init__(self, folder: Path, control_plane: ControlPlane, *, before: str = "", **life: Any) -> None:
        """``before``: addresses of other control planes, each with a comma, that are tried first."""
        self.identity, self.store = Identity(folder), AgentStore(folder / "agent.db")
        key_pem, _ = make_request("east")
        key = serialization.load_pem_private_key(key_pem, None)
        issued = control_plane.authority.issue("east", "east.region.geofed", key=key, **life)  # type: ignore[arg-type]
        federation = JoinedFederation("east", before + control_plane.address, "test")
        self.identity.store(federation, key_pem, issued.certificate_pem, issued.ca_pem)
        self.hub = ControlPlaneStream(self.identity, self.store, lambda: "{}", "1.0")
        self.taken: list[tuple[str, int]] = []
        self.refuse_once: Exception | None = None
        self.restored = 0

    async def __aenter__(self) -> Agent:
        self.running = asyncio.create_task(self.hub.run(self))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.store.close()

    def start(self, seq: int, command: agent_pb2.StartPartition) -> None:
        if self.refuse_once is not None:
            error, self.refuse_once = self.refuse_once, None
            raise error
        self.store.took_start(seq, command.job, command.SerializeToString(), "key")
        self.taken.append(("start", seq))

    def peers(self, seq: int, command: agent_pb2.Peers) -> None:
        self.store.took_peers(seq, command.job, command.SerializeToString())
        self.taken.append(("peers", seq))

    def stop(self, seq: int, command: agent_pb2.StopPartition) -> None:
        self.store.took_stop(seq, command.job, discard=command.discard)
        self.taken.append(("stop", seq))

    def state_restored(self) -> None:
        self.restored += 1

    def publish(self, seq: int, command: agent_pb2.PublishModel) -> None:
        self.store.took_publish(seq, command.job)
        self.taken.append(("publish", seq))


def play(scene: Callable[[ControlPlane, Agent], Awaitable[None]], folder: Path, **life: Any) -> None:
    """Run a scene between a control plane that the test speaks for and a real agent's hub."""

    async def whole() -> None:
        async with ControlPlane(Authority()) as control_plane, Agent(folder, control_plane, **life) as agent:
            await asyncio.wait_for(scene(control_plane, agent), 4 * _PATIENCE_SECONDS)

    asyncio.run(whole())
