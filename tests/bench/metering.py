"""The channels' own meters compared with an independent count.

    .venv/bin/python tests/bench/metering.py [--quick] [--json PATH]

Workers, a process each, merge through every channel with a few collectives. Beside the sum of their `Usage` stands what
was counted elsewhere, by kind, and in bytes of values:

- ``s3``: the server's own count of requests and of the bodies' bytes (`collectives_store.py`);
- ``redis``: the server's ``INFO commandstats``, and the bytes of its network from ``INFO stats``. What keeps the books
  beside the requests (``MULTI``, ``EXEC``, ``XADD``, ``PEXPIRE``) is not metered, as Redis charges for no request, but
  its bytes are in those of the network. Values up to 64 KiB travel twice (`docs/channels.md`), so those are looked at
  in requests only;
- ``file``: what the interpreter told of system calls (audit events): files renamed into place, mapped, removed or
  renamed away.

Looks are asked of nobody twice: a wait that is answered with nothing is a request as well. The account is what the
metered use costs; it comes out of the same figures.

With `--quick` it takes 30 seconds.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from channel_prices import REQUEST_PRICES, cost_usd
from collectives_live import PRICES, Workers, counts, store
from collectives_store import Shape
from report import Bar, Report, options
from support.stores import RedisServer, redis_server

from sync.channel import Usage
from sync.collective import ChannelCosts, Settings

ASKED = ChannelCosts(0.02, 0.005, 1e8, 1e8, parallel=8)
"""Of the S3 server here: PUT 20 ms, GET 5 ms."""
COLLECTIVES = (
    Settings("all-reduce"),
    Settings("pipelined-scatter-reduce"),
    Settings("k-reduce", chunks=2),
    Settings("k-reduce", chunks=2, codec="int8"),
    Settings("scatter-reduce", faithful=True, poll_seconds=0.01),
)
KINDS = ("puts", "gets", "misses", "looks", "deletes", "lists", "waits", "failures")
_OF_REDIS = {
    "puts": ("set",),
    # A miss and a hit are the same command.
    "gets": ("get", "getex", "getrange", "mget"),
    "looks": ("exists", "info"),
    "deletes": ("unlink",),
    # `KEYS` is what the faithful workers list with.
    "lists": ("scan", "keys"),
    "waits": ("xread",),
}


def main() -> int:
    given = options(__doc__)
    report = Report("metering", given.quick)
    count, sizes = (3, (0.25, 4.0)) if given.quick else (4, (0.25, 4.0, 14.0))
    merges = 2 if given.quick else 5
    workers = Workers(count)
    print(f"{count} workers, {merges} merges each; metered / counted elsewhere")
    print(f"{'':<6}{'MB':>6}  {'':<34}{'requests':>14}{'MB in':>18}{'MB out':>18}{'$/1000':>9}  other than metered")
    try:
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("file", "redis", "s3"):
                for size_mb in sizes:
                    _channel(report, workers, kind, size_mb, count, merges, Path(folder))
    finally:
        workers.close()
    report.bars = _bars(report.runs)
    return report.close(given.json)


def _channel(
    report: Report, workers: Workers, kind: str, size_mb: float, count: int, merges: int, folder: Path
) -> None:
    with ExitStack() as stack:
        elsewhere, addresses = stack.enter_context(_counted(workers, kind, count, folder))
        parts = {"part_bytes": 1 << 20, "multipart_bytes": 1 << 30}
        workers.ask_each([("channel", kind, address, parts, 1.0) for address in addresses])
        workers.ask(count, "vector", 1, int(size_mb * 250_000))
        for number, settings in enumerate(COLLECTIVES):
            name = f"{size_mb}-{number}"
            asked = ASKED if kind == "s3" and not settings.faithful else None
            workers.ask(count, "open", name, kind, replace(settings, asked=asked), count)
            elsewhere()
            before = workers.ask(count, "usage", kind)
            for step in range(merges):
                workers.ask(count, "merge", name, step + 1, 0.0, False)
            after = workers.ask(count, "usage", kind)
            told = elsewhere()
            workers.ask(count, "close", name)
            used = {key: sum(getattr(a, key) - getattr(b, key) for a, b in zip(after, before, strict=True))
                    for key in Usage.__dataclass_fields__}  # fmt: skip
            _row(report, kind, size_mb, settings, used, told)
        workers.ask(count, "forget", kind)


def _row(
    report: Report, kind: str, size_mb: float, settings: Settings, used: dict[str, int], told: dict[str, int]
) -> None:
    metered = dict(used)
    if kind == "redis":
        metered["gets"] += metered.pop("misses")
        told.setdefault("misses", 0)
    account = cost_usd(Usage(**used), REQUEST_PRICES[PRICES[kind]])
    same = {key: (metered.get(key, 0), told.get(key, 0)) for key in (*KINDS, "bytes_in", "bytes_out") if key in told}
    requests = [sum(pair[side] for key, pair in same.items() if key in KINDS) for side in (0, 1)]
    apart = {
        key: _apart(mine, theirs)
        for key, (mine, theirs) in same.items()
        # Two small vectors' worth of bytes are lost in what stands around them.
        if not (kind == "redis" and key.startswith("bytes") and size_mb < 1)
    }
    label = settings.pattern + (f" K={settings.chunks}" if settings.chunks else "")
    label += f" {settings.codec}" if settings.codec != "fp32" else " faithful" if settings.faithful else ""
    mine, theirs = [[same[key][side] / 1e6 for key in ("bytes_in", "bytes_out")] for side in (0, 1)]
    others = ", ".join(f"{key} {100 * value:.2f} %" for key, value in apart.items() if value)
    print(
        f"{kind:<6}{size_mb:>6g}  {label:<34}{requests[0]:>6} / {requests[1]:<6}{mine[0]:>8.2f} / {theirs[0]:<7.2f}"
        f"{mine[1]:>8.2f} / {theirs[1]:<7.2f}{1000 * account:>9.3f}  {others or '-'}"
    )
    report.runs.append(
        {
            "kind": kind, "size_mb": size_mb, "settings": asdict(settings), "metered": metered, "counted": told,
            "apart": apart, "usd": account,
        }
    )  # fmt: skip


def _apart(mine: int, theirs: int) -> float:
    """How far the meter is off, of what was counted."""
    return abs(mine - theirs) / max(1, theirs)


@contextmanager
def _counted(workers: Workers, kind: str, count: int, folder: Path) -> Iterator[tuple[Any, list[str]]]:
    """A store, a function that answers what it counted since its last call, and each worker's address of it."""
    with ExitStack() as stack:
        if kind == "s3":
            shape = Shape(count, put_seconds=0.02, get_seconds=0.005, list_seconds=0.01)
            ports = stack.enter_context(store(shape))
            control, tail = f"http://127.0.0.1:{ports[0]}", "region=us-east-1&path_style=1"

            def of_s3() -> dict[str, int]:
                return {**dict.fromkeys((*KINDS, "bytes_in", "bytes_out"), 0), **counts(control)}

            yield of_s3, [f"s3://bench/b?endpoint=http://127.0.0.1:{port}&{tail}" for port in ports[1:]]
        elif kind == "redis":
            server = stack.enter_context(redis_server(folder))
            yield _Redis(server), [server.tcp("b")] * count
        else:
            place = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="geofed-bench-"))

            def of_files() -> dict[str, int]:
                told = workers.ask(count, "audited")
                return {key: sum(each.get(key, 0) for each in told) for key in _AUDITED}

            workers.ask(count, "audit", place)
            yield of_files, [place] * count


