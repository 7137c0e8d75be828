"""The parameter server's services: workers on one port (TLS, token), the agent on the other (mutual TLS)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from contextvars import ContextVar
from dataclasses import asdict
from itertools import islice
from typing import Any

import grpc
import grpc.aio

from geofed_pb.bounds import LOGGED_NAME_BYTES, MOST_LOGGED, clean
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CHUNK_BYTES, answering, streaming, to_proto
from geofed_pb.security.access import Rule
from geofed_pb.v1 import common_pb2, sync_pb2, sync_pb2_grpc, worker_pb2, worker_pb2_grpc
from sync import framing
from sync.file_transfer.manifest import PeerAddress
from sync.histograms import from_messages, to_messages
from sync.layout import Layout
from sync.mapped_files import chunks_of, pieces_of
from sync.ps.config import PsConfig
from sync.ps.core.answers import AttachAnswer, BoundaryAnswer, ReduceAnswer
from sync.ps.core.events import (
    Attached,
    BoundaryArrived,
    Configured,
    Evaluated,
    Event,
    LoggedSums,
    ReduceArrived,
    ResourceUsage,
    Stepped,
)
from sync.ps.engine import Engine, merged_key
from sync.ps.exchange import PeerLinks
from sync.ps.execution.export import to_safetensors
from sync.ps.tokens import WorkerIdentity, verify

__all__ = ["WORKER_RULES", "AdminService", "WorkerCheck", "WorkerService"]

_Context = grpc.aio.ServicerContext[Any, Any]

CALL_TIMEOUT_SECONDS = 15.0
"""How long a worker's call waiting for its answer before it is answered "pending", and the worker calls again."""
WATCH_INTERVAL_SECONDS = 0.25
"""Shortest interval between two statuses of a Watch call."""


_MOST_LOGGED_ROUNDS = 2
"""Most rounds of which a worker reports logged values at once: the one that ends, and the one before."""


WORKER_RULES = {
    f"/geofed.v1.WorkerPort/{name}": Rule(("worker",), note="its own job, region, number and attempt")
    for name in ("Attach", "Reduce", "Stepped", "Boundary", "Evaluated")
}
"""Rules of the port for the region's workers."""
_worker: ContextVar[WorkerIdentity] = ContextVar("worker")
"""The worker whose call runs."""


class WorkerCheck:
    """Checks calls of the region's workers by the token that the agent has signed."""

    def __init__(self, config: PsConfig) -> None:
        self._config = config

    async def __call__(self, rule: Rule, context: _Context, request: Any, *, again: bool) -> None:
        """Raise ``GeofedError``: UNAUTHENTICATED, FORBIDDEN."""
        config = self._config
        identity = verify(context.invocation_metadata() or (), config.token_key, config.job, config.region)
        if not 0 <= identity.worker < identity.workers:
            raise GeofedError("FORBIDDEN", f"worker {identity.worker} of {identity.workers}")
        _worker.set(identity)


