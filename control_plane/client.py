"""Client of the control plane: each method is one RPC, and each failure is a ``GeofedError``."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio

from geofed_pb.address import addresses_of
from geofed_pb.errors import OUTAGE, GeofedError
from geofed_pb.files.task_folder import Part
from geofed_pb.rpc import CHUNK_BYTES, CONTROL_PLANE_NAME, channel, clock_of, error_of, with_token
from geofed_pb.security.signing import Signer
from geofed_pb.tasks import awaited
from geofed_pb.v1 import common_pb2, control_pb2, control_pb2_grpc

_Reply = TypeVar("_Reply")
OnBreak = Callable[[GeofedError], None]
_STAT_DIGESTS = 1000
"""Blobs that one request asks for: the servers' limit."""
_UPLOADS = 8
"""Files of a task folder that are sent at once, so that small ones do not wait for each other's answers."""
RETRY_WAIT = timedelta(seconds=0.5)
"""Time between two attempts to resume an interrupted stream."""
CHOICE = timedelta(seconds=4)
"""Timeout of the question whether a control plane leads; longer than an attempt to connect."""
TIMEOUT = timedelta(seconds=20)
"""Timeout of a call."""
PROBE_WAIT = timedelta(seconds=20)
"""Additional timeout of calls that may wait for a task's probe."""


@dataclass(frozen=True)
class Context:
    """Address and credentials of a control plane."""

    address: str
    """host:port of the control port; of several control planes on one database, separated by commas."""
    ca_file: Path
    token_file: Path
    federation: str = ""
    key_file: Path | None = None
    """The user's key for signing submissions, which is created when it is used first; None: nothing is signed."""

    @classmethod
    def load(cls, path: Path) -> Context:
        """Read the `context.json` of a control plane. Raises ``GeofedError``: UNAVAILABLE if missing,
        CONFIG_INVALID."""
        try:
            fields = json.loads(path.read_text())
            names = (fields["address"], Path(fields["ca_file"]), Path(fields["token_file"]))
            key_file = Path(fields.get("key_file") or path.absolute().parent / "user.key")
            return cls(*names, federation=fields.get("federation", ""), key_file=key_file)
        except FileNotFoundError:
            hint = "start a control plane with `geofed serve`, or name its context file"
            raise GeofedError("UNAVAILABLE", f"context file {path} not found", hint=hint) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GeofedError("CONFIG_INVALID", f"{path} is not a valid context file: {error}") from None


