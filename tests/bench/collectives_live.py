"""Live merges: a process for each worker, over real channels. `collectives.py` prints and judges them.

- ``s3``: the S3 subset of `collectives_store.py` in a process of its own: PUT 100 ms, GET 20 ms, LIST 30 ms, 100 MB/s a
  worker each way, log-normal jitter of 0.15 on each latency;
- ``redis``: a real redis-server over TCP, behind a relay for each worker: 1 ms, 1 Gbit/s;
- ``file``: files in /dev/shm, as fast as the machine is.

Workers, store and relays share the cores of one machine, while the profiles mean a machine for each. Two things make up
for that, and stand in every row. ``scale``: vector and bandwidth are both smaller by it, so seconds on the link and
requests stay the same. ``slower``: time goes slower by it: latencies and pauses are longer, bandwidth is less, and the
seconds that come out are divided by it; what the cores need weighs less by as much. Neither is used of ``file``, whose
workers do share a machine. What the faithful ones do on top of the roles: they find values
by one list of the bucket per look, and their deletes are not counted as time.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from channel_prices import REQUEST_PRICES, cost_usd
from collectives_store import Shape
from support.stores import redis_server

from sync.channel import Channel, Usage
from sync.channel_clients import _s3, open_channel
from sync.collective import ChannelCosts, Settings
from sync.means import weighted_mean
from sync.merging import MeanCollective, Member, _driver, probe
from sync.merging._driver import SequentialRequests
from sync.merging._exchange import Arrived, Delete, ExchangePart, Fetch, Put, ValuesStored

S3_LATENCY = {"put_seconds": 0.1, "get_seconds": 0.02, "list_seconds": 0.03}
S3_JITTER = 0.15
RATE = {"s3": 1e8, "redis": 1.25e8, "file": 0.0}
PRICES = {"s3": "s3/us-east-1", "redis": "redis", "file": "redis"}
LOOPBACK_WORKERS = 2
"""Of so many workers loopback and two cores bear the full rate."""
SCALED_FROM_BYTES = 2_000_000
_SETTLED_SECONDS = 0.06


@dataclass(frozen=True)
class Contender:
    """One way to merge."""

    label: str
    settings: Settings

    @property
    def combination(self) -> tuple[str, int | None, int, bool, str]:
        one = self.settings
        return one.pattern, one.chunks, one.groups, one.faithful, one.codec


@dataclass(frozen=True)
class Run:
    """One merge of all workers."""

    seconds: float
    """From the moment at which all begin until the last has the merged vector."""
    cpu_seconds: float
    """Of all workers."""
    busy: float
    """Share of the machine's cores that was in use by anybody meanwhile."""


class AsPublished(SequentialRequests):
    """Lists the bucket to find values, and deletes when the merge is over: only until then does it count."""

    def __init__(self, channel: Any, kind: str, settings: Settings, prefix: str) -> None:
        super().__init__(channel, lambda: settings.timeout_seconds, settings.poll_seconds)
        self._kind, self._prefix, self.over = kind, prefix, 0.0

    def run(self, part: ExchangePart[Any], events: Any = None) -> Any:
        deadline = time.monotonic() + self._patience()
        requests, deletes = list(part.start()), list[str]()
        while requests:
            request = requests.pop(0)
            if isinstance(request, Put):
                for key, pieces in request.values.items():
                    self._channel.put(key, pieces)
                    requests += part.handle(ValuesStored((key,)))
            elif isinstance(request, Fetch):
                for key, value in self._polled(request.keys, deadline):
                    requests += part.handle(Arrived(key, value))
            elif isinstance(request, Delete):
                deletes += request.keys
        self.over = time.monotonic()
        for key in deletes:
            self._channel.delete(key)
        return part.result

    def _polled(self, keys: Sequence[str], deadline: float) -> Iterator[tuple[str, memoryview]]:
        missing = list(keys)
        while missing:
            listed = self._listed(missing)
            for key in [key for key in missing if key in listed]:
                value = self._channel.get(key)
                assert value is not None
                missing.remove(key)
                yield key, value
            if missing and not listed:
                assert time.monotonic() < deadline
                time.sleep(self._poll_seconds)

    def _listed(self, keys: Sequence[str]) -> Collection[str]:
        channel: Any = self._channel
        if self._kind == "s3":
            prefix = channel._prefix
            page = channel._client.list_objects_v2(Bucket=channel._bucket, Prefix=prefix + self._prefix)
            there = {entry["Key"].removeprefix(prefix) for entry in page.get("Contents", ())}
            return there.intersection(keys)
        if self._kind == "redis":
            (names,) = channel._server.ask([("KEYS", f"{channel._prefix}{self._prefix}/*")])
            channel._meter.count(lists=1)
            there = {bytes(name).decode().removeprefix(channel._prefix) for name in names}
            return there.intersection(keys)
        return {key for key in keys if channel.has(key)}


