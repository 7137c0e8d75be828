"""How a region whose state is lost rejoins its running job.

The region must not begin before all other regions have answered, since any of them may be the only one that has one of
its updates: if it made another update with a number that it has used already, the regions' models would differ. By
being asked, every other region also learns that this region has none of the updates that it had acknowledged
(`StateLost`), and offers again what it keeps.

This is sufficient with synchronous exchange. Let R be the last round that any region has merged. The model after round
R is the same everywhere, so any region's checkpoint of it can replace ours. No region has merged round R + 1, and a
region keeps the updates of round R until it has merged the next one (`Ledger.forgettable`, margin 1). So each region's
own update of round R + 1, if it has made one, is still there and is offered again. Our own updates that a region may
lack are of rounds R and R + 1: the regions that have them report them, and we offer them again. If any region has our
update of R + 1, we use that one; if no region has it, our workers repeat the round's steps, and no step is lost. A
region that passes on updates also fetches those of round R, for regions that still lack them.

Where the pairs of neighbours never change, only the neighbours are asked: whatever other regions have of ours has come
through them, and they keep all updates but those of rounds before their last one. (R is then the last round that any of
them has merged.)
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
from sync.file_transfer.manifest import Manifest
from sync.file_transfer.wire import manifest_of, manifest_to_proto, open_channel
from sync.layout import Layout
from sync.ps.admission import Admission
from sync.ps.config import PsConfig
from sync.ps.core.events import Configured
from sync.ps.core.machine import Machine
from sync.ps.engine import Engine
from sync.tcp_streams.sockets import Tls

__all__ = ["Answers", "RejoinPlan", "rejoin", "rejoin_plan", "rejoin_reply"]

_log = logging.getLogger("geofed.ps")
_RETRY_SECONDS = 1.0
"""Pause before the other regions are asked again."""
_CALL_TIMEOUT_SECONDS = 20.0
"""Timeout of a Rejoin call."""

Answers = Mapping[str, sync_pb2.RejoinReply]
"""Each region's reply."""


@dataclass(frozen=True)
class RejoinPlan:
    """What a region fetches to rejoin the job."""

    furthest: str
    """The region whose checkpoint is fetched; empty: nothing is lost, since no region has an update of ours."""
    updates: tuple[tuple[str, Manifest], ...] = ()
    """Updates that other regions may lack, each with a region that has it."""


def rejoin_reply(machine: Machine, job: str, layout_json: str) -> sync_pb2.RejoinReply:
    """Return the reply to a region that has lost its state."""
    kept = [manifest for _, manifest in sorted(machine.ledger.kept.items())]
    return sync_pb2.RejoinReply(
        merges=machine.sequence + 1,
        layout_json=layout_json,
        kept=[manifest_to_proto(job, manifest) for manifest in kept],
        state_lost=machine.state_lost,
    )


def rejoin_plan(machine: Machine, answers: Answers) -> RejoinPlan | None:
    """Decide from the replies what to fetch; None: ask again.

    Raises ``GeofedError("STATE_INVALID")`` if the state cannot be restored.
    """
    if not answers or all(answer.state_lost for answer in answers.values()):
        lost = "every region's state is lost" if answers else "the state is lost, and no other region has the model"
        raise GeofedError("STATE_INVALID", lost, hint="cancel the job and run it again")
    if not set(machine.ledger.regions_to_ask()) >= set(answers):
        # All regions were asked because our neighbours have lost their state too; they must rejoin first.
        return None
    furthest = max(answers, key=lambda region: (answers[region].merges, region))
    wanted = _updates_to_fetch(machine, answers, furthest)
    if not answers[furthest].merges and not wanted:
        return RejoinPlan("")
    if machine.setup.background:
        if _nothing_is_lost(machine, answers):
            return RejoinPlan("")
        text = "the region's state is lost, and with background exchange it cannot be restored from other regions"
        raise GeofedError("STATE_INVALID", text, hint="cancel the job and run it again")
    return RejoinPlan(furthest, tuple(wanted)) if answers[furthest].merges else None


async def rejoin(engine: Engine, config: PsConfig, identity: Callable[[], Tls], admission: Admission) -> None:
    """Ask the other regions, waiting until all have replied, and continue from the state of the most advanced one.

    Raises ``GeofedError("STATE_INVALID")`` if the state cannot be restored: if no other region has a model, or if the
    regions exchange in the background and another one has, or had, an update of this region. In that case only this
    region knew its position in its data and its residual.
    """
    while True:
        version = engine.version
        machine = engine.machine
        if set(machine.setup.others) <= set(machine.ledger.peers):
            with contextlib.suppress(grpc.RpcError):
                if await _try_rejoin(engine, config, identity, admission):
                    return
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            await engine.changed_since(version)


