"""The parameter server's sockets: workers on one port (TLS, token), peers and the agent on the other (mutual TLS)."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CHUNK_BYTES, answering, peer_common_name, streaming, to_proto
from geofed_pb.v1 import common_pb2, sync_pb2, sync_pb2_grpc, worker_pb2, worker_pb2_grpc
from sync.layout import Layout
from sync.ps.config import PsConfig
from sync.ps.engine import Engine, merged_key
from sync.ps.events import (
    AttachAnswer,
    Attached,
    BoundaryAnswer,
    BoundaryArrived,
    Configured,
    Evaluated,
    Event,
    Manifest,
    Peer,
    PeerHas,
    ReduceAnswer,
    ReduceArrived,
    Ship,
    Stored,
    Verdict,
)
from sync.ps.export import to_safetensors
from sync.ps.link import Courier, Tls
from sync.ps.storage import PartialUpdate
from sync.ps.tokens import WorkerIdentity, verify

__all__ = ["AdminService", "ExchangeService", "Links", "WorkerService"]

_log = logging.getLogger("geofed.ps")
_Context = grpc.aio.ServicerContext[Any, Any]

PATIENCE_SECONDS = 15.0
"""How long a worker's call waits for its answer before it is told to ask again."""
LARGEST_UPDATE_BYTES = 64 << 30
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_VERDICTS = {
    Verdict.WANT: sync_pb2.OfferReply.VERDICT_WANT,
    Verdict.HAVE: sync_pb2.OfferReply.VERDICT_HAVE,
    Verdict.FENCED: sync_pb2.OfferReply.VERDICT_FENCED,
    Verdict.LATER: sync_pb2.OfferReply.VERDICT_UNKNOWN,
}
WATCH_INTERVAL_SECONDS = 0.25
"""At most one status in this time."""


class WorkerService(worker_pb2_grpc.WorkerPortServicer):
    """Worker → parameter server of its own region."""

    def __init__(self, engine: Engine, config: PsConfig) -> None:
        self._engine, self._config = engine, config

    def _who(self, context: _Context) -> WorkerIdentity:
        config = self._config
        identity = verify(context.invocation_metadata() or (), config.token_key, config.job, config.region)
        if identity.worker >= config.workers:
            raise GeofedError("FORBIDDEN", f"worker {identity.worker} of {config.workers}")
        if self._engine.failed is not None:
            raise self._engine.failed
        return identity

    @answering
    async def Attach(self, request: worker_pb2.AttachRequest, context: _Context) -> worker_pb2.AttachReply:
        who = self._who(context)
        layout = Layout.from_json(request.layout_json)
        if self._engine.storage.layout is None and who.attempt >= self._engine.machine.attempt:
            await self._engine.keep_layout(layout)
        answer = await self._engine.ask(
            lambda call: Attached(call, who.worker, who.attempt, layout.digest, request.initial_key), PATIENCE_SECONDS
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
        )

    @answering
    async def Reduce(self, request: worker_pb2.ReduceRequest, context: _Context) -> worker_pb2.ReduceReply:
        who = self._who(context)
        key = merged_key(who.attempt, request.step)
        if who.attempt == self._engine.machine.attempt and self._engine.channel.has(key):
            # Merged by an earlier life of this process: a worker that missed the answer gets it now.
            return worker_pb2.ReduceReply(merged_key=key)

        def arrived(call: int) -> Event:
            values = (request.step, request.key, request.samples, request.loss)
            return ReduceArrived(call, who.worker, who.attempt, *values)

        answer = await self._engine.ask(arrived, PATIENCE_SECONDS)
        if not isinstance(answer, ReduceAnswer):
            return worker_pb2.ReduceReply(pending=True)
        return worker_pb2.ReduceReply(merged_key=answer.key, samples=answer.samples)

    @answering
    async def Boundary(self, request: worker_pb2.BoundaryRequest, context: _Context) -> worker_pb2.BoundaryReply:
        who = self._who(context)

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
            )

        answer = await self._engine.ask(arrived, PATIENCE_SECONDS)
        if not isinstance(answer, BoundaryAnswer):
            return worker_pb2.BoundaryReply(pending=True)
        return worker_pb2.BoundaryReply(
            round=answer.sequence,
            model_key=answer.model_key,
            state_key=answer.state_key,
            evaluate=answer.evaluate,
            finished=answer.finished,
        )

    @answering
    async def Evaluated(self, request: worker_pb2.EvaluatedRequest, context: _Context) -> worker_pb2.EvaluatedReply:
        who = self._who(context)
        values = (request.round, request.samples, dict(request.metrics))
        answer = await self._engine.ask(
            lambda call: Evaluated(call, who.worker, who.attempt, *values), PATIENCE_SECONDS
        )
        return worker_pb2.EvaluatedReply(pending=answer is None)


