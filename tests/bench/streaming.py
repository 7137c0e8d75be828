"""A shard of 10 GB in an object store: the first step, and what all workers read in an epoch.

The store answers range requests after 20 ms, as object stores do, with CSV lines that it repeats; it counts what it
sends. The large object's index is computed, since all lines have the same length; the rate at which the agent counts
lines is measured on a smaller object.

    .venv/bin/python tests/bench/streaming.py --quick
"""

from __future__ import annotations

import http.server
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from bench.report import Bar, Report, options

from region_agent.worker.data.formats import FORMATS
from region_agent.worker.data.index import BlockIndex, least_block_bytes
from region_agent.worker.data.loading import DrawnSamples, Loading
from region_agent.worker.data.order import BlockOrder
from region_agent.worker.data.shard import BatchStream
from region_agent.worker.data.sources import Sources
from region_agent.worker.data.spec import FormatSpec
from region_agent.worker.data.streamed import Rows, Streamed
from region_agent.worker.invocation import ShardFile
from region_agent.worker.task import TaskModule

HEADER = b"label,value,text\n"
PATTERN_BYTES = 4 << 20
LATENCY_SECONDS = 0.02
BATCH = 256
WORKERS = 4
COMPUTE_SECONDS = 0.05
SAMPLE_SECONDS, SLOW_BATCH = 0.005, 16
SPEC = FormatSpec(kind="csv")


def _pattern() -> bytes:
    """Lines of 1,024 bytes."""
    rng = np.random.default_rng(1)
    lines = []
    for at in range(PATTERN_BYTES // 1024):
        begin = f"{at % 10},{rng.random():.6f},".encode()
        lines.append(begin + bytes(rng.integers(97, 123, 1023 - len(begin), np.uint8)) + b"\n")
    return b"".join(lines)


def _serve(link: Connection) -> None:
    """Answer range requests for objects whose names are their numbers of repetitions; send bytes sent when asked."""
    pattern, sent = _pattern() * 2, [0]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            size = len(HEADER) + int(self.path.strip("/")) * PATTERN_BYTES
            begin, end = (int(part) for part in self.headers["Range"].removeprefix("bytes=").split("-"))
            time.sleep(LATENCY_SECONDS)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end}/{size}")
            self.send_header("Content-Length", str(end + 1 - begin))
            self.end_headers()
            at, stop = begin, end + 1
            while at < stop:
                if at < len(HEADER):
                    piece = HEADER[at:stop]
                else:
                    inside = (at - len(HEADER)) % PATTERN_BYTES
                    piece = pattern[inside : inside + min(stop - at, PATTERN_BYTES)]
                self.wfile.write(piece)
                at += len(piece)
            sent[0] += end + 1 - begin

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    link.send(server.server_port)
    import threading

    threading.Thread(target=server.serve_forever, daemon=True).start()
    while link.recv():
        link.send(sent[0])


def _file(port: int, repeats: int) -> ShardFile:
    size = len(HEADER) + repeats * PATTERN_BYTES
    return ShardFile(name=f"{repeats}.csv", url=f"http://127.0.0.1:{port}/{repeats}", size=size)


