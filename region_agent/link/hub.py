"""The agent's line to the control plane: one stream that is dialled again for ever, and blobs beside it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio

from geofed_pb.bounds import SESSION_MESSAGE_BYTES
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CHUNK_BYTES, CONTROL_PLANE_NAME, channel, error_of, to_proto
from geofed_pb.v1 import agent_pb2, agent_pb2_grpc, common_pb2
from region_agent.link.identity import Identity
from region_agent.link.outgoing import ReportQueue, fitted, is_passing, too_large
from region_agent.state.store import AgentStore
from sync.durable import disk_full_as_error
from sync.framing import digest_of

__all__ = ["Commands", "Hub"]

_log = logging.getLogger("geofed.hub")
_BACKOFF_FIRST_SECONDS = 0.2
_BACKOFF_MOST_SECONDS = 3.0
_SILENCE_LEASES = 1.0
"""A session that has brought nothing for this many leases is dead, whatever TCP says."""
_DEFAULT_LEASE_SECONDS = 30.0


_OF_A_JOB = (
    agent_pb2.StartPartition,
    agent_pb2.Peers,
    agent_pb2.StopPartition,
    agent_pb2.ScalePartition,
    agent_pb2.PublishModel,
    agent_pb2.SendShard,
)


class Commands(Protocol):
    """Who carries out what the control plane asks for. Each is called once its command is stored."""

    def start(self, seq: int, command: agent_pb2.StartPartition) -> None: ...
    def peers(self, seq: int, command: agent_pb2.Peers) -> None: ...
    def stop(self, seq: int, command: agent_pb2.StopPartition) -> None: ...
    def scale(self, seq: int, command: agent_pb2.ScalePartition) -> None: ...
    def publish(self, seq: int, command: agent_pb2.PublishModel) -> None: ...
    def send_shard(self, seq: int, command: agent_pb2.SendShard) -> None: ...
    def profile(self, command: agent_pb2.ProfileTask) -> None:
        """Not stored: whoever waits for it asks again."""

    def probe(self, command: agent_pb2.ProfileTask) -> None:
        """The same."""

    def state_restored(self) -> None:
        """What is kept here is older than what the control plane was told: it was put back from a copy."""


class Hub:
    """One region's side of the session.

    Commands are stored before they are acknowledged, reports before they are sent; after a break, each side tells
    the other how far it has come, and both continue from there. A message that can never be delivered, or never be
    carried out, is set aside, and its job fails with the reason; what stands behind it continues.
    """

    def __init__(self, identity: Identity, store: AgentStore, catalogue: Callable[[], str], version: str) -> None:
        self._identity, self._store, self._catalogue, self._version = identity, store, catalogue, version
        self._boot_id = uuid.uuid4().hex
        self._passing: dict[str, agent_pb2.FromAgent] = {}
        self._news = asyncio.Event()
        self._stale = asyncio.Event()
        """What the present session was told of this region holds no more."""
        self.lease_seconds = _DEFAULT_LEASE_SECONDS
        self.connected = False
        self._turned = asyncio.Event()
        """A session has begun or ended."""
        self._reports = ReportQueue(store)
        self.last_heard = 0.0
        """Unix seconds of the last message from the control plane."""
        self.skew_seconds = 0.0
        """The control plane's clock minus ours."""
        self.refusal: GeofedError | None = None
        """Why the control plane does not take this agent, where it does not."""

    # Reports

    def report(self, message: agent_pb2.PartitionReport, *, durable: bool) -> None:
        """Tell how a partition stands; of those that may be lost only the newest is kept."""
        key = f"partition {message.job}"
        whole = fitted(agent_pb2.FromAgent(partition=message))
        if durable:
            stored = self._store.add_report(whole.SerializeToString())
            # What waits to be sent is older than this, and would be taken for news behind it.
            self._passing.pop(key, None)
        if not durable or not stored:
            self._passing[key] = whole
        self._news.set()

    def tell_profile(self, report: agent_pb2.ProfileReport) -> None:
        """Tell how far a profile is; only its newest word is kept."""
        self._passing[f"profile {report.id}"] = fitted(agent_pb2.FromAgent(profile=report))
        self._news.set()

    def tell_capacity(self, preemptible: int) -> None:
        """Tell how many preemptible workers there are now; the next session's first word has it too."""
        update = agent_pb2.CapacityNews(preemptible=preemptible)
        self._passing["capacity"] = agent_pb2.FromAgent(capacity=update)
        self._news.set()

    def send_durably(self, message: agent_pb2.FromAgent) -> None:
        self._store.add_report(fitted(message).SerializeToString())
        self._news.set()

    # The session

    def begin_anew(self) -> None:
        """Open another session, whose first word says what this region has now."""
        self._stale.set()

    async def turned(self, within: float) -> None:
        """Wait until a session begins or ends, for so many seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._turned.wait()
        self._turned.clear()

    async def run(self, commands: Commands) -> None:
        """Keep a session until cancelled.

        Raises ``GeofedError`` where no new try can help: ``CERTIFICATE_EXPIRED``, and ``FENCED`` where another
        process has taken over with the same identity.
        """
        backoff = _BACKOFF_FIRST_SECONDS
        while True:
            try:
                await self._session(commands)
                backoff = _BACKOFF_FIRST_SECONDS
            except grpc.RpcError as raised:
                self._identity.check()
                self._note(error := error_of(raised))
                if self.connected and not is_passing(error):
                    self._reports.broke(error)
            except TimeoutError:
                self._note(GeofedError("UNAVAILABLE", "the control plane has gone silent"))
            except GeofedError as error:
                # A command could not be stored: it was not acknowledged, and comes again in the next session.
                self._note(error)
            finally:
                was_connected, self.connected = self.connected, False
                if was_connected:
                    self._turned.set()
            backoff = _BACKOFF_FIRST_SECONDS if was_connected else min(backoff * 2, _BACKOFF_MOST_SECONDS)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    def _note(self, error: GeofedError) -> None:
        if error.code == "FENCED":
            raise GeofedError("FENCED", error.message, hint="stop the other agent of this region, then start this one")
        if self.connected or self.refusal is None or self.refusal.code != error.code:
            _log.warning("no session with the control plane: %s", error)
        self.refusal = error

    async def _session(self, commands: Commands) -> None:
        async with self._dial() as line:
            await self._converse(agent_pb2_grpc.AgentHubStub(line).Session(), commands)

    async def _converse(self, call: Any, commands: Commands) -> None:
        self._stale.clear()
        try:
            hello = agent_pb2.Hello(
                agent_version=self._version,
                boot_id=self._boot_id,
                command_cursor=self._store.command_cursor(),
                catalogue_json=self._catalogue(),
                report_cursor=self._store.reports_acknowledged(),
            )
            if hello.ByteSize() > SESSION_MESSAGE_BYTES:
                hint = "take datasets out of the region's file"
                raise GeofedError("LIMIT_EXCEEDED", f"the region's catalogue: {too_large(hello).message}", hint=hint)
            await call.write(agent_pb2.FromAgent(hello=hello))
            async with asyncio.timeout(_DEFAULT_LEASE_SECONDS):
                first = await call.read()
            if first is grpc.aio.EOF:
                return
            self._welcomed(first.welcome, commands)
            sending = asyncio.create_task(self._send(call, first.welcome.report_cursor))
            receiving = asyncio.create_task(self._receive(call, commands))
            stale = asyncio.create_task(self._stale.wait())
            try:
                done, _ = await asyncio.wait({sending, receiving, stale}, return_when=asyncio.FIRST_COMPLETED)
                if done == {stale}:
                    return
                if sending.done() and not isinstance(sending.exception(), grpc.RpcError | asyncio.InvalidStateError):
                    sending.result()
                # A stream that can no longer be written to is over; the reading side is told why.
                await receiving
            finally:
                for task in (sending, receiving, stale):
                    task.cancel()
                await asyncio.gather(sending, receiving, stale, return_exceptions=True)
        finally:
            call.cancel()

    def _welcomed(self, welcome: agent_pb2.Welcome, commands: Commands) -> None:
        self.connected, self.refusal = True, None
        self._turned.set()
        self.lease_seconds = welcome.lease_seconds or _DEFAULT_LEASE_SECONDS
        self.last_heard = time.time()
        self.skew_seconds = welcome.at - self.last_heard
        _log.info("session %d with the control plane", welcome.session)
        if self._reports.resume(welcome.report_cursor):
            _log.warning("the control plane was told more than this state directory knows of: it was lost or put back")
            commands.state_restored()

    async def _receive(self, call: Any, commands: Commands) -> None:
        while True:
            async with asyncio.timeout(self.lease_seconds * _SILENCE_LEASES):
                message = await call.read()
            if message is grpc.aio.EOF:
                # Ended in order; had it been an error, reading would have raised it.
                return
            self.last_heard = time.time()
            try:
                self._take(message, commands)
            except GeofedError as error:
                if error.retryable or not message.seq:
                    raise
                self._refuse(message, error)
            except Exception as error:
                if not message.seq:
                    raise
                # Whatever it broke on, it would again, in every session to come.
                _log.exception("command %d", message.seq)
                self._refuse(message, GeofedError("INTERNAL", f"{type(error).__name__}: {error}"))
            if message.seq:
                # Stored by now; a repeated acknowledgement does no harm.
                self._passing["ack"] = agent_pb2.FromAgent(command_ack=agent_pb2.CommandAck(seq=message.seq))
                self._news.set()

    def _refuse(self, message: agent_pb2.ToAgent, error: GeofedError) -> None:
        """A command that can never be carried out: what comes behind it still is."""
        _log.error("command %d is set aside: %s", message.seq, error)
        self._store.set_command_aside(message.seq, str(error), message.SerializeToString())
        kind = message.WhichOneof("body")
        order = getattr(message, kind) if kind is not None else None
        if isinstance(order, _OF_A_JOB):
            report = agent_pb2.PartitionReport(
                job=order.job, epoch=order.epoch, state="failed", condition=error.message, error=to_proto(error)
            )
            self.report(report, durable=True)

    def _take(self, message: agent_pb2.ToAgent, commands: Commands) -> None:
        kind = message.WhichOneof("body")
        if message.seq and message.seq <= self._store.command_cursor():
            return
        match kind:
            case "lease":
                self.lease_seconds = message.lease.lease_seconds or self.lease_seconds
            case "report_ack":
                self._reports.acknowledged(message.report_ack.seq)
                self._news.set()
            case "start":
                commands.start(message.seq, message.start)
            case "peers":
                commands.peers(message.seq, message.peers)
            case "stop":
                commands.stop(message.seq, message.stop)
            case "scale":
                commands.scale(message.seq, message.scale)
            case "publish":
                commands.publish(message.seq, message.publish)
            case "send_shard":
                commands.send_shard(message.seq, message.send_shard)
            case "profile":
                commands.profile(message.profile)
            case "probe":
                commands.probe(message.probe)

    async def _send(self, call: Any, cursor: int) -> None:
        heartbeat_due = 0.0
        while True:
            self._news.clear()
            while batch := self._reports.after(cursor):
                for seq, raw in batch:
                    await call.write(self._reports.sendable(seq, raw))
                    cursor = seq
            # Only behind every durable report, so that no older state arrives after a newer one.
            passing, self._passing = self._passing, {}
            for message in passing.values():
                await call.write(message)
            now = time.monotonic()
            if now >= heartbeat_due:
                heartbeat_due = now + self.lease_seconds / 3
                await call.write(agent_pb2.FromAgent(heartbeat=agent_pb2.Heartbeat(at=time.time())))
            try:
                async with asyncio.timeout(max(0.05, heartbeat_due - time.monotonic())):
                    await self._news.wait()
            except TimeoutError:
                continue

    # Blobs and certificates

    async def fetch_blob(self, digest: str) -> bytes:
        """A whole blob of the control plane, verified."""
        held = bytearray()
        async with self._stub() as stub:
            async for chunk in stub.FetchBlob(common_pb2.BlobRequest(digest=digest)):
                held += chunk.data
        if digest_of([held]) != digest:
            raise GeofedError("DIGEST_MISMATCH", f"blob {digest} arrived damaged")
        return bytes(held)

    async def fetch_file(self, digest: str, into: Path) -> None:
        """Have a blob of the control plane lie in a file, whole and verified; continues at what is there of it."""
        if into.exists():
            return
        partial = into.with_name(f"{into.name}.partial")
        with disk_full_as_error(into.parent):
            with partial.open("ab") as file:
                async with self._stub() as stub:
                    request = common_pb2.BlobRequest(digest=digest, offset=file.tell())
                    async for chunk in stub.FetchBlob(request):
                        await asyncio.to_thread(file.write, chunk.data)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            if await asyncio.to_thread(_file_digest, partial) != digest:
                partial.unlink()
                raise GeofedError("DIGEST_MISMATCH", f"blob {digest} arrived damaged")
            os.replace(partial, into)

    async def put_blob(self, data: bytes, digest: str) -> None:
        """Hand a blob in; continues at what the control plane has of it already."""
        async with self._stub() as stub:
            have = await stub.StatBlob(common_pb2.BlobRequest(digest=digest), timeout=30)
            if not have.complete:
                have = await stub.PutBlob(_chunks(data, digest, have.have_bytes))
        if not have.complete:
            raise GeofedError("UNAVAILABLE", f"the control plane has {have.have_bytes} of {len(data)} bytes")

    async def renew(self) -> None:
        """Have the certificate renewed, for the same key."""
        request = agent_pb2.RenewRequest(csr_pem=self._identity.renewal_request())
        async with self._stub() as stub:
            reply = await stub.Renew(request, timeout=30)
        self._identity.renew(reply.certificate_pem, reply.ca_pem)

    @asynccontextmanager
    async def _stub(self) -> AsyncIterator[agent_pb2_grpc.AgentHubStub]:
        """A line of its own, so that the end of a session does not cut it; failures as ``GeofedError``."""
        async with self._dial() as line:
            try:
                yield agent_pb2_grpc.AgentHubStub(line)
            except grpc.RpcError as error:
                raise error_of(error) from None

    def _dial(self) -> grpc.aio.Channel:
        identity = self._identity
        return channel(
            identity.federation.address,
            ca_pem=identity.ca_file.read_bytes(),
            name=CONTROL_PLANE_NAME,
            certificate_pem=identity.certificate_file.read_bytes(),
            key_pem=identity.key_file.read_bytes(),
        )


async def _chunks(data: bytes, digest: str, offset: int) -> AsyncIterator[common_pb2.BlobChunk]:
    total = len(data)
    while offset < total or total == 0:
        piece = data[offset : offset + CHUNK_BYTES]
        yield common_pb2.BlobChunk(digest=digest, total_bytes=total, offset=offset, data=piece)
        offset += len(piece)
        if total == 0:
            return


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
