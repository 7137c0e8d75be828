"""Live pipelines: a process for each worker, the real runtime, real tensors over a shaped store. `pipeline.py` runs it.

Layers compute by sleeping for as long as their profile says, so that timing does not depend on how many workers share
the cores; their outputs and gradients are tensors of the profile's size, which the runtime frames, puts, gets, merges
and deletes as it does with any other. The store is files in /dev/shm. What makes it slow stands in front of it: each
worker has a latency for each request and a link of a rate each way, on which values take turns. Tensors and rates are
both smaller by `SCALE`, so seconds stay what they are while the workers' shared cores copy less.

Two contenders run the same profile. FuncPipe's set-up, as published: GPipe order, stages of equal numbers of layers and
one memory size, pipelined scatter-reduce once the last backward pass is over. Ours: the planner's cuts, memory and
order, gradients that leave while the last backward pass runs, in bf16 where that is said.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline_processes import Made, Processes
from report import Bar, Report
from support.pipeline_choices import fastest, uniform

from scheduler import pipeline
from sync.channel import Buffer, Channel
from sync.channel_clients import FileChannel
from sync.collective import Settings
from sync.pipeline import Layers, Pipeline

__all__ = ["measure"]

MIB = 1 << 20
PUT_SECONDS, GET_SECONDS, RATE = 0.015, 0.010, 25e6
"""Of the store: a fifth of what a cloud's object store takes, and of what it gives a function."""
SCALE = 0.2
TIMEOUT_SECONDS = 60.0
SPEEDS = {51: 0.29, 77: 0.43, 102: 0.58, 128: 0.72, 177: 1.0, 246: 1.0, 307: 1.0}
"""By memory, in a tenth of AWS Lambda's megabytes, as the models are a tenth of theirs: one vCPU at 1769 MB, less below
it, and no more for one thread above it."""
_AT_ONCE_SECONDS = 0.001
DEGREES = (1, 2, 4, 8)
"""Replicas that both planners try. Micro-batches of one sample are left out for both: their messages keep the few cores
of this machine busy, where functions have one each, and no plan for functions counts that."""


class Link:
    """One direction of one worker's network; values take turns on it."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate, self._free, self._lock = bytes_per_second, 0.0, threading.Lock()

    def carry(self, size: int, ready: float) -> None:
        """Return when so many bytes, which are ready at that time, are through."""
        with self._lock:
            self._free = due = max(ready, self._free) + size / self._rate
        left = due - time.monotonic()
        if left > 0:
            time.sleep(left)


class ShapedChannel:
    """A worker's way to the store. Deletes continue beside everything and are not held up."""

    in_memory = False

    def __init__(self, folder: str, put_seconds: float, get_seconds: float, rate: float) -> None:
        self._store: Channel = FileChannel(folder)
        self._put_seconds, self._get_seconds = put_seconds, get_seconds
        self._up, self._down = Link(rate), Link(rate)

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        size = sum(memoryview(piece).nbytes for piece in pieces)
        self._up.carry(size, time.monotonic() + self._put_seconds)
        self._store.put(key, pieces)

    def put_many(self, items: Mapping[str, Sequence[Buffer]]) -> None:
        """Requests side by side: their latencies pass at the same time."""
        ready = time.monotonic() + self._put_seconds
        for key, pieces in items.items():
            self._up.carry(sum(memoryview(piece).nbytes for piece in pieces), ready)
            self._store.put(key, pieces)

    def wait(self, keys: Collection[str], timeout_seconds: float) -> Iterator[tuple[str, memoryview]]:
        """What is there already was asked for together with what came before it."""
        begun = asked = time.monotonic()
        for key, value in self._store.wait(keys, timeout_seconds):
            now = time.monotonic()
            asked = now if now - begun > _AT_ONCE_SECONDS else asked
            self._down.carry(value.nbytes, asked + self._get_seconds)
            yield key, value
            begun = time.monotonic()

    def get(self, key: str) -> memoryview | None:
        value = self._store.get(key)
        self._down.carry(0 if value is None else value.nbytes, time.monotonic() + self._get_seconds)
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Clock(threading.local):
    """A thread's sleeps: what one took too long, the next ones take less."""

    late = 0.0

    def until(self, begun: float, seconds: float) -> None:
        due = begun + seconds - self.late
        left = due - time.monotonic()
        if left > 0:
            time.sleep(left)
        self.late = min(time.monotonic() - due, 0.02)


_clock = Clock()