def _index(repeats: int) -> BlockIndex:
    """Return the index of a large object, without reading it: blocks of whole lines, which all have 1,024 bytes."""
    size = repeats * PATTERN_BYTES
    each = least_block_bytes(size) // 1024 * 1024
    offset = np.arange(0, size, each)
    length = np.minimum(each, size - offset)
    held = np.full_like(length, 2 * each)
    schema = {"label": "int64", "value": "double", "text": "string"}
    return BlockIndex(np.zeros_like(offset), offset + len(HEADER), length, length // 1024, held, schema)


def _first_step(link: Connection, port: int, repeats: int, index: bytes) -> None:
    """In a process of its own: the time from the index to the first batch, and bytes read until then."""
    begun = time.monotonic()
    rows = Rows(SPEC, [_file(port, repeats)], BlockIndex.from_bytes(index))
    stream = BatchStream(Streamed(rows, rows, 0), 1, "here", 0, WORKERS, BATCH)
    batch = stream.batch(1)
    link.send((time.monotonic() - begun, rows.sources.read_bytes, len(batch["label"])))
    rows.close()


def _worker(link: Connection, port: int, repeats: int, worker: int, steps: int, compute: float) -> None:
    """Draw steps of a worker; the seconds that it takes."""
    rows = Rows(SPEC, [_file(port, repeats)], _index(repeats))
    stream = BatchStream(Streamed(rows, rows, 2), 1, "here", worker, WORKERS, BATCH)
    stream.batch(1)
    begun = time.monotonic()
    for step in range(2, steps + 1):
        stream.batch(step)
        time.sleep(compute)
    link.send(time.monotonic() - begun)
    rows.close()


def _apart(target: Any, *given: Any) -> Any:
    """Call a function in a process of its own; returns what it sends."""
    return _all_apart(target, [given])[0]


def _all_apart(target: Any, calls: list[tuple[Any, ...]]) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    links, processes = [], []
    for given in calls:
        here, there = context.Pipe()
        processes.append(context.Process(target=target, args=(there, *given)))
        processes[-1].start()
        links.append(here)
    found = [link.recv() for link in links]
    for process in processes:
        process.join()
    return found


def _counting(port: int) -> float:
    """The agent's rate of counting lines, in MB/s."""
    repeats = 16
    sources = Sources([_file(port, repeats)])
    begun = time.monotonic()
    index = FORMATS["csv"].index(SPEC, sources)
    assert index.total == repeats * PATTERN_BYTES // 1024
    sources.close()
    return repeats * PATTERN_BYTES / 1e6 / (time.monotonic() - begun)


def _spread_of_labels() -> float:
    """Of a shard that is sorted by its label: the deviation of a label's count in a step, over that of random draws."""
    index = _index(2500)
    order = BlockOrder(index, [1, 2], BATCH)
    steps = 400
    labels = np.array(order.at(0, 0, BATCH * steps)) * 10 // index.total
    counts = np.stack([np.bincount(step, minlength=10) for step in labels.reshape(steps, BATCH)])
    return float(counts.std(axis=0).mean() / np.sqrt(BATCH * 0.1 * 0.9))


class Slow:
    """A task's dataset. A sample takes 5 ms, as calibrated sleep: other programs on this machine change it little."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        time.sleep(SAMPLE_SECONDS)
        return torch.full((3, 128, 128), float(index % 7))


def _making(link: Connection, workers: int, steps: int) -> None:
    """A worker's steps a second, each with 50 ms of compute, where so many processes make its samples."""
    # As workers do.
    torch.set_num_threads(1)
    functions: dict[str, Any] = {"dataset": lambda *_: Slow()}
    loading = Loading(TaskModule(Path(), {}, functions, makers=workers), {"train": Slow()})
    stream = BatchStream(Slow(), 1, "a", 0, 1, SLOW_BATCH)
    begun = 0.0
    for step in range(1, steps + 1):
        coming = range(step, min(step + loading.ahead, steps) + 1)
        loading.take([DrawnSamples("train", stream.groups(one, [SLOW_BATCH]), (1, one)) for one in coming])
        # The first one waits for processes to be forked.
        begun = begun or time.monotonic()
        time.sleep(COMPUTE_SECONDS)
    link.send(((steps - 1) / (time.monotonic() - begun - COMPUTE_SECONDS), loading.memory_bytes / 1e6))
    loading.close()


def main() -> int:
    given = options(__doc__)
    report = Report("streaming", given.quick)
    context = multiprocessing.get_context("spawn")
    link, there = context.Pipe()
    server = context.Process(target=_serve, args=(there,), daemon=True)
    server.start()
    port = link.recv()
    try:
        first: dict[int, list[float]] = {}
        for repeats in (25, 250, 2500) * (2 if given.quick else 5):
            seconds, read, samples = _apart(_first_step, port, repeats, _index(repeats).to_bytes())
            first.setdefault(repeats, []).append(seconds)
            megabytes = repeats * PATTERN_BYTES / 1e6
            report.runs.append({"shard_mb": megabytes, "seconds": seconds, "read_bytes": read, "samples": samples})
            print(f"{megabytes:>9,.0f} MB: first step after {seconds:.2f} s, {read / 1e6:.1f} MB read", flush=True)
        repeats = 60 if given.quick else 2500
        link.send(True)
        before = link.recv()
        steps = -(-repeats * PATTERN_BYTES // 1024 // BATCH)
        seconds = max(_all_apart(_worker, [(port, repeats, worker, steps, 0.0) for worker in range(WORKERS)]))
        link.send(True)
        size = len(HEADER) + repeats * PATTERN_BYTES
        ratio = (link.recv() - before) / size
        print(f"an epoch of {size / 1e6:,.0f} MB by {WORKERS} workers: {ratio:.3f} x read, {seconds:.1f} s", flush=True)
        steps = 40 if given.quick else 200
        pace = (steps - 1) * COMPUTE_SECONDS / _apart(_worker, port, 2500, 0, steps, COMPUTE_SECONDS)
        made: dict[int, list[float]] = {}
        for workers in (0, 2) * (2 if given.quick else 5):
            rate, megabytes = _apart(_making, workers, 30 if given.quick else 100)
            made.setdefault(workers, []).append(rate)
            report.runs.append({"num_workers": workers, "steps_per_second": rate, "memory_mb": megabytes})
            text = f"{rate:.2f} steps/s where {SLOW_BATCH} samples of {SAMPLE_SECONDS * 1000:.0f} ms are made by"
            print(f"{text} {workers} processes of {megabytes:.0f} MB together", flush=True)
        report.details["counting_mb_per_second"] = _counting(port)
        report.details["epoch_seconds"] = seconds
        spread = _spread_of_labels()
        link.send(False)
    finally:
        server.terminate()
        server.join()
    print(f"the agent counts lines at {report.details['counting_mb_per_second']:.0f} MB/s", flush=True)
    worst = max(first[2500])
    report.bars = [
        Bar.at_most("first step from 10.5 GB", worst, "s", 5.0),
        Bar.at_most("first step from 10.5 GB over 105 MB", min(first[2500]) / min(first[25]), "x", 2.0),
        Bar.at_most("bytes read in an epoch over the shard", ratio, "x", 1.05),
        Bar.at_least(f"pace with {COMPUTE_SECONDS * 1000:.0f} ms of compute, over compute alone", pace, "x", 0.8),
        Bar.at_least("steps/s with 2 num_workers over none", max(made[2]) / max(made[0]), "x", 1.5),
        Bar.at_most("deviation of labels in a step over random draws, sorted shard", spread, "x", 2.1),
    ]
    return report.close(given.json)


if __name__ == "__main__":
    raise SystemExit(main())
