"""Accuracy of training over a WAN compared with a single site, and bytes sent.

    .venv/bin/python tests/bench/wan_quality.py [--quick] [--json PATH] [--data DIR] [--seeds N] [--processes N]

Three regions, real gradients, in one process and in virtual time (quality_federation.py); links of 100 Mbit/s and 30
ms, 50 ms of compute a step. Each workload has one split that is IID and one with Dirichlet(0.3) labels.

With ``--methods``: methods of federated learning beside federated averaging, on labels of Dirichlet(0.3) and
Dirichlet(0.1). Regions have equally much data; in a round the second makes a half of the first one's local steps, and
the third a quarter, as with `train.balance: speed`.

The yardstick is one site that holds all data and trains synchronously on as many samples: the regions' batches together
in as many steps. One region's batch in three times as many steps, which no exchange between regions can make, is shown
beside it, and so is `bsp`, the exact mean of three regions after every step: the most that exchanging can give. Every
contender chooses its learning rate out of the workload's three with a seed of its own, which is not measured; a method
chooses the setting of its server, or the weight of its proximal term, likewise.
Points are per cent of accuracy, of tokens for text. Bytes are those of framed updates over all six links; `asgd` sends
the whole change at every step in fp32. The regions make the first model themselves, seeded alike.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
from quality_data import Data
from quality_federation import REGIONS, Outcome, Setting, alone, asgd_bytes, default_folder, federated, update_bytes
from quality_models import WORKLOADS, Workload
from report import Bar, Report, options

SPLITS: dict[str, float | None] = {"iid": None, "dirichlet-0.3": 0.3, "dirichlet-0.1": 0.1}
BARS = {"iid": 0.3, "dirichlet-0.3": 1.0}
"""Points that may be missing against one site."""
LEAST_RATIO = 500.0
"""asgd's bytes over ours."""
TUNING_SEED = 1000
STUDENT = {1: math.nan, 2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""97.5 % quantiles of Student's t, by the number of values."""
YARDSTICK = "one site, batch x 3"
ALONE = {YARDSTICK: 3, "one site, batch x 1": 1}
"""How many of a region's batches it takes at once."""
DEFAULT = "sparing"
"""The setting that the bars are about; what `wan: auto` takes depends on links and speeds, which a virtual WAN only
pretends."""
CODEC = "ternary"
FEWEST_ROUNDS = 8
PACES = (1.0, 0.5, 0.25)
"""Local steps of the regions with ``--methods``, as a part of the interval."""
METHOD_INTERVAL = 40
METHOD_SPLITS = ("dirichlet-0.3", "dirichlet-0.1")
METHODS = {
    "fedavg": ("ma", "", (0.0,)), "fednova": ("fednova", "", (0.0,)),
    "fedprox": ("fedprox", "mu", (0.001, 0.01, 0.1)), "fedavgm": ("fedavgm", "lr", (0.3, 0.6, 1.0)),
    "fedadam": ("fedadam", "lr", (0.003, 0.01, 0.03)), "fedyogi": ("fedyogi", "lr", (0.003, 0.01, 0.03)),
    "fedadagrad": ("fedadagrad", "lr", (0.01, 0.03, 0.1)),
}  # fmt: skip
"""By the names of the rows: the policy, the setting of it that is chosen as the rate is, and the values that it is
chosen of."""


@dataclass(frozen=True)
class Job:
    """One run."""

    workload: str
    contender: str
    split: str
    steps: int
    rate: float
    seed: int
    value: float = 0.0
    """Of the setting that a method chooses; 0: it has none."""


def contenders(workload: Workload, steps: int, value: float = 0.0) -> dict[str, Setting]:
    """Those with WAN exchange, for a job of so many steps; ``value``: of the setting that a method chooses."""
    found = [
        default(workload, steps),
        Setting("bsp", "bsp", 1),
        Setting("ma-int8", "ma", max(1, steps // 6), "int8"),
        Setting("asgd-ga-f8", "asgd-ga", 8, "fp32", {"background": 1.0}),
    ]
    for name, (policy, key, _) in METHODS.items():
        settings = {key: value} if key and value else {}
        found.append(Setting(name, policy, METHOD_INTERVAL, settings=settings, paces=PACES))
    return {setting.name: setting for setting in found}


def default(workload: Workload, steps: int) -> Setting:
    """Where bytes count most: as many rounds as 1/500 of asgd's bytes allow for, and no more than one in 16 steps."""
    a_round = len(REGIONS) * (len(REGIONS) - 1) * update_bytes(workload, CODEC)
    rounds = int(asgd_bytes(workload, steps) / LEAST_RATIO // a_round)
    # A job too short for both is to learn first of all.
    interval = max(16, math.ceil(steps / max(FEWEST_ROUNDS, rounds)))
    return Setting(DEFAULT, "diloco", min(interval, steps), CODEC, {"lr": 1.0, "momentum": 0.5})


@cache
def _data(workload: str, folder: Path) -> Data:
    return WORKLOADS[workload].data(folder)


def make(job: Job, folder: Path) -> Outcome:
    """Carry out one run."""
    torch.set_num_threads(1)
    workload, data = WORKLOADS[job.workload], _data(job.workload, folder)
    if job.contender in ALONE:
        batches = ALONE[job.contender]
        return alone(
            workload, data, batch=batches * workload.batch, steps=job.steps * 3 // batches, rate=job.rate, seed=job.seed
        )
    setting = contenders(workload, job.steps, job.value)[job.contender]
    return federated(workload, data, setting, alpha=SPLITS[job.split], steps=job.steps, rate=job.rate, seed=job.seed)


def main() -> int:
    given = options(__doc__, data=default_folder(), more=_more)
    report = Report("wan_quality", given.quick)
    names = given.workloads.split(",") if given.workloads else ["lenet-mnist"] if given.quick else list(WORKLOADS)
    seeds = 1 if given.quick else given.seeds
    report.details = {"torch": torch.__version__, "real_data": {n: _data(n, given.data).real for n in names}}
    with ProcessPoolExecutor(given.processes) as pool:
        for name in names:
            _workload(name, given, seeds, pool, report)
    return report.close(given.json)


def _more(parser: ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5, help="of each row; default: 5")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="runs at once; default: 2")
    parser.add_argument("--workloads", default="", help="some of " + ", ".join(WORKLOADS))
    parser.add_argument(
        "--only", default="", help="some of the contenders with WAN exchange: sparing, bsp, ma-int8, asgd-ga-f8"
    )
    parser.add_argument("--methods", action="store_true", help="methods of federated learning instead")
    parser.add_argument("--verbose", action="store_true", help="every run, as it ends")
    parser.add_argument("--untuned", action="store_true", help="every contender with the workload's middle rate")
    parser.add_argument("--steps", type=int, default=0, help="of a region; default: the workload's, 400 with --quick")


def _workload(name: str, given: Namespace, seeds: int, pool: ProcessPoolExecutor, report: Report) -> None:
    workload = WORKLOADS[name]
    steps = given.steps or (400 if given.quick else workload.steps)
    known = [one for one in contenders(workload, steps) if (one in METHODS) == given.methods]
    wan = [one for one in known if not given.only or one in given.only.split(",")]
    rows = [Job(name, one, "iid", steps, 0.0, 0) for one in ALONE]
    splits = METHOD_SPLITS if given.methods else tuple(BARS)
    rows += [Job(name, one, split, steps, 0.0, 0) for one in wan for split in splits]

    def run(jobs: Sequence[Job]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for job, outcome in zip(jobs, pool.map(make, jobs, [given.data] * len(jobs)), strict=True):
            report.runs.append({**asdict(job), **asdict(outcome)})
            outcomes.append(outcome)
            if given.verbose:
                print(f"  {job} {outcome}", file=sys.stderr, flush=True)
        return outcomes

    # A rate for each contender, with a seed of its own, then all rows with the same seeds.
    if given.methods:
        rows = _with_values(workload, rows, given, run)
    rate = _rates(workload, rows, steps, given, run)
    chosen = [replace(row, rate=rate[row.contender]) for row in rows]
    jobs = [replace(row, seed=seed) for row in chosen for seed in range(1, seeds + 1)]
    outcomes = run(jobs)
    found = {(row.contender, row.split): outcomes[at * seeds : (at + 1) * seeds] for at, row in enumerate(chosen)}
    _show(workload, steps, found, rate, report)
    report.details |= {f"{name}, {row.contender}, {METHODS[row.contender][1]}": row.value for row in rows if row.value}


def _with_values(
    workload: Workload, rows: Sequence[Job], given: Namespace, run: Callable[[Sequence[Job]], list[Outcome]]
) -> list[Job]:
    """The rows with the value of its setting that suits each method best, at the workload's middle rate, by the loss on
    the labels that differ less."""
    tried = [
        replace(row, rate=workload.rates[1], seed=TUNING_SEED, value=value)
        for row in rows
        if row.contender in METHODS and row.split == METHOD_SPLITS[0]
        for value in METHODS[row.contender][2]
        if METHODS[row.contender][1]
    ]
    best = {job.contender: METHODS[job.contender][2][1] for job in tried}
    if not given.quick:
        losses = list(zip(tried, run(tried), strict=True))
        for name in best:
            best[name] = min((outcome.loss, job.value) for job, outcome in losses if job.contender == name)[1]
    if best:
        print("chosen:", ", ".join(f"{METHODS[name][1]} {value:g} of {name}" for name, value in best.items()))
    return [replace(row, value=best.get(row.contender, 0.0)) for row in rows]


def _rates(
    workload: Workload, rows: Sequence[Job], steps: int, given: Namespace, run: Callable[[Sequence[Job]], list[Outcome]]
) -> dict[str, float]:
    """The learning rate that suits each contender best, of as many for each; IID data decides where there are rows
    of them, and the loss: of one seed it tells more than the accuracy, which counts samples."""
    first = {row.contender: row.split for row in reversed(rows)}
    judged = [row for row in rows if row.split == first[row.contender]]
    if given.quick or given.untuned:
        return {row.contender: workload.rates[1] for row in judged}
    tried = run([replace(row, rate=rate, seed=TUNING_SEED) for row in judged for rate in workload.rates])
    count = len(workload.rates)
    best: dict[str, float] = {}
    for at, row in enumerate(judged):
        losses = [outcome.loss for outcome in tried[at * count : (at + 1) * count]]
        best[row.contender] = workload.rates[losses.index(min(losses))]
    return best


def _show(
    workload: Workload, steps: int,
    found: dict[tuple[str, str], list[Outcome]], rates: dict[str, float], report: Report,
) -> None:  # fmt: skip
    dense = asgd_bytes(workload, steps)
    print(f"\n{workload.name}, {steps} steps of {workload.batch} in each of 3 regions; yardstick: {YARDSTICK}")
    print(f"{'contender':<22} {'split':<14} {'rate':>6} {'accuracy':>8} {'points (95 %)':>16} {'loss':>7}", end=" ")
    print(f"{'kB/step/link':>13} {'total MB':>9} {'asgd over it':>12} {'virtual s':>10}")
    for (contender, split_name), outcomes in found.items():
        against = [o.accuracy - y.accuracy for o, y in zip(outcomes, found[YARDSTICK, "iid"], strict=True)]
        mean, half = interval(against)
        sent = statistics.mean(o.bytes_total for o in outcomes)
        ratio = dense / sent if sent else math.inf
        shown = f"{mean:+.2f} ± {half:.2f}"
        accuracy, loss = (statistics.mean(getattr(o, key) for o in outcomes) for key in ("accuracy", "loss"))
        seconds = statistics.mean(o.seconds for o in outcomes)
        print(f"{contender:<22} {split_name:<14} {rates[contender]:>6g} {accuracy:>8.2f} {shown:>16}", end=" ")
        print(f"{loss:>7.4f} {sent / 6e3 / steps:>13.3f} {sent / 1e6:>9.3f} {ratio:>12.0f} {seconds:>10.1f}")
        report.details[f"{workload.name}, {contender}, {split_name}"] = {
            "rate": rates[contender], "points": mean, "half_interval": half, "accuracy": accuracy,
            "loss": loss, "bytes": sent, "asgd_over_it": ratio, "virtual_seconds": seconds,
        }  # fmt: skip
        refused = sum(o.refused for o in outcomes)
        if contender == DEFAULT:
            title = f"{workload.name}, {split_name}"
            report.bars += [
                Bar.at_most(f"{title}: points lost (± {half:.2f})", -mean, "points", BARS[split_name]),
                Bar.at_least(f"{title}: asgd's bytes over ours", ratio, "x", LEAST_RATIO),
            ]
        if contender not in ALONE:
            report.bars.append(
                Bar.at_most(f"{workload.name}, {split_name}, {contender}: honest updates refused", refused, "", 0)
            )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the 95 % confidence interval."""
    if len(values) < 2:
        return statistics.mean(values), math.nan
    return statistics.mean(values), STUDENT.get(len(values), 2.2) * statistics.stdev(values) / math.sqrt(len(values))


if __name__ == "__main__":
    sys.exit(main())
