"""Secure aggregation between real parameter servers."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.pki import Authority
from support.server_process import JOB, LAYOUT, LOOPBACK, NumpyWorker, Server, wait_until
from support.tapped import Tap

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import error_of
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc
from sync import framing
from sync.file_transfer.signing import sign, signature_of
from sync.ps.admission import Admission
from sync.ps.config import PsConfig
from sync.ps.execution.frames import check_received
from sync.ps.mask_keys import terms_of
from sync.secure import MaskKey, PairMasks, SharedScale

pytestmark = pytest.mark.processes

Servers = Callable[..., list[Server]]
Workers = Callable[..., NumpyWorker]

NAMES = ("east", "north", "west")
SHARES = {"east": 0.2, "north": 0.6, "west": 0.2}
SECURE = {"wan_settings": {"secure": 3.0}, "codec": "int8-masked", "shares": SHARES}


def _end(made: list[Server], pool: list[NumpyWorker]) -> None:
    for worker in pool:
        worker.join(40)
        assert not worker.is_alive(), f"{worker.server.region} hangs: {worker.server.status().condition}"
        assert worker.failure is None, worker.failure
    assert len({server.status().model_digest for server in made}) == 1
    assert all(np.array_equal(worker.finals[0], pool[0].finals[0]) for worker in pool)


@pytest.mark.parametrize("codec", ["int8-masked", "bf16-masked", "fp32-masked"])
@pytest.mark.parametrize("kind", ["mesh", "star", "chain"])
def test_regions_average_their_models(servers: Servers, workers: Workers, codec: str, kind: str) -> None:
    pairs = {"mesh": (), "star": (("east", "north"), ("north", "west")), "chain": (("east", "west"), ("north", "west"))}
    made = servers(*NAMES, rounds=4, **{**SECURE, "codec": codec, "neighbours": pairs[kind]})
    pool = [workers(server, push, samples=10.0) for server, push in zip(made, (1e-3, 2e-3, 3e-3), strict=True)]
    _end(made, pool)
    mean = (0.2 * 1 + 0.6 * 2 + 0.2 * 3) * 1e-3
    step = {"int8-masked": 1e-4, "bf16-masked": 2e-7, "fp32-masked": 2e-7}[codec]
    assert pool[0].finals[0] == pytest.approx(1.0 + 10 * mean, abs=2 * step)


def test_a_server_that_is_killed_in_a_round_sends_the_same_bytes(servers: Servers, workers: Workers) -> None:
    made = servers(*NAMES, rounds=3, **SECURE)
    east, north, west = made
    pool = [workers(east, 1e-3), workers(north, 2e-3)]
    sent = north.folder / "state" / "outbox" / "1.frame"
    wait_until(lambda: east.status().condition == "waiting for the update of round 1 from west", "the others to wait")
    before = sent.read_bytes()
    north.kill()
    north.launch(epoch=2)
    north.await_ready()
    for server in made:
        others = [other for other in made if other is not server]
        server.configure(*others, epoch=server.settings["epoch"])
    assert sent.read_bytes() == before
    pool.append(workers(west, 3e-3))
    _end(made, pool)


def test_disks_and_neighbours_hold_no_update_of_another_region(servers: Servers, workers: Workers) -> None:
    """A pattern in one region's change is in no file and no manifest of the others; there, only masked bytes are."""
    made = servers(*NAMES, rounds=1, **SECURE)
    pool = [workers(server, push) for server, push in zip(made, (1e-3, 0.123, 3e-3), strict=True)]
    wait_until(lambda: (made[0].folder / "state" / "inbox" / "north" / "1.frame").exists(), "an update")
    update = framing.decode((made[0].folder / "state" / "inbox" / "north" / "1.frame").read_bytes())
    values = np.array(update.tensors["masked"])
    # Every coordinate changed alike, and no two masked ones are alike.
    assert len(set(values.tolist())) == values.size
    _end(made, pool)
    fixed = round(0.6 * 0.123 * 2**26)
    canaries = [np.full(4, value).tobytes() for value in (np.float32(0.123), np.float32(0.123 * 0.6), np.int32(fixed))]
    canaries.append(np.full(4, 1 + np.float32(0.123), np.float32).tobytes())
    own = b"".join(path.read_bytes() for path in made[1].folder.rglob("*") if path.is_file())
    assert canaries[3] in own
    for server in (made[0], made[2]):
        for path in server.folder.rglob("*"):
            held = path.read_bytes() if path.is_file() else b""
            assert not any(canary in held for canary in canaries), path


