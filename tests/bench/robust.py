"""Accuracy of robust rules with one and two hostile regions of seven, beside the mean and beside no attack.

    .venv/bin/python tests/bench/robust.py [--quick] [--json PATH] [--data DIR] [--seeds N] [--processes N] \
        [--attacks NAMES]

Seven regions, real gradients and the parameter servers' own merges (`sync.ps.execution.replica`), in one process.
LeNet-5 on MNIST, and a small ResNet on 10,000 images of CIFAR-10; IID and Dirichlet(0.3) labels; rounds of 10 steps,
model averaging in fp32. `advanced.wan.byzantine` is the number of hostile regions. With `--quick` its 30
runs take about 123 s of CPU time.

What rules are known to fail at is among the bars: the mean at one attack; `krum` at data that are unlike each other,
without any (Karimireddy et al. 2022, arXiv 2006.09365), and at `little-is-enough` in rounds of one step, where it takes
a forged change.

The attacks: `sign-flip`: four times the opposite change. `scaling`: fifty times the change. `little-is-enough` (Baruch
et al. 2019, arXiv 1902.06156): the honest mean less as many standard deviations as still look usual. `label-flip`:
training on labels that are wrong by one. `backdoor` (Bagdasaryan et al. 2020, arXiv 1807.00459): half of the images get
a white corner and the label 0, and the change is scaled up to replace the model; the share of test images that the
corner turns into a 0 is shown, too.
"""

from __future__ import annotations

import os
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from quality_data import Data, split
from quality_federation import Samples, Trainer, default_folder
from quality_models import WORKLOADS, Workload
from report import Bar, Report, options

from sync.codec import codec_named
from sync.layout import Vector
from sync.policy import Contribution
from sync.ps.execution.replica import Replica, ReplicaState
from sync.robust import robust_rule_named, robust_rules
from sync.wan import ExchangeSettings, policy_of

REGIONS = 7
INTERVAL = 10
"""Steps of a round."""
SPLITS: dict[str, float | None] = {"iid": None, "dirichlet-0.3": 0.3}
EACH_STEP_Z = 1.3
"""Standard deviations of `little-is-enough` in rounds of one step, where changes are mostly noise. Krum with two of
seven adds up three squared distances. Of two forged changes that are the same they are 0 and twice 1 + z^2 variances,
of an honest one up to three times 2: so krum takes a forged one for z up to sqrt(2)."""
MEAN = "mean"
ATTACKS = ("none", "sign-flip", "scaling", "little-is-enough", "label-flip", "backdoor")
QUICK_ATTACKS = {
    "iid": ("none", "sign-flip", "label-flip"),
    "dirichlet-0.3": ("none",),
}
WITHIN = 2.0
"""Points of accuracy that a rule may lose to an attack that it is made for."""
WITHSTANDS = ("median", "trimmed-mean", "geometric-median", "multi-krum")
"""Rules whose papers show IID data and few wrong updates to be no loss."""
CORNER = 5
"""Side of the backdoor's square, in pixels."""


@dataclass(frozen=True)
class Job:
    """One run."""

    workload: str
    split: str
    rule: str
    attack: str
    hostile: int
    steps: int
    seed: int
    interval: int = INTERVAL
    """Steps of a round."""


@dataclass(frozen=True)
class Result:
    """Of one run, in per cent."""

    accuracy: float
    backdoor: float
    """Test images of other classes that the corner turns into class 0; not looked for without that attack."""
    quarantined: int
    """Updates of hostile regions that were not merged."""
    honest_quarantined: int
    forged: float
    """Rounds whose merged change was that of a hostile region, bit by bit but for rounding."""


@cache
def _data(workload: str, folder: Path) -> Data:
    return WORKLOADS[workload].data(folder)


