"""Sums over all active jobs that follow each change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import JobState, MeterTotals, Partition, Report
from control_plane.core._state import Charge, Copy
from control_plane.service.state._entries import JobEntry, reported_workers
from control_plane.service.state._sums import JobSums

REGIONS = ("a", "b", "c")


def report() -> st.SearchStrategy[Report | None]:
    made = st.builds(
        lambda workers, rounds, sent, usd: Report(
            1,
            "training",
            round=rounds,
            workers=workers,
            totals=MeterTotals(money=(Charge("egress", 1.0, "GB", usd, "test"),), sent_bytes=sent),
        ),
        st.integers(0, 4),
        st.integers(0, 9),
        st.dictionaries(st.sampled_from(REGIONS), st.integers(0, 100)),
        st.floats(0, 10),
    )
    return st.none() | made


@st.composite
def entries(draw: Callable[..., Any]) -> JobEntry:
    unused: Any = None
    parts = tuple(Partition(region, report=draw(report())) for region in REGIONS[: draw(st.integers(1, 3))])
    copies = (Copy("c", "a", 10, report=draw(report())),) if draw(st.booleans()) else ()
    return JobEntry(unused, JobState("job", 600.0, 0.0, "running", parts, copies=copies), unused, unused)


def shown(sums: JobSums) -> tuple[dict[str, int], dict[str, int], dict[tuple[str, str], int]]:
    return sums.workers(), sums.rounds(), sums.sent_bytes()


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.none() | entries()), max_size=6))
def test_they_are_those_of_the_jobs_that_are_there(
    changes: list[tuple[str, JobEntry | None]],
) -> None:
    sums, jobs = JobSums(), dict[str, JobEntry]()
    for job, entry in changes:
        sums.replace(jobs.get(job), entry)
        if entry is None:
            jobs.pop(job, None)
        else:
            jobs[job] = entry
    assert shown(sums) == shown(JobSums(jobs.values()))
    assert sums.workers() == reported_workers(jobs.values())
    assert sums.usd == pytest.approx(sum(entry.state.usd for entry in jobs.values()), abs=1e-9)
    for job in list(jobs):
        sums.replace(jobs.pop(job), None)
    assert shown(sums) == ({}, {}, {})
    assert sums.usd == pytest.approx(0, abs=1e-9)