@pytest.mark.parametrize("secure", [True, False])
def test_wires_and_relays_carry_no_update_of_another_region(secure: bool, servers: Servers, workers: Workers) -> None:
    """North's updates go to East through West. A pattern in them is in no byte of any connection, nor of the relay's
    disk; without secure aggregation it is in all of them, so that it would be found."""
    chain = (("east", "west"), ("north", "west"))
    settings = SECURE if secure else {"shares": SHARES}
    # Large updates take another way than through the port that is tapped; here they take it, too.
    made = servers(*NAMES, rounds=2, bulk_port=None, neighbours=chain, **settings)
    by_name = {server.region: server for server in made}
    taps = {(a, b): Tap(by_name[a], by_name[b]) for pair in chain for a, b in (pair, pair[::-1])}
    try:
        for server in made:
            peers = [
                sync_pb2.PsPeer(region=b, address=tap.address, epoch=1)
                for (a, b), tap in taps.items()
                if a == server.region
            ]
            far = [other for other in made if other is not server and (server.region, other.region) not in taps]
            peers += [sync_pb2.PsPeer(region=other.region, address=other.address, epoch=1) for other in far]
            server.configure_peers(*peers)
        pool = [workers(by_name["east"], 1e-3), workers(by_name["north"], 0.123)]
        held = by_name["west"].folder / "state" / "inbox" / "north" / "1.frame"
        # West has no change of its own yet, so that it keeps what it relays.
        wait_until(held.exists, "the relay to have the update")
        relay = b"".join(path.read_bytes() for path in by_name["west"].folder.rglob("*") if path.is_file())
        _end(made, [*pool, workers(by_name["west"], 3e-3)])
        push = np.float32(0.123)
        changes = [push, (np.float32(1) + push) - np.float32(1), push * np.float32(0.6)]
        canaries = [np.full(4, value, np.float32).tobytes() for value in (*changes, np.float32(1) + push)]
        canaries.append(np.full(4, round(0.6 * 0.123 * 2**26), np.int32).tobytes())
        for way in (("north", "west"), ("west", "east")):
            carried = taps[way].taken + taps[way[::-1]].taken
            assert carried.count(JOB.encode()) > 4, "manifests of two rounds"
            assert any(canary in carried for canary in canaries) is not secure, way
        assert any(canary in relay for canary in canaries) is not secure
    finally:
        for tap in taps.values():
            tap.close()


def test_an_update_that_is_not_masked_is_refused(tmp_path: Path) -> None:
    """And a masked one where others are not, or of another round: all by their frames, before they are acknowledged."""
    size, masks = LAYOUT.size, PairMasks("east", {"west": bytes(32)})
    scale = SharedScale("east", SHARES, "int8-masked")
    model = np.zeros(size, np.float32)
    masked = scale.encode(model, model, np.zeros(size), size, None, masks, 1)
    plain = {"delta": model}
    frames = {"plain": (plain, 0), "masked": (masked, 10), "mislabelled": (plain, 10)}
    for name, (tensors, mark) in frames.items():
        pieces = framing.encode(tensors, {"sequence": 1, "codec": mark})
        (tmp_path / name).write_bytes(b"".join(bytes(piece) for piece in pieces))
    check_received(tmp_path / "plain", 1, LAYOUT)
    check_received(tmp_path / "masked", 1, LAYOUT, "int8-masked")
    for name, sequence, codec, text in (
        ("plain", 1, "int8-masked", "not masked"),
        ("masked", 2, "int8-masked", "not masked"),
        ("mislabelled", 1, "int8-masked", "numbers 'masked' of 32 bits"),
        ("masked", 1, "", "without secure aggregation"),
        ("masked", 1, "fp32-masked", "numbers 'largest'"),
    ):
        with pytest.raises(GeofedError, match="FRAME_INVALID") as raised:
            check_received(tmp_path / name, sequence, LAYOUT, codec)
        assert text in raised.value.message