def worker_main(worker: int, conn: Connection) -> None:
    """One worker: answers each order with what came of it."""
    channels: dict[str, Any] = {}
    ones: dict[str, tuple[Any, MeanCollective]] = {}
    vector, audited = np.zeros(0, np.float32), Audited()
    while (order := conn.recv()) is not None:
        match order:
            case "channel", kind, address, parts, slower:
                _slow_down(slower)
                channels[kind] = _opened(kind, address, parts)
                _warm(channels[kind], f"warm/{worker}")
                answer: Any = None
            case "vector", seed, size:
                vector = vector_of(seed, worker, size)
                answer = None
            case "open", name, kind, settings, workers:
                channel, place = channels[kind], f"c/{name}"
                one = MeanCollective(settings, Member(worker, workers, 1), channel, place, vector.size)
                if settings.faithful:
                    one._driver = AsPublished(channel, kind, settings, f"{place}/1")
                ones[name] = channel, one
                # Nothing that is open now will ever be garbage: do not look at it in a merge.
                gc.freeze()
                answer = None
            case "merge", name, step, begin, checked:
                answer = _merged(*ones[name], vector, worker, step, begin, checked)
            case "iterate", name, begin, steps, compute:
                answer = _iterated(ones[name][1], vector, worker, begin, steps, compute)
            case "close", name:
                ones.pop(name)[1].close()
                answer = None
            case "probe", kind, place, cores:
                answer = probe(channels[kind], place, cores=cores)
            case "usage", kind:
                answer = channels[kind].usage
            case "audit", folder:
                if not audited.folder:
                    # For ever: a hook cannot be taken away.
                    sys.addaudithook(audited)
                audited.folder = folder
                answer = None
            case ("audited",):
                answer, audited.counts = audited.counts, Counter()
            case "forget", kind:
                channels.pop(kind).close()
                answer = None
        conn.send(answer)


class Audited:
    """Counts what the interpreter does with files below a folder, by its audit events.

    A value has come when a file gets a name without a leading dot, and is gone when it has none any more.
    """

    def __init__(self) -> None:
        self.counts, self.folder = Counter[str](), ""

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and self._is_value(arguments[1]):
            self.counts.update(puts=1, bytes_in=os.stat(arguments[0]).st_size)
        elif event in ("os.rename", "os.remove") and self._is_value(arguments[0]):
            self.counts["deletes"] += 1
        elif event == "mmap.__new__" and os.readlink(f"/proc/self/fd/{arguments[0]}").startswith(self.folder):
            self.counts.update(gets=1, bytes_out=arguments[1])

    def _is_value(self, path: Any) -> bool:
        name = str(path)
        return name.startswith(self.folder) and "/." not in name


def _merged(
    channel: Channel, one: MeanCollective, vector: Any, worker: int, step: int, begin: float, checked: bool
) -> tuple[float, float, Usage, int]:
    before = channel.usage
    time.sleep(max(0.0, begin - time.monotonic()))
    cpu = time.process_time()
    (merged,) = one.merge(step, vector, float(worker + 1))
    over, cpu = time.monotonic(), time.process_time() - cpu
    driver: Any = one._driver
    over = driver.over if isinstance(driver, AsPublished) else over
    driver.drain()
    usage = channel.usage
    # Deletes continue beside.
    while time.sleep(_SETTLED_SECONDS) is None and channel.usage != usage:
        usage = channel.usage
    used = Usage(*(after - was for after, was in zip(_counts(usage), _counts(before), strict=True)))
    return over, cpu, used, zlib.crc32(merged.vector.data) if checked else 0


