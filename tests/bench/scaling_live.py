"""Tuners of the number of workers in running jobs: real daemons, one region, sparse logistic regression to a loss.

The same job is submitted with a fixed pool, with MLLess's tuner and with ours, one after another, in turn for each
seed, and with fewer fixed workers whose learning rate goes with them, as the tuners' does: the cheapest of those is the
ceiling of what staying with one number could have had. Ours is told `workers: auto`, where it says how many to begin
with, and once more to begin with the pool. Workers of 4 GB cost four times as much beside the same parameter server as
those of 1 GB. Gradients, processes, exchange and meters are real. A sleep for each sample stands for the compute of a
worker, so that the machine's cores are not what is scaled; seconds are the wall's, from the first step until the loss
is reached; dollars are what the job's account says at its end.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Bar, Report
from support.running import PRICES, TEMPLATES, Running

from deploy.local import LocalFederation, RegionSite

__all__ = ["live"]

POOL, BATCH, SAMPLE_MS, LEARNING_RATE = 4, 64, 0.5, 0.001
SAMPLES, TARGET = 20_000, 0.60
PATIENCE_SECONDS = 400.0
FIXED, PUBLISHED = "fixed pool", "MLLess"
OURS, FROM_POOL, FAST = "ours", "ours, from pool", "ours, minimise: time"
SLEEP = f"""

_loss = loss


def loss(model, batch):
    import time

    time.sleep(batch[2].numel() * {SAMPLE_MS} / 1e3)
    return _loss(model, batch)