def test_a_peer_that_sends_what_is_not_masked_ends_the_job(servers: Servers, authority: Authority) -> None:
    """It is refused at the transfer, with its evidence, like every update that no region may send."""
    (east,) = servers("east", regions=NAMES, **SECURE)
    first = framing.encode({"delta": np.zeros(LAYOUT.size, np.float32)}, {"sequence": 1, "codec": 0})
    data = b"".join(bytes(piece) for piece in first)
    manifest = sync_pb2.UpdateManifest(
        job=JOB, region="west", epoch=1, sequence=1, digest=framing.digest_of([data]), total_bytes=len(data), weight=1.0
    )
    manifest.signature = b""
    sign(manifest, authority.region("west"))
    worker = NumpyWorker(east, 1e-3)
    worker.start()
    try:
        wait_until(lambda: (east.folder / "state" / "outbox" / "0.json").exists(), "the first model")
        with east.exchange(authority.region("west")) as line:
            stub = sync_pb2_grpc.ExchangeStub(line)
            wait_until(lambda: stub.Offer(manifest, timeout=10).verdict == sync_pb2.OfferReply.VERDICT_WANT, "an offer")
            with pytest.raises(grpc.RpcError) as raised:
                stub.Send(iter([sync_pb2.UpdateChunk(manifest=manifest, data=data)]), timeout=10)
            assert "not masked" in error_of(raised.value).message
        wait_until(lambda: east.process is not None and east.process.poll() is not None, "the server to end")
        assert "PEER_INVALID" in east.log.read_text()
    finally:
        worker.stop.set()


def _exchange(server: Server, authority: Authority, *keys: sync_pb2.MaskKey, caller: str = "west") -> sync_pb2.MaskKeys:
    with server.exchange(authority.region(caller)) as line:
        request = sync_pb2.MaskKeys(job=JOB, keys=keys)
        return sync_pb2_grpc.ExchangeStub(line).ExchangeKeys(request, timeout=10)


def _key(authority: Authority, region: str, signer: str, terms: str, public: bytes = b"") -> sync_pb2.MaskKey:
    tls, public = authority.region(signer), public or MaskKey().public
    text = json.dumps(["geofed mask key 1", JOB, region, public.hex(), terms]).encode()
    return sync_pb2.MaskKey(
        region=region, key=public, terms=terms, signature=signature_of(text, tls), certificate_pem=tls.certificate_pem
    )


class _North(sync_pb2_grpc.ExchangeServicer):
    """The parameter server of north, which counts calls, and waits before it answers."""

    def __init__(self, wait_seconds: float, *keys: sync_pb2.MaskKey) -> None:
        self.calls, self.over, self._keys, self._wait_seconds = 0, threading.Event(), keys, wait_seconds

    def ExchangeKeys(self, request: sync_pb2.MaskKeys, context: grpc.ServicerContext) -> sync_pb2.MaskKeys:
        self.calls += 1
        self.over.wait(self._wait_seconds)
        return sync_pb2.MaskKeys(job=JOB, keys=self._keys)


@contextmanager
def _peers(authority: Authority, west: Server, service: _North) -> Iterator[list[sync_pb2.PsPeer]]:
    """Run a server of north, and give its address and that of west."""
    tls, north = authority.region("north"), grpc.server(ThreadPoolExecutor(1))
    pairs = [(tls.key_pem, tls.certificate_pem)]
    credentials = grpc.ssl_server_credentials(pairs, tls.ca_pem, require_client_auth=True)
    sync_pb2_grpc.add_ExchangeServicer_to_server(service, north)
    address = f"{LOOPBACK}:{north.add_secure_port(f'{LOOPBACK}:0', credentials)}"
    north.start()
    try:
        there = {"north": address, "west": west.address}
        yield [sync_pb2.PsPeer(region=region, address=address, epoch=1) for region, address in there.items()]
    finally:
        service.over.set()
        north.stop(None)


