"""Control service: the API for users."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import grpc.aio

from control_plane.core import TERMINAL
from control_plane.oidc import SCOPE
from control_plane.pki import (
    REGION_LIFE,
    Authority,
    GivenAuthority,
    InvitationToken,
    hash_secret,
    new_secret,
    not_issued,
)
from control_plane.service.jobs._attestation import statement_of
from control_plane.service.jobs._commands import cancel, finish, rename, replan, share
from control_plane.service.jobs._replanner import Replanner
from control_plane.service.jobs._resume import resume
from control_plane.service.jobs._signed import require_signed
from control_plane.service.jobs._submission import answer_plan, scale, submit
from control_plane.service.measuring._measurements import Measurements
from control_plane.service.measuring._own_model import own_model
from control_plane.service.measuring._probing import Probing
from control_plane.service.measuring._profiling import Profiling
from control_plane.service.planning._initial_model import kept_model
from control_plane.service.rpc._access import caller_now
from control_plane.service.rpc._agents import MAX_MODEL_BYTES
from control_plane.service.rpc._authority import rotate_authority
from control_plane.service.rpc._regions import change_region
from control_plane.service.rpc._signin import SignInService
from control_plane.service.rpc._users import add_user, change_user, list_users, remove_user, user_message
from control_plane.service.rpc._wire import event_message, log_message
from control_plane.service.state._callers import Caller, caller_named
from control_plane.service.state._certificates import unseen_region
from control_plane.service.state._draft import OPERATOR
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._federation import Federation
from control_plane.service.state._job_lookup import ACTIVE
from control_plane.service.state._notifier import Notifier
from control_plane.service.storage._report import storage_report
from control_plane.service.storage._sweeper import Sweeper
from control_plane.spec import JobSpec, parse_request
from control_plane.store import AuditRow, EventRow, InvitationRow, Store
from geofed_pb.errors import GeofedError
from geofed_pb.files.task_folder import MAX_ARCHIVE_BYTES, MAX_FOLDER_BYTES
from geofed_pb.rpc import answering, streaming
from geofed_pb.security.attestation import sealed
from geofed_pb.security.audit import GENESIS, entry_line, head_line, header_line
from geofed_pb.v1 import common_pb2, control_pb2, control_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
_PAGE_BYTES = 1 << 20
"""Limit of a page's size."""
_PAGE_ITEMS = 1000
"""Limit of a page's number of items."""
_SINGLE_PAGE_BYTES = 3 << 20
"""Limit of a reply to a client that cannot page; gRPC clients accept 4 MiB."""
_Message = TypeVar("_Message", control_pb2.Job, control_pb2.Region)
DAILY_CODE_BYTES = 4 << 30
"""Limit of the code that a user uploads within a day: 256 bundles of the largest size."""
_DAILY_PARTS_BYTES = 32 << 30
"""Limit of the larger files of task folders that a user uploads within a day: 64 folders of the largest size."""
_STAT_DIGESTS = 1000
"""Limit of the blobs that one request asks for."""
_DAILY_WEIGHTS_BYTES = 128 << 30
"""Limit of the weights that a user uploads within a day: two files of the largest size. The same file is sent once."""
INVITATION_SECONDS = 24 * 3600
"""Default validity of an invitation."""
_REGION_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")


@dataclass(frozen=True)
class AccessConfig:
    """The address and certificate authority that invitations contain."""

    authority: Authority | GivenAuthority
    address: str
    """Public host:port of the control port."""
    life: timedelta = REGION_LIFE
    """Lifetime of the regions' certificates."""