class _Work(torch.autograd.Function):
    """Takes the seconds of a layer, both ways, and passes on tensors of the right size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Timed) -> torch.Tensor:
        begun = time.monotonic()
        ctx.layer, ctx.shape = layer, x.shape
        out = torch.full((x.shape[0], layer.out), float(x[0, 0]) * 0.5)
        _clock.until(begun, layer.there.seconds(x.shape[0]) / layer.speed)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        begun, layer = time.monotonic(), ctx.layer
        passed = torch.full(ctx.shape, 0.25), torch.full_like(layer.weight, float(gradient[0, 0])), None
        _clock.until(begun, layer.back.seconds(ctx.shape[0]) / layer.speed)
        return passed


class Timed(nn.Module):
    """A layer of a profile."""

    def __init__(self, layer: pipeline.Layer, out: int, speed: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(_elements(layer.parameter_bytes)))
        self.there, self.back, self.out, self.speed = layer.forward, layer.backward, out, speed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Work.apply(x, self.weight, self)


def _elements(size_bytes: int) -> int:
    return max(1, round(size_bytes / 4 * SCALE))


@dataclass(frozen=True)
class Contender:
    """One way to run a plan."""

    name: str
    plan: pipeline.PlannedPipeline
    overlap: bool
    pattern: str = "pipelined-scatter-reduce"
    codec: str = "fp32"
    """Of merges; activations go in bfloat16 where it is lossy."""

    @property
    def activations(self) -> str:
        return "fp32" if self.codec == "fp32" else "bf16"


def _layer(
    name: str, megabytes: float, out_kib: float, act_kib: float, millis: float, back: float | None = None
) -> pipeline.Layer:
    """``millis``: forward, for one sample; backward takes ``back``, or else twice as long."""
    there = pipeline.LinearCost(0.002, millis / 1e3)
    back_line = pipeline.LinearCost(0.004, (2 * millis if back is None else back) / 1e3)
    return pipeline.Layer(name, int(megabytes * MIB), int(act_kib * 1024), int(out_kib * 1024), there, back_line)


def resnet() -> tuple[pipeline.Layer, ...]:
    """As a ResNet-18 at 224 pixels: large activations and few parameters first, the other way round at the end. Sizes
    are a tenth of its own, as the store's rate is; seconds are of the store's latency's order."""
    stem = [_layer("stem", 0.004, 80, 1000, 5.0)]
    blocks = []
    for group, (megabytes, out, act, millis) in enumerate(
        [(0.03, 80, 480, 8.0), (0.11, 40, 240, 7.0), (0.42, 20, 120, 7.0), (1.7, 10, 60, 7.0)]
    ):
        blocks += [_layer(f"block {group}.{number}", megabytes, out, act, millis) for number in range(2)]
    return (*stem, *blocks, _layer("head", 0.2, 0.4, 1.0, 0.5))


def bert() -> tuple[pipeline.Layer, ...]:
    """As a small BERT (8 blocks, width 512, 64 tokens): a large embedding that computes little, then blocks that are
    alike, and a head. Sizes are a tenth of its own."""
    blocks = [_layer(f"block {number}", 1.26, 13, 450, 6.0) for number in range(8)]
    return (_layer("embedding", 6.2, 13, 13, 0.5), *blocks, _layer("head", 0.2, 6, 40, 9.0))


def amoebanet() -> tuple[pipeline.Layer, ...]:
    """As AmoebaNet-D with 18 cells of 256 filters at 224 pixels, the smaller one of FuncPipe's (467 MiB): its layers as
    made and measured by torchgpipe's benchmark model in PyTorch 2.13 on one core, two samples at a time. Sizes are a
    tenth of its own."""
    stem = [
        _layer("stem", 0.001, 314, 432, 1.8, 3.9),
        _layer("reduction 0.0", 0.028, 784, 8620, 46.2, 49.6),
        _layer("reduction 0.1", 0.131, 706, 5570, 28.7, 45.2),
    ]
    first = [_layer("cell 0.0", 0.258, 549, 3800, 20.7, 36.6), _layer("cell 0.1", 0.320, 627, 3020, 19.0, 29.0)]
    first += [_layer(f"cell 0.{number}", 0.345, 627, 3175, 19.5, 30.0) for number in range(2, 6)]
    second = [_layer("reduction 1", 0.746, 431, 3100, 21.8, 32.5), _layer("cell 1.0", 1.08, 274, 2140, 14.7, 37.2)]
    second += [_layer("cell 1.1", 1.28, 314, 1510, 13.8, 23.8)]
    second += [_layer(f"cell 1.{number}", 1.38, 314, 1590, 14.5, 25.1) for number in range(2, 6)]
    third = [_layer("reduction 2", 2.98, 216, 1550, 19.4, 35.0), _layer("cell 2.0", 4.31, 137, 1070, 14.5, 39.3)]
    third += [_layer("cell 2.1", 5.11, 157, 755, 14.5, 40.3)]
    third += [_layer(f"cell 2.{number}", 5.51, 157, 795, 15.5, 43.9) for number in range(2, 6)]
    return (*stem, *first, *second, *third, _layer("head", 1.56, 0.4, 80, 0.6, 1.2))


