"""Messages that no honest region sends, each drawn by a seed, to any port of a parameter server."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from dataclasses import dataclass
from typing import Any

import grpc
from support.damage import damaged_by
from support.hostile_peer import HostilePeer
from support.pki import Authority
from support.server_process import JOB, LAYOUT, Server

from deploy.local import LOOPBACK
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import channel_options, region_name, with_token
from geofed_pb.v1 import sync_pb2, worker_pb2
from sync.file_transfer.signing import sign
from sync.tcp_streams.sockets import dial
from sync.tcp_streams.stream import hello
from sync.tcp_streams.wire import FrameHead, FrameKind, frame

__all__ = ["MEMBER", "SENDERS", "Sender", "send", "senders"]

MEMBER = "mars"
"""The region of the job that sends them, beside doing its part; or in whose name they are sent."""
SENDERS = ("member", "region of another job", "stranger", "nobody")
_ODD = (0, 1, 2, 3, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 64) - 1)
_ODD_FLOATS = (0.0, -1.0, 1e-300, 1e30, 1e308, float("inf"), float("nan"))
_CALL_SECONDS = 5.0


@dataclass(frozen=True)
class Sender:
    """Who sends: its identity is real for the federation, unless it is a stranger's."""

    peer: HostilePeer
    encrypts: bool = True


def senders(authority: Authority) -> dict[str, Sender]:
    """One of each kind."""
    return {
        "member": Sender(HostilePeer(MEMBER, authority.region(MEMBER))),
        "region of another job": Sender(HostilePeer("venus", authority.region("venus"))),
        "stranger": Sender(HostilePeer(MEMBER, Authority("another federation").region(MEMBER))),
        "nobody": Sender(HostilePeer(MEMBER, authority.region(MEMBER)), encrypts=False),
    }


def send(draw: random.Random, sender: Sender, target: Server, rounds: int) -> str:
    """Send one message, and return what it was. What is answered does not matter: what must follow is that the job
    ends as it must."""
    place = draw.choice((_manifest, _manifest, _exchange, _agent, _bulk, _worker))
    with contextlib.suppress(grpc.RpcError, OSError, GeofedError):
        place(draw, sender, target, rounds)
    return place.__name__.strip("_")


# What is sent


def _any_manifest(draw: random.Random, sender: Sender, rounds: int) -> tuple[Any, bytes]:
    """An update of this round or another, of which one thing is odd or none, signed by its sender."""
    data = sender.peer.update(draw.choice((0.0, 1.0, 1e3)))
    data = draw.choice((data, data, data[:-1], b"", bytes(LAYOUT.size * 4), draw.randbytes(300)))
    changed: dict[str, Any] = draw.choice((
        {}, {"weight": draw.choice(_ODD_FLOATS)}, {"round_seconds": draw.choice(_ODD_FLOATS)},
        {"total_bytes": draw.choice(_ODD)}, {"stretch": draw.choice(_ODD[:6])}, {"ends": draw.choice(_ODD)},
        {"epoch": draw.choice(_ODD)}, {"sequence": draw.choice(_ODD)}, {"first": draw.choice(_ODD)},
        {"settled": draw.choice(_ODD)}, {"last": True}, {"takes_sums": True}, {"job": draw.choice(("", "job-0"))},
        {"seen": {draw.choice(("east", "mars", "pluto", "")): draw.choice(_ODD)}},
        {"digest": draw.choice(("", "sha256:", "sha256:../../x", "md5:" + "0" * 32, "sha256:" + "0" * 64))},
        {"region": draw.choice(("east", "west", "pluto", "", "../west"))},
    ))  # fmt: skip
    fields: dict[str, Any] = {"sequence": draw.randint(0, rounds + 1)} | changed
    proto = sender.peer.manifest(data, **fields)
    if draw.random() < 0.2:
        proto.merged.append(sender.peer.manifest(data, draw.randint(0, rounds), region="east"))
        sign(proto, sender.peer.identity)
    if draw.random() < 0.2:
        proto.ClearField(draw.choice(("signature", "certificate_pem")))
    return proto, data


def _odd_bytes(draw: random.Random, whole: bytes) -> bytes:
    """A message as it is, damaged, or another one."""
    chance = draw.random()
    if chance < 0.3:
        return whole
    if chance < 0.8:
        return next(iter(damaged_by(draw, whole, 1)))
    return draw.choice((b"", b"\0" * 70, b"\xff" * 5000, draw.randbytes(64), bytes(9 << 20)))


# Where it is sent to


def _line(sender: Sender, target: Server, port: str) -> grpc.Channel:
    address = f"{LOOPBACK}:{target.ports[port]}"
    if not sender.encrypts:
        return grpc.insecure_channel(address)
    tls = sender.peer.identity
    credentials = (
        grpc.ssl_channel_credentials(tls.ca_pem, tls.key_pem, tls.certificate_pem)
        if port == "exchange"
        else grpc.ssl_channel_credentials(tls.ca_pem)
    )
    options = [*channel_options(), ("grpc.ssl_target_name_override", region_name(target.region))]
    return grpc.secure_channel(address, credentials, options=options)


def _call(line: grpc.Channel, method: str, kind: str, messages: list[bytes], **more: Any) -> None:
    """Call a method with bytes, whatever they are, and take what is answered."""
    asks, answers = kind.split("_")
    ask = getattr(line, kind)(f"/geofed.v1.{method}", request_serializer=bytes, response_deserializer=bytes)
    answer = ask(iter(messages) if asks == "stream" else messages[0], timeout=_CALL_SECONDS, **more)
    if answers == "stream":
        for _ in zip(answer, range(3), strict=False):
            pass
        answer.cancel()


