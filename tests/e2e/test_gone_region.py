"""What the other regions pay while one is gone and they wait for it."""

from __future__ import annotations

import pytest
from support.running import Running, check_succeeded, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(150)]


def _calls(running: Running, job: str) -> tuple[float, float]:
    """Calls of Shanghai's function, and its metered seconds."""
    (part,) = [part for part in running.describe(job)["partitions"] if part["region"] == "shanghai"]
    told = {charge["item"]: charge["quantity"] for charge in part["money"]}
    return told.get("function-calls", 0.0), told.get("function-seconds", 0.0)


def test_workers_that_wait_for_a_region_that_is_gone_cost_nothing(running_pair: Running) -> None:
    federation = running_pair.federation
    job = running_pair.submit(
        "wan.exchange=synchronous", "wan.interval=5", "train.end.epochs=8", "train.workers=1", "train.evaluateEvery=0",
        "function.slice=1s", "limits.lostRegion=10m",
    )  # fmt: skip
    running_pair.wait_round(job, 3)
    agent = federation.processes["virginia"]
    agent.kill()
    agent.wait(timeout=30)
    try:
        # From the end of a slice on, no call of a worker is open: nothing is counted.
        last = [_calls(running_pair, job)]

        def still() -> bool:
            last.append(_calls(running_pair, job))
            return len(last) > 25 and len(set(last[-25:])) == 1

        eventually(still, "nothing more is metered while shanghai waits", 60, pause=0.25)
    finally:
        federation.start_agent("virginia")
    check_succeeded(running_pair.wait_end(job), accuracy=0.5)
    assert _calls(running_pair, job)[0] > last[-1][0], "it is called again when the region is back"