def problem(
    layers: tuple[pipeline.Layer, ...], batch: int, degrees: tuple[int, ...], hop_s: float = PUT_SECONDS + GET_SECONDS
) -> pipeline.PipelineProblem:
    """With momentum, and a tenth of the 200 MB that FuncPipe keeps free. ``hop_s``: measured, from the call that puts a
    short value until another worker has it."""
    more = (hop_s - PUT_SECONDS - GET_SECONDS) / 2
    sizes = tuple(pipeline.FunctionSize(memory, speed, 1.66667e-5) for memory, speed in SPEEDS.items())
    channel = pipeline.StageChannel(PUT_SECONDS + more, GET_SECONDS + more, RATE, RATE)
    profile = pipeline.LayerProfile(layers, input_bytes=16_000, state_factor=1.0, base_mb=20.0)
    return pipeline.PipelineProblem(
        profile,
        batch,
        (pipeline.StageRegion("here", sizes, channel),),
        degrees=degrees,
        micro_batches=(2, 4, 8),
        most_workers=12,
    )


class Bench:
    """Runs contenders over a store in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self.hop_seconds = self._hop()

    def _hop(self) -> float:
        """What a short value takes from one worker to another: the store's latencies and what this machine adds."""
        folder = str(self._folder / "hops")
        ways = [ShapedChannel(folder, PUT_SECONDS, GET_SECONDS, RATE * SCALE) for _ in range(2)]
        took = []
        for number in range(21):
            taken: list[float] = []

            def take(key: str = f"hop/{number}", taken: list[float] = taken) -> None:
                for _ in ways[1].wait([key], TIMEOUT_SECONDS):
                    taken.append(time.monotonic())

            taker = threading.Thread(target=take)
            taker.start()
            time.sleep(0.02)
            begun = time.monotonic()
            ways[0].put(f"hop/{number}", [bytes(64)])
            taker.join()
            took.append(taken[0] - begun)
        for way in ways:
            way.close()
        return statistics.median(took)

    def iterations(
        self, layers: tuple[pipeline.Layer, ...], batch: int, contender: Contender, count: int
    ) -> list[Made]:
        """Each iteration but the first."""
        self._number += 1
        folder = self._folder / str(self._number)
        plan = contender.plan
        shape = Pipeline(
            tuple((stage.first, stage.last) for stage in plan.stages),
            plan.way.degree,
            plan.way.micro_batch,
            plan.way.order,
            tuple(stage.rematerialise for stage in plan.stages),
        )
        sizes = [SPEEDS[stage.memory_mb] for stage in plan.stages]
        stage_of = [index for index, stage in enumerate(plan.stages) for _ in range(stage.first, stage.last + 1)]
        factories = [
            lambda layer=layer, at=at: Timed(layer, _elements(layer.output_bytes), sizes[stage_of[at]])
            for at, layer in enumerate(layers)
        ]
        settings = Settings(pattern=contender.pattern, codec=contender.codec, timeout_seconds=TIMEOUT_SECONDS)  # type: ignore[arg-type]
        samples = torch.zeros(batch, 40), torch.zeros(batch)
        opened: Callable[[], Any] = lambda: ShapedChannel(str(folder), PUT_SECONDS, GET_SECONDS, RATE * SCALE)  # noqa: E731
        with Processes(
            shape,
            Layers.declared(factories, 0),
            opened,
            lambda model, batch: model(batch[0]).mean(),
            settings=settings,
            codec=contender.activations,
            overlap=contender.overlap,
            timeout_seconds=TIMEOUT_SECONDS,
        ) as group:
            made = [group.step(step, samples) for step in range(1, count + 2)]
        shutil.rmtree(folder, ignore_errors=True)
        return made[1:]


def _exposed(made: Sequence[Made]) -> list[float]:
    """Of each merge, what was not hidden in the slowest worker."""
    return [max(worker.exposed_seconds for worker in one.done) for one in made]


def _numbers(made: Sequence[Made]) -> dict[str, Any]:
    return {
        "seconds": [one.seconds for one in made], "core_s": [one.core_seconds for one in made],
        "exposed": _exposed(made),
    }  # fmt: skip


