"""A plan says where the prices that it rests on are old."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from control_plane.service._enrolment import unseen_region
from control_plane.service._planning import warnings_of
from scheduler import Demand, Plan, Snapshot, plan
from tests.control_plane.fake_agent import catalogue

NOW = datetime(2026, 6, 30, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("as_of", "days"),
    [("2026-06-01", None), ("2026-04", None), ("2026-03", "91"), ("2025-06-30", "365"), ("last year", None)],
)
def test_prices_older_than_a_quarter_are_told(as_of: str, days: str | None) -> None:
    known = catalogue("a")
    assert known.prices is not None
    known = replace(known, prices=replace(known.prices, as_of=as_of))
    chosen = plan(Snapshot((known,)), Demand("j", "digits", 10, 1.0, None, 1))
    assert isinstance(chosen, Plan)
    told = warnings_of(chosen, {"a": replace(unseen_region("a"), catalogue=known)}, NOW)
    assert [f"{days} days old" in text for text in told] == ([True] if days else [])