def _has_key_of_east(west: Server, authority: Authority) -> None:
    """Wait until east has called west, which does not know the address of north and so calls no one."""
    begun = time.monotonic()
    wait_until(lambda: len(_exchange(west, authority, caller="north").keys) == 2, "the key of east")
    assert time.monotonic() - begun < 10


def test_a_region_that_does_not_answer_delays_no_other(servers: Servers, authority: Authority) -> None:
    east, west = servers("east", "west", regions=NAMES, **SECURE)
    silent = _North(30)
    with _peers(authority, west, silent) as peers:
        east.configure_peers(*peers)
        wait_until(lambda: silent.calls == 1, "the call")
        _has_key_of_east(west, authority)


def test_a_region_that_has_told_all_keys_is_not_called(servers: Servers, authority: Authority) -> None:
    east, west = servers("east", "west", regions=NAMES, **SECURE)
    own, north = _exchange(east, authority).keys[0], _North(0)
    (others,) = _exchange(west, authority, caller="north").keys
    _exchange(east, authority, own, _key(authority, "north", "north", own.terms), others, caller="north")
    with _peers(authority, west, north) as peers:
        east.configure_peers(*peers)
        wait_until(lambda: len(_exchange(west, authority, caller="north").keys) == 3, "the keys of all")
        assert north.calls == 0


def test_keys_that_are_refused_are_said_to_be_once(servers: Servers, authority: Authority) -> None:
    east, west = servers("east", "west", regions=NAMES, **SECURE)
    north = _North(0, _key(authority, "north", "west", _exchange(east, authority).keys[0].terms))
    with _peers(authority, west, north) as peers:
        east.configure_peers(*peers)
        wait_until(lambda: north.calls >= 3, "some calls")
    assert east.log.read_text().count("mask keys of north are refused") == 1


def test_a_key_that_its_region_has_not_signed_is_refused(servers: Servers, authority: Authority) -> None:
    (east,) = servers("east", regions=NAMES, **SECURE)
    terms = _exchange(east, authority).keys[0].terms
    with pytest.raises(grpc.RpcError) as raised:
        _exchange(east, authority, _key(authority, "north", "west", terms))
    assert error_of(raised.value).code == "FORBIDDEN"
    known = _exchange(east, authority, _key(authority, "north", "north", terms))
    assert [key.region for key in known.keys] == ["east", "north"]
    assert east.status().phase != "failed"


def test_regions_agree_on_the_noise_that_each_adds() -> None:
    shares = {"east": 0.5, "west": 0.5}
    noisy = {"secure": 3.0, "noise": 4.0, "clip": 1.0, "sampled": 0.0}
    made = [terms_of(shares, "fp32-masked", settings) for settings in (
        {"secure": 3.0}, noisy, {**noisy, "noise": 2.0}, {**noisy, "clip": 0.5}, {**noisy, "sampled": 1.0},
        {**noisy, "noise": 0.0},
    )]  # fmt: skip
    assert len(set(made)) == 5
    assert made[0] == made[5], "as agents without noise have it"


def test_a_second_key_of_a_region_ends_the_job(servers: Servers, authority: Authority) -> None:
    (east,) = servers("east", regions=NAMES, **SECURE)
    terms = _exchange(east, authority).keys[0].terms
    _exchange(east, authority, _key(authority, "west", "west", terms))
    _exchange(east, authority, _key(authority, "west", "west", terms))
    assert east.process is not None
    wait_until(lambda: east.process is not None and east.process.poll() is not None, "the server to end")
    assert "PEER_INVALID" in east.log.read_text()
    assert "two mask keys" in east.log.read_text()


@pytest.mark.parametrize("copied", ["east", "north"])
def test_a_region_with_the_key_of_another_ends_the_job(servers: Servers, authority: Authority, copied: str) -> None:
    """Its masks would be those of the other: with its own they could cancel."""
    (east,) = servers("east", regions=NAMES, **SECURE)
    own = _exchange(east, authority).keys[0]
    north = _key(authority, "north", "north", own.terms)
    public = {"east": own.key, "north": north.key}[copied]
    _exchange(east, authority, north)
    _exchange(east, authority, _key(authority, "west", "west", own.terms, public))
    wait_until(lambda: east.process is not None and east.process.poll() is not None, "the server to end")
    assert "PEER_INVALID" in east.log.read_text()
    assert f"west has announced the mask key of {copied}" in east.log.read_text()