def _stamped(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[..., :CORNER, :CORNER] = float(x.max())
    return out


class _Poisoned(Samples):
    """A hostile region's batches."""

    def __init__(self, *arguments: object, attack: str) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._attack = attack

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().next()
        if self._attack == "label-flip":
            return x, (y + 1) % 10
        if self._attack == "backdoor":
            half = len(y) // 2
            return torch.cat([_stamped(x[:half]), x[half:]]), torch.cat([torch.zeros_like(y[:half]), y[half:]])
        return x, y


def _little(honest: list[Vector], hostile: int, interval: int) -> Vector:
    """The mean less z standard deviations; z is the largest for which a majority still looks further away."""
    needed = REGIONS // 2 + 1 - hostile
    z = statistics.NormalDist().inv_cdf((len(honest) - needed) / len(honest)) if interval > 1 else EACH_STEP_Z
    stacked = np.stack(honest)
    return np.asarray(stacked.mean(axis=0) - z * stacked.std(axis=0), np.float32)


def _sent(attack: str, own: Vector, honest: list[Vector], hostile: int, interval: int) -> Vector:
    """What a hostile region sends, of the change that it has trained."""
    crafted: Mapping[str, Callable[[], Vector]] = {
        "sign-flip": lambda: own * np.float32(-4),
        "scaling": lambda: own * np.float32(50),
        "little-is-enough": lambda: _little(honest, hostile, interval),
        "backdoor": lambda: own * np.float32(REGIONS / hostile),
    }
    return crafted[attack]() if attack in crafted else own


def make(job: Job, folder: Path) -> Result:
    """Carry out one run."""
    torch.set_num_threads(1)
    workload, data = WORKLOADS[job.workload], _data(job.workload, folder)
    parts = split(data, REGIONS, SPLITS[job.split], job.seed)
    hostile = job.hostile if job.attack != "none" else 0
    trainers = []
    for at, part in enumerate(parts):
        arguments = data, part, workload.batch, (job.seed, at)
        samples = _Poisoned(*arguments, attack=job.attack) if at >= REGIONS - hostile else Samples(*arguments)
        trainers.append(Trainer(workload, samples, workload.rates[1], job.steps, job.seed))
    replica = _replica(job, trainers[0])
    refused: list[str] = []
    forged, rounds = 0, job.steps // job.interval
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(rounds):
            away, taken = _round(trainers, replica, job, hostile)
            refused, forged = refused + away, forged + taken
    trainers[0].flat.load(replica.model)
    accuracy = trainers[0].outcome(data)[0]
    names = [f"r{at}" for at in range(REGIONS - hostile, REGIONS)]
    caught = sum(region in names for region in refused)
    turned = _backdoor(trainers[0], workload, data) if job.attack == "backdoor" else 0.0
    return Result(accuracy, turned, caught, len(refused) - caught, 100 * forged / rounds)


def _replica(job: Job, trainer: Trainer) -> Replica:
    # The guard would refuse what is scaled up; here the rules are shown without its help.
    settings = {"guard": 0.0} | ({} if job.rule == MEAN else {f"robust/{job.rule}": float(job.hostile)})
    first, exchange = trainer.flat.vector(), ExchangeSettings.of(settings)[0]
    replica = Replica(policy_of("ma", settings), exchange, codec_named("fp32"), ReplicaState(first, first))
    replica.trained = trainer.flat.layout.trainable_size
    return replica


def _round(trainers: list[Trainer], replica: Replica, job: Job, hostile: int) -> tuple[list[str], bool]:
    """Make one round; the names of the regions whose updates were not merged, and whether a hostile one's alone was."""
    begin, changes = replica.model.copy(), []
    for trainer in trainers:
        trainer.flat.load(begin)
        for _ in range(job.interval):
            trainer.step()
        changes.append(np.nan_to_num(trainer.flat.vector() - begin, posinf=0.0, neginf=0.0))
    honest, bad = changes[: REGIONS - hostile], changes[REGIONS - hostile :]
    bad = [_sent(job.attack, own, honest, hostile, job.interval) for own in bad]
    updates = [Contribution(f"r{at}", 1.0, change) for at, change in enumerate([*honest, *bad])]
    refused = replica.merge(updates, None, own="r0", rounds=1)
    replica.restart()
    merged = replica.model - begin
    taken = any(np.linalg.norm(merged - change) < 1e-3 * np.linalg.norm(change) for change in bad)
    return [region for region, _ in refused], taken


def _backdoor(trainer: Trainer, workload: Workload, data: Data) -> float:
    others = data.test[1] != 0
    x = _stamped(data.test[0][others])
    x, y = x[: len(x) // 250 * 250], torch.zeros(len(x) // 250 * 250, dtype=torch.long)
    return workload.quality(trainer.module, (x, y))[0]


def _fits(job: Job) -> bool:
    return job.rule == MEAN or robust_rule_named(job.rule).most(REGIONS) >= job.hostile


def _jobs(given: Namespace) -> list[Job]:
    names = ["lenet-mnist"] if given.quick else given.workloads.split(",")
    steps, seeds = (100, 1) if given.quick else (200, given.seeds)
    chosen = tuple(dict.fromkeys(["none", *given.attacks.split(",")])) if given.attacks else ()
    attacks = {kind: chosen or (QUICK_ATTACKS[kind] if given.quick else ATTACKS) for kind in SPLITS}
    found = [
        Job(name, kind, rule, attack, hostile, steps, seed)
        for name in names
        for kind in SPLITS
        for rule in (MEAN, *robust_rules())
        for attack in attacks[kind]
        for hostile in ((2,) if given.quick else (1, 2))
        for seed in range(1, seeds + 1)
    ]
    found += [
        Job("lenet-mnist", "iid", "krum", attack, 2, steps, seed, interval=1)
        for attack in ("none", "little-is-enough")
        for seed in range(1, seeds + 1)
        if "lenet-mnist" in names
    ]
    # Without an attack the mean does not know of a number of hostile regions.
    return [job for job in found if _fits(job)]


def main() -> int:
    given = options(__doc__, data=default_folder(), more=_more)
    report = Report("robust", given.quick)
    jobs = _jobs(given)
    with ProcessPoolExecutor(given.processes) as pool:
        results = dict(zip(jobs, pool.map(make, jobs, [given.data] * len(jobs)), strict=True))
    report.runs = [{**asdict(job), **asdict(result)} for job, result in results.items()]
    report.details = {"torch": torch.__version__, "real_data": {n: _data(n, given.data).real for n in _names(jobs)}}
    for name in _names(jobs):
        for kind in sorted({job.split for job in jobs}):
            for hostile in sorted({job.hostile for job in jobs}):
                _table(name, kind, hostile, results, report)
    _each_step(results, report)
    return report.close(given.json)


def _names(jobs: list[Job]) -> list[str]:
    return sorted({job.workload for job in jobs})


def _table(name: str, kind: str, hostile: int, results: Mapping[Job, Result], report: Report) -> None:
    """Print accuracies of one setting, rules by attacks, and add its bars."""

    def mean(rule: str, attack: str, of: Callable[[Result], float] = lambda result: result.accuracy) -> float:
        found = [
            of(result)
            for job, result in results.items()
            if (job.workload, job.split, job.hostile, job.rule, job.attack) == (name, kind, hostile, rule, attack)
            and job.interval == INTERVAL
        ]
        return statistics.fmean(found) if found else float("nan")

    shown = {(job.attack, job.split) for job in results if job.interval == INTERVAL}
    attacks = [attack for attack in ATTACKS if (attack, kind) in shown]
    print(f"{name}, {kind}, {hostile} of {REGIONS} regions hostile: accuracy in per cent")
    print(f"  {'':<18}" + "".join(f"{attack:>18}" for attack in attacks))
    for rule in (MEAN, *robust_rules()):
        print(f"  {rule:<18}" + "".join(f"{mean(rule, attack):18.1f}" for attack in attacks))
    if "backdoor" in attacks:
        found = ", ".join(f"{r} {mean(r, 'backdoor', lambda x: x.backdoor):.0f}" for r in (MEAN, *robust_rules()))
        print(f"  images that the backdoor turns into a 0, in per cent: {found}")
    away = sum(result.honest_quarantined for job, result in results.items() if job.split == kind)
    print(f"  updates of honest regions in quarantine, over all runs of this split: {away}")
    if kind == "iid" and name == "lenet-mnist":
        plain = mean(MEAN, "none")
        for rule in WITHSTANDS:
            for attack in ("sign-flip", "scaling"):
                if attack in attacks and mean(rule, attack) == mean(rule, attack):
                    title = f"{rule} loses to {attack}, {hostile} of {REGIONS}"
                    report.bars.append(Bar.at_most(title, plain - mean(rule, attack), "points", WITHIN))
        report.bars.append(
            Bar.at_least(
                f"the mean loses to sign-flip, {hostile} of {REGIONS}", plain - mean(MEAN, "sign-flip"), "points", 5.0
            )
        )
    if kind == "dirichlet-0.3" and name == "lenet-mnist":
        lost = mean(MEAN, "none") - mean("krum", "none")
        report.bars.append(
            Bar.at_least(f"krum loses to unlike data, without an attack, byzantine: {hostile}", lost, "points", 5.0)
        )


def _each_step(results: Mapping[Job, Result], report: Report) -> None:
    """Print how `krum` fares with a round of each step, and add its bar."""
    by_attack: dict[str, list[Result]] = {}
    for job, result in results.items():
        if job.interval == 1:
            by_attack.setdefault(job.attack, []).append(result)
    if not by_attack:
        return
    print(f"lenet-mnist, iid, 2 of {REGIONS} regions hostile, a round of each step: krum")
    for attack, found in by_attack.items():
        accuracy, forged = (statistics.fmean(getattr(one, name) for one in found) for name in ("accuracy", "forged"))
        print(f"  {attack:<18}{accuracy:8.1f} per cent; {forged:.0f} % of the rounds merge a forged change alone")
    forged = statistics.fmean(one.forged for one in by_attack["little-is-enough"])
    report.bars.append(Bar.at_least("rounds in which krum takes what is forged, little-is-enough", forged, "%", 90.0))


def _more(parser: ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=1, help="of each row; default: 1")
    parser.add_argument("--attacks", default="", help="these of each split, such as none,scaling; default: all, or few")
    parser.add_argument("--workloads", default="lenet-mnist,resnet-cifar", help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="runs at once; default: 2")


if __name__ == "__main__":
    sys.exit(main())
