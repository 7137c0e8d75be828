"""The agent's connection to the control plane: one stream, which is opened again whenever it is lost, and separate
connections for blobs."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog

from geofed_pb.address import addresses_of
from geofed_pb.bounds import SESSION_MESSAGE_BYTES
from geofed_pb.errors import GeofedError
from geofed_pb.features import ANNOUNCED
from geofed_pb.files.durable import disk_full_as_error
from geofed_pb.rpc import CHUNK_BYTES, CONTROL_PLANE_NAME, channel, error_of, to_proto
from geofed_pb.tasks import awaited
from geofed_pb.v1 import agent_pb2, agent_pb2_grpc, common_pb2
from region_agent.link.audit_heads import AUDIT_HEADS, WitnessFile
from region_agent.link.identity import Identity
from region_agent.link.outgoing import ReportQueue, fitted, is_transient, too_large
from region_agent.state.store import AgentStore
from sync.framing import digest_of

__all__ = ["Commands", "ControlPlaneStream"]

_log = structlog.get_logger("geofed.hub")
_BACKOFF_FIRST_SECONDS = 0.2
"""Pause before the first attempt to reconnect; it doubles with each further one."""
_BACKOFF_LONGEST_SECONDS = 3.0
"""Longest pause between attempts to reconnect."""
_SILENCE_LEASES = 1.0
"""Timeout of a session without a message, in leases."""
_DEFAULT_LEASE_SECONDS = 30.0
"""Lease until the control plane has sent its own."""


_JOB_COMMANDS = (
    agent_pb2.StartPartition,
    agent_pb2.Peers,
    agent_pb2.StopPartition,
    agent_pb2.ScalePartition,
    agent_pb2.PublishModel,
    agent_pb2.SendShard,
)


class Commands(Protocol):
    """Carries out the control plane's commands. An implementation stores each command before it returns."""

    def start(self, seq: int, command: agent_pb2.StartPartition) -> None:
        """Start a partition."""

    def peers(self, seq: int, command: agent_pb2.Peers) -> None:
        """Pass the addresses of the other regions to a partition."""

    def stop(self, seq: int, command: agent_pb2.StopPartition) -> None:
        """End a partition or the transfer of a shard."""

    def scale(self, seq: int, command: agent_pb2.ScalePartition) -> None:
        """Change a partition's number of workers."""

    def publish(self, seq: int, command: agent_pb2.PublishModel) -> None:
        """Publish a partition's model."""

    def keep(self, seq: int, command: agent_pb2.KeepModel) -> None:
        """Upload the model of an evaluated round."""

    def send_shard(self, seq: int, command: agent_pb2.SendShard) -> None:
        """Send a shard to another region."""

    def profile(self, command: agent_pb2.ProfileTask) -> None:
        """Start a profile. The command is not stored, since the control plane repeats it."""

    def probe(self, command: agent_pb2.ProfileTask) -> None:
        """Start a probe. The command is not stored, since the control plane repeats it."""

    def own_model(self, command: agent_pb2.OwnModel) -> None:
        """Upload the region's own model of a job. The command is not stored, since the control plane repeats it."""

    def state_restored(self) -> None:
        """Handle a state directory that is older than the control plane's knowledge, as after a restore of a backup."""


