"""Whatever dies, whenever and however often: the job ends with its model, and every update is applied once."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from support.running import Running, check_succeeded

from tests.e2e.conftest import REGIONS

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(400)]

RUNS = 4
FIRST_SEED = RUNS * int(os.environ.get("GEOFED_TEST_SEED", "0"))
KILLS = 6
SETTINGS = ("train.end.epochs=80", "wan.interval=10", "train.evaluateEvery=0", "function.slice=3s")


class Chaos:
    """Kills what a seed says, when it says."""

    def __init__(self, running: Running, job: str, seed: int) -> None:
        self._running, self._job, self._random = running, job, random.Random(seed)
        self.done: list[str] = []
        """What has been killed, in order."""

    def go_on(self) -> bool:
        """Wait for some rounds and kill something; False where the job has ended."""
        rounds = self._round() + self._random.choice((0, 0, 1, 2, 4))
        self._running.wait_round_or_end(self._job, rounds)
        if not self._works():
            return False
        kinds: list[Callable[[str], str]] = [self._control_plane, self._agent, self._server, self._worker]
        self.done.append(f"round {self._round()}: {self._random.choice(kinds)(self._random.choice(REGIONS))}")
        return True

    def _works(self) -> bool:
        return not self._running.describe(self._job)["finished_at"]

    def _round(self) -> int:
        return min((part["round"] for part in self._running.describe(self._job)["partitions"]), default=0)

    def _control_plane(self, _: str) -> str:
        self._running.federation.kill("control-plane")
        self._running.federation.start_control_plane()
        return "the control plane"

    def _agent(self, region: str) -> str:
        self._running.federation.kill(region)
        self._running.federation.start_agent(region)
        return f"the agent of {region}"

    def _server(self, region: str) -> str:
        for server in self._running.descendants(region, "sync.ps"):
            server.kill()
        return f"the parameter server of {region}"

    def _worker(self, region: str) -> str:
        workers = self._running.workers(region)
        for worker in self._random.sample(workers, min(1, len(workers))):
            worker.kill()
        return f"a worker of {region}"


@pytest.mark.parametrize("exchange", ["synchronous", "background"])
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + RUNS))
def test_a_job_outlives_any_deaths(running: Running, seed: int, exchange: str) -> None:
    job = running.submit(*SETTINGS, f"wan.exchange={exchange}")
    chaos = Chaos(running, job, seed)
    while len(chaos.done) < KILLS and chaos.go_on():
        print(chaos.done[-1])
    assert len(chaos.done) >= 2, "it has ended before it was disturbed"
    check_succeeded(running.wait_end(job, 240.0))