def _iterated(
    one: MeanCollective, vector: Any, worker: int, begin: float, steps: int, compute: float
) -> list[tuple[float, float]]:
    """A chain of iterations; of each the seconds that it computed, as it came out, and when it was over."""
    driver: Any = one._driver
    told = []
    time.sleep(max(0.0, begin - time.monotonic()))
    for step in range(1, steps + 1):
        began = time.monotonic()
        time.sleep(compute)
        computed = time.monotonic() - began
        one.merge(step, vector, float(worker + 1))
        # A worker alone asks nobody for anything.
        published = isinstance(driver, AsPublished) and driver.over > began
        told.append((computed, driver.over if published else time.monotonic()))
    driver.drain()
    return told


_PAUSES = {
    (module, name): getattr(module, name)
    for module in (_driver, _s3)
    for name in ("_MIN_PAUSE_SECONDS", "_MAX_PAUSE_SECONDS")
}


def _slow_down(slower: float) -> None:
    for (module, name), seconds in _PAUSES.items():
        setattr(module, name, seconds * slower)


def _counts(usage: Usage) -> list[int]:
    return [getattr(usage, name) for name in Usage.__dataclass_fields__]


def vector_of(seed: int, worker: int, size: int) -> Any:
    return np.random.default_rng([seed, worker]).standard_normal(size, np.float32)


def _opened(kind: str, address: str, parts: dict[str, int]) -> Channel:
    if kind == "s3":
        # Parts are scaled as the vectors are, so that a value is cut into as many.
        return _s3.S3Channel(address, **parts)
    return open_channel(kind, address)


def _warm(channel: Channel, place: str) -> None:
    """Connections are there before the first merge, as in the second merge of an invocation."""
    keys = [f"{place}/{number}" for number in range(16)]
    channel.put_many({key: [b"-"] for key in keys})
    for _ in channel.wait(keys, 30):
        pass
    channel.delete_many(keys)


class Workers:
    """Processes that merge when they are told to."""

    def __init__(self, count: int) -> None:
        # The store asks for none, but its client does.
        os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench")
        context = multiprocessing.get_context("spawn")
        self._pairs = []
        for worker in range(count):
            here, there = context.Pipe()
            process = context.Process(target=worker_main, args=(worker, there), daemon=True)
            process.start()
            self._pairs.append((process, here))

    def ask(self, count: int, *order: Any) -> list[Any]:
        return self.ask_each([order] * count)

    def ask_each(self, orders: Sequence[Any]) -> list[Any]:
        for (_, conn), order in zip(self._pairs, orders, strict=False):
            conn.send(order)
        return [conn.recv() for (_, conn), _ in zip(self._pairs, orders, strict=False)]

    def close(self) -> None:
        for process, conn in self._pairs:
            with contextlib.suppress(OSError):
                conn.send(None)
            process.join(10)


@dataclass
class Group:
    """Workers and a channel between them, with all contenders open."""

    workers: Workers
    kind: str
    size_bytes: int
    count: int
    scale: int
    slower: float
    control: str = ""

    def probed(self) -> ChannelCosts:
        """What one worker measures, with the profile's bandwidth and prices."""
        (costs,) = self.workers.ask(1, "probe", self.kind, "probe", os.cpu_count() if self.kind == "file" else 0)
        prices = REQUEST_PRICES[PRICES[self.kind]]
        return replace(
            costs,
            put_seconds=costs.put_seconds / self.slower,
            get_seconds=costs.get_seconds / self.slower,
            poll_seconds=costs.poll_seconds / self.slower,
            request_cpu_seconds=costs.request_cpu_seconds / self.slower,
            merge_seconds_per_byte=costs.merge_seconds_per_byte / self.slower,
            up_bytes_per_second=costs.up_bytes_per_second * self.scale * self.slower,
            down_bytes_per_second=costs.down_bytes_per_second * self.scale * self.slower,
            parallel=16,
            put_usd=prices.put or 0.0, get_usd=prices.get or 0.0, list_usd=prices.list or 0.0,
        )  # fmt: skip

    def open(self, name: str, contender: Contender, costs: ChannelCosts) -> None:
        settings = contender.settings
        if self.kind == "s3" and not settings.faithful:
            link = replace(
                costs,
                put_seconds=costs.put_seconds * self.slower,
                get_seconds=costs.get_seconds * self.slower,
                up_bytes_per_second=costs.up_bytes_per_second / self.scale / self.slower,
                down_bytes_per_second=costs.down_bytes_per_second / self.scale / self.slower,
            )
            settings = replace(settings, asked=link)
        settings = replace(settings, poll_seconds=settings.poll_seconds * self.slower)
        self.workers.ask(self.count, "open", name, self.kind, settings, self.count)

    def merge(self, name: str, step: int, expected: int | None) -> tuple[Run, Usage]:
        """Raises ``AssertionError`` where a worker's mean is not, bit for bit, the weighted mean."""
        begin, before = time.monotonic() + 0.06, _cores()
        answers = self.workers.ask(self.count, "merge", name, step, begin, expected is not None)
        over = max(answer[0] for answer in answers)
        after = _cores()
        if expected is not None:
            held = {answer[3] for answer in answers}
            # What a codec rounds is another mean, but the same for all.
            assert held == {expected} or (not expected and len(held) == 1), f"{name}: workers hold another mean"
        usage = sum((answer[2] for answer in answers), Usage())
        usage = replace(usage, bytes_in=usage.bytes_in * self.scale, bytes_out=usage.bytes_out * self.scale)
        busy = 1 - (after[1] - before[1]) / max(1e-9, after[0] - before[0])
        return Run((over - begin) / self.slower, sum(answer[1] for answer in answers), busy), usage


