"""AgentHub service: the API for region agents, on the mutual-TLS port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import grpc.aio
import structlog
from google.protobuf.message import Message

from control_plane._safetensors import facts_of, flat_bytes
from control_plane.core import Copy, Heartbeat, Models, Partition, Reported, Uploaded, models_of
from control_plane.pki import Authority, GivenAuthority, utc_now
from control_plane.service.measuring._measurements import Measurements
from control_plane.service.rpc._access import region_of
from control_plane.service.rpc._session import AgentSession
from control_plane.service.rpc._wire import log_rows, report_of
from control_plane.service.state._certificates import Certificate, revocations_of
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._federation import Federation
from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError, unforeseen_as_internal
from geofed_pb.rpc import answering, peer_address, peer_expiry, peer_serial, streaming
from geofed_pb.tasks import background, log_only
from geofed_pb.v1 import agent_pb2, agent_pb2_grpc, common_pb2

MAX_MODEL_BYTES = 64 << 30
"""Limit of an uploaded model's size."""
_DAILY_MODELS_BYTES = 1 << 40
"""Limit of the models that a region uploads within a day: a hundred of 10 GB."""
_MAX_DATA_CHARACTERS = 64 << 10
"""Limit of an event's JSON data."""
_HAPPENINGS = frozenset({
    "attempt.resumed", "collective.used", "message.undeliverable", "partition.batch", "partition.scaled",
    "peer.refused", "ps-ended", "setback", "shard.received", "shard.sending", "shard.sent", "update.refused",
    "wan.decision", "worker-failed",
})  # fmt: skip
"""Kinds of events that agents report; another one is shown as `region.note`, since it may say what only the control
plane knows."""
_AUDITED = {"shard.sent": "to", "shard.received": "from"}
"""Those that are in the audit log, too, with what names the other region in their data."""
_HEAD_STATES = frozenset({"finished", "failed", "stopped", "published", "refused", "sent"})
"""States of a report whose head of the region's audit log is recorded."""
_MOST_NOTED = 100_000
"""Of so many entries that regions have caused it is known that they are in the audit log."""
_HELLO_SECONDS = 10.0
"""Time limit of a session's first message, which agents send at once."""
_log = structlog.get_logger("geofed.agents")
Context = grpc.aio.ServicerContext[Any, Any]


