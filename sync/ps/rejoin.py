"""The way back into a running job for a region whose state is lost.

Nothing may be begun before all other regions have answered, since each of them may be the only one that has an update
of ours: an update that a region makes anew, under a number that it has used, would part the models. Every other region
thereby also learns that we have nothing of what we were known to have (`Lapsed`), and offers what it keeps again.

Why that is all, where regions exchange synchronously. Let R be the last round that any of them has merged. Round R's
model is the same everywhere, so that one region's checkpoint is what ours was or would have become. Nobody has merged
round R + 1, and a region keeps the updates of round R until it has made the next one (`Ledger.forgettable`, margin 1).
So its own update of round R + 1 is at each region that has made it, and is offered again. Our own ones that somebody
may lack are of rounds R and R + 1: whoever has them tells us, and we offer them as before the loss. If we had sent that
of R + 1 to anybody, it is taken up as it was; if to nobody, the round's steps are made again, and no step is lost. A
region that passes updates on takes those of round R, too, for whoever still is without them.

Where regions have neighbours for good, it is those who are asked: what others have of ours has come through them, and
they keep what is not of a round before their last one. (Then R is the last round that any of them has merged.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import channel, error_of, region_name
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc
from sync import framing
from sync.layout import Layout
from sync.ps.config import PsConfig
from sync.ps.engine import Engine
from sync.ps.events import Configured, Manifest, Peer
from sync.ps.link import Tls

__all__ = ["rejoin"]

_log = logging.getLogger("geofed.ps")
_AGAIN_SECONDS = 1.0
_ANSWER_SECONDS = 20.0

_Answers = dict[str, sync_pb2.RejoinReply]


async def rejoin(engine: Engine, config: PsConfig, identity: Callable[[], Tls]) -> None:
    """Ask all other regions, and go on from what the furthest has; waits until all have answered.

    Raises ``GeofedError("STATE_INVALID")`` where the others train in the background and have a model: there a region's
    place in its data, and what it held back, are known to nobody else.
    """
    while True:
        version = engine.version
        peers, asked = engine.machine.ledger.peers, engine.machine.ledger.near()
        if set(asked) <= set(peers):
            with contextlib.suppress(grpc.RpcError):
                if await _came_back(engine, config, identity, {region: peers[region] for region in asked}):
                    return
            await asyncio.sleep(_AGAIN_SECONDS)
        else:
            await engine.changed_since(version)


async def _came_back(engine: Engine, config: PsConfig, identity: Callable[[], Tls], peers: dict[str, Peer]) -> bool:
    """True once there is nothing more to do; False where somebody's answer did not hold."""
    lines = {region: _line(peer, identity()) for region, peer in peers.items()}
    try:
        stubs = {region: sync_pb2_grpc.ExchangeStub(line) for region, line in lines.items()}
        request = sync_pb2.RejoinRequest(job=config.job)
        asked = [stub.Rejoin(request, timeout=_ANSWER_SECONDS) for stub in stubs.values()]
        answers: _Answers = dict(zip(stubs, await asyncio.gather(*asked), strict=True))
        furthest = max(answers, key=lambda region: (answers[region].merges, region))
        wanted = _wanted(engine, answers, furthest)
        if not answers[furthest].merges and not wanted:
            _go_on_fresh(engine)
            return True
        if engine.machine.setup.background:
            text = "the region's state is lost, and with background exchange there is no way back into the job"
            raise GeofedError("STATE_INVALID", text, hint="cancel the job and run it again")
        if not answers[furthest].merges:
            return False
        try:
            updates = [(m, (await _fetch(stubs[region], _asked(config.job, m)))[0]) for region, m in wanted]
            newest = sync_pb2.FetchRequest(job=config.job, checkpoint=True)
            checkpoint, digest = await _fetch(stubs[furthest], newest)
        except grpc.RpcError as error:
            if error_of(error).code != "MODEL_NOT_FOUND":
                raise
            # It was forgotten while we asked: the others have gone on meanwhile, from what they had of ours.
            return False
        damaged = any(framing.digest_of([data]) != manifest.digest for manifest, data in updates)
        if damaged or framing.decode(checkpoint).facts["sequence"] != answers[furthest].merges - 1:
            # Or it has gone on meanwhile: what it had when it answered belongs to the model of then.
            return False
        layout = Layout.from_json(answers[furthest].layout_json)
        _log.warning("the state was lost; %s's is taken, %d bytes", furthest, len(checkpoint))
        await engine.take_over(lambda: engine.storage.take_over(checkpoint, digest, layout, updates))
        return True
    finally:
        for line in lines.values():
            await line.close(None)


def _go_on_fresh(engine: Engine) -> None:
    """Nobody has begun: neither had we."""
    machine = engine.machine
    engine.storage.mark()
    machine.lapsed = False
    engine.feed(Configured(machine.epoch, machine.attempt, ()))
    engine.have_calls_again()


def _line(peer: Peer, tls: Tls) -> grpc.aio.Channel:
    return channel(
        peer.address,
        ca_pem=tls.ca_pem,
        name=region_name(peer.region),
        certificate_pem=tls.certificate_pem,
        key_pem=tls.key_pem,
    )


def _wanted(engine: Engine, answers: _Answers, furthest: str) -> list[tuple[str, Manifest]]:
    """Updates that others may lack, each with a region that has it: ours, and where we pass others' on, theirs."""
    ledger, setup = engine.machine.ledger, engine.machine.setup
    found: dict[tuple[str, int], tuple[str, Manifest]] = {}
    for region, answer in answers.items():
        for proto in answer.kept:
            passed_on = region == furthest and proto.sequence < answer.merges and (ledger.neighbours or setup.rerouted)
            if proto.region == setup.region or passed_on:
                found[proto.region, proto.sequence] = region, _manifest(proto)
    return [held for _, held in sorted(found.items())]


def _asked(job: str, manifest: Manifest) -> sync_pb2.FetchRequest:
    return sync_pb2.FetchRequest(job=job, region=manifest.region, sequence=manifest.sequence)


async def _fetch(stub: sync_pb2_grpc.ExchangeStub, request: sync_pb2.FetchRequest) -> tuple[bytes, str]:
    """A whole file, and the digest that was told of it; raises grpc.RpcError where the other side breaks off."""
    data, digest = bytearray(), ""
    async for chunk in stub.Fetch(request):
        if chunk.offset != len(data):
            raise GeofedError("FRAME_INVALID", "a piece of another region's state is missing")
        data += chunk.data
        digest = chunk.digest
    return bytes(data), digest


def _manifest(proto: sync_pb2.UpdateManifest) -> Manifest:
    return Manifest(
        proto.region,
        proto.epoch,
        proto.sequence,
        proto.digest,
        proto.total_bytes,
        proto.weight,
        tuple(sorted(proto.seen.items())),
        proto.last,
        max(1, proto.stretch),
        proto.settled,
    )