def test_a_region_with_another_plan_is_found(servers: Servers, authority: Authority) -> None:
    (east,) = servers("east", regions=NAMES, **SECURE)
    _exchange(east, authority, _key(authority, "west", "west", "[]"))
    wait_until(lambda: east.process is not None and east.process.poll() is not None, "the server to end")
    assert "other terms" in east.log.read_text()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"regions": ("east", "west"), "shares": {"east": 0.5, "west": 0.5}}, "over 2 regions"),
        ({"wan_settings": {"secure": 4.0}}, "where at least 4"),
        ({"wan_settings": {"secure": 0.5}}, "a whole number from 3"),
        ({"wan_settings": {"secure": 2.0}}, "a whole number from 3"),
        ({"wan_settings": {"secure": 0.5}, "codec": "int8"}, "a whole number from 3"),
        ({"shares": {"east": 1.0, "north": 0.0, "west": 0.0}}, "the share of north is 0.0"),
        ({"shares": {"east": 1.0, "north": 0.5, "west": 0.01}}, "over 2 regions of more than a small share"),
        ({"wan_settings": {}}, "is only for secure aggregation"),
        ({"codec": "int8"}, "cannot be used for secure aggregation"),
        ({"shares": {}}, "without each region's share"),
        ({"wan_settings": {"secure": 3.0, "background": 1.0}}, "synchronous"),
    ],
)
def test_what_would_not_hide_updates_is_refused(
    tmp_path: Path, authority: Authority, changed: dict[str, object], text: str
) -> None:
    settings = {"regions": NAMES, **SECURE, **changed}
    server = Server(tmp_path / "east", authority, "east", settings.pop("regions"), **settings)
    server.launch()
    assert server.process is not None
    assert server.process.wait(30) != 0
    assert text in server.log.read_text()


def test_a_region_that_has_lost_its_key_does_not_make_another(servers: Servers, workers: Workers) -> None:
    made = servers(*NAMES, rounds=2, **SECURE)
    workers(made[0], 1e-3)
    wait_until(lambda: (made[0].folder / "state" / "outbox" / "1.json").exists(), "an update")
    made[0].kill()
    (made[0].folder / "state" / "mask-key.json").unlink()
    made[0].launch(epoch=2)
    assert made[0].process is not None
    assert made[0].process.wait(30) != 0
    assert "the key of its masks" in made[0].log.read_text()


def test_a_region_that_has_lost_its_state_does_not_rejoin(servers: Servers, workers: Workers) -> None:
    made = servers(*NAMES, rounds=2, **SECURE)
    workers(made[0], 1e-3)
    wait_until(lambda: (made[0].folder / "state" / "outbox" / "1.json").exists(), "an update")
    made[0].kill()
    shutil.rmtree(made[0].folder / "state")
    made[0].launch(epoch=2, begun=True)
    assert made[0].process is not None
    assert made[0].process.wait(30) != 0
    assert "STATE_INVALID" in made[0].log.read_text()


def _ends_with(server: Server, text: str) -> None:
    wait_until(lambda: server.process is not None and server.process.poll() is not None, "the server to end")
    assert "STATE_INVALID" in server.log.read_text()
    assert text in server.log.read_text()


def test_a_masked_update_that_is_lost_is_not_made_again(servers: Servers, workers: Workers) -> None:
    """A part of the state is lost: another update of the round would be under the same mask."""
    made = servers(*NAMES, rounds=2, **SECURE)
    east, north, west = made
    workers(east, 1e-3)
    wait_until(lambda: (east.folder / "state" / "outbox" / "1.json").exists(), "an update")
    wait_until(lambda: east.status().condition == "waiting for the update of round 1 from north, west", "it to count")
    east.kill()
    for path in (east.folder / "state" / "outbox").glob("1.*"):
        path.unlink()
    east.launch(epoch=2)
    east.await_ready()
    east.configure(north, west, epoch=2)
    _ends_with(east, "an update of round 1 was masked before")


