"""Time and cost of one merge for every collective, number of chunks, model size and number of workers.

    .venv/bin/python tests/bench/collectives.py [--quick] [--json PATH] [--only modelled|live] [--repeats N]
        [--channel s3|redis|file] [--workers N]

Rows are MODELLED or LIVE. LIVE: a process for each worker over real channels, see `collectives_live.py`; needs
redis-server and boto3. All of them take about an hour; `--channel` and `--workers` choose. MODELLED: the roles that run
in production, over a channel that is a model (latency, bandwidth and prices as below), in virtual time; computing the
sums takes no time. ``faithful`` rows make requests as published: one after the other, found by listing. Beside each
stands the closed form's prediction, and the bound: through a store that computes nothing, a worker must move
2 S (W - 1) / W down, or S up.

Vectors above 2 MB are played smaller by a factor, over bandwidths that are smaller by the same.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collectives_published import least_seconds, unequal_batches
from report import Bar, Report, options
from support.memory_channel import MemoryChannel
from support.virtual_channel import Program, Virtual

from sync.collective import ChannelCosts, Merge, Settings, choose, estimate
from sync.merging import ChangeCollective, MeanCollective, Member
from sync.merging._exchange import Given
from sync.merging._reduction_plan import plan_of

MB = 1e6
SIZES_MB = {"0.25 MB": 0.25, "14 MB": 14.0, "47 MB": 47.0}
"""MobileNet's head or LeNet, MobileNet-like, ResNet-18."""
WORKERS, QUICK_WORKERS = (2, 4, 8, 16), (4, 8, 16)
PLAYED_BYTES = 2_000_000
WORKER_USD_PER_SECOND = 2 * 0.0000166667
"""2 GB of AWS Lambda."""
CODED = {"fp32": 1.0, "bf16": 0.5, "int8": 0.2510}
"""Bytes against float32."""


@dataclass(frozen=True)
class Profile:
    """A channel, in constants."""

    costs: ChannelCosts
    pauses: tuple[float, float, float] | None
    """The pauses between looks, as the channel makes them; None: it tells."""


PROFILES = {
    # PUT 100 ms, GET 20 ms, 100 MB/s a worker; prices of S3 in us-east-1.
    "s3": Profile(ChannelCosts(0.1, 0.02, 1e8, 1e8, 0.02, 0.03, 16, 5e-6, 4e-7, 5e-6), (0.02, 1.5, 1.0)),
    # 1 ms, 1 Gbit/s a worker; requests cost nothing, the node's hours are the job's.
    "redis": Profile(ChannelCosts(0.001, 0.001, 1.25e8, 1.25e8, 0.0, 0.001, 16), None),
}


@dataclass(frozen=True)
class Case:
    """One row's merge."""

    profile: str
    size: str
    workers: int
    label: str
    settings: Settings
    density: float = 0.0
    """``isp``: of entries that are significant in each worker."""


@dataclass
class Outcome:
    seconds: float
    """Until the last worker has the merged vector, all having begun together."""
    puts: int
    gets: int
    polls: int
    bytes_in: int
    bytes_out: int
    requests_usd: float
    usd: float
    """Requests, and the workers' time while they merge."""


class Source(Protocol):
    """Where rows come from: a model, or a real channel."""

    name: str

    def play(self, case: Case) -> Outcome: ...


