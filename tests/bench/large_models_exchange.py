"""The exchange of a large model between three regions' parameter servers, for `large_models.py`.

Each server is a process of its own, on loopback, with TLS as in a job. What calls it is not a worker but a thread here,
which puts a model into the channel, so that no training runs beside the exchange. A round lasts from the moment when
all three have called until all have the answer.

The floor is the work that no exchange can do without, by the same number of processes on the same machine: send the
update to both peers over TLS, take the SHA-256 of the own update and of both received ones, add all three to a model,
and write as many bytes to the disk, flushed, as one update has.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
import ssl
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from report import Bar, Report

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.pki import Authority
from support.server_process import LOOPBACK, Server

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import channel_options, region_name, with_token
from geofed_pb.v1 import worker_pb2, worker_pb2_grpc
from sync import framing
from sync.channel_clients import FileChannel
from sync.layout import Layout, Slot, Vector
from sync.tcp_streams.sockets import Tls, accept_tls, dial

__all__ = ["measure_exchange"]

_REGIONS = ("ams", "fra", "lon")
_ELEMENTS = 124_440_000
"""Of GPT-2 with 124 million parameters: 498 MB in float32."""
_QUICK_ELEMENTS = 8_000_000
_SECONDS = {"fp32": 8.0, "int8": 5.0}
"""Bars: most seconds of a round, by codec."""
_SIZE = {"fp32": 4.0, "int8": 1.004}
"""Bytes of an update by coordinate."""
_FLOOR_FACTOR = 1.5
"""Aim: most seconds of a round as a multiple of the floor."""
_MEMORY_FACTOR, _MEMORY_BYTES = 3, 256e6
"""Bar of a server's peak memory: this multiple of the trained bytes, plus these."""
_PIECE_BYTES = 256 << 10
_BLOCK = 1 << 16
_TICKS = os.sysconf("SC_CLK_TCK")


def measure_exchange(report: Report, *, quick: bool) -> None:
    """Measure rounds in each codec; the floor, and the bars of time, hold for the full size alone."""
    elements, rounds = (_QUICK_ELEMENTS, 2) if quick else (_ELEMENTS, 4)
    for codec in _SECONDS:
        layout = Layout((Slot("w", (elements,), "float32"),), 1)
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            found = _Exchange(Path(folder), Path(memory), layout, codec, rounds).run()
        _judge(report, codec, elements, found, None if quick else _floor(elements, int(elements * _SIZE[codec])))


def _judge(
    report: Report, codec: str, elements: int, found: list[dict[str, Any]], floor: dict[str, float] | None
) -> None:
    for run in found:
        report.runs.append({"what": "exchange", "codec": codec, "elements": elements, "floor": floor, **run})
        cpu = ", ".join(f"{run['cpu_seconds'][region]:.2f}" for region in _REGIONS)
        peak = max(run["peak_bytes"].values()) / 1e6
        print(f"exchange {codec:<5} {4e-6 * elements:.0f} MB: {run['seconds']:6.2f} s, CPU {cpu} s, peak {peak:.0f} MB")
    # The first round allocates every buffer.
    seconds = min(run["seconds"] for run in found[1:])
    peak = max(max(run["peak_bytes"].values()) for run in found)
    bound = _MEMORY_FACTOR * 4 * elements + _MEMORY_BYTES
    report.bars.append(Bar.at_most(f"peak memory of a server, {codec}", peak / 1e6, "MB", bound / 1e6))
    if floor is not None:
        print(f"floor    {codec:<5} {floor['seconds']:.2f} s, CPU {floor['cpu_seconds']:.2f} s by region")
        report.bars.append(Bar.at_most(f"exchange of 498 MB, {codec}", seconds, "s a round", _SECONDS[codec]))
        ratio = seconds / floor["seconds"]
        report.bars.append(Bar.at_most(f"aim: exchange of 498 MB, {codec}", ratio, "x floor", _FLOOR_FACTOR))


