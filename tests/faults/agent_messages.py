"""Messages that no honest region's agent sends, each drawn by a seed, to a control plane's agent port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import grpc
import grpc.aio
from support.damage import damaged_by

from geofed_pb.v1 import agent_pb2, common_pb2
from tests.control_plane.fake_agent import Identity, catalogue, digest_of

__all__ = ["send_as_agent"]

_ODD = (0, 1, 2, 1 << 31, 1 << 53, (1 << 64) - 1)
_ODD_FLOATS = (0.0, -1.0, 1e308, float("inf"), float("nan"))
_ODD_TEXT = ("", "x" * 100_000, "caf\0", "<b>", "../../etc", "\u202e" * 9)
_STATES = (
    "", "accepted", "ready", "training", "finished", "published", "failed", "refused", "stopped", "paused", "nonsense",
)  # fmt: skip
_CALL_SECONDS = 3.0


async def send_as_agent(draw: random.Random, identity: Identity, job: str, *, member: bool) -> str:
    """Send one message, and return what it was. ``member``: its region takes part in the job, and may end it."""
    place = draw.choice((_session, _session, _session, _blob, _renew, _bytes))
    with contextlib.suppress(grpc.RpcError, asyncio.TimeoutError):
        async with identity.open() as line, asyncio.timeout(2 * _CALL_SECONDS):
            await place(draw, line, identity, job, member)
    return place.__name__.strip("_")


def _report(draw: random.Random, job: str) -> Any:
    number, odd = draw.choice(_ODD), draw.choice(_ODD_FLOATS)
    code = draw.choice(("TASK_FAILED", "INTERNAL", "NONSENSE", ""))
    error = common_pb2.Error(code=code, message=draw.choice(_ODD_TEXT))
    report = agent_pb2.PartitionReport(
        job=draw.choice((job, job, job, "none", "", "../x")), epoch=draw.choice((1, 1, *_ODD)),
        state=draw.choice(_STATES), condition=draw.choice(_ODD_TEXT), ps_address=draw.choice(("", "h:1", ":", "[")),
        round=number, step=number, samples=number, loss=odd, model_digest=draw.choice(_ODD_TEXT),
        blob_digest=draw.choice(("", "sha256:x", digest_of(b"none"))), workers=draw.choice(_ODD[:4]), meter=number,
    )  # fmt: skip
    if draw.random() < 0.5:
        report.error.CopyFrom(error)
    if draw.random() < 0.5:
        report.totals.money.add(item=draw.choice(_ODD_TEXT), quantity=odd, unit="GB", usd=odd, source="x")
        report.totals.sent_bytes[draw.choice(("a", "b", "pluto", ""))] = number
        report.evaluation.metrics[draw.choice(("accuracy", *_ODD_TEXT))] = odd
        report.speed.samples_per_second = odd
        report.logged.round = number
        report.logged.values[draw.choice(("norm", *_ODD_TEXT))] = odd
        report.usage.cpu_cores, report.usage.memory_bytes = odd, number
    return report


def _message(draw: random.Random, job: str) -> agent_pb2.FromAgent:
    named = draw.choice((job, job, "none", ""))
    record = agent_pb2.LogRecord(job=named, at=draw.choice(_ODD_FLOATS), source=draw.choice(_ODD_TEXT), text="x")
    happening = agent_pb2.Happening(
        job=named, at=draw.choice(_ODD_FLOATS), kind=draw.choice(("region.note", "job.succeeded", "")),
        text=draw.choice(_ODD_TEXT), data_json=draw.choice(("", "{", "[" * 5000, "NaN", '{"a": 1e999}')),
    )  # fmt: skip
    return draw.choice((
        agent_pb2.FromAgent(partition=_report(draw, job)), agent_pb2.FromAgent(partition=_report(draw, job)),
        agent_pb2.FromAgent(happening=happening), agent_pb2.FromAgent(logs=agent_pb2.LogBatch(records=[record] * 3)),
        agent_pb2.FromAgent(profile=agent_pb2.ProfileReport(id=named)),
        agent_pb2.FromAgent(capacity=agent_pb2.CapacityNews(preemptible=draw.choice(_ODD[:4]))),
        agent_pb2.FromAgent(heartbeat=agent_pb2.Heartbeat(at=draw.choice(_ODD_FLOATS))),
        agent_pb2.FromAgent(command_ack=agent_pb2.CommandAck(seq=draw.choice(_ODD))),
        agent_pb2.FromAgent(hello=agent_pb2.Hello(boot_id="x")), agent_pb2.FromAgent(),
    ))  # fmt: skip


async def _session(draw: random.Random, line: grpc.aio.Channel, identity: Identity, job: str, member: bool) -> None:
    """A session of its own, which ends another one of its region, and a message in it."""
    told = json.dumps(asdict(catalogue(identity.region)))
    odd = (told, told, "", "{}", "null", "[" * 9000, told.replace("100", "1e999"), told.replace("digits", "x" * 5000))
    hello = agent_pb2.Hello(
        agent_version=draw.choice(("test", *_ODD_TEXT)), boot_id="hostile", catalogue_json=draw.choice(odd),
        # A region of the job that passes over its own commands or reports has chosen to be silent.
        command_cursor=0 if member else draw.choice(_ODD), report_cursor=0 if member else draw.choice(_ODD),
    )  # fmt: skip
    message = _message(draw, job)
    message.seq = 0 if member else draw.choice(_ODD)
    if member and message.HasField("command_ack"):
        message.command_ack.seq = 0
    frames = [agent_pb2.FromAgent(hello=hello), message]
    if draw.random() < 0.1:
        frames.reverse()
    data = [frame.SerializeToString() for frame in frames]
    if draw.random() < 0.3 and not member:
        data[1] = next(iter(damaged_by(draw, data[1], 1)))

    async def outgoing() -> AsyncIterator[bytes]:
        for each in data:
            yield each
        await asyncio.sleep(_CALL_SECONDS)

    ask = line.stream_stream("/geofed.v1.AgentHub/Session", request_serializer=bytes, response_deserializer=bytes)
    answers = ask(outgoing(), timeout=_CALL_SECONDS)
    for _ in range(3):
        async with asyncio.timeout(0.3):
            await answers.read()


async def _blob(draw: random.Random, line: grpc.aio.Channel, identity: Identity, job: str, member: bool) -> None:
    """An upload, whole or not, or a question about what it has not made."""
    content = draw.randbytes(100)
    digest = draw.choice((digest_of(content), digest_of(b"x"), "sha256:../../x", ""))
    chunk = common_pb2.BlobChunk(
        digest=digest, total_bytes=draw.choice((100, 99, *_ODD)), offset=draw.choice((0, *_ODD)), data=content
    )
    kind, method, data = draw.choice((
        ("stream_unary", "PutBlob", chunk), ("unary_unary", "StatBlob", common_pb2.BlobRequest(digest=digest)),
        ("unary_stream", "FetchBlob", common_pb2.BlobRequest(digest=digest, offset=draw.choice(_ODD))),
    ))  # fmt: skip
    await _call(line, kind, method, [data.SerializeToString()] * draw.randint(1, 2))


async def _renew(draw: random.Random, line: grpc.aio.Channel, identity: Identity, job: str, member: bool) -> None:
    """A request for a certificate that is none."""
    csr = draw.choice((b"", b"-----BEGIN CERTIFICATE REQUEST-----\n", draw.randbytes(500), identity.certificate_pem))
    await _call(line, "unary_unary", "Renew", [agent_pb2.RenewRequest(csr_pem=csr).SerializeToString()])


async def _bytes(draw: random.Random, line: grpc.aio.Channel, identity: Identity, job: str, member: bool) -> None:
    """Bytes that may be no message, to any method."""
    kind, method = draw.choice((
        ("stream_stream", "Session"), ("unary_stream", "FetchBlob"), ("unary_unary", "StatBlob"),
        ("stream_unary", "PutBlob"), ("unary_unary", "Renew"), ("unary_unary", "Nothing"),
    ))  # fmt: skip
    await _call(line, kind, method, [draw.choice((b"", b"\xff" * 99, draw.randbytes(64), bytes(9 << 20)))])


async def _call(line: grpc.aio.Channel, kind: str, method: str, messages: list[bytes]) -> None:
    asks, answers = kind.split("_")
    ask = getattr(line, kind)(f"/geofed.v1.AgentHub/{method}", request_serializer=bytes, response_deserializer=bytes)

    async def outgoing() -> AsyncIterator[bytes]:
        for each in messages:
            yield each

    call = ask(outgoing() if asks == "stream" else messages[0], timeout=_CALL_SECONDS)
    if answers == "stream":
        await call.read()
    else:
        await call