class ControlPlaneStream:
    """The region's side of the session.

    Commands are stored before they are acknowledged, and reports before they are sent. After a lost connection each
    side sends the number of the last message that it has, and both continue from there. A message that can never be
    delivered or carried out is set aside, and its job fails with the reason; later messages are not affected.
    """

    def __init__(self, identity: Identity, store: AgentStore, catalogue: Callable[[], str], version: str) -> None:
        self._identity, self._store, self._catalogue, self._version = identity, store, catalogue, version
        self._boot_id = uuid.uuid4().hex
        self._latest: dict[str, agent_pb2.FromAgent] = {}
        """Messages that are not stored, by kind and subject; only the latest of each is sent."""
        self._news = asyncio.Event()
        """There is something to send."""
        self._stale = asyncio.Event()
        """The region's description in the present session is out of date."""
        self.lease_seconds = _DEFAULT_LEASE_SECONDS
        self.connected = False
        self._failed_sessions = 0
        """Attempts to open a session that have failed; each further one is with the next control plane."""
        self._session_changed = asyncio.Event()
        """A session has begun or ended since the last `session_changed`."""
        self._reports = ReportQueue(store)
        self._witness = WitnessFile(identity.folder / AUDIT_HEADS)
        if self._witness.damage:
            _log.error(self._witness.damage)
        self.last_heard = 0.0
        """Unix seconds of the last message from the control plane."""
        self.refusal: GeofedError | None = None
        """Reason why there is no session; None while there is one."""

    # Reports

    def report(self, message: agent_pb2.PartitionReport, *, durable: bool) -> None:
        """Send a report on a partition. Of reports that are not durable only the latest is kept."""
        key = f"partition {message.job}"
        whole = fitted(agent_pb2.FromAgent(partition=message))
        if durable:
            stored = self._store.add_report(whole.SerializeToString())
            # A waiting report is older than this one, and must not be sent after it.
            self._latest.pop(key, None)
        if not durable or not stored:
            self._latest[key] = whole
        self._news.set()

    def report_profile(self, report: agent_pb2.ProfileReport) -> None:
        """Send a report on a profile; only the latest one is kept."""
        self._latest[f"profile {report.id}"] = fitted(agent_pb2.FromAgent(profile=report))
        self._news.set()

    def report_capacity(self, preemptible: int) -> None:
        """Send the present number of preemptible workers; the first message of the next session contains it, too."""
        update = agent_pb2.CapacityNews(preemptible=preemptible)
        self._latest["capacity"] = agent_pb2.FromAgent(capacity=update)
        self._news.set()

    def send_durably(self, message: agent_pb2.FromAgent) -> None:
        """Store a message, and send it until it is acknowledged."""
        self._store.add_report(fitted(message).SerializeToString())
        self._news.set()

    # The session

    def open_new_session(self) -> None:
        """Open another session, whose first message describes the region as it is now."""
        self._stale.set()

    async def session_changed(self, within: float) -> None:
        """Wait until a session begins or ends, with a timeout in seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._session_changed.wait()
        self._session_changed.clear()

    async def run(self, commands: Commands) -> None:
        """Keep a session open until cancelled.

        Raises ``GeofedError`` if a retry cannot help: ``CERTIFICATE_EXPIRED``; ``FENCED`` if another process uses the
        same identity.
        """
        backoff = _BACKOFF_FIRST_SECONDS
        while True:
            try:
                await self._session(commands)
                backoff = _BACKOFF_FIRST_SECONDS
            except grpc.RpcError as raised:
                self._identity.check()
                self._note(error := error_of(raised))
                if self.connected and not is_transient(error):
                    self._reports.broke(error)
            except TimeoutError:
                self._note(GeofedError("UNAVAILABLE", "no message from the control plane within the lease"))
            except GeofedError as error:
                # A command could not be stored. It was not acknowledged, so the next session sends it again.
                self._note(error)
            finally:
                was_connected, self.connected = self.connected, False
                self._failed_sessions += not was_connected
                if was_connected:
                    self._session_changed.set()
            backoff = _BACKOFF_FIRST_SECONDS if was_connected else min(backoff * 2, _BACKOFF_LONGEST_SECONDS)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    def _note(self, error: GeofedError) -> None:
        if error.code == "FENCED":
            raise GeofedError("FENCED", error.message, hint="stop the other agent of this region, then start this one")
        if self.connected or self.refusal is None or self.refusal.code != error.code:
            _log.warning("no session with the control plane", error=str(error))
        self.refusal = error

    async def _session(self, commands: Commands) -> None:
        async with self._connect() as connection:
            await self._run_session(agent_pb2_grpc.AgentHubStub(connection).Session(), commands)

    async def _run_session(self, call: Any, commands: Commands) -> None:
        self._stale.clear()
        try:
            hello = agent_pb2.Hello(
                agent_version=self._version,
                boot_id=self._boot_id,
                command_cursor=self._store.command_cursor(),
                catalogue_json=self._catalogue(),
                report_cursor=self._store.reports_acknowledged(),
                features=ANNOUNCED,
            )
            if hello.ByteSize() > SESSION_MESSAGE_BYTES:
                hint = "remove datasets from the region's file"
                raise GeofedError("LIMIT_EXCEEDED", f"the region's catalogue: {too_large(hello).message}", hint=hint)
            await call.write(agent_pb2.FromAgent(hello=hello))
            async with asyncio.timeout(_DEFAULT_LEASE_SECONDS):
                first = await call.read()
            if first is grpc.aio.EOF:
                return
            self._begin_session(first.welcome, commands)
            sending = awaited(self._send(call, first.welcome.report_cursor))
            receiving = awaited(self._receive(call, commands))
            stale = awaited(self._stale.wait())
            try:
                done, _ = await asyncio.wait({sending, receiving, stale}, return_when=asyncio.FIRST_COMPLETED)
                if done == {stale}:
                    return
                if sending.done() and not isinstance(sending.exception(), grpc.RpcError | asyncio.InvalidStateError):
                    sending.result()
                # After a failed write the reason is raised by the reading side.
                await receiving
            finally:
                for task in (sending, receiving, stale):
                    task.cancel()
                await asyncio.gather(sending, receiving, stale, return_exceptions=True)
        finally:
            call.cancel()

    def _begin_session(self, welcome: agent_pb2.Welcome, commands: Commands) -> None:
        self.connected, self.refusal = True, None
        self._session_changed.set()
        self.lease_seconds = welcome.lease_seconds or _DEFAULT_LEASE_SECONDS
        self.last_heard = time.time()
        if welcome.HasField("revoked"):
            self._take_certificates(welcome.revoked)
        _log.info("session with the control plane", session=welcome.session)
        if self._reports.resume(welcome.report_cursor):
            _log.warning("this state directory is older than the control plane's records: it was lost or restored")
            commands.state_restored()

    def _keep_head(self, told: agent_pb2.AuditHead) -> None:
        value = {field.name: getattr(told, field.name) for field in told.DESCRIPTOR.fields}
        try:
            wrong = self._witness.add(value)
        except OSError as error:
            wrong = f"the head of the control plane's audit log cannot be kept: {error}"
        if wrong:
            _log.error(wrong)

    def _take_certificates(self, told: agent_pb2.RevokedCertificates) -> None:
        self._identity.revoke(told.serials)
        self._identity.trust(told.ca_pem)

    async def _receive(self, call: Any, commands: Commands) -> None:
        while True:
            async with asyncio.timeout(self.lease_seconds * _SILENCE_LEASES):
                message = await call.read()
            if message is grpc.aio.EOF:
                # A regular end; after an error, reading would have raised.
                return
            self.last_heard = time.time()
            try:
                self._dispatch(message, commands)
            except GeofedError as error:
                if error.retryable or not message.seq:
                    raise
                self._refuse(message, error)
            except Exception as error:
                if not message.seq:
                    raise
                # The command would fail again in every later session.
                _log.exception("a command failed", seq=message.seq)
                self._refuse(message, GeofedError("INTERNAL", f"{type(error).__name__}: {error}"))
            if message.seq:
                # The command is stored by now; a repeated acknowledgement is harmless.
                self._latest["ack"] = agent_pb2.FromAgent(command_ack=agent_pb2.CommandAck(seq=message.seq))
                self._news.set()

    def _refuse(self, message: agent_pb2.ToAgent, error: GeofedError) -> None:
        """Set aside a command that can never be carried out, and report its job as failed."""
        _log.error("a command is set aside", seq=message.seq, error=str(error))
        self._store.set_command_aside(message.seq, str(error), message.SerializeToString())
        kind = message.WhichOneof("body")
        command = getattr(message, kind) if kind is not None else None
        if isinstance(command, _JOB_COMMANDS):
            report = agent_pb2.PartitionReport(
                job=command.job, epoch=command.epoch, state="failed", condition=error.message, error=to_proto(error)
            )
            self.report(report, durable=True)

    def _dispatch(self, message: agent_pb2.ToAgent, commands: Commands) -> None:
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
            case "keep":
                commands.keep(message.seq, message.keep)
            case "send_shard":
                commands.send_shard(message.seq, message.send_shard)
            case "profile":
                commands.profile(message.profile)
            case "revoked":
                self._take_certificates(message.revoked)
            case "probe":
                commands.probe(message.probe)
            case "own_model":
                commands.own_model(message.own_model)
            case "audit_head":
                self._keep_head(message.audit_head)

    async def _send(self, call: Any, cursor: int) -> None:
        heartbeat_due = 0.0
        while True:
            self._news.clear()
            while batch := self._reports.after(cursor):
                for seq, raw in batch:
                    await call.write(self._reports.sendable(seq, raw))
                    cursor = seq
            # After all durable reports, so that no older state arrives after a newer one.
            latest, self._latest = self._latest, {}
            for message in latest.values():
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
        """Download a blob from the control plane and verify it."""
        held = bytearray()
        async with self._stub() as stub:
            async for chunk in stub.FetchBlob(common_pb2.BlobRequest(digest=digest)):
                held += chunk.data
        if digest_of([held]) != digest:
            raise GeofedError("DIGEST_MISMATCH", f"blob {digest} arrived damaged")
        return bytes(held)

    async def fetch_file(self, digest: str, into: Path) -> None:
        """Download a blob into a file and verify it; continues a partial download."""
        await self.fetch_files({digest: into})

    async def fetch_files(self, wanted: Mapping[str, Path]) -> None:
        """Download blobs, by digest, into files that do not exist yet, one after another over one connection."""
        missing = {digest: into for digest, into in wanted.items() if not into.exists()}
        if missing:
            async with self._stub() as stub:
                for digest, into in missing.items():
                    await self._fetch_file(stub, digest, into)

    async def _fetch_file(self, stub: agent_pb2_grpc.AgentHubStub, digest: str, into: Path) -> None:
        partial = into.with_name(f"{into.name}.partial")
        with disk_full_as_error(into.parent):
            with partial.open("ab") as file:
                request = common_pb2.BlobRequest(digest=digest, offset=file.tell())
                async for chunk in stub.FetchBlob(request):
                    await asyncio.to_thread(file.write, chunk.data)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            if await asyncio.to_thread(_file_digest, partial) != digest:
                partial.unlink()
                raise GeofedError("DIGEST_MISMATCH", f"blob {digest} arrived damaged")
            os.replace(partial, into)

    async def put_blob(self, file: FileIO, digest: str) -> None:
        """Upload a file, which was opened without a buffer; continues a partial upload."""
        async with self._stub() as stub:
            have = await stub.StatBlob(common_pb2.BlobRequest(digest=digest), timeout=30)
            if not have.complete:
                have = await stub.PutBlob(_chunks(file, digest, have.have_bytes))
        if not have.complete:
            text = f"the control plane has {have.have_bytes} of {os.fstat(file.fileno()).st_size} bytes"
            raise GeofedError("UNAVAILABLE", text)

    async def renew(self) -> None:
        """Renew the certificate, with the same key."""
        request = agent_pb2.RenewRequest(csr_pem=self._identity.renewal_request())
        async with self._stub() as stub:
            reply = await stub.Renew(request, timeout=30)
        self._identity.renew(reply.certificate_pem, reply.ca_pem)

    @asynccontextmanager
    async def _stub(self) -> AsyncIterator[agent_pb2_grpc.AgentHubStub]:
        """Open a separate connection, which does not end with a session; failures are raised as ``GeofedError``."""
        async with self._connect() as connection:
            try:
                yield agent_pb2_grpc.AgentHubStub(connection)
            except grpc.RpcError as error:
                raise error_of(error) from None

    def _address(self) -> str:
        """Return the address of the control plane that is tried now."""
        addresses = addresses_of(self._identity.federation.address)
        return addresses[self._failed_sessions % len(addresses)]

    def _connect(self) -> grpc.aio.Channel:
        identity = self._identity
        return channel(
            self._address(),
            ca_pem=identity.ca_file.read_bytes(),
            name=CONTROL_PLANE_NAME,
            certificate_pem=identity.certificate_file.read_bytes(),
            key_pem=identity.key_file.read_bytes(),
        )


async def _chunks(file: FileIO, digest: str, offset: int) -> AsyncIterator[common_pb2.BlobChunk]:
    total = os.fstat(file.fileno()).st_size
    while offset < total or total == 0:
        piece = await asyncio.to_thread(os.pread, file.fileno(), CHUNK_BYTES, offset)
        yield common_pb2.BlobChunk(digest=digest, total_bytes=total, offset=offset, data=piece)
        offset += len(piece)
        if total == 0:
            return


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
