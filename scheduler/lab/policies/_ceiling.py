"""An upper bound of the deadlines that can be met: it knows the future, and changes shares without cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.simulate._trace import TraceJob

_MOST_COLUMNS = 400_000
"""Size above which a linear programme is reduced to a third by combining intervals: more of them hardly tighten the
bound."""


@dataclass(frozen=True)
class Ceiling:
    """An upper bound on the deadlines that any scheduler meets."""

    met: float
    alone: int
    """Jobs that meet their deadline with the whole cluster to themselves: a looser bound."""
    columns: int
    """Columns of the linear programme; 0: none was solved, and ``met`` is ``alone``."""


def ceiling(
    jobs: Sequence[TraceJob], devices: int, seconds: float = 120.0, most_columns: int = _MOST_COLUMNS
) -> Ceiling:
    """The clairvoyant fluid bound of a trace on a cluster.

    A linear programme over the intervals between all submissions and deadlines: maximise Σ y_j such that in every
    interval t job j spends x_jlt seconds on its levels l, no more in all than the part y_j of what it has of the
    interval, its work is done (Σ T_l·x_jlt ≥ M_j·y_j), and no more devices are in use than there are
    (Σ g_l·x_jlt ≤ G·|t|). Fractions of jobs count, changes are free, and all arrivals are known: no schedule meets
    more. With very many jobs neighbouring intervals share one row of devices, which only loosens the bound. Solved by
    HiGHS on one thread, within `seconds` or not at all.
    """
    able = [job for job in jobs if job.deadlines and _fits(job, devices)]
    if not able:
        return Ceiling(0.0, 0, 0)
    edges = np.unique(np.array([at for job in able for at in (job.submit_s, job.deadline_s)]))
    count, most = sum(_columns(job, edges, devices) for job in able), most_columns
    while count > most:
        edges, most = np.unique(np.concatenate((edges[::2], edges[-1:]))), most_columns // 3
        count = sum(_columns(job, edges, devices) for job in able)
    solved = _solve(_programme(able, edges, devices), seconds)
    if solved is None:
        return Ceiling(float(len(able)), len(able), 0)
    return Ceiling(min(solved, float(len(able))), len(able), count)


def _fits(job: TraceJob, devices: int) -> bool:
    rate = job.curve.rate(devices)
    return rate > 0 and job.work / rate <= job.deadline_s - job.submit_s


def _levels(job: TraceJob, devices: int) -> list[tuple[int, float]]:
    curve = job.curve.capped(devices)
    return [] if curve is None else [(curve.levels[index], curve.rates[index]) for index in curve.lean]


def _span(job: TraceJob, edges: NDArray[np.float64]) -> tuple[int, int]:
    """The intervals that it has something of: from the first to before the last."""
    return int(edges.searchsorted(job.submit_s, side="right")) - 1, int(edges.searchsorted(job.deadline_s))


def _columns(job: TraceJob, edges: NDArray[np.float64], devices: int) -> int:
    first, last = _span(job, edges)
    return 1 + (last - first) * len(_levels(job, devices))


@dataclass(frozen=True)
class _Programme:
    """A linear programme. Columns: y of each job, then x by job, interval and level. Rows: capacity of each interval,
    then work and time of each job. The matrix is stored by columns: the rows and values of all entries, one column
    after the other."""

    jobs: int
    lengths: NDArray[np.int64]
    """Entries of each column."""
    rows: NDArray[np.int64]
    values: NDArray[np.float64]
    row_lower: NDArray[np.float64]
    row_upper: NDArray[np.float64]


def _programme(jobs: Sequence[TraceJob], edges: NDArray[np.float64], devices: int) -> _Programme:
    spans = np.diff(edges)
    starts: list[NDArray[np.int64]] = []
    rows: list[NDArray[np.int64]] = []
    values: list[NDArray[np.float64]] = []
    upper_rows: list[float] = (devices * spans).tolist()
    lower_rows: list[float] = [-math.inf] * len(spans)
    y_rows: list[list[int]] = []
    y_values: list[list[float]] = []
    for job in jobs:
        first, last = _span(job, edges)
        work_row = len(upper_rows)
        times = np.arange(first, last)
        time_rows = work_row + 1 + np.arange(last - first)
        upper_rows += [math.inf] + [0.0] * (last - first)
        lower_rows += [0.0] + [-math.inf] * (last - first)
        has = np.minimum(edges[first + 1 : last + 1], job.deadline_s) - np.maximum(edges[first:last], job.submit_s)
        y_rows.append([work_row, *time_rows.tolist()])
        y_values.append([-1.0, *(-has).tolist()])
        for level, rate in _levels(job, devices):
            block = np.stack((times, np.full(len(times), work_row), time_rows), axis=1)
            rows.append(block.ravel())
            worth = np.stack(
                (np.full(len(times), float(level)), np.full(len(times), rate / job.work), np.ones(len(times))), axis=1
            )
            values.append(worth.ravel())
            starts.append(np.full(len(times), 3, dtype=np.int64))
    return _Programme(
        jobs=len(jobs),
        lengths=np.concatenate(([len(entry) for entry in y_rows], *starts)),
        rows=np.concatenate((np.array([row for entry in y_rows for row in entry]), *rows)),
        values=np.concatenate((np.array([value for entry in y_values for value in entry]), *values)),
        row_lower=np.array(lower_rows),
        row_upper=np.array(upper_rows),
    )


def _solve(programme: _Programme, seconds: float) -> float | None:
    """The largest sum of the jobs' y; None: not found in time."""
    import highspy

    columns, jobs = len(programme.lengths), programme.jobs
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, len(programme.row_upper)
    lp.col_cost_ = np.concatenate((np.ones(jobs), np.zeros(columns - jobs)))
    lp.col_lower_ = np.zeros(columns)
    lp.col_upper_ = np.concatenate((np.ones(jobs), np.full(columns - jobs, math.inf)))
    lp.row_lower_, lp.row_upper_ = programme.row_lower, programme.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.concatenate(([0], np.cumsum(programme.lengths)))
    lp.a_matrix_.index_, lp.a_matrix_.value_ = programme.rows, programme.values
    lp.sense_ = highspy.ObjSense.kMaximize
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("time_limit", seconds)
    solver.passModel(lp)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return float(solver.getInfo().objective_function_value)