class WorkerService(worker_pb2_grpc.WorkerPortServicer):
    """Serves the workers of the region."""

    def __init__(self, engine: Engine, config: PsConfig) -> None:
        self._engine, self._config = engine, config

    def _authenticate(self) -> WorkerIdentity:
        identity = _worker.get()
        if self._engine.failed is not None:
            raise self._engine.failed
        machine = self._engine.machine
        if identity.attempt >= machine.attempt and identity.workers != machine.setup.workers:
            # Every token states the number of workers, so that no step is merged from too few of them.
            self._engine.feed(Configured(0, identity.attempt, (), workers=identity.workers))
        return identity

    @answering
    async def Attach(self, request: worker_pb2.AttachRequest, context: _Context) -> worker_pb2.AttachReply:
        who = self._authenticate()
        layout = Layout.from_json(request.layout_json)
        begins = who.attempt >= self._engine.machine.attempt
        differs, base_key = await self._engine.agree(layout, request.base_key, begins=begins)
        answer = await self._engine.ask(
            lambda call: Attached(call, who.worker, who.attempt, request.initial_key, differs), CALL_TIMEOUT_SECONDS
        )
        if not isinstance(answer, AttachAnswer):
            return worker_pb2.AttachReply(pending=True)
        return worker_pb2.AttachReply(
            round=answer.sequence,
            step=answer.step,
            model_key=answer.model_key,
            state_key=answer.state_key,
            boundary=answer.boundary,
            finished=answer.finished,
            evaluate=answer.evaluate,
            until_step=answer.until_step,
            correction_key=answer.correction_key,
            background=answer.background,
            base_key=base_key,
        )

    @answering
    async def Reduce(self, request: worker_pb2.ReduceRequest, context: _Context) -> worker_pb2.ReduceReply:
        who = self._authenticate()
        key = merged_key(who.attempt, request.step)
        if who.attempt == self._engine.machine.attempt and self._engine.channel.has(key):
            # An earlier process merged it, and the worker missed the answer.
            return worker_pb2.ReduceReply(merged_key=key)

        def arrived(call: int) -> Event:
            values = (request.step, request.key, request.samples, request.loss)
            return ReduceArrived(call, who.worker, who.attempt, *values)

        answer = await self._engine.ask(arrived, CALL_TIMEOUT_SECONDS)
        if not isinstance(answer, ReduceAnswer):
            return worker_pb2.ReduceReply(pending=True)
        return worker_pb2.ReduceReply(merged_key=answer.key, samples=answer.samples)

    @answering
    async def Stepped(self, request: worker_pb2.SteppedRequest, context: _Context) -> worker_pb2.SteppedReply:
        who, present = self._authenticate(), self._engine.machine.attempt
        if who.attempt < present:
            raise GeofedError("FENCED", f"attempt {present} has taken over from {who.attempt}")
        self._engine.feed(Stepped(request.step, request.loss))
        return worker_pb2.SteppedReply()

    @answering
    async def Boundary(self, request: worker_pb2.BoundaryRequest, context: _Context) -> worker_pb2.BoundaryReply:
        who = self._authenticate()

        def arrived(call: int) -> Event:
            return BoundaryArrived(
                call=call,
                worker=who.worker,
                attempt=who.attempt,
                sequence=request.round,
                step=request.step,
                digest=request.digest,
                model_key=request.model_key,
                state_key=request.state_key,
                samples=request.samples,
                loss=request.loss,
                compute_seconds=request.compute_seconds,
                merge_seconds=request.merge_seconds,
                evaluate_seconds=request.evaluate_seconds,
                group=request.group,
                logged=_logged(request.logged),
                usage=ResourceUsage(
                    request.usage.cpu_cores, request.usage.memory_bytes, request.usage.gpu_memory_bytes
                ),
            )

        answer = await self._engine.ask(arrived, CALL_TIMEOUT_SECONDS)
        if not isinstance(answer, BoundaryAnswer):
            return worker_pb2.BoundaryReply(pending=True)
        return worker_pb2.BoundaryReply(
            round=answer.sequence,
            model_key=answer.model_key,
            state_key=answer.state_key,
            evaluate=answer.evaluate,
            finished=answer.finished,
            until_step=answer.until_step,
            correction_key=answer.correction_key,
        )

    @answering
    async def Evaluated(self, request: worker_pb2.EvaluatedRequest, context: _Context) -> worker_pb2.EvaluatedReply:
        who = self._authenticate()
        histograms, dropped = from_messages(request.histograms)
        error = request.error or dropped
        values = (request.round, request.samples, dict(request.metrics), error, _logged(request.logged), histograms)
        answer = await self._engine.ask(
            lambda call: Evaluated(call, who.worker, who.attempt, *values), CALL_TIMEOUT_SECONDS
        )
        return worker_pb2.EvaluatedReply(pending=answer is None)


def _logged(rounds: Iterable[worker_pb2.LoggedRound]) -> LoggedSums:
    """Return what a worker has logged, bounded: it runs the task's code."""
    return {
        one.round: {
            clean(name, LOGGED_NAME_BYTES): (value.sum, value.count)
            for name, value in islice(one.values.items(), MOST_LOGGED)
            if math.isfinite(value.sum)
        }
        for one in islice(rounds, _MOST_LOGGED_ROUNDS)
    }


