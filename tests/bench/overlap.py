"""Steps per second with gradients sent during the backward pass, and after it. LIVE.

    .venv/bin/python tests/bench/overlap.py [--quick] [--json PATH] [--workers N] [--repeats N]

Workers are processes that merge as production workers do (`merging_for`), through the S3 server of
`collectives_store.py`: PUT 100 ms, GET 20 ms, 100 MB/s a worker each way, log-normal jitter of 0.15. Gradients are
tensors of the model's sizes, and really move; computing is sleeping, at the pace at which the real model's backward
pass gives them, which is measured first, on this machine. As in `collectives_live.py` vectors and bandwidth are both
smaller by ``scale``, and time goes slower by ``slower``, since all share the cores of one machine; the seconds that
come out are divided by that. Both ways take turns; the floor is what compute, latencies and the link leave.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import collectives_live as live
from channel_prices import REQUEST_PRICES as PRICES
from channel_prices import cost_usd
from collectives_published import least_seconds
from collectives_store import Shape
from overlap_models import Pace, StandIn, mobilenet, pace_of, resnet18
from report import Bar, Report, options

from region_agent.worker.invocation import Invocation
from region_agent.worker.task import TaskModule
from region_agent.worker.training.merging import Merging, merging_for
from sync.channel import Channel, Usage
from sync.channel_clients import _s3
from sync.collective import ChannelCosts
from sync.flat import FlatModel
from sync.merging import _reduction_plan, probe

MODELS = {"ResNet-18, 44.7 MB": resnet18, "MobileNetV2, 14.0 MB": mobilenet}
CASES = (
    ("ResNet-18, 44.7 MB", 1.0),
    ("ResNet-18, 44.7 MB", 2.0),
    ("MobileNetV2, 14.0 MB", 0.5),
    ("MobileNetV2, 14.0 MB", 1.0),
)
"""Seconds of compute in a step."""
WORKER_USD_PER_SECOND = 2 * 0.0000166667
STEPS = 3
WAYS = ("after", "during")
_MIN_CHUNKS = _reduction_plan._MIN_CHUNKS_IN_PARTS


@dataclass(frozen=True)
class Setup:
    """What the workers of one case share."""

    workers: int
    compute: float
    pace: Pace
    scale: int
    slower: float


class Side:
    """One way to merge, of one worker, as its invocation would."""

    def __init__(self, way: str, worker: int, setup: Setup, channel: Channel, costs: ChannelCosts) -> None:
        # Where no number of chunks is worth it, production hands in whole vectors, in chunks of one length.
        _reduction_plan._MIN_CHUNKS_IN_PARTS = _MIN_CHUNKS if way == "during" else sys.maxsize
        self.module = StandIn(setup.pace, setup.compute * setup.slower, setup.scale, (worker,))
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        call = Invocation(
            job="job-1", region="east", worker=worker, workers=setup.workers, attempt=1, token="", ps_address="",
            ps_name="", ca_pem="", channel="s3", channel_address="", bundle_key="", module="", config={}, splits={},
            region_batch=setup.workers, steps_per_round=1, rounds=1, seed=0, slice_seconds=3600.0,
            collective="pipelined-scatter-reduce", channel_costs={k: float(v) for k, v in asdict(costs).items()},
        )  # fmt: skip
        flat, task = FlatModel(self.module), TaskModule(Path(), {}, {})
        prefixed: Any = _Under(channel, way)
        self.merging: Merging = merging_for(call, task, self._optimizer, flat, prefixed, time.monotonic())
        assert self.merging._gradients.overlap == (way == "during")  # type: ignore[attr-defined]
        self.step = 0

    def run(self, steps: int) -> None:
        x = torch.ones(1)
        for _ in range(steps):
            self.step += 1
            self._optimizer.zero_grad(set_to_none=True)
            loss = self.module(x)
            self.merging.arm(self.step, 1)
            loss.backward()
            self.merging.step(None, self.step, 1, 0.0)  # type: ignore[arg-type]  # no server hears of it


class _Under:
    """A channel whose keys all lie under a place, so that both ways may be open at once."""

    def __init__(self, channel: Any, place: str) -> None:
        self._channel, self._place = channel, place

    def put_many(self, items: dict[str, Any]) -> None:
        self._channel.put_many({f"{self._place}/{key}": value for key, value in items.items()})

    def get(self, key: str) -> memoryview | None:
        value: memoryview | None = self._channel.get(f"{self._place}/{key}")
        return value

    def delete_many(self, keys: Any) -> None:
        self._channel.delete_many([f"{self._place}/{key}" for key in keys])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


def worker_main(worker: int, conn: Connection) -> None:
    torch.set_num_threads(1)
    sides: dict[str, Side] = {}
    channel: Any = None
    while (order := conn.recv()) is not None:
        answer: Any = None
        match order:
            case "channel", address, parts, slower:
                live._slow_down(slower)
                channel = _s3.S3Channel(address, **parts)
                live._warm(channel, f"warm/{worker}")
            case ("probe",):
                answer = probe(channel, "probe")
            case "open", way, setup, costs:
                sides[way] = Side(way, worker, setup, channel, costs)
            case "run", way, begin, steps:
                before = channel.usage
                time.sleep(max(0.0, begin - time.monotonic()))
                sides[way].run(steps)
                answer = time.monotonic(), live._counts(channel.usage), live._counts(before)
            case ("close",):
                for side in sides.values():
                    side.merging.close()
                sides.clear()
                channel.close()
        conn.send(answer)


class Workers(live.Workers):
    """Processes that train a stand-in when they are told to."""

    def __init__(self, count: int) -> None:
        os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench")
        context = multiprocessing.get_context("spawn")
        self._pairs = []
        for worker in range(count):
            here, there = context.Pipe()
            process = context.Process(target=worker_main, args=(worker, there), daemon=True)
            process.start()
            self._pairs.append((process, here))


@contextmanager
def opened(workers: Workers, setup: Setup) -> Iterator[ChannelCosts]:
    """A fresh store, with both ways open at every worker."""
    count, slower, scale = setup.workers, setup.slower, setup.scale
    latency = {name: value * slower for name, value in live.S3_LATENCY.items()}
    rate = live.RATE["s3"] / scale / slower
    with live.store(Shape(count, bytes_per_second=rate, jitter=live.S3_JITTER, **latency)) as ports:
        tail = "region=us-east-1&path_style=1"
        addresses = [f"s3://bench/b?endpoint=http://127.0.0.1:{port}&{tail}" for port in ports[1:]]
        parts = {"part_bytes": (16 << 20) // scale, "multipart_bytes": (64 << 20) // scale}
        workers.ask_each([("channel", address, parts, slower) for address in addresses[:count]])
        (costs,) = workers.ask(1, "probe")
        costs = replace(costs, parallel=16)
        for way in WAYS:
            workers.ask(count, "open", way, setup, costs)
        try:
            yield costs
        finally:
            workers.ask(count, "close")


@dataclass(frozen=True)
class Run:
    """Some steps of all workers, one after the other."""

    seconds: float
    """Of a step."""
    usd: float
    """Of a step: requests, and the workers' time."""
    misses: float
    """Looks of a step that found nothing."""


