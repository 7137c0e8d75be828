"""Jobs that run in several regions at one pace, and what they hold over time."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scheduler.deadline._curve import SpeedCurve

__all__ = ["AssignmentPace", "Gang", "Reservation", "RowNeeds", "devices_of"]


@dataclass(frozen=True)
class AssignmentPace:
    """One assignment of workers to all regions of a job, and its speed."""

    workers: Mapping[str, int]
    """Workers by region."""
    rate: float
    """Rounds a second that promises may rely on."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """Devices of these workers, by region; of regions that count them."""

    @cached_property
    def needs(self) -> Mapping[str, int]:
        """What has to be free: workers by region, and devices by `devices_of` the region."""
        return {**self.workers, **{devices_of(region): count for region, count in self.devices.items()}}


def devices_of(region: str) -> str:
    """Return the name by which capacities and needs count the devices of a region, beside its workers."""
    return f"{region}/devices"


class RowNeeds:
    """What the paces of a gang, counted from 1, need of some rows of a ledger."""

    def __init__(self, always: tuple[str, ...], paces: int, by_row: Mapping[str, list[int]]) -> None:
        self.always, self.paces, self.by_row = always, paces, by_row
        """Rows that every pace needs, number of paces, and what none and each of them needs by row."""
        self.only = always[0] if always == tuple(by_row) and len(always) == 1 else ""
        """The row, if it is just one."""
        self.levels = by_row[self.only] if self.only else []
        """What is needed of that one."""
        table = np.array(list(by_row.values()), dtype=np.int64).reshape(len(by_row), paces + 1)
        self.counts: NDArray[np.int64] = table.T
        """Shape (paces + 1, rows)."""
        self.totals: NDArray[np.int64] = table.sum(axis=0)
        """What is needed of all rows together; shape (paces + 1,)."""
        self.ascends = all(sorted(needs) == needs for needs in by_row.values())
        """Whether no row is needed less by a faster pace."""

    def of(self, rows: Mapping[str, int]) -> tuple[RowNeeds, int | NDArray[np.int64] | None]:
        """Return the needs of the rows that are there, and the numbers of these, one number if it is ``only`` one.

        None instead of numbers: no pace can be had, since a row that every pace needs is not there.
        """
        if self.only:
            return self, rows.get(self.only)
        if any(row not in rows for row in self.always):
            return self, None
        there = {row: needs for row, needs in self.by_row.items() if row in rows}
        mine = self if len(there) == len(self.by_row) else RowNeeds((), self.paces, there)
        return mine, np.array([rows[row] for row in there], dtype=np.int64)


@dataclass(frozen=True)
class Gang:
    """A job that has workers in several regions: a round ends with the slowest, so that all have one pace.

    Raises ``ValueError`` where the paces do not ascend.
    """

    name: str
    paces: tuple[AssignmentPace, ...]
    """Ascending in rate, and in no region descending in workers."""
    work: float
    """Rounds left."""
    deadline_s: float = math.inf
    """Instant that was promised or is asked for; infinite: best effort."""
    later: tuple[float, ...] = ()
    """A soft deadline's further instants, ascending, tried in turn."""
    held: int = -1
    """Index of the pace that it has now; -1: no workers."""
    wish: int = 0
    """Index of the pace to run at while the workers are free: the fastest that is worth its cost."""
    fixed: bool = False
    """Whether it has one pace, which it keeps from its begin to its end."""
    since_s: float = 0.0
    """Instant at which it was submitted."""
    user: str = ""
    served_s: float = 0.0
    """Worker seconds that its user's best-effort jobs have had."""
    ready_s: float = -math.inf
    """Instant until which it is paused by an earlier change."""
    value: float = 1.0
    """Value of its deadline; where promises break, those of least value break first."""
    insists: bool = False
    """Whether ``wish`` was decided elsewhere: the gang grows to it even if the time saved is less than the pause."""

    preemptible: bool = False
    """Whether its present workers are preemptible. Among on-demand workers it counts as having none, and gets some only
    once its deadline needs them."""

    def __post_init__(self) -> None:
        if not self.paces:
            raise ValueError(f"{self.name} has no pace")
        for slow, fast in zip(self.paces, self.paces[1:], strict=False):
            fewer = any(fast.workers.get(region, 0) < count for region, count in slow.workers.items())
            if fast.rate <= slow.rate or fewer:
                raise ValueError(f"the paces of {self.name} do not ascend")

    @property
    def best_effort(self) -> bool:
        """Whether the job has no deadline."""
        return math.isinf(self.deadline_s)

    @cached_property
    def needed(self) -> RowNeeds:
        """What each pace needs of all rows of the ledger that any pace needs."""
        counts: dict[str, list[int]] = {}
        for index, pace in enumerate(self.paces, 1):
            for row, count in pace.needs.items():
                counts.setdefault(row, [0] * (len(self.paces) + 1))[index] = count
        used = {row: needs for row, needs in counts.items() if any(needs)}
        return RowNeeds(tuple(self.paces[0].needs), len(self.paces), used)

    @cached_property
    def rates(self) -> NDArray[np.float64]:
        """The rates of no pace and of each; shape (paces + 1,)."""
        return np.array([0.0, *(pace.rate for pace in self.paces)])

    @cached_property
    def hull(self) -> tuple[tuple[int, float, int], ...]:
        """The paces on the lower hull: number from 1 on, rate, workers in all regions."""
        chosen = [(index + 1, self.paces[index]) for index in self.curve.lean]
        return tuple((number, pace.rate, sum(pace.workers.values())) for number, pace in chosen)

    @cached_property
    def curve(self) -> SpeedCurve:
        """The rate by workers in all regions; by number of the pace where two paces have equally many."""
        rates = tuple(pace.rate for pace in self.paces)
        totals = tuple(sum(pace.workers.values()) for pace in self.paces)
        ascends = all(a < b for a, b in zip((0, *totals), totals, strict=False))
        return SpeedCurve(totals if ascends else tuple(range(1, len(rates) + 1)), rates)

    def waiting(self, now: float) -> Gang:
        """Return the gang with the rounds of its pause added to its work, for calculations without pauses."""
        if self.held < 0 or self.ready_s <= now:
            return self
        return replace(self, work=self.work + (self.ready_s - now) * self.paces[self.held].rate, ready_s=-math.inf)

    def lasting(self) -> Gang:
        """Return the gang as it counts among lasting workers."""
        return replace(self, held=-1, ready_s=-math.inf) if self.preemptible else self

    def workers(self, pace: int) -> Mapping[str, int]:
        """Return the workers by region; none for pace -1."""
        return self.paces[pace].workers if pace >= 0 else {}

    def needs(self, pace: int) -> Mapping[str, int]:
        """Return what has to be free for them; nothing for pace -1."""
        return self.paces[pace].needs if pace >= 0 else {}


