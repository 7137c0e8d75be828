"""What the commands and the dashboard show of a job, from its message alone."""

from __future__ import annotations

import math

import pytest

from control_plane._figures import metric_text
from control_plane._view import figure_text, job_view, kept_if_cancelled, seconds_text, slack_text
from geofed_pb.v1 import control_pb2


def _job(**fields: object) -> control_pb2.Job:
    return control_pb2.Job(id="digits-1", name="digits", created_at=1.0, started_at=2.0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "finished_at", "successor", "slack", "text"),
    [
        ("succeeded", 40.0, "", 60.0, "met with 1 min 0 s to spare"),
        ("succeeded", 130.0, "", -30.0, "missed by 30.0 s"),
        ("failed", 2.5, "", None, "not met: the job has failed"),
        ("cancelled", 2.5, "", None, "not met: the job was cancelled"),
        ("succeeded", 40.0, "digits-2", None, "now that of digits-2"),
    ],
)
def test_only_a_job_with_its_result_has_met_its_deadline(
    state: str, finished_at: float, successor: str, slack: float | None, text: str
) -> None:
    view = job_view(_job(state=state, finished_at=finished_at, successor=successor, deadline_at=100.0))
    assert (view["slack_seconds"], slack_text(view)) == (slack, text)
    assert slack_text(job_view(_job(state=state, finished_at=finished_at))) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (119.4, "1 min 59 s"),
        (119.6, "2 min 0 s"),
        (3599.4, "59 min 59 s"),
        (3599.7, "1 h 0 min"),
        (7199.0, "2 h 0 min"),
        (90_000.0, "25 h 0 min"),
    ],
)
def test_no_part_of_a_duration_reaches_the_next_unit(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.99999, "1"),
        (0.1234567, "0.1235"),
        (0.0000123456, "0.00001235"),
        (1e-9, "1e-09"),
        (12.3456, "12.35"),
        (999.94, "999.9"),
        (999.96, "1,000"),
        (23_612.4, "23,612"),
        (-23_612.4, "-23,612"),
        (3e38, "3e+38"),
        (float("nan"), "nan"),
    ],
)
def test_figures_are_written_without_an_exponent_where_they_can_be_read(value: float, text: str) -> None:
    assert figure_text(value) == text


@pytest.mark.parametrize(
    ("rounds", "text"),
    [
        ((), "No round was evaluated: nothing is kept."),
        ((2,), "Kept: round 2 (accuracy 0.9000)."),
        (
            (2, 4, 6, 8),
            "Kept: round 4 (accuracy 0.9000); round 6 (accuracy 0.9000); round 8 (accuracy 0.9000), the best.",
        ),
    ],
)
def test_what_a_cancelled_job_leaves_is_told(rounds: tuple[int, ...], text: str) -> None:
    models = [control_pb2.KeptModel(round=one, metrics={"accuracy": 0.9}, best=one == 8) for one in rounds]
    assert kept_if_cancelled(job_view(_job(state="running", models=models))) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (0.98611, "0.9861"),
        (-2.5, "-2.5000"),
        (0.0000321, "3.21e-05"),
        (1.5e9, "1.5e+09"),
        (math.nan, "nan"),
    ],
)
def test_metrics_of_every_size_tell_something(value: float, text: str) -> None:
    assert metric_text(value) == text
