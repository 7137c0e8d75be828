"""Measured speeds of a job: what is derived from them is derived again only when they say something new."""

from __future__ import annotations

from control_plane.core import Report, Speed
from control_plane.service.measuring._speeds import FEWEST_ROUNDS, JobSpeeds


def _reports(rounds: int) -> JobSpeeds:
    """Return the speeds of a job whose region has reported so many rounds after its first report."""
    speeds = JobSpeeds()
    for number in range(rounds + 1):
        speeds.record("north", Report(1, "training", round=number, speed=Speed(round_samples_per_second=100.0)))
    return speeds


def test_jobs_without_a_known_speed_have_one_version() -> None:
    assert JobSpeeds().version() == JobSpeeds().version() == _reports(FEWEST_ROUNDS - 1).version()


def test_a_known_speed_and_preferred_workers_change_the_version() -> None:
    speeds = _reports(FEWEST_ROUNDS)
    first = speeds.version()
    assert speeds.speed("north") == 100.0
    assert first != JobSpeeds().version()
    speeds.record("north", Report(1, "training", round=90, speed=Speed(round_samples_per_second=300.0)))
    assert speeds.version() != first
    before, speeds.wanted = speeds.version(), {"north": 2}
    assert speeds.version() != before