class AdminService(sync_pb2_grpc.PsAdminServicer):
    """Serves the region's agent."""

    def __init__(self, engine: Engine, config: PsConfig, links: PeerLinks) -> None:
        self._engine, self._config, self._links = engine, config, links
        self.stopped = asyncio.Event()

    @answering
    async def Configure(self, request: sync_pb2.PsConfig, context: _Context) -> sync_pb2.PsStatus:
        peers = tuple(PeerAddress(peer.region, peer.epoch, peer.address) for peer in request.peers)
        unknown = {peer.region for peer in peers} - set(self._config.regions)
        if unknown:
            raise GeofedError("CONFIG_INVALID", f"not a region of this job: {', '.join(sorted(unknown))}")
        pairs = tuple((pair.a, pair.b) for pair in request.neighbours) or self._config.neighbours
        former = tuple((pair.a, pair.b) for pair in request.former)
        event = Configured(
            request.epoch,
            request.attempt,
            peers,
            pairs,
            routes=request.routes,
            former=former,
            finish=request.finish,
            halt=request.halt,
        )
        if peers:
            unsigned = frozenset(peer.region for peer in request.peers if peer.unsigned)
            self._links.admission.unsigned = unsigned
        self._engine.feed(event)
        if request.stop:
            self.stopped.set()
        return self._status()

    @streaming
    async def Watch(self, request: sync_pb2.PsWatchRequest, context: _Context) -> AsyncIterator[sync_pb2.PsStatus]:
        version = -1
        while True:
            version = await self._engine.changed_since(version)
            yield self._status()
            await asyncio.sleep(WATCH_INTERVAL_SECONDS)

    @streaming
    async def GetModel(
        self, request: sync_pb2.PsModelRequest, context: _Context
    ) -> AsyncIterator[common_pb2.BlobChunk]:
        model = await self._engine.model(request.round)
        layout, progress = self._engine.storage.layout, self._engine.machine.progress
        if model is None or layout is None:
            raise GeofedError("MODEL_NOT_FOUND", _missing(request.round))
        digest = framing.digest_of(pieces_of(model)) if request.round else progress.model_digest
        facts = {"job": self._config.job, "round": str(request.round or progress.sequence), "flat_digest": digest}
        base = self._engine.executor.base.contents(layout)
        pieces = to_safetensors(layout, model, facts, base)
        total_bytes, offset = sum(piece.nbytes for piece in pieces), 0
        digest = await asyncio.to_thread(framing.digest_of, pieces_of(*pieces))
        chunks = chunks_of(pieces, CHUNK_BYTES)
        while data := await asyncio.to_thread(next, chunks, b""):
            yield common_pb2.BlobChunk(digest=digest, total_bytes=total_bytes, offset=offset, data=data)
            offset += len(data)

    def _status(self) -> sync_pb2.PsStatus:
        progress, failed = self._engine.machine.progress, self._engine.failed
        peer_senders = self._links.peer_senders
        return sync_pb2.PsStatus(
            phase="failed" if failed else progress.phase,
            condition=failed.message if failed else self._condition(progress.condition),
            epoch=progress.epoch,
            attempt=progress.attempt,
            round=progress.sequence,
            step=progress.step,
            samples=int(progress.samples),
            loss=progress.loss,
            round_loss=progress.round_loss,
            logged=common_pb2.Logged(round=progress.logged_sequence, values=progress.logged),
            usage=common_pb2.Usage(**asdict(progress.usage)),
            metrics=progress.metrics,
            metrics_samples=int(progress.metrics_samples),
            metrics_round=progress.metrics_sequence,
            metrics_error=progress.metrics_error,
            histograms=to_messages(progress.histograms),
            sent_bytes={region: peer_sender.meter.sent_bytes for region, peer_sender in peer_senders.items()},
            received_bytes=self._links.received_bytes,
            model_digest=progress.model_digest,
            applied_updates=progress.applied,
            error=to_proto(failed) if failed else None,
            wait_seconds=self._engine.standstill.seconds,
            time=common_pb2.RoundTime(**self._engine.times),
            link_rtt_ms={region: peer_sender.meter.rtt_ms for region, peer_sender in peer_senders.items()},
            link_mbps={region: one.mbps_of(progress.update_bytes) for region, one in peer_senders.items()},
            samples_per_second=progress.samples_per_second,
            staleness=progress.staleness,
            refused=progress.refused,
            refusal_reasons=progress.refusal_reasons,
            interval=progress.interval,
            routes=progress.routes,
            update_bytes=progress.update_bytes,
            codec=self._engine.executor.codec_name,
            suspicion=self._engine.executor.suspicion,
            decisions=self._engine.controller.decisions,
            channel=asdict(self._engine.channel.usage),
            link_streams={region: peer_sender.meter.streams for region, peer_sender in peer_senders.items()},
            peer_faults=[
                sync_pb2.PeerFault(region=region, code=code, text=fault.text, count=fault.count)
                for (region, code), fault in sorted(self._links.admission.faults.items())
            ],
            links_down=sorted(region for region, peer_sender in peer_senders.items() if not peer_sender.meter.up),
        )

    def _condition(self, waiting: str) -> str:
        """Return what the server is waiting for, and what may delay it."""
        notes = [text for text in (waiting, self._links.store_fault) if text]
        for region, peer_sender in sorted(self._links.peer_senders.items()):
            if not peer_sender.meter.up:
                notes.append(f"link to {region} is down")
            elif peer_sender.meter.slow_path:
                notes.append(f"large updates to {region} take a slower path: {peer_sender.meter.slow_path}")
        return "; ".join(notes)


def _missing(sequence: int) -> str:
    return f"the model of round {sequence} is not kept" if sequence else "there is no model yet"