class Modelled:
    """Production roles over a modelled channel, in virtual time."""

    name = "modelled"

    def play(
        self, case: Case, *, compute: float = 0.0, others: float = 0.0, steps: int = 1, buckets: bool = False
    ) -> Outcome:
        """``compute``, ``others``: seconds of compute before each merge, of owners and of workers without a chunk."""
        profile = PROFILES[case.profile]
        full = int(SIZES_MB[case.size] * MB)
        scale = max(1, full // PLAYED_BYTES)
        size, costs = full // scale // 4, profile.costs
        costs = replace(
            costs,
            up_bytes_per_second=costs.up_bytes_per_second / scale,
            down_bytes_per_second=costs.down_bytes_per_second / scale,
            poll_seconds=case.settings.poll_seconds if case.settings.faithful else 0.0,
        )
        asked = None if profile.pauses is None else costs
        case = replace(case, settings=replace(case.settings, asked=asked))
        virtual = Virtual(costs, pauses=None if case.settings.faithful else profile.pauses)
        for worker in range(case.workers):
            program = _program(case, worker, size, (compute, others), steps, virtual if buckets else None)
            virtual.add(program, serial=case.settings.faithful, uploads=_uploads(case, size))
        virtual.run()
        seconds = max(span[1] for worker in virtual.workers for span in worker.spans) / steps
        total = [worker.meter for worker in virtual.workers]
        puts, gets = (sum(getattr(meter, kind) for meter in total) // steps for kind in ("puts", "gets"))
        polls = sum(meter.polls for meter in total) // steps
        looks_usd = polls * (costs.list_usd if case.settings.faithful else costs.get_usd)
        requests_usd = puts * costs.put_usd + gets * costs.get_usd + looks_usd
        return Outcome(
            seconds,
            puts,
            gets,
            polls,
            sum(meter.bytes_in for meter in total) * scale // steps,
            sum(meter.bytes_out for meter in total) * scale // steps,
            requests_usd,
            requests_usd + case.workers * WORKER_USD_PER_SECOND * seconds,
        )


def _uploads(case: Case, size: int) -> int | None:
    if case.settings.pattern == "isp":
        return None
    return plan_of(Member(0, case.workers, 1), size, case.settings, "c").uploads_at_once


def _program(
    case: Case, worker: int, size: int, computes: tuple[float, float], steps: int, buckets: Virtual | None
) -> Program:
    member = Member(worker, case.workers, 1)
    rng = np.random.default_rng(worker)
    if case.settings.pattern == "isp":
        sharing = ChangeCollective(case.settings, member, MemoryChannel(), "c", size)
        model = np.ones(size, np.float32)
        for step in range(1, steps + 1):
            change = (rng.random(size) < case.density).astype(np.float32) * 10
            yield computes[0]
            yield sharing.part(step, change, 1.0, model)
        return
    reducing = MeanCollective(case.settings, member, MemoryChannel(), "c", size)
    vector = np.zeros(size, np.float32)
    compute = computes[0] if reducing.plan.own is not None else computes[1]
    for step in range(1, steps + 1):
        if buckets is None:
            yield compute
            yield reducing.part(step, vector, 1.0)
            continue
        # A third of it is the forward pass; then chunks come one by one, the last one first.
        yield compute / 3
        one = buckets.workers[worker]
        for number, part in enumerate(reducing.plan.bounds):
            when = buckets.now + compute * 2 / 3 * (1 - part.start / size)
            buckets.at(when, lambda number=number, one=one: buckets.tell(one, Given(number)))
        yield reducing.part(step, vector, 1.0, whole=False)
    if case.settings.staleness:
        yield reducing.settling(steps)


def cases(workers: tuple[int, ...], sizes: tuple[str, ...]) -> Iterator[Case]:
    for profile in PROFILES:
        for size in sizes:
            for count in workers:
                chunks = sorted({1, max(1, count // 4), max(1, count // 2), count})
                rows: list[tuple[str, Settings]] = [
                    ("LambdaML all-reduce, faithful", Settings("all-reduce", faithful=True)),
                    ("LambdaML scatter-reduce, faithful", Settings("scatter-reduce", faithful=True)),
                    *(
                        ("FasDL K-REDUCE, faithful", Settings("k-reduce", chunks=k, faithful=True, poll_seconds=0.0))
                        for k in chunks
                    ),
                    ("all-reduce", Settings("all-reduce")),
                    ("scatter-reduce", Settings("scatter-reduce")),
                    ("pipelined-scatter-reduce", Settings("pipelined-scatter-reduce")),
                    *(("k-reduce", Settings("k-reduce", chunks=k)) for k in chunks),
                    *(
                        (f"k-reduce {codec}", Settings("k-reduce", chunks=count, codec=codec))
                        for codec in ("bf16", "int8")
                    ),
                ]
                for label, settings in rows:
                    yield Case(profile, size, count, label, settings)
                for codec, label in (("fp32", "chosen for cost"), ("bf16", "chosen for cost, bf16")):
                    best = choose(
                        count, SIZES_MB[size] * MB * CODED[codec], PROFILES[profile].costs,
                        usd_per_worker_second=WORKER_USD_PER_SECOND, minimise="cost",
                    )  # fmt: skip
                    pattern: Any = best.merge.pattern
                    settings = Settings(pattern, chunks=best.merge.chunks, groups=best.merge.in_groups, codec=codec)
                    yield Case(profile, size, count, label, settings)
                if size != "47 MB" and count >= 8:
                    for density in (0.01,):
                        yield Case(
                            profile, size, count, "MLLess ISP, faithful",
                            Settings("isp", faithful=True, significance=0.5), density,
                        )  # fmt: skip
                        for k in (None, max(1, count // 4)):
                            label = "isp, all to all" if k is None else "isp, ranges"
                            isp = Settings("isp", chunks=k, codec="bf16", significance=0.5)
                            yield Case(profile, size, count, label, isp, density)


def predicted(case: Case) -> float | None:
    """The closed form's seconds."""
    if case.settings.pattern == "isp":
        return None
    costs = PROFILES[case.profile].costs
    if case.settings.faithful:
        costs = replace(costs, poll_seconds=case.settings.poll_seconds)
    size = SIZES_MB[case.size] * MB * CODED[case.settings.codec]
    merge = Merge(
        case.settings.pattern, case.workers, size, case.settings.chunks, case.settings.faithful, case.settings.groups
    )
    return estimate(merge, costs).seconds


def main() -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", choices=("modelled", "live"), help="these rows alone")
        parser.add_argument("--channel", choices=("s3", "redis", "file"), help="live rows of this channel alone")
        parser.add_argument("--workers", type=int, help="live rows of so many workers alone")
        parser.add_argument("--repeats", type=int, help="merges of each live row; default: 3, of --quick 2")

    given = options(__doc__, more=more)
    report = Report("collectives", given.quick)
    if given.only != "live":
        _modelled(report)
    if given.only != "modelled":
        from collectives_rows import groups, live, live_bars

        chosen = groups(given.quick, given.channel, given.workers)
        report.bars += live_bars(
            live(report, chosen, WORKER_USD_PER_SECOND, given.repeats or (2 if given.quick else 3))
        )
    return report.close(given.json)


def _modelled(report: Report) -> None:
    sizes = ("0.25 MB", "14 MB") if report.quick else tuple(SIZES_MB)
    source: Source = Modelled()
    begun = time.monotonic()
    rows: list[tuple[Case, Outcome]] = []
    for case in cases(QUICK_WORKERS if report.quick else WORKERS, sizes):
        outcome = source.play(case)
        rows.append((case, outcome))
        told = predicted(case)
        bound = least_seconds(case.workers, SIZES_MB[case.size] * MB, PROFILES[case.profile].costs)
        report.runs.append(
            {
                "source": source.name,
                **asdict(case),
                **asdict(outcome),
                "predicted_seconds": told,
                "bound_seconds": bound,
            }
        )
    _table(rows)
    report.details["ceilings"] = {
        f"{size}, W = {workers}": asdict(ceiling) for (_, size, workers), ceiling in _ceilings(rows).items()
    }
    report.details["mechanisms"] = _mechanisms()
    report.details["prices"] = {"worker_usd_per_second": WORKER_USD_PER_SECOND}
    report.details["profiles"] = {name: asdict(profile) for name, profile in PROFILES.items()}
    report.bars += _bars(rows)
    print(f"\nall figures modelled; played in {time.monotonic() - begun:.0f} s")


def _table(rows: list[tuple[Case, Outcome]]) -> None:
    group = None
    ceilings = _ceilings(rows)
    for case, outcome in rows:
        if group != (case.profile, case.size, case.workers):
            group = (case.profile, case.size, case.workers)
            bound = least_seconds(case.workers, SIZES_MB[case.size] * MB, PROFILES[case.profile].costs)
            print(f"\n{case.profile}, {case.size}, W = {case.workers}; bound {bound:.4f} s (MODELLED)")
            if (ceiling := ceilings.get(group)) is not None:
                print(ceiling.text)
            print(
                f"{'':<36}{'K':>4}{'seconds':>10}{'predicted':>10}{'/bound':>8}{'puts':>7}{'gets':>7}{'looks':>7}"
                f"{'MB in':>9}{'MB out':>9}{'$/1000':>9}"
            )
        told = predicted(case)
        chunks = Merge(case.settings.pattern, case.workers, 1, case.settings.chunks).owners
        print(
            f"{case.label:<36}{chunks:>4}{outcome.seconds:>10.4f}{told if told is not None else math.nan:>10.4f}"
            f"{outcome.seconds / bound:>8.1f}{outcome.puts:>7}{outcome.gets:>7}{outcome.polls:>7}"
            f"{outcome.bytes_in / MB:>9.1f}{outcome.bytes_out / MB:>9.1f}{outcome.usd * 1000:>9.3f}"
        )


@dataclass(frozen=True)
class Ceiling:
    """What can be saved of the published scatter-reduce, in float32."""

    link_seconds: float
    """What link and latencies leave: 2 S (W - 1) / W down, and two puts and gets one after the other."""
    seconds: float
    """What they leave where every value is an object, which is read once it is whole; of the fastest K and groups."""
    usd: float
    """Of the cheapest K and groups: their requests, and the time that is left."""
    published: Outcome

    @property
    def text(self) -> str:
        time_, link = (100 * (1 - one / self.published.seconds) for one in (self.seconds, self.link_seconds))
        money = 100 * (1 - self.usd / self.published.usd)
        return (
            f"at most {time_:.1f} % of the time and {money:.1f} % of the money of the published scatter-reduce can be "
            f"saved in fp32 by any K and groups; {link:.1f} % of the time by latencies and link alone"
        )


def _ceilings(rows: list[tuple[Case, Outcome]]) -> dict[tuple[str, str, int], Ceiling]:
    """By profile, size and workers; of S3, where requests are what money is."""
    ceilings = {}
    for case, outcome in rows:
        if case.profile != "s3" or case.label != "LambdaML scatter-reduce, faithful":
            continue
        # Nobody looks too late, or in vain.
        costs = replace(PROFILES["s3"].costs, poll_seconds=0.0)
        size = SIZES_MB[case.size] * MB
        least = [
            estimate(Merge("k-reduce", case.workers, size, chunks, groups=groups), costs, late=0.0)
            for chunks in range(1, case.workers + 1)
            for groups in range(1, case.workers // chunks + 1)
        ]
        link = least_seconds(case.workers, size, costs) + 2 * (costs.put_seconds + costs.get_seconds)
        usd = min(one.usd(case.workers, WORKER_USD_PER_SECOND) for one in least)
        seconds = min(one.seconds for one in least)
        ceilings["s3", case.size, case.workers] = Ceiling(link, seconds, usd, outcome)
    return ceilings


def _mechanisms() -> list[dict[str, object]]:
    """From the faithful K-REDUCE to ours, one mechanism at a time: 14 MB, W = 8, S3, with 1 s of compute a step.

    Where workers that own no chunk continue one step behind, their batch is larger by what they compute while owners
    aggregate (FasDL §1.4), at most twice an owner's.
    """
    source, steps, compute, batch = Modelled(), 6, 1.0, 32
    faithful = Settings("k-reduce", chunks=4, faithful=True, poll_seconds=0.0)
    ours = Settings("k-reduce", chunks=4)
    rows: list[tuple[str, Settings, bool, bool]] = [
        ("FasDL K-REDUCE, faithful, synchronous", faithful, False, False),
        ("... with its staleness and batches", replace(faithful, staleness=1), True, False),
        ("side by side, nothing listed (K = W)", Settings("scatter-reduce"), False, False),
        ("+ uploads overlap downloads (K = W)", Settings("pipelined-scatter-reduce"), False, False),
        ("+ buckets during the backward pass", Settings("pipelined-scatter-reduce", in_parts=True), False, True),
        ("+ bf16", Settings("pipelined-scatter-reduce", codec="bf16", in_parts=True), False, True),
        ("+ K = 4, without buckets", ours, False, False),
        ("+ staleness and batches", replace(ours, staleness=1), True, False),
        ("+ bf16", replace(ours, staleness=1, codec="bf16"), True, False),
    ]
    print(f"\nmechanisms: S3, 14 MB, W = 8, {compute:g} s of compute a step, {steps} steps (MODELLED)")
    print(f"{'':<40}{'s a step':>10}{'exposed':>10}{'samples/s':>11}{'$/1M samples':>14}")
    out: list[dict[str, object]] = []
    exposed = 0.0
    for label, settings, unequal, buckets in rows:
        workers, chunks = 8, settings.chunks or 8
        larger = batch
        if unequal:
            larger = unequal_batches(
                batch, chunks, workers,
                aggregation_seconds=exposed, seconds_per_sample=compute / batch,
                most=batch * chunks + 2 * batch * (workers - chunks),
            )  # fmt: skip
        case = Case("s3", "14 MB", workers, label, settings)
        outcome = source.play(case, compute=compute, others=compute * larger / batch, steps=steps, buckets=buckets)
        exposed = exposed if unequal else outcome.seconds - compute
        samples = batch * chunks + larger * (workers - chunks)
        usd = outcome.usd / samples * 1e6
        print(
            f"{label:<40}{outcome.seconds:>10.3f}{outcome.seconds - compute:>10.3f}"
            f"{samples / outcome.seconds:>11.1f}{usd:>14.3f}"
        )
        out.append({"label": label, "seconds_per_step": outcome.seconds, "samples": samples, "usd": outcome.usd})
    return out


def _bars(rows: list[tuple[Case, Outcome]]) -> list[Bar]:
    def best(profile: str, size: str, workers: int, label: str, what: str = "seconds") -> float:
        return min(
            getattr(outcome, what)
            for case, outcome in rows
            if (case.profile, case.size, case.workers, case.label) == (profile, size, workers, label)
        )

    groups = sorted({(case.size, case.workers) for case, _ in rows if case.workers >= 8})
    faster = [best("s3", *group, "FasDL K-REDUCE, faithful") / best("s3", *group, "k-reduce") for group in groups]
    scatter = "LambdaML scatter-reduce, faithful"
    saved = {
        what: [1 - best("s3", *group, "chosen for cost", what) / best("s3", *group, scatter, what) for group in groups]
        for what in ("seconds", "usd")
    }
    ceilings = [_ceilings(rows)["s3", *group] for group in groups]
    of_all = [
        one / (1 - ceiling.usd / ceiling.published.usd) for one, ceiling in zip(saved["usd"], ceilings, strict=True)
    ]
    coded = [
        1 - best("s3", *group, "chosen for cost, bf16", "usd") / best("s3", *group, scatter, "usd") for group in groups
    ]
    errors = [
        abs(told - outcome.seconds) / outcome.seconds
        for case, outcome in rows
        # As published workers look every tenth of a second, and in lockstep find all or nothing: no average tells that.
        if not case.settings.faithful and (told := predicted(case)) is not None
    ]
    apart = [
        best("redis", *group, "k-reduce") / least_seconds(group[1], SIZES_MB[group[0]] * MB, PROFILES["redis"].costs)
        for group in groups
        if group[0] != "0.25 MB"
    ]
    bars = [
        Bar.at_least("S3, W >= 8: K-REDUCE against faithful K-REDUCE, each at its best K", min(faster), "times", 1.5),
        Bar.at_least("S3, W >= 8: time saved against faithful scatter-reduce", 100 * min(saved["seconds"]), "%", 30),
        Bar.at_least("S3, W >= 8: money saved against faithful scatter-reduce", 100 * min(saved["usd"]), "%", 45),
        Bar.at_least("S3, W >= 8: money saved, of all that K and groups can save", 100 * min(of_all), "%", 90),
        Bar.at_least("S3, W >= 8: the same in bf16", 100 * min(coded), "%", 45),
        Bar.at_most("Redis, from 14 MB: K-REDUCE against the bound", max(apart), "times", 1.6),
        Bar.at_most("prediction error, median", 100 * statistics.median(errors), "%", 3),
        Bar.at_most("prediction error, worst", 100 * max(errors), "%", 6),
    ]
    ranges = [case for case, _ in rows if case.label == "isp, ranges" and case.workers >= 16]
    for case in ranges[:1]:
        fewer = best("s3", case.size, case.workers, "MLLess ISP, faithful", "bytes_out") / best(
            "s3", case.size, case.workers, "isp, ranges", "bytes_out"
        )
        bars.append(Bar.at_least("ISP, W = 16: bytes read against all to all as published", fewer, "times fewer", 3))
    return bars


if __name__ == "__main__":
    sys.exit(main())
