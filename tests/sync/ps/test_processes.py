"""Real parameter servers over real sockets: whole jobs, who is let in, and deaths at the worst moments."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.pki import Authority, write
from support.relay import Relay
from support.server_process import JOB, LAYOUT, NumpyWorker, Server, wait_until

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CHUNK_BYTES, error_of, region_name, with_token
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc, worker_pb2, worker_pb2_grpc
from sync import framing
from sync.file_transfer.signing import sign
from sync.tcp_streams.sockets import Tls

pytestmark = pytest.mark.processes

Servers = Callable[..., list[Server]]
Workers = Callable[..., NumpyWorker]


def _end(servers: list[Server], workers: list[NumpyWorker], rounds: int = 2) -> None:
    """All workers are done, and all regions have the same model, with every remote update once."""
    for worker in workers:
        worker.join(40)
        assert not worker.is_alive(), f"{worker.server.region} hangs: {worker.server.status().condition}"
        assert worker.failure is None, worker.failure
    told = [server.status() for server in servers]
    assert {status.phase for status in told} == {"finished"}
    assert len({status.model_digest for status in told}) == 1
    for place, status in enumerate(told):
        assert status.applied_updates == rounds * (len(servers) - 1) + (place > 0)
    assert all(np.array_equal(worker.finals[0], workers[0].finals[0]) for worker in workers)


def test_a_server_whose_agent_is_gone_before_it_is_awake_ends() -> None:
    """Else nobody would end it, and the agent's next life would find the state taken."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    server = [sys.executable, "-m", "sync.ps", "--config", "/nowhere", "--die-with-parent", str(gone.pid)]
    assert subprocess.run(server, capture_output=True, timeout=60, check=False).returncode == -signal.SIGKILL


def test_three_regions_average_their_models(servers: Servers, workers: Workers) -> None:
    made = servers("east", "north", "west")
    worker_group = [workers(made[0], 1.0, samples=10.0), workers(made[1], 2.0, samples=30.0), workers(made[2], 3.0)]
    _end(made, worker_group)
    # Round r moves a region by push * r: 1 + (1 + 2) * mean of the pushes, weighted 10 : 30 : 10.
    assert worker_group[0].finals[0] == pytest.approx(1.0 + 3 * (1 * 10 + 2 * 30 + 3 * 10) / 50, rel=1e-6)
    status = made[0].status()
    assert status.metrics == {"accuracy": 0.5}
    assert set(status.sent_bytes) == {"north", "west"}
    assert min(status.sent_bytes.values()) > 3 * LAYOUT.size * 4


def test_workers_of_one_region_merge_their_steps(servers: Servers) -> None:
    (server,) = servers("east", workers=2, rounds=1)
    results: list[worker_pb2.ReduceReply] = []
    pool = [NumpyWorker(server, 0.0, index=index) for index in range(2)]
    for worker, value in zip(pool, (1.0, 4.0), strict=True):
        gradient = np.full(LAYOUT.size, value, np.float32)
        worker.channel.put(f"g/1/1/{worker.index}", framing.encode({"gradient": gradient}))
    requests = [worker_pb2.ReduceRequest(step=1, key=f"g/1/1/{w.index}", samples=1 + 2 * w.index) for w in pool]
    threads = [
        threading.Thread(target=lambda w=w, r=r: results.append(w._call("Reduce", r)))
        for w, r in zip(pool, requests, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {reply.merged_key for reply in results} == {"g/1/1/merged"}
    merged = pool[0].channel.get("g/1/1/merged")
    assert merged is not None
    assert framing.decode(merged).tensors["gradient"] == pytest.approx((1 * 1 + 4 * 3) / 4)


# Who is let in


def _refusal(call: Callable[[], object]) -> GeofedError:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return error_of(raised.value)


def _attach(server: Server, token: str | None) -> object:
    credentials = grpc.ssl_channel_credentials(server.identity.ca_pem)
    options = [("grpc.ssl_target_name_override", region_name(server.region))]
    with grpc.secure_channel(f"127.0.0.1:{server.ports['worker']}", credentials, options=options) as line:
        metadata = with_token(token) if token is not None else ()
        request = worker_pb2.AttachRequest(layout_json=LAYOUT.to_json(), initial_key="init/1/0")
        return worker_pb2_grpc.WorkerPortStub(line).Attach(request, metadata=metadata, timeout=10)


def test_plaintext_is_refused(servers: Servers) -> None:
    (server,) = servers("east")
    for port in server.ports.values():
        with grpc.insecure_channel(f"127.0.0.1:{port}") as line:
            stub = sync_pb2_grpc.PsAdminStub(line)
            assert _refusal(lambda stub=stub: stub.Configure(sync_pb2.PsConfig(), timeout=10)).code == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("token", "code"),
    [
        ({"key": "another key that is long enough for it too"}, "UNAUTHENTICATED"),
        ({"life": timedelta(seconds=-60)}, "UNAUTHENTICATED"),
        ({"job": "job-2"}, "FORBIDDEN"),
        ({"region": "west"}, "FORBIDDEN"),
        ({"worker": 7}, "FORBIDDEN"),
        ({"attempt": 1}, "FENCED"),
        (None, "UNAUTHENTICATED"),
    ],
)
def test_a_token_that_is_not_this_workers_is_refused(
    one_server: Server, token: dict[str, object] | None, code: str
) -> None:
    text = None if token is None else one_server.token(**token)  # type: ignore[arg-type]
    assert _refusal(lambda: _attach(one_server, text)).code == code


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Server]:
    """A server at its second attempt, which no test changes."""
    server = Server(tmp_path_factory.mktemp("one") / "east", authority, "east", ("east", "west"), attempt=2)
    (server.folder / "state").mkdir()
    (server.folder / "state" / "layout.json").write_text(LAYOUT.to_json())
    server.launch()
    server.await_ready()
    yield server
    server.kill()