def _manifest(draw: random.Random, sender: Sender, target: Server, rounds: int) -> None:
    """An exchange manifest, with its update or without."""
    proto, data = _any_manifest(draw, sender, rounds)
    with _line(sender, target, "exchange") as line:
        if draw.random() < 0.5:
            _call(line, "Exchange/Offer", "unary_unary", [proto.SerializeToString()])
            return
        offset = draw.choice((0, 0, 0, 0, *_ODD))
        first = sync_pb2.UpdateChunk(manifest=proto, offset=offset, data=data)
        more = sync_pb2.UpdateChunk(offset=draw.choice(_ODD), data=data)
        chunks = draw.choice(([first], [first], [first, more], [more], [first, first]))
        _call(line, "Exchange/Send", "stream_unary", [chunk.SerializeToString() for chunk in chunks])


def _exchange(draw: random.Random, sender: Sender, target: Server, rounds: int) -> None:
    """A call of a peer: any of them, with a message that it takes or with bytes that it cannot."""
    proto, data = _any_manifest(draw, sender, rounds)
    job, region = draw.choice((JOB, JOB, "job-0", "")), draw.choice(("east", MEMBER, "west", "pluto", ""))
    fetch = sync_pb2.FetchRequest(job=job, checkpoint=draw.random() < 0.5, region=region, sequence=draw.choice(_ODD))
    method, kind, message = draw.choice((
        ("Offer", "unary_unary", proto), ("Send", "stream_unary", sync_pb2.UpdateChunk(manifest=proto, data=data)),
        ("Rejoin", "unary_unary", sync_pb2.RejoinRequest(job=job)), ("Fetch", "unary_stream", fetch),
        ("Collect", "unary_stream", sync_pb2.CollectRequest(job=job)), ("Nothing", "unary_unary", proto),
    ))  # fmt: skip
    with _line(sender, target, "exchange") as line:
        _call(line, f"Exchange/{method}", kind, [_odd_bytes(draw, message.SerializeToString())])


def _agent(draw: random.Random, sender: Sender, target: Server, rounds: int) -> None:
    """A call that only the region's own agent may make."""
    peer = sync_pb2.PsPeer(region="west", address=f"{LOOPBACK}:1", epoch=9, unsigned=True)
    config = draw.choice((
        sync_pb2.PsConfig(epoch=1, stop=True), sync_pb2.PsConfig(epoch=1, finish=True),
        sync_pb2.PsConfig(epoch=9, attempt=9), sync_pb2.PsConfig(epoch=1, peers=[peer]),
    ))  # fmt: skip
    method, kind, message = draw.choice((
        ("Configure", "unary_unary", config), ("Configure", "unary_unary", config),
        ("Watch", "unary_stream", sync_pb2.PsWatchRequest()), ("GetModel", "unary_stream", sync_pb2.PsModelRequest()),
    ))  # fmt: skip
    with _line(sender, target, "exchange") as line:
        _call(line, f"PsAdmin/{method}", kind, [_odd_bytes(draw, message.SerializeToString())])


def _worker(draw: random.Random, sender: Sender, target: Server, rounds: int) -> None:
    """A call of a worker, whose token is no worker's of this partition."""
    number = draw.randint(0, rounds)
    method, message = draw.choice((
        ("Attach", worker_pb2.AttachRequest(layout_json=LAYOUT.to_json(), initial_key="../x")),
        ("Reduce", worker_pb2.ReduceRequest(step=number, key="g/1/1/0", samples=1e30)),
        ("Boundary", worker_pb2.BoundaryRequest(round=number, step=number, samples=float("nan"), digest="x")),
        ("Evaluated", worker_pb2.EvaluatedRequest(round=number, metrics={"accuracy": float("nan")})),
        ("Stepped", worker_pb2.SteppedRequest(step=number, loss=float("inf"))),
    ))  # fmt: skip
    other: dict[str, Any] = draw.choice(({"region": MEMBER}, {"job": "job-0"}, {"worker": 7}, {"key": "another " * 5}))
    token = draw.choice((target.token(**other), "", "a.b.c", "x" * 5000))
    with _line(sender, target, "worker") as line:
        message_bytes = _odd_bytes(draw, message.SerializeToString())
        _call(line, f"WorkerPort/{method}", "unary_unary", [message_bytes], metadata=with_token(token))


def _bulk(draw: random.Random, sender: Sender, target: Server, rounds: int) -> None:
    """Frames of a stream: in order or not, of the right form or not, whole or not."""
    port = (LOOPBACK, target.ports["bulk"])
    proto, data = _any_manifest(draw, sender, rounds)
    offer = frame(FrameKind.OFFER, 1, sync_pb2.BulkOffer(manifest=proto).SerializeToString())
    chunk = FrameHead(FrameKind.CHUNK, 1, len(data), draw.choice((0, *_ODD)), draw.choice((0, 1))).pack() + data
    greeting = hello(draw.choice((JOB, JOB, "job-0")), collects=draw.random() < 0.3, ticket=draw.randbytes(16))
    frames = [greeting, *draw.choices((offer, chunk, frame(FrameKind.FAULT, 0, b"\xff"), greeting), k=3)]
    stream = b"".join(draw.sample(frames, draw.randint(1, len(frames))) if draw.random() < 0.3 else frames)
    if draw.random() < 0.5:
        stream = next(iter(damaged_by(draw, stream, 1)))
    if not sender.encrypts:
        with socket.create_connection(port, _CALL_SECONDS) as plain:
            plain.sendall(draw.choice((stream, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(99))))
            if draw.random() < 0.5:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return
    with dial(port, target.region, sender.peer.identity, _CALL_SECONDS) as line:
        line.settimeout(1.0)
        line.sendall(stream)
        with contextlib.suppress(OSError):
            while line.recv(1 << 16):
                pass