@dataclass(frozen=True)
class Reservation:
    """Reservation of a gang: one of its paces, or none, in each interval of time."""

    times: tuple[float, ...]
    """Boundaries of the intervals, one more than intervals; the last is the end."""
    pace_indices: tuple[int, ...]
    """Index of the gang's pace in each interval; -1: it has no workers."""
    late: bool = False
    """Whether the deadline cannot be met even with all free capacity."""
    schedule: tuple[tuple[float, int], ...] = ()
    """(instant, pace from then on): forecast with spare workers included. The forecasts of all gangs were simulated
    together to the end, with all pauses, and no gang was late."""
    ladder: tuple[AssignmentPace, ...] = ()
    """Paces that `pace_indices` and `schedule` refer to: the gang's at the time of the answer. They may have changed
    since."""

    def on(self, gang: Gang) -> Reservation | None:
        """Return the holding in terms of a gang's present paces; None where that is impossible.

        Each pace becomes the fastest with no more workers anywhere, so that it fits wherever the old one did.
        """
        if self.ladder == gang.paces:
            return self
        steps = {-1: -1}
        for index in {*self.pace_indices, *(pace for _, pace in self.schedule)} - {-1}:
            if index >= len(self.ladder):
                return None
            had = self.ladder[index].workers
            within = (all(count <= had.get(region, 0) for region, count in pace.workers.items()) for pace in gang.paces)
            # Workers never decrease from one pace to the next, so the paces that fit come first.
            steps[index] = sum(within) - 1
            if steps[index] < 0:
                return None
        indices = tuple(steps[pace] for pace in self.pace_indices)
        schedule = tuple((at, steps[pace]) for at, pace in self.schedule)
        return replace(self, pace_indices=indices, schedule=schedule, ladder=gang.paces)

    @property
    def now(self) -> int:
        """Index of the pace held in the first interval; -1: the gang stands still."""
        return self.pace_indices[0] if self.pace_indices else -1

    def worker_seconds(self, gang: Gang, regions: Collection[str], until_s: float = math.inf) -> float:
        """Return the worker seconds that are held in some regions up to an instant."""
        spans = zip(self.times, self.times[1:], self.pace_indices, strict=False)
        ways = [(max(0.0, min(end, until_s) - begin), gang.workers(pace)) for begin, end, pace in spans if pace >= 0]
        return sum(seconds * workers.get(region, 0) for seconds, workers in ways for region in regions)

    @property
    def end_s(self) -> float:
        """Instant at which the last interval ends."""
        return self.times[-1]