class ControlClient:
    """A connection to the control plane; use it as an async context manager."""

    def __init__(self, address: str, ca_pem: bytes, token: str, key_file: Path | None = None) -> None:
        self._addresses = addresses_of(address) or (address,)
        self._ca_pem = ca_pem
        self._key_file = key_file
        self._metadata = with_token(token)
        self._chosen = len(self._addresses) == 1
        """Whether the channel is to the control plane that leads, or to the only one."""
        self._choosing = asyncio.Lock()
        self._former: list[grpc.aio.Channel] = []
        """Channels to other control planes, on which calls may still be ending."""
        self._open(self._addresses[0])

    def _open(self, address: str) -> None:
        self._channel = channel(address, ca_pem=self._ca_pem, name=CONTROL_PLANE_NAME)
        self._stub = control_pb2_grpc.ControlStub(self._channel)

    async def _choose(self) -> None:
        """Connect to the control plane that leads. Raises ``GeofedError``: UNAVAILABLE or STANDBY if none does."""
        failure: GeofedError | None = None
        for address in self._addresses:
            self._former.append(self._channel)
            self._open(address)
            try:
                with _mapped():
                    await self._stub.Version(
                        control_pb2.VersionRequest(), metadata=self._metadata, timeout=CHOICE.total_seconds()
                    )
            except GeofedError as error:
                if error.code in OUTAGE:
                    failure = error if failure is None or error.code == "STANDBY" else failure
                    continue
                # It leads, or it would not look at the token, which a client that signs in does not have.
                if error.code != "UNAUTHENTICATED":
                    raise
            self._chosen = True
            return
        assert failure is not None
        raise failure

    @asynccontextmanager
    async def _calling(self) -> AsyncIterator[None]:
        """Make a call to the control plane that leads; failures are raised as ``GeofedError``."""
        async with self._choosing:
            if not self._chosen:
                await self._choose()
        try:
            with _mapped():
                yield
        except GeofedError as error:
            if error.code in OUTAGE:
                self._chosen = len(self._addresses) == 1
            raise

    async def _followed(
        self,
        method: Callable[[control_pb2_grpc.ControlStub], Any],
        request: control_pb2.WatchRequest | control_pb2.LogsRequest,
        on_break: OnBreak | None,
    ) -> AsyncGenerator[Any, None]:
        """Yield what a stream sends after the request's cursor, over lost connections if the request follows it."""
        while True:
            try:
                async with self._calling():
                    stream = method(self._stub)(request, metadata=self._metadata, wait_for_ready=request.follow)
                    async for message in stream:
                        request.cursor = message.cursor
                        yield message
                return
            except GeofedError as error:
                if not request.follow or error.code not in OUTAGE:
                    raise
                if on_break is not None:
                    on_break(error)
            await asyncio.sleep(RETRY_WAIT.total_seconds())

    @classmethod
    def connect(cls, context: Context) -> ControlClient:
        """Return a client for a context. Raises ``GeofedError("UNAUTHENTICATED")`` if its files cannot be read."""
        try:
            token = context.token_file.read_text().strip()
            return cls(context.address, context.ca_file.read_bytes(), token, context.key_file)
        except OSError as error:
            raise GeofedError("UNAUTHENTICATED", f"cannot read {error.filename}: {error.strerror}") from None

    async def __aenter__(self) -> ControlClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in (*self._former, self._channel):
            await each.close(None)

    async def version(self) -> control_pb2.VersionReply:
        """Return the server's version and the federation's name."""
        return await self._answer(lambda stub: stub.Version, control_pb2.VersionRequest())

    async def ping(self) -> tuple[float, float | None]:
        """Measure a request; return its seconds, and those that this machine's clock is ahead of the server's.

        None: an older server, which does not report its clock.
        """
        async with self._calling():
            begun, at = time.monotonic(), time.time()
            timeout = TIMEOUT.total_seconds()
            call = self._stub.Version(control_pb2.VersionRequest(), metadata=self._metadata, timeout=timeout)
            await call
            seconds, clock = time.monotonic() - begun, clock_of(await call.trailing_metadata())
        return seconds, None if clock is None else at + seconds / 2 - clock

    async def put_parts(self, parts: Sequence[Part], folder: Path, begun: Callable[[int, int], None]) -> None:
        """Upload the files of a task folder that its archive lists, as far as they are not uploaded already.

        Args:
            begun: called with the number of files and of bytes to be sent, if there are any.

        Raises ``GeofedError``: ILLEGAL_STATE if the control plane is of an earlier version; DIGEST_MISMATCH if a file
        has changed meanwhile; TASK_INVALID if one is gone.
        """
        named, missing = {one.digest: one for one in parts}, dict[str, int]()
        digests = list(named)
        for first in range(0, len(digests), _STAT_DIGESTS):
            asked = common_pb2.BlobsRequest(digests=digests[first : first + _STAT_DIGESTS])
            reply: common_pb2.BlobsReply = await self._answer(lambda stub: stub.StatBlobs, asked)
            missing |= {one.digest: one.have_bytes for one in reply.incomplete}
        if missing:
            begun(len(missing), sum(named[digest].bytes - have for digest, have in missing.items()))
        turn = asyncio.Semaphore(_UPLOADS)

        async def send(digest: str) -> None:
            async with turn:
                await self._put_file(folder / named[digest].name, digest, missing[digest], part=True)

        sending = {named[digest].name: awaited(send(digest)) for digest in missing}
        try:
            if sending:
                await asyncio.wait(sending.values(), return_when=asyncio.FIRST_EXCEPTION)
        finally:
            ended = [task for task in sending.values() if task.done()]
            for task in sending.values():
                task.cancel()
            await asyncio.gather(*sending.values(), return_exceptions=True)
        if failed := next((task for task in ended if not task.cancelled() and task.exception()), None):
            failed.result()
        # gRPC cancels a call whose messages cannot be made, and keeps the reason to itself.
        if unread := next((name for name, task in sending.items() if task.cancelled()), None):
            raise GeofedError("TASK_INVALID", f"{unread} could not be read while it was sent")

    async def put_bundle(self, content: bytes, digest: str) -> None:
        """Upload the archive of a task folder unless it is uploaded already; resume an interrupted upload."""
        have: common_pb2.BlobAck = await self._answer(lambda stub: stub.StatBlob, common_pb2.BlobRequest(digest=digest))
        if not have.complete:
            await self._answer(lambda stub: stub.PutBlob, _chunks(content, digest, have.have_bytes))

    async def put_weights(self, path: Path, digest: str, begun: Callable[[int], None] = lambda bytes_: None) -> None:
        """Upload a file of weights unless it is uploaded already; ``begun`` is called with the bytes to be sent.

        An interrupted upload is resumed for as long as each attempt brings bytes.
        """
        asked = common_pb2.BlobRequest(digest=digest)
        have: common_pb2.BlobAck = await self._answer(lambda stub: stub.StatBlob, asked)
        if not have.complete:
            begun(path.stat().st_size - have.have_bytes)
            await self._put_file(path, digest, have.have_bytes)

    async def _put_file(self, path: Path, digest: str, have_bytes: int, *, part: bool = False) -> None:
        """Upload a file of which the control plane has the first bytes."""
        asked = common_pb2.BlobRequest(digest=digest)
        have = common_pb2.BlobAck(have_bytes=have_bytes)
        while not have.complete:
            try:
                chunks = _file_chunks(path, digest, have.have_bytes, part=part)
                async with aclosing(chunks), self._calling():
                    have = await self._stub.PutBlob(chunks, metadata=self._metadata)
            except GeofedError as error:
                if error.code not in OUTAGE:
                    raise
                await asyncio.sleep(RETRY_WAIT.total_seconds())
                now: common_pb2.BlobAck = await self._answer(lambda stub: stub.StatBlob, asked)
                if not now.complete and now.have_bytes <= have.have_bytes:
                    raise
                have = now

    async def plan(self, spec_json: str, code_digest: str = "", bundle_digest: str = "") -> control_pb2.PlanReply:
        """Plan a job without submitting it.

        Args:
            code_digest: `LoadedSpec.code_digest`, by which earlier runs of the same code are found.
            bundle_digest: digest of the uploaded code, so that a new task can be probed first.
        """
        request = control_pb2.PlanRequest(spec_json=spec_json, code_digest=code_digest, bundle_digest=bundle_digest)
        if bundle_digest:
            self._sign(request.submission, spec_json, bundle_digest)
        return await self._answer(lambda stub: stub.Plan, request, PROBE_WAIT)

    async def submit(self, spec_json: str, bundle_digest: str, request_id: str) -> control_pb2.SubmitReply:
        """Submit a job; once for each request ID."""
        request = control_pb2.SubmitRequest(request_id=request_id, spec_json=spec_json, bundle_digest=bundle_digest)
        self._sign(request.submission, spec_json, bundle_digest)
        return await self._answer(lambda stub: stub.Submit, request, PROBE_WAIT)

    async def profile(
        self,
        spec_json: str,
        bundle_digest: str,
        request_id: str,
        memories_mb: Sequence[int] = (),
    ) -> AsyncIterator[control_pb2.ProfileNews]:
        """Profile a task; yield progress, and last the result. A repeated request ID continues the same profile."""
        request = control_pb2.ProfileRequest(
            request_id=request_id,
            spec_json=spec_json,
            bundle_digest=bundle_digest,
            memories_mb=memories_mb,
        )
        self._sign(request.submission, spec_json, bundle_digest)
        async with self._calling():
            async for progress in self._stub.Profile(request, metadata=self._metadata):
                yield progress

    def _sign(self, submission: common_pb2.Submission, spec_json: str, bundle_digest: str) -> None:
        """Sign what regions are to run, if the user has a key or can have one."""
        if self._key_file is not None:
            try:
                signer = Signer.load_or_create(self._key_file)
            except OSError:
                # A context in a folder that is read-only.
                return
            # What is no job file is refused by the control plane, with the reason.
            with suppress(KeyError, TypeError, ValueError):
                submission.CopyFrom(signer.sign(spec_json, bundle_digest))

    async def job(self, job: str) -> control_pb2.Job:
        """Return a job by ID or name."""
        return await self._answer(lambda stub: stub.GetJob, control_pb2.JobRequest(job=job))

    async def jobs(
        self, *, ended: bool = False, limit: int = 100, labels: Mapping[str, str] | None = None
    ) -> list[control_pb2.Job]:
        """Return the jobs that the caller may read, newest first, without spec, plan and result.

        ``labels``: only those that have all of these.
        """
        return (await self.jobs_and_occupied(ended=ended, limit=limit, labels=labels))[0]

    async def jobs_and_occupied(
        self, *, ended: bool = False, limit: int = 100, labels: Mapping[str, str] | None = None
    ) -> tuple[list[control_pb2.Job], dict[str, int]]:
        """Return the same jobs, and by region the workers of all other active jobs."""
        found: list[control_pb2.Job] = []
        after, wanted = "", (labels or {}).items()
        while True:
            # With labels whole pages, since few of the jobs may have them.
            request = control_pb2.ListJobsRequest(all=ended, limit=0 if wanted else limit - len(found), after=after)
            reply: control_pb2.ListJobsReply = await self._answer(lambda stub: stub.ListJobs, request)
            found += [job for job in reply.jobs if wanted <= job.labels.items()]
            if not reply.more or not reply.jobs or len(found) >= limit:
                return found[:limit], dict(reply.occupied)
            after = reply.jobs[-1].id

    async def cancel(self, job: str, reason: str = "") -> control_pb2.Job:
        """Cancel a job."""
        return await self._answer(lambda stub: stub.Cancel, control_pb2.CancelRequest(job=job, reason=reason))

    async def finish(self, job: str, reason: str = "") -> control_pb2.Job:
        """End a job with its current model."""
        return await self._answer(lambda stub: stub.Finish, control_pb2.FinishRequest(job=job, reason=reason))

    async def replan(self, job: str, reason: str = "") -> control_pb2.Job:
        """Replan a job: end it, and continue its model in a new job over the regions that are available now."""
        return await self._answer(lambda stub: stub.Replan, control_pb2.ReplanRequest(job=job, reason=reason))

    async def resume(self, job: str, request_id: str) -> control_pb2.SubmitReply:
        """Continue an ended job as a new one, from its last kept model; once for each request ID."""
        request = control_pb2.ResumeRequest(job=job, request_id=request_id)
        return await self._answer(lambda stub: stub.Resume, request, PROBE_WAIT)

    async def share(self, job: str, user: str, *, end: bool = False) -> control_pb2.Job:
        """Let a user read a job or, with ``end``, not any more."""
        return await self._answer(lambda stub: stub.Share, control_pb2.ShareRequest(job=job, user=user, end=end))

    async def rename(self, job: str, name: str) -> control_pb2.Job:
        """Give a job another name."""
        return await self._answer(lambda stub: stub.Rename, control_pb2.RenameRequest(job=job, name=name))

    async def delete(self, job: str) -> control_pb2.DeleteReply:
        """Delete an ended job and all that belongs to it."""
        return await self._answer(lambda stub: stub.Delete, control_pb2.DeleteRequest(job=job))

    async def storage(self, job: str = "", jobs: int = 10) -> control_pb2.StorageReply:
        """Return what the control plane keeps, with the largest jobs; ``job``: only what belongs to it."""
        return await self._answer(lambda stub: stub.Storage, control_pb2.StorageRequest(job=job, jobs=jobs))

    async def scale(self, job: str, workers: dict[str, int], reason: str = "") -> control_pb2.Job:
        """Change the numbers of workers of a job's regions."""
        return await self._answer(
            lambda stub: stub.Scale, control_pb2.ScaleRequest(job=job, workers=workers, reason=reason)
        )

    async def regions(self) -> list[control_pb2.Region]:
        """Return all regions, sorted by name."""
        found: list[control_pb2.Region] = []
        while True:
            request = control_pb2.ListRegionsRequest(after=found[-1].name if found else "", paged=True)
            reply: control_pb2.ListRegionsReply = await self._answer(lambda stub: stub.ListRegions, request)
            found += reply.regions
            if not reply.more or not reply.regions:
                return found

    async def change_region(
        self, region: str, change: str, reason: str = "", *, move: bool = False
    ) -> control_pb2.Region:
        """Change a region: "drain", "undrain", "revoke" or "remove"; with ``move`` its running jobs are replanned."""
        wanted = f"CHANGE_{change.upper()}"
        request = control_pb2.ChangeRegionRequest(region=region, change=wanted, reason=reason, move=move)
        return await self._answer(lambda stub: stub.ChangeRegion, request)

    async def rotate_authority(self, *, force: bool = False) -> control_pb2.RotateAuthorityReply:
        """Take the next step of the replacement of the federation's certificate authority."""
        request = control_pb2.RotateAuthorityRequest(force=force)
        return await self._answer(lambda stub: stub.RotateAuthority, request)

    async def invite(self, region: str, ttl: timedelta = timedelta(hours=24)) -> control_pb2.InviteReply:
        """Create a one-time token for a region."""
        request = control_pb2.InviteRequest(region=region, ttl_seconds=int(ttl.total_seconds()))
        return await self._answer(lambda stub: stub.Invite, request)

    async def add_user(
        self,
        name: str,
        promised_workers: int | None = None,
        *,
        role: str = "",
        token_seconds: float = 0.0,
        identity: str = "",
    ) -> control_pb2.UserReply:
        """Create a user; the reply has its token. ``role``: empty: member. ``token_seconds``: 0: it does not expire.
        ``identity``: who the user is at the identity provider; then there is no token."""
        request = control_pb2.AddUserRequest(
            name=name, promised_workers=promised_workers, role=role, token_seconds=token_seconds, identity=identity
        )
        reply: control_pb2.UserReply = await self._answer(lambda stub: stub.AddUser, request)
        try:
            _require_understood(reply, role, token_seconds, identity)
        except GeofedError:
            await self.remove_user(name)
            raise
        return reply

    async def change_user(
        self,
        name: str,
        promised_workers: int | None = None,
        *,
        no_quota: bool = False,
        new_token: bool = False,
        new_key: bool = False,
        role: str = "",
        token_seconds: float = 0.0,
        identity: str | None = None,
    ) -> control_pb2.UserReply:
        """Change a user's quota (None: unchanged), role (empty: unchanged), identity at the identity provider (None:
        unchanged; empty: none) or token, which expires after ``token_seconds`` (0: never); ``new_key``: take the key
        of the next submission."""
        request = control_pb2.ChangeUserRequest(
            name=name, promised_workers=promised_workers, no_quota=no_quota, new_token=new_token, new_key=new_key,
            role=role, token_seconds=token_seconds, identity=identity,
        )  # fmt: skip
        reply: control_pb2.UserReply = await self._answer(lambda stub: stub.ChangeUser, request)
        _require_understood(reply, role, token_seconds, identity or "")
        return reply

    async def sign_in_options(self) -> control_pb2.SignInOptionsReply:
        """Return the identity provider by which users sign in; needs no token. Raises ``GeofedError("ILLEGAL_STATE")``
        if there is none."""
        return await self._answer(lambda stub: stub.SignInOptions, control_pb2.SignInOptionsRequest())

    async def sign_in(self, id_token: str) -> control_pb2.SignInReply:
        """Exchange an ID token of the identity provider for a token of its user; needs no token."""
        return await self._answer(lambda stub: stub.SignIn, control_pb2.SignInRequest(id_token=id_token))

    async def sign_out(self) -> None:
        """Revoke this client's token; only that of a sign-in can be."""
        await self._answer(lambda stub: stub.SignOut, control_pb2.SignOutRequest())

    async def remove_user(self, name: str) -> control_pb2.User:
        """Remove a user."""
        return await self._answer(lambda stub: stub.RemoveUser, control_pb2.RemoveUserRequest(name=name))

    async def users(self) -> list[control_pb2.User]:
        """Return the users that the caller may see, sorted by name."""
        reply: control_pb2.ListUsersReply = await self._answer(
            lambda stub: stub.ListUsers, control_pb2.ListUsersRequest()
        )
        return list(reply.users)

    async def audit(self) -> AsyncIterator[str]:
        """Yield the lines of the audit log's file; only the operator may."""
        async with self._calling():
            async for reply in self._stub.Audit(control_pb2.AuditRequest(), metadata=self._metadata):
                yield reply.line

    async def attestation(self, job: str) -> str:
        """Return a signed statement of where an ended job's models come from, for `attestation.opened`."""
        reply: control_pb2.AttestReply = await self._answer(lambda stub: stub.Attest, control_pb2.JobRequest(job=job))
        return reply.envelope

    async def watch(
        self, job: str, *, cursor: int = 0, follow: bool = True, on_break: OnBreak | None = None
    ) -> AsyncIterator[control_pb2.Event]:
        """Yield the events of a job, or of all with an empty name, in order.

        With `follow` until the job's last event, of all without an end, over lost connections.

        `on_break` is called for each lost connection; events in between are not lost.
        """
        request = control_pb2.WatchRequest(job=job, cursor=cursor, follow=follow)
        async with aclosing(self._followed(lambda stub: stub.Watch, request, on_break)) as events:
            async for event in events:
                yield event
                if job and event.terminal:
                    return

    async def logs(
        self,
        job: str,
        *,
        region: str = "",
        cursor: int = 0,
        tail: int = 0,
        follow: bool = False,
        on_break: OnBreak | None = None,
    ) -> AsyncIterator[control_pb2.LogLine]:
        """Yield the log lines of a job in order; with `follow` until it has ended, over lost connections."""
        request = control_pb2.LogsRequest(job=job, region=region, cursor=cursor, tail=tail, follow=follow)
        async with aclosing(self._followed(lambda stub: stub.Logs, request, on_break)) as lines:
            async for line in lines:
                yield line

    async def model(
        self, job: str, *, round_: int = 0, region: str = "", offset: int = 0
    ) -> AsyncIterator[common_pb2.BlobChunk]:
        """Yield the bytes of a job's last model, of a round's, or of a region's own, from `offset` on.

        Each chunk has the digest of the whole."""
        async with self._calling():
            request = control_pb2.ModelRequest(job=job, round=round_, region=region, offset=offset)
            async for chunk in self._stub.GetModel(request, metadata=self._metadata):
                yield chunk

    async def _answer(
        self, method: Callable[[Any], Callable[..., Awaitable[_Reply]]], request: object, more: timedelta = timedelta()
    ) -> _Reply:
        """Call a method of the stub and return its answer; `more` is added to its timeout."""
        async with self._calling():
            call = method(self._stub)
            return await call(request, metadata=self._metadata, timeout=(TIMEOUT + more).total_seconds())


