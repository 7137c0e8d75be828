"""The way back into a running job for a region whose state is lost.

Nothing may be begun before all other regions have answered, since each of them may be the only one that has an update
of ours: an update that a region makes anew, under a number that it has used, would part the models. Every other region
thereby also learns that we have nothing of what we were known to have (`StateLost`), and offers what it keeps again.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import error_of
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc
from sync import framing
from sync.layout import Layout
from sync.ps.config import PsConfig
from sync.ps.core.events import Configured
from sync.ps.core.machine import Machine
from sync.ps.engine import Engine
from sync.transfer.manifest import Manifest
from sync.transfer.wire import manifest_of, manifest_to_proto, open_channel
from sync.transport.sockets import Tls

__all__ = ["Answers", "Way", "answer_of", "rejoin", "way_back"]

_log = logging.getLogger("geofed.ps")
_AGAIN_SECONDS = 1.0
_ANSWER_SECONDS = 20.0

Answers = Mapping[str, sync_pb2.RejoinReply]
"""By region."""


@dataclass(frozen=True)
class Way:
    """Where to continue from."""

    furthest: str
    """The region whose checkpoint is taken; empty: nothing is lost, since nobody has anything of ours."""
    updates: tuple[tuple[str, Manifest], ...] = ()
    """Those that others may lack, each with a region that has it."""


def answer_of(machine: Machine, job: str, layout_json: str) -> sync_pb2.RejoinReply:
    """What a region answers one that has lost its state."""
    kept = [manifest for _, manifest in sorted(machine.ledger.kept.items())]
    return sync_pb2.RejoinReply(
        merges=machine.sequence + 1,
        layout_json=layout_json,
        kept=[manifest_to_proto(job, manifest) for manifest in kept],
        state_lost=machine.state_lost,
    )


def way_back(machine: Machine, answers: Answers) -> Way | None:
    """What the answers of all that were asked lead to; None: ask again.

    Raises ``GeofedError("STATE_INVALID")`` where there is no way back.
    """
    if not answers or all(answer.state_lost for answer in answers.values()):
        lost = "every region's state is lost" if answers else "the state is lost, and no other region has the model"
        raise GeofedError("STATE_INVALID", lost, hint="cancel the job and run it again")
    if not set(machine.ledger.near()) >= set(answers):
        # The others were asked as well: those that we exchange with have lost their state, too, and come back first.
        return None
    furthest = max(answers, key=lambda region: (answers[region].merges, region))
    wanted = _wanted(machine, answers, furthest)
    if not answers[furthest].merges and not wanted:
        return Way("")
    if machine.setup.background:
        if _all_is_kept(machine, answers):
            return Way("")
        text = "the region's state is lost, and with background exchange there is no way back into the job"
        raise GeofedError("STATE_INVALID", text, hint="cancel the job and run it again")
    return Way(furthest, tuple(wanted)) if answers[furthest].merges else None


async def rejoin(engine: Engine, config: PsConfig, identity: Callable[[], Tls]) -> None:
    """Ask all other regions, and continue from what the furthest has; waits until all have answered.

    Raises ``GeofedError("STATE_INVALID")`` where there is no way back: where no other region has a model that is not
    lost, and where the others train in the background and have, or had, something of this region. There a region's
    place in its data, and what it held back, are known to nobody else.
    """
    while True:
        version = engine.version
        machine = engine.machine
        if set(machine.setup.others) <= set(machine.ledger.peers):
            with contextlib.suppress(grpc.RpcError):
                if await _came_back(engine, config, identity):
                    return
            await asyncio.sleep(_AGAIN_SECONDS)
        else:
            await engine.changed_since(version)


async def _came_back(engine: Engine, config: PsConfig, identity: Callable[[], Tls]) -> bool:
    """True once there is nothing more to do; False where somebody's answer did not hold."""
    machine = engine.machine
    near, peers = machine.ledger.near(), machine.ledger.peers
    lines = {region: open_channel(peers[region], identity()) for region in machine.setup.others}
    try:
        stubs = {region: sync_pb2_grpc.ExchangeStub(line) for region, line in lines.items()}
        answers = await _asked(config.job, {region: stubs[region] for region in near})
        if all(answer.state_lost for answer in answers.values()):
            answers = await _asked(config.job, stubs)
        way = way_back(machine, answers)
        if way is None:
            return False
        if not way.furthest:
            _go_on_fresh(engine)
            return True
        return await _took_over(engine, config.job, way, answers[way.furthest], stubs)
    finally:
        for line in lines.values():
            await line.close(None)