class _Exchange:
    """Three servers, and one caller each."""

    def __init__(self, folder: Path, memory: Path, layout: Layout, codec: str, rounds: int) -> None:
        authority, self._layout, self._rounds = Authority(), layout, rounds
        options: dict[str, Any] = {"codec": codec, "rounds": rounds + 1, "stall_seconds": 60.0}
        self._servers = [
            Server(folder / region, authority, region, _REGIONS, channel_address=str(memory / region), **options)
            for region in _REGIONS
        ]
        self._callers = [_Caller(server, Path(memory / server.region), layout) for server in self._servers]
        draws = np.random.default_rng(1)
        self._change = np.resize(draws.normal(size=1 << 20).astype(np.float32) * 1e-3, layout.size)

    def run(self) -> list[dict[str, Any]]:
        try:
            for server in self._servers:
                server.launch()
            for server in self._servers:
                server.await_ready()
            for server in self._servers:
                server.configure(*(other for other in self._servers if other is not server))
            with ThreadPoolExecutor(len(self._callers)) as pool:
                list(pool.map(_Caller.attach, self._callers))
                return [self._round(pool, number) for number in range(1, self._rounds + 1)]
        finally:
            for server in self._servers:
                if server.process is not None:
                    server.kill()

    def _round(self, pool: ThreadPoolExecutor, number: int) -> dict[str, Any]:
        for place, caller in enumerate(self._callers):
            caller.put(number, self._change, place + 1.0)
        before = {server.region: _cpu_seconds(_pid(server)) for server in self._servers}
        begun = time.monotonic()
        list(pool.map(lambda caller: caller.end(number), self._callers))
        seconds = time.monotonic() - begun
        after = {server.region: _cpu_seconds(_pid(server)) for server in self._servers}
        return {
            "round": number,
            "seconds": seconds,
            "cpu_seconds": {region: after[region] - before[region] for region in _REGIONS},
            "peak_bytes": {server.region: _peak_bytes(_pid(server)) for server in self._servers},
            "load": os.getloadavg()[0],
        }


class _Caller:
    """Does what the one worker of a region does between its steps."""

    def __init__(self, server: Server, channel: Path, layout: Layout) -> None:
        self._server, self._channel, self._layout = server, FileChannel(channel), layout
        self._model_key = ""

    def attach(self) -> None:
        key = "init/1/0"
        self._channel.put(key, framing.encode({"model": np.zeros(self._layout.size, np.float32)}))
        reply = self._call("Attach", worker_pb2.AttachRequest(layout_json=self._layout.to_json(), initial_key=key))
        self._channel.delete(key)
        self._model_key = reply.model_key

    def put(self, number: int, change: Vector, factor: float) -> None:
        value = self._channel.get(self._model_key)
        assert value is not None, self._model_key
        end = change * np.float32(factor)
        end += np.asarray(framing.decode(value).tensors["model"], np.float32)
        self._channel.put(_key(number), framing.encode({"model": end}))

    def end(self, number: int) -> None:
        request = worker_pb2.BoundaryRequest(
            round=number, step=number, digest="alone", model_key=_key(number), samples=10.0, loss=1.0
        )
        self._model_key = self._call("Boundary", request).model_key
        self._channel.delete(_key(number - 1))

    def _call(self, method: str, request: Any) -> Any:
        server = self._server
        options = [*channel_options(), ("grpc.ssl_target_name_override", region_name(server.region))]
        credentials = grpc.ssl_channel_credentials(server.identity.ca_pem)
        with grpc.secure_channel(f"{LOOPBACK}:{server.ports['worker']}", credentials, options=options) as line:
            stub: Any = worker_pb2_grpc.WorkerPortStub(line)
            while True:
                reply = getattr(stub, method)(request, metadata=with_token(server.token()), timeout=60)
                if not reply.pending:
                    return reply
                if server.status().phase == "failed":
                    raise GeofedError("INTERNAL", server.log.read_text()[-2000:])


def _key(number: int) -> str:
    return f"b/1/{number}/model"