@contextmanager
def group(workers: Workers, kind: str, size_bytes: int, count: int, slower: float, folder: Path) -> Iterator[Group]:
    """A fresh store of this kind, with a channel of each worker to it."""
    scale = max(1, count // LOOPBACK_WORKERS) if kind != "file" and size_bytes > SCALED_FROM_BYTES else 1
    with ExitStack() as stack:
        rate = RATE[kind] / scale / slower
        control = ""
        if kind == "file":
            place = f"/dev/shm/geofed-bench-{os.getpid()}-{secrets.token_hex(4)}"
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            addresses = [place] * count
        elif kind == "redis":
            real = stack.enter_context(redis_server(Path(stack.enter_context(_folder(folder)))))
            ports = stack.enter_context(
                store(Shape(count, get_seconds=0.001 * slower, bytes_per_second=rate, relay_to=real.port))
            )
            addresses = [f"redis://127.0.0.1:{port}/0?prefix=b" for port in ports[1:]]
        else:
            latency = {name: value * slower for name, value in S3_LATENCY.items()}
            ports = stack.enter_context(store(Shape(count, bytes_per_second=rate, jitter=S3_JITTER, **latency)))
            control = f"http://127.0.0.1:{ports[0]}"
            tail = "region=us-east-1&path_style=1"
            addresses = [f"s3://bench/b?endpoint=http://127.0.0.1:{port}&{tail}" for port in ports[1:]]
        parts = {"part_bytes": (16 << 20) // scale, "multipart_bytes": (64 << 20) // scale}
        workers.ask_each([("channel", kind, address, parts, slower) for address in addresses])
        workers.ask(count, "vector", size_bytes, size_bytes // scale // 4)
        try:
            yield Group(workers, kind, size_bytes, count, scale, slower, control)
        finally:
            workers.ask(count, "forget", kind)


@contextmanager
def store(shape: Shape) -> Iterator[list[int]]:
    """The ports of a store: the control's, then one for each worker."""
    program = Path(__file__).with_name("collectives_store.py")
    process = subprocess.Popen([sys.executable, str(program), shape.json()], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def counts(control: str) -> dict[str, int]:
    """What a store has counted since the last call."""
    with urllib.request.urlopen(f"{control}/-/counts") as answer:
        told: dict[str, int] = json.load(answer)
    return told


@contextmanager
def _folder(parent: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=parent) as name:
        yield name


def _cores() -> tuple[float, float]:
    """Ticks of all cores, and those in which they had nothing to do."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(ticks[:8]), ticks[3] + ticks[4]


def expected_mean(size_bytes: int, scale: int, count: int) -> int:
    vectors = [vector_of(size_bytes, worker, size_bytes // scale // 4) for worker in range(count)]
    return zlib.crc32(weighted_mean(vectors, [float(worker + 1) for worker in range(count)]).data)


def usd(usage: Usage, seconds: float, count: int, kind: str, usd_per_worker_second: float) -> float:
    """Requests, and the workers' time."""
    return cost_usd(usage, REQUEST_PRICES[PRICES[kind]]) + count * usd_per_worker_second * seconds


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