def _offer(server: Server, identity: Tls, name: str | None = None, **changed: object) -> sync_pb2.OfferReply:
    fields = {
        "job": JOB, "region": "west", "epoch": 1, "sequence": 1, "digest": "sha256:" + "0" * 64, "total_bytes": 10,
        "weight": 1.0,
    } | changed  # fmt: skip
    proto = sync_pb2.UpdateManifest(**fields)  # type: ignore[arg-type]
    sign(proto, identity)
    with server.exchange(identity, name) as line:
        return sync_pb2_grpc.ExchangeStub(line).Offer(proto, timeout=10)


def test_a_peer_may_speak_for_itself_only(one_server: Server, authority: Authority) -> None:
    west, mars = authority.region("west"), authority.region("mars")
    assert _offer(one_server, west).verdict == sync_pb2.OfferReply.VERDICT_WANT
    assert _refusal(lambda: _offer(one_server, mars)).code == "FORBIDDEN"
    assert _refusal(lambda: _offer(one_server, mars, region="mars")).code == "FORBIDDEN"
    assert _refusal(lambda: _offer(one_server, one_server.identity, region="east")).code == "FORBIDDEN"


def test_only_the_regions_own_agent_configures(one_server: Server, authority: Authority) -> None:
    with one_server.exchange(authority.region("west")) as line:
        stub = sync_pb2_grpc.PsAdminStub(line)
        assert _refusal(lambda: stub.Configure(sync_pb2.PsConfig(epoch=9), timeout=10)).code == "FORBIDDEN"
    assert one_server.status().epoch == 1


def test_another_federations_certificate_is_refused(one_server: Server) -> None:
    stranger = Authority("another federation").region("west")
    mixed = Tls(one_server.identity.ca_pem, stranger.certificate_pem, stranger.key_pem)
    assert _refusal(lambda: _offer(one_server, mixed)).code in {"UNAVAILABLE", "CERTIFICATE_INVALID"}
    assert _refusal(lambda: _offer(one_server, one_server.identity, name=region_name("west"))).code in {
        "UNAVAILABLE",
        "CERTIFICATE_INVALID",
    }


# Deaths


def test_killed_while_it_waits_for_a_peer(servers: Servers, workers: Workers) -> None:
    east, west = servers("east", "west")
    first = workers(east, 1.0)
    wait_until(lambda: east.status().condition == "waiting for the update of round 1 from west", "east to wait")
    east.kill()
    east.launch(attempt=2)
    east.await_ready()
    east.configure(west)
    first.stop.set()
    again = workers(east, 1.0, attempt=2)
    _end([east, west], [again, workers(west, 2.0)])


def test_killed_when_all_updates_of_the_round_are_durable(servers: Servers, workers: Workers) -> None:
    """Nobody sends an update again that was acknowledged: the server must find out by itself that it can continue."""
    east, west = servers("east", "west", rounds=1)
    first = workers(east, 1.0)
    wait_until(lambda: east.status().condition == "waiting for the update of round 1 from west", "east to wait")
    wait_until(lambda: west.status().applied_updates == 1, "the first model in the west")
    east.kill()
    second = workers(west, 2.0)
    made = west.folder / "state" / "outbox"
    wait_until((made / "1.json").exists, "west's own update")
    # As if it had become durable in the east in the moment before.
    inbox = east.folder / "state" / "inbox" / "west"
    inbox.mkdir(exist_ok=True)
    for kind in ("frame", "json"):
        shutil.copy(made / f"1.{kind}", inbox / f"1.{kind}")
    east.launch()
    east.await_ready()
    wait_until(lambda: east.status().round == 1, "round 1 in the east")
    east.configure(west)
    _end([east, west], [first, second], rounds=1)


