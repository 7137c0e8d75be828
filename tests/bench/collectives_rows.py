"""Which live merges are made, in turn, and what must come of them."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from collectives_live import Contender, Group, Run, Workers, expected_mean, group, usd
from collectives_published import best_chunks, least_seconds
from report import Bar, Report

from sync.channel import Usage
from sync.collective import ChannelCosts, Choice, Settings, choose

MB = 1e6
FASDL, LAMBDAML, CHEAP = "FasDL K-REDUCE, faithful", "LambdaML scatter-reduce, faithful", "chosen for cost"
CHEAP_BF16 = "chosen for cost, bf16"
QUICK = (("s3", 0.25, 8), ("s3", 14.0, 8), ("redis", 14.0, 4), ("file", 0.25, 4), ("file", 14.0, 4))
FULL = tuple(
    (kind, size, workers)
    for kind, counts in (("s3", (2, 4, 8, 16)), ("redis", (2, 4, 8)), ("file", (2, 4, 8)))
    for workers in counts
    for size in (0.25, 14.0, 47.0)
)
"""Channel, megabytes, workers."""


@dataclass
class Row:
    """One contender in one group, and all its runs."""

    kind: str
    size_mb: float
    workers: int
    scale: int
    contender: Contender
    bound: float
    runs: list[Run] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    """Under which further names this combination stands: what was chosen."""
    usd_per_worker_second: float = 0.0

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def usd(self) -> float:
        rate = self.usd_per_worker_second
        return statistics.median(
            usd(usage, run.seconds, self.workers, self.kind, rate)
            for run, usage in zip(self.runs, self.usages, strict=True)
        )

    def named(self, label: str) -> bool:
        return label == self.contender.label or label in self.also


def groups(quick: bool, channel: str | None, workers: int | None) -> list[tuple[str, float, int]]:
    """Which channels, sizes and numbers of workers are measured."""
    return [one for one in (QUICK if quick else FULL) if channel in (None, one[0]) and workers in (None, one[2])]


def live(
    report: Report, groups: Sequence[tuple[str, float, int]], usd_per_worker_second: float, repeats: int
) -> list[Row]:
    """Make all merges; every single run goes to the report."""
    rows: list[Row] = []
    workers = Workers(max(count for _, _, count in groups))
    try:
        with tempfile.TemporaryDirectory() as folder:
            for kind, size, count in groups:
                most = 2 if report.quick else 4
                slower = 1 if kind == "file" else max(1, min(most, count // 2))
                with group(workers, kind, int(size * MB), count, slower, Path(folder)) as one:
                    rows += _group(report, one, size, usd_per_worker_second, repeats)
    finally:
        workers.close()
    return rows


def _group(report: Report, group: Group, size_mb: float, rate: float, repeats: int) -> list[Row]:
    costs = group.probed()
    chosen = {
        "auto": choose(group.count, group.size_bytes, costs, usd_per_worker_second=rate),
        CHEAP: choose(group.count, group.size_bytes, costs, usd_per_worker_second=rate, minimise="cost"),
    }
    chosen[CHEAP_BF16] = choose(group.count, group.size_bytes / 2, costs, usd_per_worker_second=rate, minimise="cost")
    bound = _bound(group, costs)
    rows = [
        Row(group.kind, size_mb, group.count, group.scale, one, bound, usd_per_worker_second=rate)
        for one in _contenders(group, costs, report.quick)
    ]
    for label, choice in chosen.items():
        settings = replace(_settings(choice, group.kind), codec="bf16" if label == CHEAP_BF16 else "fp32")
        same = [row for row in rows if row.contender.combination == Contender("", settings).combination]
        if not same:
            same = [Row(group.kind, size_mb, group.count, group.scale, Contender(label, settings), bound)]
            same[0].usd_per_worker_second = rate
            rows += same
        same[0].also.append(label)
    expected = expected_mean(group.size_bytes, group.scale, group.count)
    for number, row in enumerate(rows):
        group.open(str(number), row.contender, costs)
    # In turn; the first turn, in which memory and threads are made, is checked and not counted.
    for step, (number, row) in itertools.product(range(repeats + 1), list(enumerate(rows))):
        settings = row.contender.settings
        # What is coded, or rounded once more in groups, is the same for all and not the mean bit for bit.
        exact = expected if settings.codec == "fp32" and settings.groups == 1 else 0
        run, usage = group.merge(str(number), step + 1, None if step else exact)
        report.runs.append(
            {
                "source": "live", "kind": row.kind, "size_mb": size_mb, "workers": row.workers, "scale": row.scale,
                "slower": group.slower, "label": row.contender.label, "also": row.also,
                "settings": asdict(row.contender.settings),
                "counted": step > 0, **asdict(run), **asdict(usage), "bound_seconds": row.bound,
            }
        )  # fmt: skip
        if step:
            row.runs.append(run)
            row.usages.append(usage)
    for number in range(len(rows)):
        group.workers.ask(group.count, "close", str(number))
    name = f"{group.kind}, {size_mb:g} MB, W = {group.count}"
    report.details.setdefault("probed", {})[name] = asdict(costs)
    _print(name, group, rows, costs, chosen)
    return rows


def _contenders(group: Group, costs: ChannelCosts, quick: bool) -> list[Contender]:
    count = group.count
    published = best_chunks(count, group.size_bytes, costs)
    # S3 as published: FasDL lists without a pause. Elsewhere a busy loop would take the cores that the workers share.
    pause = 0.0 if group.kind == "s3" else 0.001
    rest = 0.1 if group.kind == "s3" else 0.001
    faithful = sorted({published, *(() if quick else (max(1, count // 2), count))})
    ours = sorted({max(2, count // 4), max(2, count // 2)} - {count})
    ours = ours[-1:] if quick else ours
    return [
        Contender(LAMBDAML, Settings("scatter-reduce", faithful=True, poll_seconds=rest)),
        *(
            Contender(FASDL, Settings("k-reduce", chunks=chunks, faithful=True, poll_seconds=pause))
            for chunks in faithful
        ),
        # Never the best there, and it takes longest.
        *(
            ()
            if quick and group.kind == "s3" and group.scale > 1
            else (Contender("all-reduce", Settings("all-reduce")),)
        ),
        *(() if quick else (Contender("scatter-reduce", Settings("scatter-reduce")),)),
        Contender("pipelined-scatter-reduce", Settings("pipelined-scatter-reduce")),
        *(Contender("k-reduce", Settings("k-reduce", chunks=chunks)) for chunks in ours),
    ]


def _settings(choice: Choice, kind: str) -> Settings:
    merge = choice.merge
    if kind == "file" and merge.pattern == "scatter-reduce":
        # One thread has nothing to overlap: they make the same requests.
        return Settings("pipelined-scatter-reduce")
    if merge.pattern == "k-reduce" and merge.owners == 1:
        return Settings("all-reduce")
    if merge.pattern == "k-reduce" and merge.owners == merge.workers:
        return Settings("pipelined-scatter-reduce")
    return Settings(merge.pattern, chunks=merge.chunks, groups=merge.in_groups)  # type: ignore[arg-type]


def _bound(group: Group, costs: ChannelCosts) -> float:
    if not costs.cores:
        return least_seconds(group.count, group.size_bytes, costs)
    # All but one vector must be copied in, and added.
    once = 1 / costs.up_bytes_per_second + costs.merge_seconds_per_byte
    return (group.count - 1) * group.size_bytes * once / min(costs.cores, group.count)


def _print(name: str, group: Group, rows: Sequence[Row], costs: ChannelCosts, chosen: dict[str, Choice]) -> None:
    print(
        f"\n{name}; bound {rows[0].bound:.4f} s by probed constants; 1/{group.scale} of bytes and bandwidth, "
        f"time {group.slower:g} times slower (LIVE)"
    )
    print(
        f"probed: put {1e3 * costs.put_seconds:.2f} ms, get {1e3 * costs.get_seconds:.2f} ms, up "
        f"{costs.up_bytes_per_second / MB:.0f} MB/s, down {costs.down_bytes_per_second / MB:.0f} MB/s, adding "
        f"{1e-6 / max(1e-12, costs.merge_seconds_per_byte):.0f} MB/s, {1e3 * costs.request_cpu_seconds:.2f} ms of a "
        "core a request"
    )
    print(
        f"{'':<36}{'K':>4}{'seconds':>9}{'min':>8}{'max':>8}{'/bound':>8}{'cpu s':>7}{'busy':>6}{'requests':>9}"
        f"{'MB in':>9}{'MB out':>9}{'$/1000':>9}"
    )
    for row in rows:
        usage, spread = row.usages[-1], [run.seconds for run in row.runs]
        chunks = row.contender.settings.chunks or (1 if row.contender.settings.pattern == "all-reduce" else row.workers)
        print(
            f"{row.contender.label:<36}{chunks:>4}{row.seconds:>9.4f}{min(spread):>8.3f}{max(spread):>8.3f}"
            f"{row.seconds / row.bound:>8.1f}{statistics.median(run.cpu_seconds for run in row.runs):>7.2f}"
            f"{statistics.median(run.busy for run in row.runs):>6.2f}{usage.requests:>9}{usage.bytes_in / MB:>9.1f}"
            f"{usage.bytes_out / MB:>9.1f}{row.usd * 1000:>9.3f}  {', '.join(row.also)}"
        )
    for label, choice in chosen.items():
        (row,) = (row for row in rows if label in row.also)
        print(f"{label}: predicted {choice.estimate.seconds:.4f} s, took {row.seconds:.4f} s")


def live_bars(rows: Sequence[Row]) -> list[Bar]:
    groups: dict[tuple[str, float, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.size_mb, row.workers), []).append(row)
    many = [group for (kind, _, workers), group in groups.items() if kind == "s3" and workers >= 8]

    def least(group: Sequence[Row], label: str) -> Row:
        return min((row for row in group if row.named(label)), key=lambda row: row.seconds)

    def fastest(group: Sequence[Row]) -> Row:
        fair = (row for row in group if not row.contender.settings.faithful and row.contender.settings.codec == "fp32")
        return min(fair, key=lambda row: row.seconds)

    ours = [
        least(group, FASDL).seconds
        / min(row.seconds for row in group if not row.contender.settings.faithful and _reduces(row))
        for group in many
    ]
    regrets = {key: least(group, "auto").seconds / fastest(group).seconds - 1 for key, group in groups.items()}
    saved = [1 - least(group, CHEAP).seconds / least(group, LAMBDAML).seconds for group in many]
    spared = [1 - least(group, CHEAP).usd / least(group, LAMBDAML).usd for group in many]
    coded = [1 - least(group, CHEAP_BF16).usd / least(group, LAMBDAML).usd for group in many]
    faster = [1 - least(group, "auto").seconds / least(group, LAMBDAML).seconds for group in many]
    bars = []
    if many:
        bars = [
            Bar.at_least("LIVE S3, W >= 8: K-REDUCE against faithful K-REDUCE at best K", min(ours), "times", 1.5),
            Bar.at_least("LIVE S3, W >= 8: time auto saves against scatter-reduce", 100 * min(faster), "%", 30),
            Bar.at_least("LIVE S3, W >= 8: time the cheapest choice saves", 100 * min(saved), "%", 30),
            Bar.at_least("LIVE S3, W >= 8: money the cheapest choice saves", 100 * min(spared), "%", 45),
            Bar.at_least("LIVE S3, W >= 8: the same in bf16", 100 * min(coded), "%", 45),
        ]
    bars.append(Bar.at_most("LIVE, all channels: mean regret of auto", 100 * statistics.mean(regrets.values()), "%", 5))
    for kind in sorted({key[0] for key in regrets}):
        mine = [regret for key, regret in regrets.items() if key[0] == kind]
        bars.append(Bar.at_most(f"LIVE, {kind}: mean regret of auto", 100 * statistics.mean(mine), "%", 5))
    return bars


def _reduces(row: Row) -> bool:
    """K-REDUCE, with K from 1 to W, of the same bytes as published."""
    return row.contender.settings.codec == "fp32" and row.contender.settings.pattern in (
        "k-reduce",
        "all-reduce",
        "pipelined-scatter-reduce",
    )