class AgentHubService(agent_pb2_grpc.AgentHubServicer):
    """Serves agents. The certificate identifies the region; no message can claim another one."""

    def __init__(
        self,
        federation: Federation,
        measurements: Measurements,
        authority: Authority | GivenAuthority,
        region_life: timedelta,
    ) -> None:
        self._federation = federation
        self._measurements = measurements
        self._authority = authority
        self._region_life = region_life
        self._closing: set[asyncio.Task[None]] = set()
        self._noted: dict[tuple[object, ...], None] = {}
        """Entries of the audit log that regions have caused, the last ones: none is recorded twice."""

    @streaming
    async def Session(
        self, requests: AsyncIterator[agent_pb2.FromAgent], context: Context
    ) -> AsyncIterator[agent_pb2.ToAgent]:
        """Exchange messages with an agent for the life of its connection."""
        federation = self._federation
        region = region_of(self._federation, context)
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            raise GeofedError("FRAME_INVALID", f"no hello within {_HELLO_SECONDS:.0f} s") from None
        if first is None or not first.HasField("hello"):
            raise GeofedError("FRAME_INVALID", "the first message of a session must be hello")
        shown = None if federation.issues_certificates else Certificate(peer_serial(context), peer_expiry(context))
        session = await federation.connect(region, first.hello, peer_address(context), shown)
        reader = background(self._read(session, requests), session.end)
        context.add_done_callback(lambda _: self._close(session, reader))  # type: ignore[arg-type]
        yield agent_pb2.ToAgent(
            welcome=agent_pb2.Welcome(
                lease_seconds=federation.lease.total_seconds(),
                report_cursor=session.report_cursor,
                session=session.number,
                at=federation.clock(),
                revoked=federation.revoked_certificates(),
            )
        )
        async for message in session.outgoing(
            lambda seq: federation.read(lambda store: store.commands_after(region, seq)),
            partial(federation.refuse_command, region),
        ):
            yield message

    @answering
    async def StatBlob(self, request: common_pb2.BlobRequest, context: Context) -> common_pb2.BlobAck:
        """Return how many bytes of a blob are uploaded."""
        return self._federation.blobs.stat(request.digest, self._uploader(context))

    @answering
    async def PutBlob(self, requests: AsyncIterator[common_pb2.BlobChunk], context: Context) -> common_pb2.BlobAck:
        """Upload a model."""
        return await self._federation.blobs.receive(
            requests,
            limit_bytes=MAX_MODEL_BYTES,
            uploader=self._uploader(context),
            daily_bytes=_DAILY_MODELS_BYTES,
        )

    @streaming
    async def FetchBlob(self, request: common_pb2.BlobRequest, context: Context) -> AsyncIterator[common_pb2.BlobChunk]:
        """Send a code bundle or an initial model to a region that runs its job."""
        region = region_of(self._federation, context)
        may = self._federation.may_fetch(region, request.digest) or self._measurements.may_fetch(region, request.digest)
        if not may:
            raise GeofedError("FORBIDDEN", f"no job that runs in {region} needs {request.digest}")
        async for chunk in self._federation.blobs.send(request.digest, request.offset):
            yield chunk

    @answering
    async def Renew(self, request: agent_pb2.RenewRequest, context: Context) -> agent_pb2.RenewReply:
        """Issue a region's next certificate. The one that the call was made with stays valid, so that an answer that is
        lost, however often, locks no region out."""
        region = region_of(self._federation, context)
        federation = self._federation
        async with federation.change() as draft:
            issued = self._authority.sign_region(request.csr_pem, region, utc_now(draft.at), self._region_life)
            entry = draft.regions[region]
            row = replace(
                entry.row,
                serials=(peer_serial(context), issued.serial),
                certificate_expires=issued.expires,
            )
            draft.revocations += revocations_of(
                replace(entry.row, serials=tuple(one for one in entry.row.serials if one not in row.serials))
            )
            draft.put_region(replace(entry, row=row))
            draft.record("region.renewed", f"region {region} has a new certificate", region=region)
        return agent_pb2.RenewReply(certificate_pem=issued.certificate_pem, ca_pem=self._authority.ca_pem)

    # --- helpers

    def _uploader(self, context: Context) -> str:
        """Return whose the partial uploads of a call are."""
        return f"region {region_of(self._federation, context)}"

    def _close(self, session: AgentSession, reader: asyncio.Task[None]) -> None:
        reader.cancel()
        closing = background(self._disconnect(session), log_only)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _disconnect(self, session: AgentSession) -> None:
        try:
            await self._federation.disconnect(session)
        except GeofedError as error:
            # The region's lease expires later, with the same effect.
            _log.warning("the end of a session could not be stored", region=session.region, code=error.code)

    async def _read(self, session: AgentSession, requests: AsyncIterator[agent_pb2.FromAgent]) -> None:
        try:
            async for message in requests:
                if session.ended:
                    return
                await self._take(session, message)
            session.end()
        except GeofedError as error:
            session.end(error)
        except grpc.aio.AbortError:
            # The outgoing stream has ended already, with an error code.
            session.end()
        except asyncio.CancelledError:
            session.end()
            raise
        except Exception as error:  # noqa: BLE001 - the last handler of the task: the stream must end with an error code
            _log.exception("a message of an agent failed", region=session.region)
            session.end(GeofedError("INTERNAL", f"{type(error).__name__} while handling a message"))

    async def _take(self, session: AgentSession, message: agent_pb2.FromAgent) -> None:
        kind = message.WhichOneof("body")
        federation = self._federation
        if kind == "command_ack":
            await federation.acknowledge_commands(session, message.command_ack.seq)
        elif message.seq or kind == "partition":
            await self._apply_or_skip(session, message)
            return
        elif kind == "profile":
            self._measurements.received(session.region, message.profile)
        elif kind == "capacity":
            await federation.capacity_changed(session, message.capacity.preemptible)
        elif kind != "heartbeat":
            raise GeofedError("FRAME_INVALID", f"{kind or 'an empty message'} must have a sequence number")
        await federation.renew_lease(session)
        if kind == "heartbeat":
            lease = agent_pb2.LeaseGrant(lease_seconds=federation.lease.total_seconds())
            session.send(agent_pb2.ToAgent(lease=lease))

    async def _apply_or_skip(self, session: AgentSession, message: agent_pb2.FromAgent) -> None:
        """Apply a report; skip it and fail its job if it can never be applied.

        Without skipping, the same report would fail in every later session. Retryable errors end the session instead.
        """
        log = partial(_log.exception, "a report of an agent failed", region=session.region)
        try:
            # Later messages must still be handled.
            with unforeseen_as_internal(log, grpc.aio.AbortError):
                await self._apply(session, message)
        except GeofedError as error:
            if error.retryable or error.code == "FENCED":
                raise
            await self._skip(session, message, error)

    async def _skip(self, session: AgentSession, message: agent_pb2.FromAgent, error: GeofedError) -> None:
        region, seq = session.region, message.seq
        kind = message.WhichOneof("body") or ""
        job = getattr(getattr(message, kind, None), "job", "")
        _log.error("a report is skipped", region=region, seq=seq, code=error.code, report=clean(str(message)))
        async with self._federation.change() as draft:
            entry = draft.region(region)
            if entry is None or entry.state.session != session.number:
                raise GeofedError("FENCED", f"a later session of region {region} has replaced this one")
            draft.set_aside_message(region, job, f"a report ({kind}) of region {region}", error)
            if seq > self._federation.report_cursor(region):
                draft.report_cursor = (region, seq)
        if seq:
            session.send(agent_pb2.ToAgent(report_ack=agent_pb2.ReportAck(seq=seq)))

    async def _apply(self, session: AgentSession, message: agent_pb2.FromAgent) -> None:
        """Apply a report exactly once: store it with its sequence number, then acknowledge it."""
        federation, region, seq = self._federation, session.region, message.seq
        noted: tuple[object, ...] | None = None
        async with federation.change() as draft:
            entry = draft.region(region)
            if entry is None or entry.state.session != session.number:
                raise GeofedError("FENCED", f"a later session of region {region} has replaced this one")
            draft.apply_to_region(region, Heartbeat(draft.at, session.number, federation.lease.total_seconds()))
            done = federation.report_cursor(region)
            if done and seq > done + 1:
                # This control plane was restored from a backup: the reports between were applied before.
                draft.resend_commands(region, f"report {seq} follows report {done}")
            if seq > done and (ended := await self._ended_job(message)) is not None:
                report = report_of(message.partition)
                draft.settle(ended, region, report)
                self._drop_unwanted(draft, ended, report.kept)
                noted = self._note_head(draft, ended, region, message.partition)
            elif seq == 0 or seq > done:
                before = draft.job(message.partition.job)
                self._apply_body(draft, region, message, await self._deleted_jobs(message))
                if message.WhichOneof("body") == "partition":
                    noted = self._note_head(draft, before, region, message.partition)
                elif (happening := message.happening).kind in _AUDITED:
                    named = draft.job(happening.job) or await federation.lookup.ended_job(happening.job)
                    noted = self._note_happening(draft, named, region, happening)
            if seq > done:
                draft.report_cursor = (region, seq)
        if noted is not None:
            # Only now is it stored.
            self._noted[noted] = None
            if len(self._noted) > _MOST_NOTED:
                del self._noted[next(iter(self._noted))]
        if seq:
            session.send(agent_pb2.ToAgent(report_ack=agent_pb2.ReportAck(seq=max(seq, done))))
        await self._stop_where_ended(session, message)

    async def _stop_where_ended(self, session: AgentSession, message: agent_pb2.FromAgent) -> None:
        """Stop a partition whose job has ended or is unknown, as after the agent was restored from a backup."""
        report = message.partition
        if message.WhichOneof("body") != "partition" or report.job in self._federation.jobs:
            return
        if report.state in ("stopped", "refused"):
            return
        waiting = await self._federation.read(lambda store: store.commands_after(session.region, 0))
        if not any(command.job == report.job for command in waiting):
            stop = agent_pb2.StopPartition(job=report.job, epoch=report.epoch, reason="the job has ended", discard=True)
            session.send(agent_pb2.ToAgent(stop=stop))

    async def _ended_job(self, message: agent_pb2.FromAgent) -> JobEntry | None:
        """Return the job of a report if it has ended, else None."""
        if message.WhichOneof("body") != "partition":
            return None
        return await self._federation.lookup.ended_job(message.partition.job)

    async def _deleted_jobs(self, message: agent_pb2.FromAgent) -> set[str]:
        """Return the jobs of an event or of log lines that do not exist, as after their deletion."""
        named = {message.happening.job, *(record.job for record in message.logs.records)} - {""}
        # The difference from a view of keys would look at all jobs.
        ended = {job for job in named if job not in self._federation.jobs}
        return ended - await self._federation.read(lambda store: store.existing(ended)) if ended else ended

    def _apply_body(self, draft: Draft, region: str, message: agent_pb2.FromAgent, deleted: set[str]) -> None:
        kind = message.WhichOneof("body")
        if kind == "partition":
            report = report_of(message.partition)
            size, flat = None, 0
            if report.state == "published" and report.blob_digest:
                size = self._federation.blobs.size(report.blob_digest)
                flat = flat_bytes(self._federation.blobs.path(report.blob_digest)) or 0
            job = message.partition.job
            entry = draft.job(job)
            kept = self._kept_bytes(entry, region, report.kept)
            draft.apply_to_job(job, Reported(draft.at, region, report, size, flat, kept))
            if message.seq and (entry := draft.job(job)) is not None:
                self._drop_unwanted(draft, entry, report.kept)
            self._federation.allocation.reported(draft, message.partition.job)
        elif kind == "happening":
            happening = message.happening
            if happening.job in deleted or not self._is_involved(happening.job, region):
                return
            kind = happening.kind if happening.kind in _HAPPENINGS else "region.note"
            data = _parsed(happening.data_json)
            draft.record(kind, happening.text, region=region, job=happening.job, data=data, audited=False)
        elif kind == "logs":
            records = [record for record in message.logs.records if record.job not in deleted]
            draft.logs += log_rows(region, [record for record in records if self._is_involved(record.job, region)])

    def _note_head(
        self, draft: Draft, entry: JobEntry | None, region: str, report: agent_pb2.PartitionReport
    ) -> tuple[object, ...] | None:
        """Record the head of a region's audit log, at the end of its part of a job, which may have ended itself.

        Once for each end, so that no region fills the log. Returns what is recorded; None: nothing.
        """
        part = _part_of(entry, region)
        noted = (report.job, region, report.epoch, report.state)
        is_told = report.HasField("audit_head") and report.state in _HEAD_STATES
        if not is_told or part is None or part.epoch != report.epoch or noted in self._noted:
            return None
        draft.note_region_head(report.job, region, _fields(report.audit_head))
        return noted

    def _note_happening(
        self, draft: Draft, entry: JobEntry | None, region: str, happening: agent_pb2.Happening
    ) -> tuple[object, ...] | None:
        """Record that data have moved between regions, once for each job and pair of them.

        Returns what is recorded; None: nothing.
        """
        kind, data = happening.kind, _parsed(happening.data_json)
        if _part_of(entry, region) is None or not isinstance(data, dict):
            return None
        other = str(data.get(_AUDITED[kind], ""))
        noted = (happening.job, region, kind, other if other in draft.regions else "")
        if noted in self._noted:
            return None
        draft.record_audited(kind, data, region=region, job=happening.job)
        return noted

    def _kept_bytes(self, entry: JobEntry | None, region: str, kept: Uploaded) -> int | None:
        """Return the size of a model that the region has uploaded as commanded; None unless it is there."""
        models = entry.state.models if entry is not None else Models()
        asked = models.region == region and bool(models.awaited) and models.awaited[0].round == kept.round
        if entry is None or not asked or not self._is_model_of(entry.row.id, kept):
            return None
        return self._federation.blobs.size(kept.digest)

    def _is_model_of(self, job: str, kept: Uploaded) -> bool:
        """Whether a region has uploaded a model, and the file itself says that it is of this job and round."""
        blobs = self._federation.blobs
        if not kept.digest or blobs.size(kept.digest) is None:
            return False
        facts = facts_of(blobs.path(kept.digest))
        return (facts.get("job"), facts.get("round")) == (job, str(kept.round))

    def _drop_unwanted(self, draft: Draft, entry: JobEntry, kept: Uploaded) -> None:
        """Drop an uploaded model that came too late to be kept."""
        wanted = {model.digest for model in models_of(entry.state)}
        if kept.digest not in wanted and self._is_model_of(entry.row.id, kept):
            draft.dropped_models.append(kept.digest)

    def _is_involved(self, job: str, region: str) -> bool:
        entry = self._federation.jobs.get(job)
        if entry is None:
            return True
        return entry.state.partition(region) is not None or entry.state.copy_from(region) is not None


def _parsed(text: str) -> object:
    """Return an event's data. Halves of surrogate pairs, which cannot be stored as text, become question marks."""
    try:
        if len(text) <= _MAX_DATA_CHARACTERS:
            value = json.loads(text) if text else {}
            return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        pass
    return {"raw": clean(text)}


def _part_of(entry: JobEntry | None, region: str) -> Partition | Copy | None:
    """Return a region's part of a job: its partition, or its shard's transfer; None: it has none."""
    return entry.state.partition(region) or entry.state.copy_from(region) if entry is not None else None


def _fields(message: Message) -> dict[str, Any]:
    return {field.name: value for field, value in message.ListFields()}