def _pid(server: Server) -> int:
    assert server.process is not None
    return server.process.pid


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _peak_bytes(pid: int) -> int:
    """Most memory so far, mapped files and shared memory included."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


# The floor


@dataclass(frozen=True)
class _Place:
    """One process of the floor."""

    number: int
    elements: int
    sent_bytes: int
    """Bytes of an update."""
    folder: str
    identities: tuple[Tls, ...]
    ports: tuple[int, ...]


def _floor(elements: int, sent_bytes: int) -> dict[str, float]:
    """Seconds of the work that no exchange can do without, and the mean CPU seconds of a process."""
    context, authority = multiprocessing.get_context("spawn"), Authority()
    barrier, results = context.Barrier(len(_REGIONS)), context.SimpleQueue()
    identities = tuple(authority.region(region) for region in _REGIONS)
    with tempfile.TemporaryDirectory() as folder:
        listeners = [socket.create_server((LOOPBACK, 0)) for _ in _REGIONS]
        ports = tuple(listener.getsockname()[1] for listener in listeners)
        for listener in listeners:
            listener.close()
        places = [_Place(n, elements, sent_bytes, folder, identities, ports) for n in range(len(_REGIONS))]
        processes = [context.Process(target=_floor_of, args=(place, barrier, results)) for place in places]
        for process in processes:
            process.start()
        found = [results.get() for _ in processes]
        for process in processes:
            process.join()
    return {"seconds": max(wall for wall, _ in found), "cpu_seconds": sum(cpu for _, cpu in found) / len(found)}


def _floor_of(place: _Place, barrier: Barrier, results: Any) -> None:
    identity, others = place.identities[place.number], [n for n in range(len(_REGIONS)) if n != place.number]
    values = np.random.default_rng(place.number).normal(size=1 << 20).astype(np.float32)
    own = np.resize(values, place.elements)
    model, received = np.zeros_like(own), [np.zeros_like(own) for _ in others]
    with socket.create_server((LOOPBACK, place.ports[place.number])) as listener, ThreadPoolExecutor(8) as pool:
        barrier.wait()
        accepted = [pool.submit(lambda: accept_tls(listener.accept()[0], identity, 10.0)) for _ in others]
        lines = [dial((LOOPBACK, place.ports[n]), _REGIONS[n], identity, 10.0) for n in others]
        taken = [future.result() for future in accepted]
        for line in (*lines, *taken):
            line.settimeout(None)
        barrier.wait()
        begun, cpu = time.monotonic(), time.process_time()
        size = place.sent_bytes
        work = [pool.submit(line.sendall, memoryview(own).cast("B")[:size]) for line in lines]
        pairs = zip(taken, received, strict=True)
        work += [pool.submit(_take, line, memoryview(into).cast("B")[:size]) for line, into in pairs]
        work.append(pool.submit(lambda: hashlib.sha256(memoryview(own).cast("B")[:size]).digest()))
        writing = pool.submit(_write, Path(place.folder, str(place.number)), memoryview(own).cast("B")[:size])
        for done in work:
            done.result()
        _add(model, [own, *received])
        writing.result()
        barrier.wait()
        results.put((time.monotonic() - begun, time.process_time() - cpu))


def _take(line: ssl.SSLSocket, into: memoryview) -> bytes:
    digest, at = hashlib.sha256(), 0
    while at < len(into):
        count = 0
        piece = into[at : at + _PIECE_BYTES]
        while count < len(piece):
            count += line.recv_into(piece[count:])
        digest.update(piece)
        at += count
    return digest.digest()


def _write(path: Path, content: memoryview) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _add(model: Vector, updates: list[Vector]) -> None:
    term = np.empty(_BLOCK, np.float32)
    for at in range(0, model.size, _BLOCK):
        block = model[at : at + _BLOCK]
        for update in updates:
            np.multiply(update[at : at + _BLOCK], np.float32(1 / len(updates)), out=term[: block.size])
            block += term[: block.size]