def run(workers: Workers, setup: Setup, way: str, steps: int) -> Run:
    begin = time.monotonic() + 0.1
    answers = workers.ask(setup.workers, "run", way, begin, steps)
    seconds = (max(answer[0] for answer in answers) - begin) / setup.slower / steps
    used = [Usage(*(a - b for a, b in zip(after, before, strict=True))) for _, after, before in answers]
    requests = sum(cost_usd(usage, PRICES["s3/us-east-1"]) for usage in used) / steps
    usd = requests + setup.workers * WORKER_USD_PER_SECOND * seconds
    return Run(seconds, usd, sum(usage.misses for usage in used) / steps)


def main() -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--workers", type=int, default=8)
        parser.add_argument("--repeats", type=int, help="runs of each way; default: 5, of --quick 2")

    given = options(__doc__, more=more)
    report, count = Report("overlap", given.quick), given.workers
    torch.set_num_threads(1)
    paces = {name: pace_of(made()) for name, made in MODELS.items()}
    workers = Workers(count)
    gains: dict[str, float] = {}
    print(f"S3, W = {count}, pipelined scatter-reduce; steps/s, medians (LIVE; computing is sleeping)")
    print(f"{'':<24}{'compute s':>10}{'after':>9}{'during':>9}{'gain %':>8}{'exposed s':>18}{'floor':>7}{'$/1000':>17}")
    try:
        for model, compute in CASES[1::2] if given.quick else CASES:
            setup = Setup(
                count, compute, paces[model], max(1, count // live.LOOPBACK_WORKERS), max(1, min(4, count // 2))
            )
            gains[f"{model}, {compute:g} s"] = _case(
                report, workers, model, setup, given.repeats or (2 if given.quick else 5)
            )
    finally:
        workers.close()
    report.bars = [Bar.at_least(f"W = {count}, {name}: steps/s more", gain, "%", 10) for name, gain in gains.items()]
    return report.close(given.json)


def _case(report: Report, workers: Workers, model: str, setup: Setup, repeats: int) -> float:
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    with opened(workers, setup):
        for number in range(repeats + 1):
            for way in WAYS:
                # The first turn makes memory and threads, and shows what the module does.
                one = run(workers, setup, way, STEPS if number else 2)
                report.runs.append({"model": model, "way": way, "counted": number > 0, **_told(setup), **asdict(one)})
                if number:
                    runs[way].append(one)
    seconds = {way: statistics.median(one.seconds for one in runs[way]) for way in WAYS}
    usd = {way: 1000 * statistics.median(one.usd for one in runs[way]) for way in WAYS}
    size = 4.0 * sum(setup.pace.sizes)
    profile = ChannelCosts(0.1, 0.02, live.RATE["s3"], live.RATE["s3"])
    latencies = 2 * (profile.put_seconds + profile.get_seconds)
    link = setup.compute * setup.pace.forward + least_seconds(setup.workers, size, profile)
    floor = max(setup.compute, link) + latencies
    gain = 100 * (seconds["after"] / seconds["during"] - 1)
    exposed = " ".join(f"{seconds[way] - setup.compute:8.3f}" for way in WAYS)
    print(
        f"{model:<24}{setup.compute:>10.2f}{1 / seconds['after']:>9.3f}{1 / seconds['during']:>9.3f}{gain:>8.1f}"
        f"{exposed:>18}{1 / floor:>7.3f} {' '.join(f'{usd[way]:7.3f}' for way in WAYS)}",
        flush=True,
    )
    return gain


def _told(setup: Setup) -> dict[str, Any]:
    return {"workers": setup.workers, "compute": setup.compute, "scale": setup.scale, "slower": setup.slower}


if __name__ == "__main__":
    sys.exit(main())
