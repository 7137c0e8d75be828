"""A model of three times a function's memory, through real daemons. `pipeline.py --part large` runs it.

One region whose functions get so many MB and no more: the embedded gateway kills a worker above it. A chain of residual
blocks whose parameters and gradients alone take three times as much is profiled layer by layer, planned, and trained in
stages; nobody ever holds the whole of it. A process without limits then trains the same model on the same samples.

The task itself notes when each of its optimisers has made a step, and each micro-batch's loss. An iteration is the time
from when all stages have made one step to when all have made the next. All functions share this machine's cores, so
that a step takes as long as these have work, and longer where others use them: what the functions keep the cores
busy is told apart, and does not depend on others so much.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from report import Bar, Report

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deploy.local import LocalFederation, RegionSite
from region_agent.worker.data.shard import BatchStream
from sync.pipeline import Layers

__all__ = ["measure"]

TASK = Path(__file__).with_name("pipeline_large_task.py")
REGION, BATCH, LENGTH, SEED, WORKERS = "east", 16, 16, 3, 24
PRICES = {
    "source": "AWS Lambda, eu-central-1", "asOf": "2025-01", "functionUsdPerGbSecond": 0.0000166667,
    "functionUsdPerRequest": 0.0000002, "serverUsdPerHour": 0.05, "egressUsdPerGb": 0.09,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """A model, and what a function may use."""

    memory_mb: int
    width: int
    blocks: int
    steps: int
    """Of a round."""
    rounds: int

    @property
    def parameters(self) -> int:
        """Of the blocks alone."""
        return self.blocks * (8 * self.width**2 + 7 * self.width)

    @property
    def times(self) -> float:
        """Parameters and gradients, in sizes of a function's memory."""
        return 2 * 4 * self.parameters / (self.memory_mb * 2**20)

    @property
    def config(self) -> dict[str, Any]:
        return {"width": self.width, "blocks": self.blocks, "length": LENGTH, "lr": 0.05}


WHOLE = Size(640, 640, 78, 12, 2)
SMALL = Size(640, 640, 78, 6, 1)
"""Fewer steps, for --quick; the model must stay what it is."""


@dataclass(frozen=True)
class Trained:
    """What came of the job."""

    planned: dict[str, Any]
    """The region's part of the plan."""
    estimate: dict[str, Any]
    result: dict[str, Any]
    losses: list[float]
    """Of each step, the mean over its samples."""
    iterations: list[float]
    """Seconds from each step to the next; a round's end is in some."""
    core_seconds: float
    """Of an iteration, what all functions keep cores busy; medians by process."""
    others: float
    """Cores that all else on this machine kept busy between the first and the last step."""
    updates: dict[int, float]
    """Seconds of the optimiser's step, by process, medians."""
    begun_seconds: float
    """From submission to the first loss: functions start, the first model is made, handed over and kept."""
    ended_seconds: float
    """From the last step to the job's end: the last round's model and state are kept, the result is made."""
    failures: int
    """Of functions."""


def measure(report: Report, *, quick: bool) -> None:
    """Train, compare, print, and add to the report."""
    size = SMALL if quick else WHOLE
    report.details["load before the large part"] = os.getloadavg()
    # On a disk, as what lies in shared memory is taken from the functions'; the channel alone is there.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "data" / "text.txt"
        text.parent.mkdir()
        text.write_bytes(_text(BATCH * 40 * (LENGTH + 1)))
        made, *again = _in_stages(folder, text, size, runs=1 if quick else 2)
        alone = _alone(folder, text, size)
    _tell(report, size, made, alone)
    for later in again:
        _tell_again(report, size, later)


