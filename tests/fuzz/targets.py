"""The parsers that read what a peer, a user or a file tells, each with valid inputs to start from."""

from __future__ import annotations

import atexit
import base64
import contextlib
import gzip
import io
import json
import shutil
import struct
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError, Message

from control_plane._safetensors import facts_of, flat_bytes
from control_plane.pki import Authority, InvitationToken
from control_plane.service.rpc._wire import report_of
from control_plane.service.state._catalogue import read_catalogue
from control_plane.spec import load
from control_plane.spec._load import parse_request
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from region_agent.config import load_config
from region_agent.link.identity import read_invitation
from region_agent.shards.listing import ListedFile, ShardManifest, read_list
from region_agent.worker.invocation import Invocation, ShardFile, read_invocation
from region_agent.worker.task import unpack
from sync.codec import codec_by_mark, codec_named, codecs
from sync.framing import decode, digest_of, encode
from sync.layout import Layout
from sync.tcp_streams import wire
from tests.control_plane.conftest import JOB, TASK
from tests.control_plane.fake_agent import catalogue
from tests.region_agent.test_config import WHOLE

__all__ = ["ALL", "ODD", "TARGETS", "Target", "parse"]

_ELEMENTS = 4096
"""Coordinates of the models whose updates are decoded."""
_LONGEST_YAML = 2048
"""Bytes; the parser takes milliseconds for a page. Only users' own files are YAML."""
ODD: tuple[bytes, ...] = (
    b"", b"\0", b"null", b"NaN", b"1e999", b"9" * 5_000, b"%" * 5_000, b'"\\ud800"', b"\xff\xfe",
    b"[" * 50_000, b'{"a":' * 10_000, b'{"slots":' + b"[" * 30_000, base64.b64encode(b"[" * 9_000),
    struct.pack("<Q", 9_000) + b"[" * 9_000, b'{"__metadata__":{"flat_elements":"1e9"}}',
)  # fmt: skip
"""Inputs that a fuzzer rarely finds."""


@dataclass(frozen=True)
class Target:
    """A parser: bytes in, a value or a ``GeofedError`` out."""

    parse: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    memory_mb: int = 64
    """Memory that one input may take, beyond what the process has before the first."""
    longest: int = 1 << 16
    """Bytes of an input; a limit keeps 1,000,000 inputs within hours."""


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


@cache
def _folder() -> Path:
    """One for all inputs, since to make one takes longer than to parse most."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _from_file(read: Callable[[Path], object], data: bytes) -> None:
    (path := _folder() / "file").write_bytes(data)
    read(path)


def _bundle(data: bytes) -> None:
    """Gzip has a checksum, which no change would survive: what is changed is within it."""
    unpacked = unpack(gzip.compress(data[1:], 1) if data[:1] == b"\0" else data[1:], _folder())
    shutil.rmtree(unpacked)


def _report(data: bytes) -> None:
    message: Message = agent_pb2.FromAgent()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return
    report_of(message.partition)  # type: ignore[attr-defined]


def _update(data: bytes) -> None:
    """A frame, and then its values in the codec that it names."""
    mark, frame = data[:1], decode(data[1:], max_elements=_ELEMENTS)
    codec_by_mark(mark[0] if mark else 0, trained=_ELEMENTS // 2).decode(frame.tensors, _ELEMENTS)


def _updates() -> tuple[bytes, ...]:
    vector = np.linspace(-1.0, 1.0, _ELEMENTS, dtype=np.float32)
    named = [codec_named(name) for name in codecs()]
    return tuple(bytes([codec.mark]) + b"".join(encode(codec.encode(vector))) for codec in named)


def _archive(name: str) -> bytes:
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            member = tarfile.TarInfo(name)
            member.size = len(TASK)
            archive.addfile(member, io.BytesIO(TASK.encode()))
        return file.getvalue()


def _archives() -> tuple[bytes, ...]:
    plain = tuple(b"\0" + _archive(name) for name in ("task.py", "a/b.py"))
    return (*plain, b"\1" + gzip.compress(_archive("task.py")))


def _job_request() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "job.yaml")).write_text(JOB)
        return load(path).json.encode()


def _invitation() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.open(Path(folder), "geofed", datetime.now(UTC))
        return str(InvitationToken("host:7443", authority.ca_pem, "a", "secret")).encode()


def _model(data: bytes) -> None:
    """A header's length is right unless the first byte tells otherwise, or hardly any change would reach the header."""
    whole = data[1:] if data[:1] == b"\1" else struct.pack("<Q", len(data)) + data
    for read in (flat_bytes, facts_of):
        _from_file(read, whole)