async def _asked(job: str, stubs: Mapping[str, sync_pb2_grpc.ExchangeStub]) -> Answers:
    request = sync_pb2.RejoinRequest(job=job)
    calls = [stub.Rejoin(request, timeout=_ANSWER_SECONDS) for stub in stubs.values()]
    return dict(zip(stubs, await asyncio.gather(*calls), strict=True))


async def _took_over(
    engine: Engine,
    job: str,
    way: Way,
    answer: sync_pb2.RejoinReply,
    stubs: Mapping[str, sync_pb2_grpc.ExchangeStub],
) -> bool:
    """False where the others have continued meanwhile."""
    try:
        updates = [(m, (await _fetch(stubs[region], _update(job, m)))[0]) for region, m in way.updates]
        newest = sync_pb2.FetchRequest(job=job, checkpoint=True)
        checkpoint, digest = await _fetch(stubs[way.furthest], newest)
    except grpc.RpcError as error:
        if error_of(error).code != "MODEL_NOT_FOUND":
            raise
        # It was forgotten while we asked: the others have continued meanwhile, from what they had of ours.
        return False
    damaged = any(framing.digest_of([data]) != manifest.digest for manifest, data in updates)
    if damaged or framing.decode(checkpoint).facts["sequence"] != answer.merges - 1:
        # Or it has continued meanwhile: what it had when it answered belongs to the model of then.
        return False
    layout = Layout.from_json(answer.layout_json)
    _log.warning("the state was lost; %s's is taken, %d bytes", way.furthest, len(checkpoint))
    await engine.take_over(lambda: engine.storage.take_over(checkpoint, digest, layout, updates))
    return True


def _go_on_fresh(engine: Engine) -> None:
    """Nobody has begun: neither had we."""
    machine = engine.machine
    engine.storage.mark()
    machine.state_lost = False
    engine.feed(Configured(machine.epoch, machine.attempt, ()))
    engine.have_calls_again()


def _wanted(machine: Machine, answers: Answers, furthest: str) -> list[tuple[str, Manifest]]:
    """Updates that others may lack: ours, and where we pass others' on, theirs."""
    found: dict[tuple[str, int], tuple[str, Manifest]] = {}
    for region, answer in answers.items():
        for proto in answer.kept:
            passed_on = region == furthest and proto.sequence < answer.merges and _passes_on(machine)
            if proto.region == machine.setup.region or passed_on:
                found[proto.region, proto.sequence] = region, manifest_of(proto)
    return [held for _, held in sorted(found.items())]


def _passes_on(machine: Machine) -> bool:
    return bool(machine.ledger.neighbours) or machine.setup.rerouted


def _all_is_kept(machine: Machine, answers: Answers) -> bool:
    """Whether nothing is lost although others have begun: of ours nobody has anything, and of theirs all is kept.

    The last update of a region that is merged is kept (`Ledger.forgettable`, margin 1). So one of whose updates none is
    kept has none in the model, and of the others' nothing is forgotten where the first is there still.
    """
    setup = machine.setup
    for region, answer in answers.items():
        kept: dict[str, int] = {}
        for proto in answer.kept:
            begins = proto.first or proto.sequence
            kept[proto.region] = min(kept.get(proto.region, begins), begins)
        here = kept if _passes_on(machine) else {name: kept[name] for name in kept if name == region}
        if setup.region in kept or any(first > (name != setup.regions[0]) for name, first in here.items()):
            return False
    return True


def _update(job: str, manifest: Manifest) -> sync_pb2.FetchRequest:
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