class ControlService(control_pb2_grpc.ControlServicer):
    """Serves users. Who may call what is in `CONTROL_RULES`, and was checked before."""

    def __init__(
        self,
        federation: Federation,
        profiling: Profiling,
        probing: Probing,
        replanner: Replanner,
        sweeper: Sweeper,
        measurements: Measurements,
        access: AccessConfig,
        sign_ins: SignInService,
    ) -> None:
        self._federation = federation
        self._profiling = profiling
        self._probing = probing
        self._replanner = replanner
        self._sweeper = sweeper
        self._measurements = measurements
        self._sign_ins = sign_ins
        self.access = access
        """Replaced once the port is bound."""

    @answering
    async def Version(self, request: control_pb2.VersionRequest, context: Context) -> control_pb2.VersionReply:
        """Return the server's version and the federation's name."""
        return control_pb2.VersionReply(version=_version(), federation=self._federation.name)

    @answering
    async def StatBlob(self, request: common_pb2.BlobRequest, context: Context) -> common_pb2.BlobAck:
        """Return how many bytes of a blob are uploaded."""
        return self._federation.blobs.stat(request.digest, _uploader())

    @answering
    async def StatBlobs(self, request: common_pb2.BlobsRequest, context: Context) -> common_pb2.BlobsReply:
        """Return which of several blobs are not uploaded, and how many bytes of them are."""
        if len(request.digests) > _STAT_DIGESTS:
            raise GeofedError("LIMIT_EXCEEDED", f"{len(request.digests)} digests; the limit is {_STAT_DIGESTS}")
        found = await asyncio.to_thread(self._federation.blobs.incomplete, request.digests, _uploader())
        return common_pb2.BlobsReply(incomplete=found)

    @answering
    async def PutBlob(self, requests: AsyncIterator[common_pb2.BlobChunk], context: Context) -> common_pb2.BlobAck:
        """Upload the archive of a task folder, another file of it, or weights to start from."""
        first = await anext(aiter(requests), None)
        most, daily, kind = MAX_ARCHIVE_BYTES, DAILY_CODE_BYTES, ""
        if first is not None and first.model:
            most, daily, kind = MAX_MODEL_BYTES, _DAILY_WEIGHTS_BYTES, "weights"
        elif first is not None and first.part:
            most, daily, kind = MAX_FOLDER_BYTES, _DAILY_PARTS_BYTES, "parts"
        chunks = _with_first(first, requests)
        return await self._federation.blobs.receive(
            chunks, limit_bytes=most, uploader=_uploader(), daily_bytes=daily, counted=kind
        )

    @contextlib.asynccontextmanager
    async def _given(self, spec_json: str, bundle: str) -> AsyncIterator[JobSpec]:
        """Parse a job file, and keep its task folder, which no job has yet.

        Raises ``GeofedError``: SPEC_INVALID, LIMIT_EXCEEDED.
        """
        blobs = self._federation.blobs

        def parsed() -> JobSpec:
            # The folder's listing is known from now on.
            blobs.parts(bundle)
            return parse_request(spec_json)

        spec = await asyncio.to_thread(parsed)
        with blobs.held(bundle):
            yield spec

    @answering
    async def Plan(self, request: control_pb2.PlanRequest, context: Context) -> control_pb2.PlanReply:
        """Plan a job without storing it."""
        caller = caller_now()
        async with self._given(request.spec_json, request.bundle_digest) as spec:
            text, admissible = await answer_plan(self._federation, self._probing, request, spec, caller.user)
        return control_pb2.PlanReply(plan_json=text, admissible=admissible)

    @answering
    async def Submit(self, request: control_pb2.SubmitRequest, context: Context) -> control_pb2.SubmitReply:
        """Submit a job; once for each request ID."""
        caller = caller_now()
        async with self._given(request.spec_json, request.bundle_digest) as spec:
            entry, created = await submit(self._federation, self._probing, request, spec, caller.user)
        return control_pb2.SubmitReply(job=self._federation.describe(entry), created=created)

    @streaming
    async def Profile(
        self, request: control_pb2.ProfileRequest, context: Context
    ) -> AsyncIterator[control_pb2.ProfileNews]:
        """Profile a task in the regions that hold its data; the last message has the result."""
        user = caller_now().user
        async with self._given(request.spec_json, request.bundle_digest) as spec:
            signed = request.submission, user, request.spec_json, spec, request.bundle_digest
            request.submission.CopyFrom(await require_signed(self._federation, *signed))
            async for progress in self._profiling.run(request, spec):
                yield progress

    @answering
    async def GetJob(self, request: control_pb2.JobRequest, context: Context) -> control_pb2.Job:
        """Return the current state of a job."""
        return self._federation.describe(await self._find(request.job))

    @answering
    async def ListJobs(self, request: control_pb2.ListJobsRequest, context: Context) -> control_pb2.ListJobsReply:
        """Return a page of the jobs that the caller may read, newest first, and what the others occupy."""
        caller = caller_now()
        limit = min(request.limit or 100, _PAGE_ITEMS)
        phases = ACTIVE | TERMINAL if request.all else ACTIVE
        entries = await self._federation.lookup.list_jobs(phases, limit + 1, request.after, caller.reads_of)
        return await asyncio.to_thread(self._listed, entries, limit, caller)

    def _listed(self, entries: Sequence[JobEntry], limit: int, caller: Caller) -> control_pb2.ListJobsReply:
        """Return the page of a list; in a thread, since many jobs take long."""
        jobs, more = _page(map(self._federation.summarise, entries[:limit]))
        occupied = self._federation.occupied(caller.may_read) if caller.reads_of else {}
        return control_pb2.ListJobsReply(jobs=jobs, more=more or len(entries) > limit, occupied=occupied)

    @streaming
    async def Watch(self, request: control_pb2.WatchRequest, context: Context) -> AsyncIterator[control_pb2.Event]:
        """Stream the events after a cursor and, with `follow`, new ones until the job has ended; without a job, all
        events."""
        federation, cursor = self._federation, request.cursor
        job = (await self._find(request.job)).row.id if request.job else None
        while True:
            seen, ended = federation.events_notifier.count, job is not None and job not in federation.jobs
            rows = await federation.read(partial(Store.events_after, cursor=cursor, job=job))
            shown = None if job is not None else await self._readable(rows)
            for row in rows:
                cursor = row.cursor
                if shown is not None and row.job not in shown:
                    continue
                yield event_message(row)
                if row.terminal and job is not None:
                    return
            if not rows:
                if not request.follow or ended:
                    return
                await self._next(federation.events_notifier, seen)

    @streaming
    async def Logs(self, request: control_pb2.LogsRequest, context: Context) -> AsyncIterator[control_pb2.LogLine]:
        """Stream a job's log lines after a cursor and, with `follow`, new ones until the job has ended."""
        federation, cursor, region = self._federation, request.cursor, request.region
        entry = await self._find(request.job)
        job, parts = entry.row.id, [part.region for part in entry.plan.partitions]
        if region and region not in parts:
            raise GeofedError("REGION_NOT_FOUND", f"region {region} is not part of job {job}", hint=", ".join(parts))
        if request.tail and not cursor:
            cursor = await federation.read(lambda store: store.log_tail_cursor(job, request.tail, region=region))
        while True:
            seen, ended = federation.logs_notifier.count, job not in federation.jobs
            rows = await federation.read(partial(Store.logs_after, job=job, cursor=cursor, region=region))
            if rows:
                await federation.note_read(entry, caller_now().user, "")
            for row in rows:
                yield log_message(row)
                cursor = row.cursor
            if not rows:
                if not request.follow or ended:
                    return
                await self._next(federation.logs_notifier, seen)

    @answering
    async def Cancel(self, request: control_pb2.CancelRequest, context: Context) -> control_pb2.Job:
        """Cancel a job; repeating it has no effect. A job that has succeeded or failed cannot be cancelled."""
        entry = await cancel(self._federation, await self._find(request.job), request.reason, _who())
        return self._federation.describe(entry)

    @answering
    async def Finish(self, request: control_pb2.FinishRequest, context: Context) -> control_pb2.Job:
        """End a job early with its current model, without a successor. A job that is ending anyway just ends."""
        entry = await finish(self._federation, await self._find(request.job), request.reason, _who())
        return self._federation.describe(entry)

    @answering
    async def Replan(self, request: control_pb2.ReplanRequest, context: Context) -> control_pb2.Job:
        """Replan a job: end it, and continue its model in a new job over the regions that are available now."""
        entry = await replan(self._federation, self._replanner, await self._find(request.job), request.reason, _who())
        return self._federation.describe(entry)

    @answering
    async def Resume(self, request: control_pb2.ResumeRequest, context: Context) -> control_pb2.SubmitReply:
        """Continue an ended job as a new one; once for each request ID."""
        job = (await self._find(request.job)).row.id
        entry, created = await resume(self._federation, self._probing, job, request.request_id, _who())
        return control_pb2.SubmitReply(job=self._federation.describe(entry), created=created)

    @answering
    async def Scale(self, request: control_pb2.ScaleRequest, context: Context) -> control_pb2.Job:
        """Change the numbers of workers of a job's regions."""
        entry = await self._find(request.job)
        await scale(self._federation, entry.row.id, dict(request.workers), request.reason, _who())
        return self._federation.describe(await self._find(request.job))

    @answering
    async def Share(self, request: control_pb2.ShareRequest, context: Context) -> control_pb2.Job:
        """Let a user read a job, or not any more; repeating it has no effect."""
        entry = await self._find(request.job)
        entry = await share(self._federation, entry, request.user, _who(), end=request.end)
        return self._federation.describe(entry)

    @answering
    async def Rename(self, request: control_pb2.RenameRequest, context: Context) -> control_pb2.Job:
        """Give a job another name; repeating it has no effect."""
        entry = await rename(self._federation, await self._find(request.job), request.name, _who())
        return self._federation.describe(entry)

    @answering
    async def Delete(self, request: control_pb2.DeleteRequest, context: Context) -> control_pb2.DeleteReply:
        """Delete an ended job and all that belongs to it."""
        return await self._sweeper.delete_job(request.job, caller_now())

    @answering
    async def Storage(self, request: control_pb2.StorageRequest, context: Context) -> control_pb2.StorageReply:
        """Return what the control plane keeps, and what its retention rules remove next."""
        return await storage_report(self._federation, self._sweeper, request, caller_now())

    @answering
    async def ListRegions(
        self, request: control_pb2.ListRegionsRequest, context: Context
    ) -> control_pb2.ListRegionsReply:
        """Return a page of regions, sorted by name."""
        names = sorted(name for name in self._federation.regions if name > request.after)
        described = (self._federation.describe_region(self._federation.regions[name]) for name in names)
        regions, more = _page(described, _PAGE_BYTES if request.paged else _SINGLE_PAGE_BYTES)
        if more and not request.paged:
            hint = "use a command line of the control plane's version"
            raise GeofedError("LIMIT_EXCEEDED", f"{len(names)} regions do not fit into one reply", hint=hint)
        return control_pb2.ListRegionsReply(regions=regions, more=more)

    @answering
    async def Invite(self, request: control_pb2.InviteRequest, context: Context) -> control_pb2.InviteReply:
        """Create a one-time token for a region."""
        name = request.region
        if not self.access.authority.issues:
            raise not_issued()
        if not _REGION_NAME.fullmatch(name):
            raise GeofedError(
                "CONFIG_INVALID",
                f"{name!r} is not a valid region name",
                hint="use at most 42 lower-case letters, digits and hyphens",
            )
        secret = new_secret()
        async with self._federation.change() as draft:
            draft.by = _who()
            expires = draft.at + (request.ttl_seconds or INVITATION_SECONDS)
            if draft.region(name) is None:
                draft.put_region(unseen_region(name))
            draft.invitations.append(InvitationRow(hash_secret(secret), name, expires))
            draft.record("region.invited", f"region {name} was invited", region=name)
        token = InvitationToken(self.access.address, self.access.authority.ca_pem, name, secret)
        return control_pb2.InviteReply(token=str(token), expires=expires)

    @answering
    async def RotateAuthority(
        self, request: control_pb2.RotateAuthorityRequest, context: Context
    ) -> control_pb2.RotateAuthorityReply:
        """Take the next step of the replacement of the federation's certificate authority."""
        return await rotate_authority(self._federation, self.access.authority, self.access.life, request, _who())

    @answering
    async def ChangeRegion(self, request: control_pb2.ChangeRegionRequest, context: Context) -> control_pb2.Region:
        """Drain a region, revoke its certificates, or remove it."""
        return await change_region(self._federation, self._replanner, request, _who())

    @answering
    async def AddUser(self, request: control_pb2.AddUserRequest, context: Context) -> control_pb2.UserReply:
        """Create a user; only this reply has the token."""
        return await add_user(self._federation, request, _who())

    @answering
    async def ChangeUser(self, request: control_pb2.ChangeUserRequest, context: Context) -> control_pb2.UserReply:
        """Change a user's quota or token."""
        changed = await change_user(self._federation, request, _who())
        await self._federation.rights_changed()
        return changed

    @answering
    async def RemoveUser(self, request: control_pb2.RemoveUserRequest, context: Context) -> control_pb2.User:
        """Remove a user."""
        removed = await remove_user(self._federation, request.name, _who())
        await self._federation.rights_changed()
        return removed

    @answering
    async def ListUsers(self, request: control_pb2.ListUsersRequest, context: Context) -> control_pb2.ListUsersReply:
        """Return the users with their quotas and promised workers."""
        return list_users(self._federation, caller_now())

    @answering
    async def SignInOptions(
        self, request: control_pb2.SignInOptionsRequest, context: Context
    ) -> control_pb2.SignInOptionsReply:
        """Return the identity provider."""
        provider = self._sign_ins.provider
        return control_pb2.SignInOptionsReply(
            federation=self._federation.name, issuer=provider.issuer, client_id=provider.client_id, scope=SCOPE
        )

    @answering
    async def SignIn(self, request: control_pb2.SignInRequest, context: Context) -> control_pb2.SignInReply:
        """Exchange an ID token for a token of its user."""
        user, token, expires_at = await self._sign_ins.sign_in(request.id_token)
        shown = user_message(self._federation, user)
        return control_pb2.SignInReply(user=shown, token=token, expires_at=expires_at)

    @answering
    async def SignOut(self, request: control_pb2.SignOutRequest, context: Context) -> control_pb2.SignOutReply:
        """Revoke the token of this call."""
        headers = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        token = headers.get("authorization", "").removeprefix("Bearer ")
        await self._sign_ins.sign_out(hash_secret(token))
        return control_pb2.SignOutReply()

    @streaming
    async def GetModel(
        self, request: control_pb2.ModelRequest, context: Context
    ) -> AsyncIterator[common_pb2.BlobChunk]:
        """Stream a kept model of a job, the last one or that of a round; or the own model of a region."""
        entry = await self._find(request.job)
        if request.region:
            digest = await own_model(self._measurements, entry, request.region)
            await self._federation.note_read(entry, caller_now().user, digest, request.region)
            async for chunk in self._federation.blobs.send(digest, request.offset):
                yield chunk
            return
        model = kept_model(entry, request.round or None)
        if self._federation.blobs.size(model.digest) is None:
            hint = "`geofed storage` shows the rules"
            raise GeofedError("MODEL_NOT_FOUND", f"the model of {entry.row.id} is not kept any more", hint=hint)
        await self._federation.note_read(entry, caller_now().user, model.digest)
        async for chunk in self._federation.blobs.send(model.digest, request.offset):
            yield chunk

    @streaming
    async def Audit(self, request: control_pb2.AuditRequest, context: Context) -> AsyncIterator[control_pb2.AuditLine]:
        """Stream the lines of the audit log's file."""
        yield control_pb2.AuditLine(line=header_line(self._federation.name))
        last: AuditRow | None = None
        while page := await self._federation.read(partial(Store.audit_after, seq=last.seq if last else 0)):
            for last in page:
                yield control_pb2.AuditLine(line=entry_line(last.text, last.hash))
        log, last = self._federation.audit, last or AuditRow("", 0, GENESIS)
        yield control_pb2.AuditLine(line=head_line(log.head(last), log.key, self._federation.name))

    @answering
    async def Attest(self, request: control_pb2.JobRequest, context: Context) -> control_pb2.AttestReply:
        """Return a signed statement of where an ended job's models come from."""
        entry, audit = await self._find(request.job), self._federation.audit
        heads = await self._federation.read(partial(Store.region_heads, job=entry.row.id))
        statement = statement_of(entry.row, self._federation.name, audit.head(), heads)
        return control_pb2.AttestReply(envelope=sealed(audit.key, statement))

    # --- helpers

    async def _next(self, notifier: Notifier, seen: int) -> None:
        if not self._federation.stopping:
            await notifier.wait(seen)
        if self._federation.stopping:
            raise GeofedError("UNAVAILABLE", "the control plane is stopping")

    async def _readable(self, rows: Sequence[EventRow]) -> set[str] | None:
        """Return the jobs of events that the caller may read; None: every event may be read."""
        # The role that the user has now, which may have changed since the call began.
        caller = caller_named(self._federation.users, caller_now().user)
        if caller.may_read_all:
            return None
        found = set()
        for name in {row.job for row in rows if row.job}:
            entry = self._federation.jobs.get(name)
            row = entry.row if entry is not None else await self._federation.read(partial(Store.job, job_id=name))
            if row is not None and caller.may_read(row):
                found.add(name)
        return found

    async def _find(self, name: str) -> JobEntry:
        """Return a job that the caller may know by the name."""
        return await self._federation.lookup.find_job(name, caller_now().may_read)


async def _with_first(
    first: common_pb2.BlobChunk | None, others: AsyncIterator[common_pb2.BlobChunk]
) -> AsyncIterator[common_pb2.BlobChunk]:
    """Yield a chunk that was taken from a stream, and then the stream."""
    if first is not None:
        yield first
    async for chunk in others:
        yield chunk


def _who() -> str:
    """Return the name of the caller, for events."""
    return caller_now().user or OPERATOR


def _uploader() -> str:
    """Return whose the partial uploads of this call are."""
    return f"user {caller_now().user}"


def _page(messages: Iterable[_Message], max_bytes: int = _PAGE_BYTES) -> tuple[list[_Message], bool]:
    """Return the messages that fit into a page, and whether there are more."""
    found: list[_Message] = []
    total = 0
    for message in messages:
        total += message.ByteSize()
        if found and (total > max_bytes or len(found) >= _PAGE_ITEMS):
            return found, True
        found.append(message)
    return found, False


def _version() -> str:
    try:
        return version("geofed")
    except PackageNotFoundError:
        return "0"