def _models() -> tuple[bytes, ...]:
    tensors = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    headers = ({**tensors, "__metadata__": {"flat_elements": "6"}}, {**tensors, "__metadata__": {}}, tensors)
    plain = tuple(json.dumps(header).encode() for header in headers)
    return (*plain, b"\1" + struct.pack("<Q", len(plain[0])) + plain[0] + bytes(24))


def _head(data: bytes) -> None:
    wire.parse(data[: wire.HEAD_BYTES].ljust(wire.HEAD_BYTES, b"\0"))


_CATALOGUE = json.dumps(asdict(catalogue("a"))).encode()
_LAYOUT = b'{"slots":[{"name":"w","shape":[2,3],"dtype":"float32"}],"trainable":1,"aliases":[["v","w"]]}'
_REPORT = agent_pb2.FromAgent(
    partition=agent_pb2.PartitionReport(job="j", state="training", evaluation={"metrics": {"accuracy": 0.5}})
)
_SHARD_LIST = ShardManifest(
    dataset="digits", files=(ListedFile(split="train", name="a/b", folder=True, size=1, digest=digest_of([b"x"])),)
)
_INVOCATION = Invocation(
    job="j", region="a", worker=0, workers=2, attempt=1, token="t", ps_address="h:1", ps_name="a", ca_pem="",
    channel="redis", channel_address="h:2", bundle_key="b", module="task.py", config={"width": 8},
    splits={"train": (ShardFile(name="a", path="/a", size=3),)}, region_batch=10, steps_per_round=2, rounds=2, seed=1,
    slice_seconds=60.0, stages=((0, 1), (2, 3)),
)  # fmt: skip

ALL = "all"
TARGETS = {
    "job-file": Target(partial(_from_file, load), (JOB.encode(),), longest=_LONGEST_YAML),
    "region-file": Target(partial(_from_file, load_config), (WHOLE.encode(),), longest=_LONGEST_YAML),
    "job-request": Target(lambda data: parse_request(_text(data)), (_job_request(),)),
    "catalogue": Target(lambda data: read_catalogue("a", _text(data)), (_CATALOGUE,)),
    "report": Target(_report, (_REPORT.SerializeToString(),)),
    "bundle": Target(_bundle, _archives()),
    "invitation": Target(lambda data: InvitationToken.parse(_text(data)), (_invitation(),)),
    "invitation-joined": Target(lambda data: read_invitation(_text(data)), (_invitation(),)),
    "update": Target(_update, _updates()),
    "layout": Target(lambda data: Layout.from_json(_text(data)), (_LAYOUT,)),
    "bulk-frame": Target(_head, (wire.frame(wire.FrameKind.OFFER, 1, b"x"),)),
    "model-file": Target(_model, _models(), longest=1 << 12),
    "shard-list": Target(read_list, (_SHARD_LIST.to_bytes(),)),
    "invocation": Target(read_invocation, (_INVOCATION.model_dump_json().encode(),)),
}


def parse(name: str, data: bytes) -> None:
    """Parse an input; raises what is not a ``GeofedError``. With ``ALL`` its first byte chooses the parser."""
    if name == ALL:
        names = tuple(TARGETS)
        name, data = names[(data[:1] or b"\0")[0] % len(names)], data[1:]
    with contextlib.suppress(GeofedError):
        TARGETS[name].parse(data)