def _merges(bench: Bench, report: Report, count: int) -> list[Bar]:
    """What of the merge of eight replicas is not hidden: plain, pipelined, and ours, with one mechanism at a time."""
    layers = tuple(_layer(f"layer {number}", 0.25, 0.4, 1.0, 10.0) for number in range(16))
    problem_ = problem(layers, 16, (8,))
    plan = pipeline.evaluate(problem_, pipeline_way(8, 2, "gpipe"), (pipeline.Cut(0, 15, 0, 3),))
    assert plan is not None
    contenders = [
        Contender("plain scatter-reduce", plan, False, "scatter-reduce"),
        Contender("pipelined scatter-reduce (FuncPipe)", plan, False),
        Contender("+ while the last backward pass runs", plan, True),
        Contender("+ bf16 (ours)", plan, True, codec="bf16"),
        Contender("bf16 alone", plan, False, codec="bf16"),
    ]
    found: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(count):
        for contender in contenders:
            made = bench.iterations(layers, 16, contender, 1)
            found[contender.name] += _exposed(made)
            report.runs.append({"part": "merge", "turn": turn, "contender": contender.name, **_numbers(made)})
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(f"\nExposed merge of 4 MiB by 8 replicas, median of {count} (last backward pass 0.7 s)")
    for name, value in medians.items():
        print(f"  {name:<40} {1e3 * value:7.0f} ms  ({min(found[name]) * 1e3:.0f} to {max(found[name]) * 1e3:.0f})")
    size = sum(layer.parameter_bytes for layer in layers)
    print(f"  {'bound: 2 (n-1)/n bytes, two latencies':<40} {1e3 * 2 * 7 / 8 * size / RATE:7.0f} ms without overlap")
    ours = medians["+ bf16 (ours)"]
    plain, pipelined = medians["plain scatter-reduce"], medians["pipelined scatter-reduce (FuncPipe)"]
    report.details["exposed merge, s"] = medians
    return [
        Bar.at_least("exposed merge below plain scatter-reduce, 8 replicas", 100 * (1 - ours / plain), "%", 60),
        Bar.at_least("exposed merge below pipelined scatter-reduce, 8 replicas", 100 * (1 - ours / pipelined), "%", 40),
    ]


def pipeline_way(degree: int, micro_batch: int, order: str) -> Any:
    """What all stages of a pipeline have in common."""
    return pipeline.PipelineOptions(degree, micro_batch, order)  # type: ignore[arg-type]


