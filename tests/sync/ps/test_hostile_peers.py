"""A member of the job that sends what it may not: it is refused and named, and a bad update of its own ends the job."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from support.hostile_peer import HostilePeer, frame_of
from support.pki import Authority
from support.server_process import LAYOUT, NumpyWorker, Server, wait_until

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import error_of
from geofed_pb.v1 import sync_pb2
from sync import framing
from sync.ps.admission import Admission
from sync.ps.config import PsConfig
from sync.ps.engine import Engine

pytestmark = pytest.mark.processes

Servers = Callable[..., list[Server]]
Workers = Callable[..., NumpyWorker]
_LATER = sync_pb2.OfferReply.VERDICT_UNKNOWN


@pytest.fixture
def mars(authority: Authority) -> HostilePeer:
    return HostilePeer("mars", authority.region("mars"))


def _refusal(call: Callable[[], object]) -> GeofedError:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return error_of(raised.value)


def _failure(server: Server) -> str:
    """The line that a server which fails ends with."""
    assert server.process is not None
    assert server.process.wait(20) == 1
    return next(line for line in server.log.read_text().splitlines() if line.startswith("error["))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weight": 1e30}, "states 1e+30 samples, beyond its 10.1"),
        ({"weight": 0.0}, "states 0.0 samples"),
        ({"weight": -1.0}, "states -1.0 samples"),
        ({"weight": float("nan")}, "states nan samples"),
        ({"total_bytes": 1 << 29}, "update 1 of mars states 536870912 bytes, of at most"),
        ({"total_bytes": 0}, "update 1 of mars states 0 bytes, of at most"),
        ({"digest": "sha256:../../../../tmp/x"}, "update 1 of mars states an invalid digest"),
        ({"round_seconds": float("inf")}, "a round of inf s"),
        ({"stretch": 1 << 31}, "stretch 2147483648, of at most 64"),
        ({"seen": {"east": 1 << 60}}, "seen east"),
        ({"sequence": 1 << 60}, "round 1152921504606846976, of at most 2"),
    ],
)
def test_what_a_region_may_not_state_ends_the_job_and_names_it(
    pair: Server, mars: HostilePeer, changed: dict[str, object], said: str
) -> None:
    error = _refusal(lambda: mars.offer(pair, mars.manifest(mars.update(1.0), **changed)))
    assert error.code in {"FRAME_INVALID", "LIMIT_EXCEEDED"}
    assert said in error.message
    assert _failure(pair).startswith("error[PEER_INVALID]: ")
    assert said in _failure(pair)
    assert not list((pair.folder / "state" / "inbox").rglob("*.part"))


@pytest.fixture
def pair(servers: Servers, workers: Workers) -> Server:
    """East, at round 1, waits for mars, of which 10 samples a round are planned."""
    (server,) = servers("east", regions=("east", "mars"), round_samples={"east": 10.0, "mars": 10.0})
    workers(server, 1.0)
    wait_until(lambda: server.status().condition.startswith("waiting for the update of round 1"), "east to wait")
    return server


def _bad_facts() -> bytes:
    return frame_of(np.zeros(LAYOUT.size, np.float32), **{"from": float("nan"), "to": 3})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GFT1" + bytes(100), "not a tensor frame"),
        (frame_of(np.zeros(3, np.float32)), "not a vector of float32"),
        (b"".join(framing.encode({"delta": np.zeros(LAYOUT.size, np.float32)}, {"codec": 15})), "codec number 15"),
        (_bad_facts(), "states from nan"),
        (frame_of(np.zeros(LAYOUT.size, np.float32), whole=1), "a model instead of a change"),
    ],
)
def test_a_malformed_update_is_not_acknowledged(pair: Server, mars: HostilePeer, data: bytes, said: str) -> None:
    error = _refusal(lambda: mars.send(pair, mars.manifest(data), data))
    assert error.code == "FRAME_INVALID"
    assert said in error.message
    failed = _failure(pair)
    assert failed.startswith("error[PEER_INVALID]: update 1 of mars cannot be merged")
    state = pair.folder / "state"
    assert not list((state / "inbox").rglob("*.json"))
    assert (state / "evidence" / "mars-1.frame").read_bytes() == data
    assert said in json.loads((state / "evidence" / "mars-1.json").read_text())["reason"]
    # What is durable can be continued from: nothing of the update is left to fail again.
    pair.launch()
    pair.await_ready()
    assert pair.status().round == 0


def test_nobody_sends_for_another(servers: Servers, workers: Workers, mars: HostilePeer, authority: Authority) -> None:
    """Neither with its own signature nor without one, nor a signed update that it has altered."""
    made = servers("east", "west", regions=("east", "mars", "west"))
    workers(made[0], 1.0)
    data, west = mars.update(9.0), HostilePeer("west", authority.region("west"))
    honest = west.manifest(mars.update(1.0))
    ending = sync_pb2.UpdateManifest()
    ending.CopyFrom(honest)
    ending.ends = 1
    unsigned = sync_pb2.UpdateManifest()
    unsigned.CopyFrom(honest)
    unsigned.ClearField("signature")
    own = west.manifest(data, signer=mars.identity)
    for forged in (own, ending, unsigned):
        assert _refusal(lambda forged=forged: mars.offer(made[0], forged)).code == "FORBIDDEN"
    # What is signed is accepted only from where the topology leads it.
    assert mars.offer(made[0], honest).verdict == _LATER
    status = made[0].status()
    assert {(fault.region, fault.code): fault.count for fault in status.peer_faults} == {("mars", "FORBIDDEN"): 3}
    assert status.phase != "failed"


def test_two_updates_of_one_number_are_proof(pair: Server, mars: HostilePeer) -> None:
    first, second = mars.update(1.0), mars.update(2.0)
    one, two = mars.manifest(first, settled=0), mars.manifest(second)
    assert mars.offer(pair, one).verdict == sync_pb2.OfferReply.VERDICT_WANT
    # The same one, sent again later, states other things of others.
    assert mars.offer(pair, mars.manifest(first, settled=1)).verdict == sync_pb2.OfferReply.VERDICT_WANT
    assert _refusal(lambda: mars.offer(pair, two)).code == "PEER_INVALID"
    assert "error[PEER_INVALID]: mars has made two different updates of round 1" in _failure(pair)
    kept = json.loads((pair.folder / "state" / "evidence" / "mars-1.json").read_text())["manifests"]
    assert {manifest["digest"] for manifest in kept} == {framing.digest_of([first]), framing.digest_of([second])}


def test_what_others_have_merged_is_proof_as_well(
    servers: Servers, workers: Workers, mars: HostilePeer, authority: Authority
) -> None:
    """Mars tells east and west different things; west's next update shows east which one it has merged."""
    (east,) = servers("east", regions=("east", "mars", "west"))
    workers(east, 1.0)
    wait_until(lambda: east.status().condition.startswith("waiting for the update of round 1"), "east to wait")
    told, other = mars.update(1.0), mars.manifest(mars.update(2.0))
    assert mars.send(east, mars.manifest(told), told).verdict == sync_pb2.OfferReply.VERDICT_HAVE
    west = HostilePeer("west", authority.region("west"))
    proto = west.manifest(told, sequence=2)
    other.ClearField("certificate_pem")
    forged = west.manifest(told, sequence=2)
    forged.merged.append(mars.manifest(mars.update(3.0), signer=west.identity))
    west.offer(east, forged)
    assert east.status().phase != "failed"
    proto.merged.append(other)
    assert _refusal(lambda: west.offer(east, proto)).code == "PEER_INVALID"
    assert "error[PEER_INVALID]: mars has made two different updates" in _failure(east)