async def _file_chunks(
    path: Path, digest: str, offset: int, *, part: bool
) -> AsyncGenerator[common_pb2.BlobChunk, None]:
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        file.seek(offset)
        while True:
            data = await asyncio.to_thread(file.read, CHUNK_BYTES)
            yield common_pb2.BlobChunk(
                digest=digest, total_bytes=total, offset=offset, data=data, model=not part, part=part
            )
            offset += len(data)
            if not data or offset >= total:
                return


async def _chunks(content: bytes, digest: str, offset: int) -> AsyncIterator[common_pb2.BlobChunk]:
    while True:
        data = content[offset : offset + CHUNK_BYTES]
        yield common_pb2.BlobChunk(digest=digest, total_bytes=len(content), offset=offset, data=data)
        offset += len(data)
        if offset >= len(content):
            return


@contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error) from None


def _require_understood(reply: control_pb2.UserReply, role: str, token_seconds: float, identity: str) -> None:
    """Raise ``GeofedError("ILLEGAL_STATE")`` where a control plane has left out what it does not know of a request."""
    if (role and reply.user.role != role) or (token_seconds and not reply.user.token_expires_at):
        text = "this control plane is of a version without roles and without tokens that expire"
        raise GeofedError("ILLEGAL_STATE", text, hint="upgrade it first")
    if identity.strip() and not reply.user.identity:
        raise GeofedError(
            "ILLEGAL_STATE", "this control plane is of a version without sign-ins", hint="upgrade it first"
        )