def _as_run(asked: pipeline.PipelineProblem) -> pipeline.PlannedPipeline:
    """FuncPipe's own experiments: four stages of the largest memory, micro-batches of 4 (its code's settings); here
    cut equally, with two replicas of each."""
    length, largest = len(asked.profile.layers), len(asked.places[0].sizes) - 1
    ends = [length * number // 4 for number in range(5)]
    cuts = [pipeline.Cut(first, after - 1, 0, largest) for first, after in itertools.pairwise(ends)]
    plan = pipeline.evaluate(asked, pipeline_way(2, 4, "gpipe"), cuts)
    assert plan is not None, "four stages of the largest memory hold both models"
    return plan


def _end_to_end(bench: Bench, report: Report, count: int, batch: int) -> list[Bar]:
    """Iterations of whole pipelines, each contender with the plan that its own planner chooses."""
    bars, errors = [], []
    for name, layers in (("resnet", resnet()), ("bert", bert()), ("amoebanet", amoebanet())):
        asked = problem(layers, batch, DEGREES, bench.hop_seconds)
        # Both planners are asked for the fastest, ours within what theirs costs. Ours knows what it plans for.
        theirs = uniform(asked)[0]
        early = replace(asked, merges_early=True, merges_apart=True)
        contenders = [
            Contender("FuncPipe's set-up, searched", theirs, False),
            Contender("FuncPipe's set-up, as run", _as_run(asked), False),
            Contender("our plan, its merge", _ours(asked, theirs), False),
            Contender("+ merge while it computes", _ours(early, theirs), True),
            Contender("+ bf16", _ours(replace(early, sent_share=0.5, merged_share=0.5), theirs), True, codec="bf16"),
            Contender("+ int8 merges", _ours(replace(early, sent_share=0.5, merged_share=0.25), theirs), True,
                      codec="int8"),
        ]  # fmt: skip
        found: dict[str, list[Made]] = {contender.name: [] for contender in contenders}
        for turn in range(count):
            for contender in contenders:
                made = bench.iterations(layers, batch, contender, 1)
                found[contender.name] += made
                report.runs.append(
                    {
                        "part": "end to end", "model": name, "turn": turn, "contender": contender.name,
                        "predicted": contender.plan.seconds, **_numbers(made),
                    }
                )  # fmt: skip
        print(f"\n{name}, batch {batch}, median of {count}")
        print(
            f"  {'':<32} {'stages':>24} {'order':>6} {'mem MB':>14} {'s':>6} {'predicted':>9} {'1e-6 USD':>9}"
            f" {'core s':>6}"
        )
        usd = {}
        medians = {name: statistics.median(made.seconds for made in runs) for name, runs in found.items()}
        for contender in contenders:
            plan = contender.plan
            seconds = medians[contender.name]
            busy = statistics.median(made.core_seconds for made in found[contender.name])
            usd[contender.name] = plan.usd - plan.function_usd + plan.function_usd * seconds / plan.seconds
            cuts = ",".join(f"{stage.first}-{stage.last}" for stage in plan.stages) + f" x{plan.way.degree}"
            memory = ",".join(str(stage.memory_mb) for stage in plan.stages)
            print(
                f"  {contender.name:<32} {cuts:>24} {plan.way.order:>6} {memory:>14} {seconds:6.2f}"
                f" {plan.seconds:9.2f} {1e6 * usd[contender.name]:9.2f} {busy:6.2f}"
            )
            errors.append(abs(plan.seconds / seconds - 1))
        for mine, against in itertools.product(contenders[-2:], contenders[:2]):
            times = medians[against.name] / medians[mine.name]
            saved = 100 * (1 - usd[mine.name] / usd[against.name])
            bars.append(Bar.at_least(f"{name}, {mine.name}: faster than {against.name}", times, "x", 1.3))
            bars.append(Bar.at_least(f"{name}, {mine.name}: cheaper than {against.name}", saved, "%", 20))
        report.details[name] = {"usd": usd, "plans": {c.name: asdict(c.plan) for c in contenders}}
    return [*bars, *_prediction(bench, report, errors, count)]


def _ours(asked: pipeline.PipelineProblem, theirs: pipeline.PlannedPipeline) -> pipeline.PlannedPipeline:
    found = fastest(pipeline.front(asked), theirs.usd)
    assert found is not None, "every plan of the baseline is among those that the search covers"
    return found


def _prediction(bench: Bench, report: Report, errors: list[float], count: int) -> list[Bar]:
    """Predicted against measured iterations, over cuts, orders, degrees and micro-batches; merges are not hidden."""
    layers, batch = bert(), 16
    asked = problem(layers, batch, DEGREES, bench.hop_seconds)
    cases = [
        (cuts, way)
        for cuts in (((0, 4), (5, 9)), ((0, 2), (3, 6), (7, 9)), ((0, 9),))
        for way in ((1, 2, "gpipe"), (1, 4, "1f1b"), (2, 2, "1f1b"), (2, 4, "gpipe"), (4, 2, "gpipe"))
    ]
    for cuts, way in cases:
        chosen = tuple(pipeline.Cut(first, last, 0, 3) for first, last in cuts)
        plan = pipeline.evaluate(asked, pipeline_way(*way), chosen)
        if plan is None:
            continue
        made = bench.iterations(layers, batch, Contender("", plan, False), max(1, count // 2))
        measured = statistics.median(one.seconds for one in made)
        errors.append(abs(plan.seconds / measured - 1))
        report.runs.append(
            {"part": "prediction", "cuts": cuts, "way": way, "predicted": plan.seconds, **_numbers(made)}
        )
        print(f"  {cuts!s:<34} {way!s:<18} predicted {plan.seconds:6.3f} s, measured {measured:6.3f} s")
    report.details["prediction errors"] = errors
    return [
        Bar.at_most("predicted iteration, median error", 100 * statistics.median(errors), "%", 5),
        Bar.at_most("predicted iteration, worst error", 100 * max(errors), "%", 10),
    ]


def measure(report: Report, *, quick: bool) -> None:
    """Run everything, print tables, and add runs, details and bars to the report. Two to three minutes where quick."""
    torch.set_num_threads(1)
    count, batch = 2 if quick else 5, 16
    report.details["store"] = {"put_s": PUT_SECONDS, "get_s": GET_SECONDS, "bytes_per_s": RATE, "kind": "shaped files"}
    report.details["load before the live part"] = os.getloadavg()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        bench = Bench(Path(folder))
        report.details["hop_s"] = bench.hop_seconds
        print(f"\nA short value from worker to worker: {1e3 * bench.hop_seconds:.1f} ms, of which the store 25 ms")
        report.bars += _merges(bench, report, count)
        report.bars += _end_to_end(bench, report, count, batch)