class Links:
    """The couriers to all peers, and what has come from them."""

    def __init__(self, engine: Engine, config: PsConfig, identity: Callable[[], Tls]) -> None:
        self._engine, self._config, self._identity = engine, config, identity
        self.couriers: dict[str, Courier] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.received_bytes: dict[str, int] = {}
        engine.on_ship = self.ship

    def ship(self, action: Ship) -> None:
        region = action.peer.region
        if region not in self.couriers:
            storage, own = self._engine.storage, self._config.region
            courier = Courier(
                self._config.job,
                self._identity,
                lambda sequence: storage.update_path(own, sequence),
                lambda peer, sequence: self._engine.feed(PeerHas(peer, sequence)),
                self._config.stall_seconds,
                self._engine.notify,
            )
            self.couriers[region] = courier
            task = asyncio.create_task(courier.run(), name=f"courier to {region}")
            task.add_done_callback(self._courier_ended)
            self._tasks.append(task)
        self.couriers[region].ship(action.peer, action.manifests)

    def _courier_ended(self, task: asyncio.Task[None]) -> None:
        """A courier works for ever; should it break, the process must not go on without it."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("%s broke", task.get_name(), exc_info=error)
            self._engine.fail(GeofedError("INTERNAL", f"{task.get_name()}: {type(error).__name__}: {error}"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass
class _Incoming:
    """An update on its way in; the newest stream that brings it is the one that counts."""

    partial: PartialUpdate
    stream: int = 0
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class ExchangeService(sync_pb2_grpc.ExchangeServicer):
    """Parameter server → parameter server."""

    def __init__(self, engine: Engine, config: PsConfig, links: Links) -> None:
        self._engine, self._config, self._links = engine, config, links
        self._incoming: dict[tuple[str, int], _Incoming] = {}

    def _check(self, proto: sync_pb2.UpdateManifest, context: _Context) -> Manifest:
        config, caller = self._config, peer_common_name(context)
        if caller != proto.region or proto.region not in config.regions or proto.region == config.region:
            raise GeofedError("FORBIDDEN", f"{caller} may not send updates of {proto.region}")
        if not 0 < proto.total_bytes <= LARGEST_UPDATE_BYTES:
            raise GeofedError("LIMIT_EXCEEDED", f"an update of {proto.total_bytes} bytes")
        if not (math.isfinite(proto.weight) and proto.weight >= 0 and _DIGEST.fullmatch(proto.digest)):
            raise GeofedError("FRAME_INVALID", "an update whose weight or digest is none")
        return Manifest(proto.region, proto.epoch, proto.sequence, proto.digest, proto.total_bytes, proto.weight)

    def _verdict(self, proto: sync_pb2.UpdateManifest, manifest: Manifest) -> sync_pb2.OfferReply:
        if proto.job != self._config.job:
            return sync_pb2.OfferReply(verdict=sync_pb2.OfferReply.VERDICT_UNKNOWN)
        verdict, have = self._engine.machine.verdict(manifest), 0
        if verdict is Verdict.WANT:
            have = self._entry(manifest).partial.have_bytes
        elif verdict is Verdict.HAVE:
            have = manifest.total_bytes
        return sync_pb2.OfferReply(verdict=_VERDICTS[verdict], have_bytes=have)

    def _entry(self, manifest: Manifest) -> _Incoming:
        key = (manifest.region, manifest.sequence)
        entry = self._incoming.get(key)
        if entry is None or entry.partial.manifest.digest != manifest.digest:
            entry = self._incoming[key] = _Incoming(self._engine.storage.incoming(manifest))
        return entry

    @answering
    async def Offer(self, request: sync_pb2.UpdateManifest, context: _Context) -> sync_pb2.OfferReply:
        return self._verdict(request, self._check(request, context))

    @answering
    async def Send(self, request: AsyncIterator[sync_pb2.UpdateChunk], context: _Context) -> sync_pb2.OfferReply:
        entry: _Incoming | None = None
        stream, manifest, proto = 0, None, None
        async for chunk in request:
            if entry is None or manifest is None:
                proto = chunk.manifest
                manifest = self._check(proto, context)
                verdict = self._verdict(proto, manifest)
                if verdict.verdict != sync_pb2.OfferReply.VERDICT_WANT:
                    return verdict
                entry = self._entry(manifest)
                entry.stream += 1
                stream = entry.stream
            async with entry.writing:
                if entry.stream != stream:
                    raise GeofedError("FENCED", "another stream brings this update now")
                await asyncio.to_thread(entry.partial.append, chunk.offset, chunk.data)
            received = self._links.received_bytes
            received[manifest.region] = received.get(manifest.region, 0) + len(chunk.data)
        if entry is None or manifest is None or proto is None:
            raise GeofedError("FRAME_INVALID", "a stream without a manifest")
        if entry.partial.have_bytes < manifest.total_bytes:
            return sync_pb2.OfferReply(verdict=sync_pb2.OfferReply.VERDICT_WANT, have_bytes=entry.partial.have_bytes)
        async with entry.writing:
            # Another stream may have completed it while this one waited.
            if self._engine.machine.verdict(manifest) is Verdict.WANT:
                await asyncio.to_thread(entry.partial.complete)
                self._incoming.pop((manifest.region, manifest.sequence), None)
                self._engine.feed(Stored(manifest))
        return self._verdict(proto, manifest)


class AdminService(sync_pb2_grpc.PsAdminServicer):
    """Agent → its own parameter server."""

    def __init__(self, engine: Engine, config: PsConfig, links: Links) -> None:
        self._engine, self._config, self._links = engine, config, links
        self.stopped = asyncio.Event()

    def _check(self, context: _Context) -> None:
        caller = peer_common_name(context)
        if caller != self._config.region:
            raise GeofedError("FORBIDDEN", f"{caller} does not own this parameter server")

    @answering
    async def Configure(self, request: sync_pb2.PsConfig, context: _Context) -> sync_pb2.PsStatus:
        self._check(context)
        peers = tuple(Peer(peer.region, peer.epoch, peer.address) for peer in request.peers)
        unknown = {peer.region for peer in peers} - set(self._config.regions)
        if unknown:
            raise GeofedError("CONFIG_INVALID", f"not a region of this job: {', '.join(sorted(unknown))}")
        self._engine.feed(Configured(request.epoch, request.attempt, peers))
        if request.stop:
            self.stopped.set()
        return self._status()

    @streaming
    async def Watch(self, request: sync_pb2.PsWatchRequest, context: _Context) -> AsyncIterator[sync_pb2.PsStatus]:
        self._check(context)
        version = -1
        while True:
            version = await self._engine.changed_since(version)
            yield self._status()
            await asyncio.sleep(WATCH_INTERVAL_SECONDS)

    @streaming
    async def GetModel(
        self, request: sync_pb2.PsModelRequest, context: _Context
    ) -> AsyncIterator[common_pb2.BlobChunk]:
        self._check(context)
        storage, progress = self._engine.storage, self._engine.machine.progress
        if storage.model is None or storage.layout is None:
            raise GeofedError("MODEL_NOT_FOUND", "there is no model yet")
        facts = {"job": self._config.job, "round": str(progress.sequence), "flat_digest": progress.model_digest}
        data, digest = await asyncio.to_thread(to_safetensors, storage.layout, storage.model, facts)
        for offset in range(0, len(data), CHUNK_BYTES):
            piece = data[offset : offset + CHUNK_BYTES]
            yield common_pb2.BlobChunk(digest=digest, total_bytes=len(data), offset=offset, data=piece)

    def _status(self) -> sync_pb2.PsStatus:
        progress, failed = self._engine.machine.progress, self._engine.failed
        couriers = self._links.couriers
        return sync_pb2.PsStatus(
            phase="failed" if failed else progress.phase,
            condition=failed.message if failed else self._condition(progress.condition),
            epoch=progress.epoch,
            attempt=progress.attempt,
            round=progress.sequence,
            step=progress.step,
            samples=int(progress.samples),
            loss=progress.loss,
            metrics=progress.metrics,
            metrics_samples=int(progress.metrics_samples),
            metrics_round=progress.metrics_sequence,
            sent_bytes={region: courier.meter.sent_bytes for region, courier in couriers.items()},
            received_bytes=self._links.received_bytes,
            model_digest=progress.model_digest,
            applied_updates=progress.applied,
            error=to_proto(failed) if failed else None,
            wait_seconds=self._engine.wan_wait_seconds,
            link_rtt_ms={region: courier.meter.rtt_ms for region, courier in couriers.items()},
            link_mbps={region: courier.meter.mbps for region, courier in couriers.items()},
            samples_per_second=progress.samples_per_second,
            links_down=sorted(region for region, courier in couriers.items() if not courier.meter.up),
        )

    def _condition(self, waits: str) -> str:
        """What is waited for, and why it may be long in coming."""
        faults = [
            f"the way to {region} is down: {courier.meter.fault}"
            for region, courier in sorted(self._links.couriers.items())
            if not courier.meter.up
        ]
        return "; ".join([*([waits] if waits else []), *faults])