_AUDITED = ("puts", "gets", "deletes", "bytes_in", "bytes_out")


class _Redis:
    """What a Redis server counts."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._before = self._now()

    def _now(self) -> dict[str, int]:
        calls = self._server.calls()
        told = {key: sum(calls.get(name, 0) for name in names) for key, names in _OF_REDIS.items()}
        lines = self._server.command("INFO", "stats").splitlines()
        stats = dict(line.partition(":")[::2] for line in lines)
        told |= {"bytes_in": int(stats["total_net_input_bytes"]), "bytes_out": int(stats["total_net_output_bytes"])}
        return told

    def __call__(self) -> dict[str, int]:
        before, self._before = self._before, self._now()
        told = {key: now - before[key] for key, now in self._before.items()}
        # These two questions.
        told["looks"] -= 2
        return told


def _bars(runs: list[dict[str, Any]]) -> list[Bar]:
    bars = []
    for kind in ("file", "redis", "s3"):
        mine = [run for run in runs if run["kind"] == kind]
        requests = [value for run in mine for key, value in run["apart"].items() if not key.startswith("bytes")]
        moved = [value for run in mine for key, value in run["apart"].items() if key.startswith("bytes")]
        bars.append(Bar.at_most(f"{kind}: requests of any kind, most off", 100 * max(requests), "%", 2))
        bars.append(Bar.at_most(f"{kind}: bytes, most off", 100 * max(moved), "%", 2))
    return bars


if __name__ == "__main__":
    sys.exit(main())