def test_only_the_control_plane_ends_a_job(pair: Server, mars: HostilePeer) -> None:
    data = mars.update(1.0)
    early = mars.manifest(data, ends=1)
    assert mars.send(pair, early, data).verdict == _LATER
    assert "mars states that the job ends with round 1" in pair.status().condition
    assert pair.status().round == 0
    pair.configure(finish=True)
    assert mars.send(pair, early, data).verdict == sync_pb2.OfferReply.VERDICT_HAVE
    wait_until(lambda: pair.status().round == 1, "round 1")


def test_an_unsigned_update_needs_the_control_planes_word(pair: Server, mars: HostilePeer) -> None:
    data = mars.update(1.0)
    proto = mars.manifest(data)
    proto.ClearField("signature")
    proto.ClearField("certificate_pem")
    assert _refusal(lambda: mars.send(pair, proto, data)).code == "FORBIDDEN"
    old = sync_pb2.PsPeer(region="mars", address="127.0.0.1:1", epoch=1, unsigned=True)
    pair.configure_peers(old)
    assert mars.send(pair, proto, data).verdict == sync_pb2.OfferReply.VERDICT_HAVE
    wait_until(lambda: pair.status().round == 1, "round 1")


def test_a_region_that_has_lost_its_state_believes_signatures_only(
    servers: Servers, mars: HostilePeer, authority: Authority
) -> None:
    """What another region says that it has made counts only if it was made by this one."""
    (east,) = servers("east", regions=("east", "mars"))
    admission = Admission(PsConfig(**east.settings), lambda: east.identity, lambda event: None)
    own = HostilePeer("east", east.identity)
    kept = [own.manifest(b"own"), mars.manifest(b"theirs"), own.manifest(b"made up", 2, signer=mars.identity)]
    found = admission.signed_only("mars", sync_pb2.RejoinReply(merges=3, layout_json="{}", kept=kept))
    assert list(found.kept) == kept[:2]
    assert (found.merges, found.layout_json) == (3, "{}")
    assert admission.faults["mars", "FORBIDDEN"].count == 1


def test_a_paused_region_is_patient() -> None:
    """Without a worker that waits, the other region may be paused as well."""

    async def waiting() -> list[str]:
        engine = Engine.__new__(Engine)
        engine.machine = SimpleNamespace(  # type: ignore[assignment]
            awaited=("mars",), sequence=0, ledger=SimpleNamespace(newest=lambda _: 0),
            progress=SimpleNamespace(condition="waiting"),
        )  # fmt: skip
        engine.failed, engine.patience_seconds, engine._awaited, engine._patience = None, 100.0, (), None
        failures: list[str] = []
        engine.fail = lambda error: failures.append(error.code)  # type: ignore[method-assign]
        engine._watch_awaited()
        first = engine._patience
        engine._called_at = time.monotonic() - 1000
        engine._lost(("mars",))
        assert not failures
        assert engine._patience is not first, "it waits as long again"
        engine._called_at = time.monotonic()
        engine._lost(("mars",))
        return failures

    assert asyncio.run(waiting()) == ["REGION_LOST"]


def test_a_silent_region_is_not_waited_for_for_ever(servers: Servers, workers: Workers) -> None:
    (east,) = servers("east", regions=("east", "mars"), patience_seconds=1.0)
    workers(east, 1.0)
    assert "error[REGION_LOST]: nothing came from mars for 1 s: waiting for the update of round 1" in _failure(east)
