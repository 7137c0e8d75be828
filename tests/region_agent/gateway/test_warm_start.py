"""How soon a replica answers that is forked from the warm parent, on a machine that does nothing else."""

from __future__ import annotations

import json
import statistics
import time
from datetime import timedelta

import pytest
from support.sandboxes import needs_sandboxes

from .conftest import open_target

pytestmark = [pytest.mark.alone, pytest.mark.anyio, pytest.mark.processes]
SOON = timedelta(seconds=20)


@pytest.mark.parametrize("isolation", [pytest.param("require", marks=needs_sandboxes), "none"])
async def test_replica_starts_within_200_ms(launch, isolation: str) -> None:
    embedded = launch(preload=["numpy", "torch"], isolation=isolation, forked=False)
    async with open_target(embedded) as target:
        probe = await target.deploy()
        starts = []
        for replicas in range(2, 9):
            began = time.perf_counter()
            await target.client.scale(probe.name, replicas)
            await target.client.wait_ready(probe.name, replicas, SOON)
            starts.append(time.perf_counter() - began)
        assert statistics.median(starts) < 0.2
        answer = json.loads((await probe("env")).body)
        assert "torch" not in answer["environ"]