def _text(length: int) -> bytes:
    """Words, by a generator of its own: a model can learn them."""
    generator = torch.Generator().manual_seed(SEED)
    words = [bytes(torch.randint(1, 27, (size,), generator=generator).tolist()) for size in (2, 3, 4, 5, 6, 7) * 8]
    drawn = torch.randint(0, len(words), (length // 3,), generator=generator).tolist()
    return b"\0".join(words[number] for number in drawn)[:length]


def _in_stages(folder: Path, text: Path, size: Size, runs: int) -> list[Trained]:
    """Profiled once, and run so often."""
    notes, job = text.with_name("notes.jsonl"), folder / "job"
    notes.touch()
    job.mkdir()
    (job / "task.py").write_text(TASK.read_text())
    (job / "job.yaml").write_text(json.dumps(_job(size, notes)))
    site = RegionSite(
        REGION,
        {
            "cloud": "test",
            "capacity": {"workers": WORKERS, "memoryMb": size.memory_mb},
            "prices": PRICES,
            "datasets": {"text": {"splits": {"train": {"uri": str(text), "samples": BATCH * 40}}}},
        },
    )
    with LocalFederation(folder / "federation", [site]) as federation, Watch() as watch:
        begun = time.monotonic()
        federation.control_plane("profile", str(job / "job.yaml"), timeout=400)
        print(f"profiled in {time.monotonic() - begun:.0f} s", flush=True)
        return [_run(federation, job, notes, watch) for _ in range(runs)]


def _run(federation: LocalFederation, job: Path, notes: Path, watch: Watch) -> Trained:
    notes.write_bytes(b"")
    begun = time.monotonic()
    submitted = federation.control_plane("submit", str(job / "job.yaml"), "-o", "name").stdout.strip()
    federation.control_plane("wait", submitted, "--timeout", "900s", check=False, timeout=930)
    ended = time.monotonic()
    told = json.loads(federation.control_plane("describe", submitted, "-o", "json").stdout)["data"]
    events = federation.control_plane("events", submitted, "-o", "jsonl").stdout.splitlines()
    if told["state"] != "succeeded":
        print(federation.log(f"agent-{REGION}")[-4000:], *events[-20:], sep="\n")
        raise SystemExit(f"the job {told['state']}: {told.get('error')}")
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    failures = sum(json.loads(line)["data"]["kind"].endswith("failed") for line in events)
    part = told["plan"]["partitions"][0]
    return Trained(
        planned=part,
        estimate=told["plan"]["estimate"],
        result=told["result"],
        losses=_losses(lines),
        iterations=_iterations(lines),
        core_seconds=_core_seconds(lines),
        others=_others(lines, watch),
        updates=_updates(lines),
        begun_seconds=min(line["at"] for line in lines) - begun,
        ended_seconds=ended - max(line["at"] for line in lines),
        failures=failures,
    )


def _job(size: Size, notes: Path) -> dict[str, Any]:
    return {
        "apiVersion": "geofed/v1", "kind": "TrainingJob", "metadata": {"name": "large"},
        "task": {"module": "task.py", "config": {**size.config, "notes": str(notes)}},
        "data": {"dataset": "text"},
        "train": {"batch": BATCH, "seed": SEED, "end": {"steps": size.steps * size.rounds}},
        "advanced": {"wan": {"interval": size.steps}},
        "parallelism": {"pipeline": {"activations": "fp32"}},
        "objective": {"minimise": "time"},
        "function": {"slice": "10m"},
    }  # fmt: skip


def _losses(lines: list[dict[str, float]]) -> list[float]:
    """Of each step, from those of its micro-batches, which the last stage has noted in turn."""
    found, total, samples = [], 0.0, 0.0
    for line in lines:
        if "loss" in line:
            total, samples = total + line["loss"] * line["samples"], samples + line["samples"]
            if samples >= BATCH:
                found.append(total / samples)
                total = samples = 0.0
    return found


def _core_seconds(lines: list[dict[str, float]]) -> float:
    busy: dict[float, list[float]] = {}
    for line in lines:
        if "busy_seconds" in line:
            busy.setdefault(line["process"], []).append(line["busy_seconds"])
    return sum(statistics.median(b - a for a, b in itertools.pairwise(told)) for told in busy.values())


class Watch:
    """Of the whole machine: core seconds so far, twice a second. Use as a context manager."""

    def __init__(self) -> None:
        self._told: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def between(self, begun: float, ended: float) -> float:
        """Core seconds between two times of the monotonic clock."""
        before = max((one for one in self._told if one[0] <= begun), default=self._told[0])
        after = min((one for one in self._told if one[0] >= ended), default=self._told[-1])
        return (after[1] - before[1]) * (ended - begun) / max(1e-6, after[0] - before[0])

    def _look(self) -> None:
        while not self._over.wait(0.5):
            times = psutil.cpu_times()
            # What a guest uses counts as the user's already.
            busy = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
            self._told.append((time.monotonic(), busy))


def _others(lines: list[dict[str, float]], watch: Watch) -> float:
    """What is no function's, though the parameter server is the job's as well."""
    told: dict[float, list[tuple[float, float]]] = {}
    for line in lines:
        if "busy_seconds" in line:
            told.setdefault(line["process"], []).append((line["at"], line["busy_seconds"]))
    begun, ended = min(ats[0][0] for ats in told.values()), max(ats[-1][0] for ats in told.values())
    own = sum(ats[-1][1] - ats[0][1] for ats in told.values())
    return max(0.0, watch.between(begun, ended) - own) / (ended - begun)


def _updates(lines: list[dict[str, float]]) -> dict[int, float]:
    steps = [line for line in lines if "step_seconds" in line]
    return {
        int(process): statistics.median(one["step_seconds"] for one in steps if one["process"] == process)
        for process in {line["process"] for line in steps}
    }


def _iterations(lines: list[dict[str, float]]) -> list[float]:
    """A step has ended when all stages have made theirs."""
    made: Counter[float] = Counter()
    ends: dict[int, float] = {}
    for line in lines:
        if "step_seconds" in line:
            made[line["process"]] += 1
            ends[made[line["process"]]] = line["at"]
    return [after - before for before, after in itertools.pairwise(ends[step] for step in sorted(ends))]


def _alone(folder: Path, text: Path, size: Size) -> list[float]:
    """The losses of one process that holds everything."""
    spec = importlib.util.spec_from_file_location("large_task", TASK)
    assert spec is not None
    assert spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    config = {**size.config, "notes": str(folder / "alone.jsonl")}
    layers = Layers.declared(task.layers(config), SEED)
    model = layers.stage(0, len(layers) - 1).train()
    optimizer = task.optimizer(model.parameters(), config)
    stream = BatchStream(task.dataset(str(text), "train", config), SEED, REGION, 0, 1, BATCH)
    losses = []
    for step in range(1, size.steps * size.rounds + 1):
        optimizer.zero_grad()
        loss = task.loss(model, stream.batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _tell(report: Report, size: Size, made: Trained, alone: list[float]) -> None:
    pipeline, iteration = made.planned["pipeline"], statistics.median(made.iterations)
    predicted, stages = pipeline["step_seconds"], len(pipeline["stages"])
    apart = max(abs(mine / his - 1) for mine, his in zip(made.losses, alone, strict=True))
    update = sum(made.updates.values())
    print(f"\n{size.parameters / 1e6:.0f} million parameters; they and their gradients take {size.times:.2f} times the")
    print(f"{size.memory_mb} MB of a function. {stages} stages, micro-batches of {pipeline['micro_batch']}")
    for stage in pipeline["stages"]:
        print(f"  layers {stage['first']:>3}-{stage['last']:<3} need {stage['needed_mb']:5.0f} MB")
    print(f"  {'step':>4} {'loss':>9} {'alone':>9} {'s':>7}")
    for step, (mine, his) in enumerate(zip(made.losses, alone, strict=True), 1):
        took = f"{made.iterations[step - 2]:7.2f}" if step > 1 else ""
        print(f"  {step:>4} {mine:9.5f} {his:9.5f} {took}")
    print(f"  an iteration: predicted {predicted:.2f} s, measured {iteration:.2f} s (median);", end=" ")
    print(f"{update:.2f} s of a core are the optimisers'")
    work = predicted * len(os.sched_getaffinity(0))
    print(f"  of the cores: predicted {work:.2f} s at most, measured {made.core_seconds:.2f} s;", end=" ")
    print(f"all else kept {made.others:.2f} cores busy meanwhile")
    print(f"  job: predicted {made.estimate['seconds']['expected']:.0f} s, measured {made.result['seconds']:.0f} s;")
    for phase in made.estimate["phases"]:
        print(f"    {phase['name']:<36}{phase['times']:>4} {phase['seconds']:>8.2f} s predicted")
    print(f"    {made.begun_seconds:.0f} s of it before the first loss, {made.ended_seconds:.0f} s after the last step")
    print(f"  functions that failed: {made.failures}; load {os.getloadavg()[0]:.1f}")
    report.runs.append({"part": "large", "size": asdict(size), **asdict(made), "alone": alone})
    report.details["load after the large part"] = os.getloadavg()
    report.bars += [
        Bar.at_least("large: parameters and gradients, in sizes of a function's memory", size.times, "x", 3.0),
        Bar.at_most("large: functions that failed", made.failures, "", 0),
        Bar.at_most("large: losses apart from one process's, worst step", 100 * apart, "%", 0.1),
        Bar.at_most("large: iteration predicted by the profile, error", 100 * abs(predicted / iteration - 1), "%", 10),
        Bar.at_most(
            "large: predicted job, error",
            100 * abs(made.estimate["seconds"]["expected"] / made.result["seconds"] - 1),
            "%",
            20,
        ),
        Bar.at_most(
            "large: predicted work of the cores in an iteration, error",
            100 * abs(work / made.core_seconds - 1),
            "%",
            10,
        ),
    ]


def _tell_again(report: Report, size: Size, made: Trained) -> None:
    """Of a run whose plan rests on one before it, too."""
    predicted, iteration = made.planned["pipeline"]["step_seconds"], statistics.median(made.iterations)
    print(f"\n  another run: an iteration: predicted {predicted:.2f} s, measured {iteration:.2f} s (median);", end=" ")
    print(f"reckoned {made.planned['pipeline']['pace']:.2f} times as long as by the profile")
    print(f"  job: predicted {made.estimate['seconds']['expected']:.0f} s, measured {made.result['seconds']:.0f} s")
    report.runs.append({"part": "large, again", "size": asdict(size), **asdict(made)})
    report.bars.append(
        Bar.at_most("large: iteration predicted after a run, error", 100 * abs(predicted / iteration - 1), "%", 10)
    )