async def _try_rejoin(engine: Engine, config: PsConfig, identity: Callable[[], Tls], admission: Admission) -> bool:
    """Ask once, and restore the state if possible. Return False if the other regions must be asked again."""
    machine = engine.machine
    near, peers = machine.ledger.regions_to_ask(), machine.ledger.peers
    channels = {region: open_channel(peers[region], identity()) for region in machine.setup.others}
    try:
        stubs = {region: sync_pb2_grpc.ExchangeStub(channel) for region, channel in channels.items()}
        answers = await _ask_all(config.job, {region: stubs[region] for region in near})
        if all(answer.state_lost for answer in answers.values()):
            answers = await _ask_all(config.job, stubs)
        answers = {region: admission.signed_only(region, answer) for region, answer in answers.items()}
        plan = rejoin_plan(machine, answers)
        if plan is None:
            return False
        if not plan.furthest:
            _start_fresh(engine)
            return True
        return await _take_over(engine, config.job, plan, answers[plan.furthest], stubs)
    finally:
        for channel in channels.values():
            await channel.close(None)


async def _ask_all(job: str, stubs: Mapping[str, sync_pb2_grpc.ExchangeStub]) -> Answers:
    request = sync_pb2.RejoinRequest(job=job)
    calls = [stub.Rejoin(request, timeout=_CALL_TIMEOUT_SECONDS) for stub in stubs.values()]
    return dict(zip(stubs, await asyncio.gather(*calls), strict=True))


async def _take_over(
    engine: Engine,
    job: str,
    plan: RejoinPlan,
    answer: sync_pb2.RejoinReply,
    stubs: Mapping[str, sync_pb2_grpc.ExchangeStub],
) -> bool:
    """Fetch checkpoint and updates, and continue from them. Return False if the other regions have continued
    meanwhile."""
    try:
        updates = [(m, (await _fetch(stubs[region], _update(job, m)))[0]) for region, m in plan.updates]
        newest = sync_pb2.FetchRequest(job=job, checkpoint=True)
        checkpoint, digest = await _fetch(stubs[plan.furthest], newest)
    except grpc.RpcError as error:
        if error_of(error).code != "MODEL_NOT_FOUND":
            raise
        # The other regions have deleted it meanwhile: they have continued with what they had of ours.
        return False
    damaged = any(framing.digest_of([data]) != manifest.digest for manifest, data in updates)
    if damaged or framing.decode(checkpoint).facts["sequence"] != answer.merges - 1:
        # Either the data are damaged, or the region has continued since its reply, to another model than the reply
        # describes.
        return False
    layout = Layout.from_json(answer.layout_json)
    _log.warning("the state was lost; restored it from %s (%d bytes)", plan.furthest, len(checkpoint))
    await engine.take_over(lambda: engine.storage.take_over(checkpoint, digest, layout, updates))
    return True


def _start_fresh(engine: Engine) -> None:
    """Begin the job: no other region has begun, so no state is lost."""
    machine = engine.machine
    engine.storage.mark()
    machine.state_lost = False
    engine.feed(Configured(machine.epoch, machine.attempt, ()))
    engine.retry_calls()


def _updates_to_fetch(machine: Machine, answers: Answers, furthest: str) -> list[tuple[str, Manifest]]:
    """Return the updates to fetch, each with a region that has it: our own, and if we pass on others', theirs."""
    found: dict[tuple[str, int], tuple[str, Manifest]] = {}
    for region, answer in answers.items():
        for proto in answer.kept:
            passed_on = region == furthest and proto.sequence < answer.merges and _passes_on(machine)
            if proto.region == machine.setup.region or passed_on:
                found[proto.region, proto.sequence] = region, manifest_of(proto)
    return [held for _, held in sorted(found.items())]


def _passes_on(machine: Machine) -> bool:
    return bool(machine.ledger.neighbours) or machine.setup.rerouted


def _nothing_is_lost(machine: Machine, answers: Answers) -> bool:
    """Whether nothing is lost although other regions have begun: none has an update of ours, and each still keeps all
    of its own.

    A region keeps its last merged update (`Ledger.forgettable`, margin 1). So if it keeps none of a region's updates,
    its model contains none of them; and if it still keeps a region's first update, it has deleted none of that
    region's.
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
    """Fetch a whole file, and the digest that was sent with it. Raises grpc.RpcError if the peer aborts."""
    data, digest = bytearray(), ""
    async for chunk in stub.Fetch(request):
        if chunk.offset != len(data):
            raise GeofedError("FRAME_INVALID", "part of another region's state is missing")
        data += chunk.data
        digest = chunk.digest
    return bytes(data), digest