def test_a_masked_update_counts_even_if_the_process_died_right_after_it(servers: Servers, workers: Workers) -> None:
    """The file of the key is written after the update, and before it is sent."""
    made = servers(*NAMES, rounds=2, **SECURE)
    east, north, west = made
    workers(east, 1e-3)
    key = east.folder / "state" / "mask-key.json"
    wait_until(lambda: json.loads(key.read_text())["used"] == 1, "an update")
    east.kill()
    assert (east.folder / "state" / "outbox" / "1.json").exists()
    key.write_text(json.dumps({**json.loads(key.read_text()), "used": 0}))
    east.launch(epoch=2)
    east.await_ready()
    assert json.loads(key.read_text())["used"] == 1
    east.configure(north, west, epoch=2)
    assert east.status().condition == "waiting for the update of round 1 from north, west"


def test_a_key_that_is_kept_is_not_used_with_another_state(servers: Servers, workers: Workers) -> None:
    made = servers(*NAMES, rounds=2, **SECURE)
    east = made[0]
    workers(east, 1e-3)
    wait_until(lambda: (east.folder / "state" / "outbox" / "1.json").exists(), "an update")
    east.kill()
    key = (east.folder / "state" / "mask-key.json").read_bytes()
    shutil.rmtree(east.folder / "state")
    (east.folder / "state").mkdir()
    (east.folder / "state" / "mask-key.json").write_bytes(key)
    east.launch(epoch=2, begun=True)
    _ends_with(east, "the region's state is lost")


def test_an_update_is_given_to_no_one_before_it_is_durable(
    servers: Servers, workers: Workers, authority: Authority
) -> None:
    """One that is not may be made again, and differently: two vectors under one mask."""
    (east,) = servers("east", regions=NAMES, **SECURE)
    workers(east, 1e-3)
    outbox = east.folder / "state" / "outbox"
    wait_until(lambda: east.status().condition == "waiting for the mask key of north, west", "the round's end")
    (outbox / "1.frame").write_bytes(b"masked")
    with east.exchange(authority.region("west")) as line:

        def fetch(sequence: int) -> bytes:
            request = sync_pb2.FetchRequest(job=JOB, region="east", sequence=sequence)
            return b"".join(chunk.data for chunk in sync_pb2_grpc.ExchangeStub(line).Fetch(request, timeout=10))

        assert fetch(0) == (outbox / "0.frame").read_bytes()
        with pytest.raises(grpc.RpcError) as raised:
            fetch(1)
        assert error_of(raised.value).code == "MODEL_NOT_FOUND"


def test_a_model_that_is_not_trained_fits_into_an_update(tmp_path: Path, authority: Authority) -> None:
    size = 1 << 20
    server = Server(tmp_path / "east", authority, "east", NAMES, **SECURE)
    scale, masks = SharedScale("east", SHARES, "int8-masked"), PairMasks("east", {"west": bytes(32)})
    model = np.zeros(size, np.float32)
    tensors = scale.encode(model, model, np.zeros(size), 1, None, masks, 1)
    limits = Admission(PsConfig(**server.settings), lambda: server.identity, lambda event: None).limits
    assert sum(piece.nbytes for piece in framing.encode(tensors)) <= limits.most_bytes_of(1, size, 0)


def test_no_update_is_made_before_the_keys_of_all_are_known(
    servers: Servers, workers: Workers, authority: Authority
) -> None:
    (east,) = servers("east", regions=NAMES, rounds=1, **SECURE)
    workers(east, 1e-3)
    wait_until(lambda: east.status().condition == "waiting for the mask key of north, west", "the round's end")
    terms = _exchange(east, authority).keys[0].terms
    _exchange(east, authority, _key(authority, "north", "north", terms))
    wait_until(lambda: east.status().condition == "waiting for the mask key of west", "one key")
    assert not (east.folder / "state" / "outbox" / "1.json").exists()
    _exchange(east, authority, _key(authority, "west", "west", terms))
    wait_until(lambda: east.status().condition == "waiting for the update of round 1 from north, west", "the other")
    assert (east.folder / "state" / "mask-key.json").stat().st_mode & 0o777 == 0o600