def test_killed_in_the_middle_of_a_transfer(tmp_path: Path, authority: Authority) -> None:
    """Five of eight chunks had arrived; after the restart no byte of them is sent again."""
    west, east = Server(tmp_path / "west", authority, "west", ("east", "west")), authority.region("east")
    model = np.random.default_rng(1).standard_normal(2 * CHUNK_BYTES - 64).astype(np.float32)
    data = b"".join(framing.encode({"delta": model}, {"codec": 0}))
    assert 7 * CHUNK_BYTES < len(data) <= 8 * CHUNK_BYTES
    proto = sync_pb2.UpdateManifest(
        job=JOB, region="east", epoch=1, digest=framing.digest_of([data]), total_bytes=len(data), weight=1.0
    )
    sign(proto, east)

    def chunks(first: int, last: int) -> Iterator[sync_pb2.UpdateChunk]:
        for number in range(first, last):
            offset = number * CHUNK_BYTES
            head = proto if number == first else None
            yield sync_pb2.UpdateChunk(manifest=head, offset=offset, data=data[offset : offset + CHUNK_BYTES])

    try:
        for first, last, verdict in ((0, 5, "VERDICT_WANT"), (5, 8, "VERDICT_HAVE")):
            west.launch()
            west.await_ready()
            with west.exchange(east) as line:
                stub = sync_pb2_grpc.ExchangeStub(line)
                assert stub.Offer(proto, timeout=10).have_bytes == first * CHUNK_BYTES
                reply = stub.Send(chunks(first, last), timeout=20)
                assert sync_pb2.OfferReply.Verdict.Name(reply.verdict) == verdict
                assert stub.Offer(proto, timeout=10).verdict == reply.verdict
            west.kill()
    finally:
        west.kill()
    assert (west.folder / "state" / "inbox" / "east" / "0.frame").read_bytes() == data


@pytest.fixture
def relay() -> Iterator[Relay]:
    with Relay() as made:
        yield made


def test_a_cut_transfer_goes_on_where_it_was(servers: Servers, authority: Authority, relay: Relay) -> None:
    """The line breaks in the middle of an update: at most the chunks in flight cross it twice."""
    east, west = servers("east", "west", rounds=1, stall_seconds=5.0, bulk_port=None)
    relay.to = ("127.0.0.1", west.ports["exchange"])
    east.configure(west, address=relay.address)
    size = 24 * CHUNK_BYTES // 4
    relay.cut_after = 8 * CHUNK_BYTES
    big = np.random.default_rng(2).standard_normal(size).astype(np.float32)
    layout = f'{{"slots":[{{"name":"w","shape":[{size}],"dtype":"float32"}}],"trainable":1,"aliases":[]}}'
    worker = NumpyWorker(east, 1.0)
    key = worker._put("init/1/0", big)
    worker._call("Attach", worker_pb2.AttachRequest(layout_json=layout, initial_key=key))
    wait_until(lambda: west.status().applied_updates == 1, "the first model to arrive in the west")
    assert relay.cuts == 1
    total = 24 * CHUNK_BYTES
    assert west.status().received_bytes["east"] <= total + CHUNK_BYTES
    # What was sent beyond it had left the sender, and was in the broken connection's buffers.
    assert total < east.status().sent_bytes["west"] < total + 8 * CHUNK_BYTES
    assert west.status().model_digest == east.status().model_digest


# Time passes


def test_a_renewed_certificate_is_shown_without_a_restart(
    tmp_path: Path, authority: Authority, workers: Workers
) -> None:
    """The first one ends in a moment; the agent renews it in place, and both ports and the sender take it up."""
    short = {"begins": timedelta(minutes=-5), "life": timedelta(minutes=5, seconds=4)}
    pair = [
        Server(tmp_path / name, authority, name, ("east", "west"), identity=authority.region(name, **short))
        for name in ("east", "west")
    ]
    ends = time.monotonic() + 4
    try:
        for server in pair:
            server.launch()
        for server in pair:
            server.await_ready()
        for server in pair:
            server.identity = authority.region(server.region)
            write(server.identity, server.folder / "identity")
        time.sleep(max(0.0, ends + 1 - time.monotonic()))
        pair[0].configure(pair[1])
        pair[1].configure(pair[0])
        _end(pair, [workers(pair[0], 1.0), workers(pair[1], 2.0)])
    finally:
        for server in pair:
            server.kill()


def test_what_is_wrong_at_the_start_is_told_in_one_line(tmp_path: Path, authority: Authority) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = Server(tmp_path / "a", authority, "a", ("a",), exchange_listen=f"127.0.0.1:{port}")
        server.launch()
        assert server.process is not None
        assert server.process.wait(20) == 6
    told, hint = server.log.read_text().splitlines()[-2:]
    assert told == f"error[PORT_IN_USE]: cannot listen on 127.0.0.1:{port}"
    assert hint == "hint: stop what listens there, or choose another address"


def test_two_servers_never_share_a_state(servers: Servers, tmp_path: Path, authority: Authority) -> None:
    (first,) = servers("east")
    second = Server(tmp_path / "again", authority, "east", ("east",), state_dir=first.settings["state_dir"])
    second.launch()
    assert second.process is not None
    assert second.process.wait(20) == 8
    assert "error[ILLEGAL_STATE]" in second.log.read_text()
    assert first.stop() == 0


def test_a_model_that_is_not_finite_ends_the_partition_with_its_reason(servers: Servers, workers: Workers) -> None:
    (server,) = servers("east", rounds=1)
    worker = workers(server, float("inf"))
    assert server.process is not None
    assert server.process.wait(20) == 1
    assert "error[TASK_FAILED]: w is not finite after round 1" in server.log.read_text()
    worker.stop.set()