"""


@dataclass(frozen=True)
class Lived:
    """One job."""

    market: str
    policy: str
    seed: int
    seconds: float
    """From the first step until its loss was reached."""
    usd: float
    rounds: int
    samples: int
    changes: tuple[tuple[int, int, int], ...]
    """(step from which the batch was another, workers before, workers after)."""
    reasons: tuple[str, ...]
    load: float


def live(report: Report, *, quick: bool, seeds: int | None, memories_mb: Sequence[int]) -> list[Bar]:
    """Run it, print tables; returns the bars."""
    policies = [FIXED, PUBLISHED, OURS, FROM_POOL, FAST, _fewer(2), _fewer(1)]
    runs: list[Lived] = []
    with tempfile.TemporaryDirectory(prefix="geofed-bench-") as name:
        folder = Path(name)
        with LocalFederation(folder / "federation", [_site(folder)]) as federation:
            running = Running(federation, folder)
            for seed in range(1, 1 + (seeds or (1 if quick else 3))):
                for memory, policy in product(memories_mb[-1:] if quick else memories_mb, policies):
                    if quick and policy not in (FIXED, PUBLISHED, OURS):
                        continue
                    runs.append(_lived(running, memory, policy, seed))
                    print(f"  live, {runs[-1].market}, seed {seed}: {_shown(runs[-1])}", flush=True)
    report.runs += [{"part": "live", **asdict(run)} for run in runs]
    markets = list(dict.fromkeys(run.market for run in runs))
    return [bar for market in markets for bar in _told([run for run in runs if run.market == market], market)]


def _told(runs: list[Lived], market: str) -> list[Bar]:
    """A table, and its bars."""
    print(f"\nlive, {market}: medians until the loss is reached; against the fixed pool")
    for policy in dict.fromkeys(run.policy for run in runs):
        own = [run for run in runs if run.policy == policy]
        seconds, usd = (statistics.median(getattr(run, column) for run in own) for column in ("seconds", "usd"))
        less, longer = (100 * (_ratio(runs, policy, FIXED, column) - 1) for column in ("usd", "seconds"))
        print(f"  {policy:<24}{seconds:>8.1f} s{1e6 * usd:>9.0f} u${less:>+8.0f} % dollars{longer:>+8.0f} % time")
    text = f"live, {market}: ours"
    bars = [
        Bar.at_least(f"{text} cheaper than {other}", 100 * (1 - _ratio(runs, OURS, other, "usd")), "%", least)
        for other, least in ((FIXED, 25.0), (PUBLISHED, 10.0))
    ]
    if any(run.policy == FAST for run in runs):
        slower = 100 * (_ratio(runs, FAST, FIXED, "seconds") - 1)
        bars.append(Bar.at_most(f"{text}, minimise: time, slower than the fixed pool", slower, "%", 2))
        best = min((FIXED, _fewer(2), _fewer(1)), key=lambda policy: _ratio(runs, policy, FIXED, "usd"))
        over = 100 * (_ratio(runs, OURS, best, "usd") - 1)
        bars.append(Bar.at_most(f"{text} dearer than the cheapest fixed number ({best})", over, "%", 10))
        saved = 100 * (1 - _ratio(runs, best, FIXED, "usd"))
        bars.append(Bar.at_least(f"live, {market}: that one cheaper than the pool (ceiling)", saved, "%", 25))
    return bars


def _fewer(workers: int) -> str:
    return f"fixed, {workers} of {POOL}"


def _site(folder: Path) -> RegionSite:
    job = folder / "job"
    shutil.copytree(TEMPLATES / "sparse-logistic-regression", job)
    with (job / "task.py").open("a") as file:
        file.write(SLEEP)
    argv = [sys.executable, str(job / "make_data.py"), "--regions", "east", "--out", str(folder / "data")]
    made = subprocess.run([*argv, "--samples", str(SAMPLES)], check=True, capture_output=True, text=True).stdout
    splits = {split: {"uri": p["path"], "samples": p["samples"]} for split, p in json.loads(made)["east"].items()}
    return RegionSite(
        "east",
        {
            "cloud": "test",
            "capacity": {"workers": POOL, "memoryMb": 4096},
            "prices": PRICES,
            "datasets": {"clicks": {"splits": splits}},
            "channel": {"kind": "file", "path": str(folder / "channel")},
        },
    )


def _settings(policy: str, seed: int) -> tuple[str, ...]:
    workers, rate = "auto" if policy in (OURS, FAST) else str(POOL), LEARNING_RATE
    scaling = {PUBLISHED: "mlless", OURS: "tuned", FROM_POOL: "tuned", FAST: "tuned"}.get(policy, "fixed")
    if policy.startswith("fixed, "):
        workers = policy.split()[1]
        rate *= (int(workers) / POOL) ** 0.5
    return (
        f"train.batch={BATCH}", f"train.seed={seed}", f"train.workers={workers}", f"train.scaling={scaling}",
        f"train.end={{epochs: 200, goal: {{metric: loss, atMost: {TARGET}}}}}", "train.evaluateEvery=1",
        "wan.interval=5", f"task.config.lr={rate}", f"objective.minimise={'time' if policy == FAST else 'cost'}",
    )  # fmt: skip


def _lived(running: Running, memory_mb: int, policy: str, seed: int) -> Lived:
    load = os.getloadavg()[0]
    job = running.submit(*_settings(policy, seed), f"function.memoryMb={memory_mb}")
    ended = running.wait_end(job, PATIENCE_SECONDS)
    result, events = ended["result"], running.events(job)
    if ended["state"] != "succeeded" or not result["ended_early"]:
        raise SystemExit(f"{policy}, seed {seed}: the loss was not reached: {ended['state']} {ended.get('error')}")
    told = {event["kind"]: event for event in events}
    begun, reached = (_seconds(told[kind]["at"]) for kind in ("job.running", "job.goal"))
    before, changes = POOL, []
    for event in events:
        if event["kind"] == "partition.batch":
            changes.append((event["data"]["first_step"], before, event["data"]["workers"]))
            before = event["data"]["workers"]
    reasons = tuple(event["text"] for event in events if event["kind"] == "job.tuning")
    (region,) = result["regions"]
    return Lived(
        market=f"workers of {memory_mb} MB",
        policy=policy,
        seed=seed,
        seconds=reached - begun,
        usd=result["usd"],
        rounds=region["rounds"],
        samples=region["samples"],
        changes=tuple(changes),
        reasons=reasons,
        load=load,
    )


def _seconds(at: str | float) -> float:
    return float(at) if not isinstance(at, str) else datetime.fromisoformat(at).timestamp()


def _shown(run: Lived) -> str:
    ways = ", ".join(f"{after} from step {step}" for step, _, after in run.changes) or "no change"
    return f"{run.policy:<24}{run.seconds:6.1f} s, {1e6 * run.usd:6.0f} u$, {run.rounds} rounds; {ways}"


def _ratio(runs: list[Lived], one: str, other: str, column: str) -> float:
    """Median over the seeds."""
    beside = {run.seed: getattr(run, column) for run in runs if run.policy == other}
    return statistics.median(getattr(run, column) / beside[run.seed] for run in runs if run.policy == one)
