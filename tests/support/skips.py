"""In CI no test is skipped, except for a reason that no installation on its machine would remove."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["TOLERATED", "fail_in_ci"]

TOLERATED = (
    # Of what a test is given there is nothing to try.
    "this gateway has no authentication",
    "GEOFED_TEST_CALLBACK_URL does not say",
    "back-end netem has no relay",
    "already not root",
    # It depends on where the interpreter and the clone lie.
    "no Python of 3.11 or newer that nobody may run",
    "nobody may not read the checkout",
    # What is not in the clone.
    "the published traces are not on this machine",
    "this clone is shallow",
    # Another machine.
    "needs a machine with fewer GPUs",
    "Linux's scheduler",
    "its number of the call is unknown",
    "glibc's settings",
    # `make soak` ends.
    "the time of this run is over",
)
"""Beginnings of the reasons."""


def fail_in_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Have a test, or a module, fail that was skipped in CI for another reason: such a skip hides what is not
    installed, or does not start."""
    if not report.skipped or not os.environ.get("CI") or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not reason.startswith(TOLERATED):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {reason}"
