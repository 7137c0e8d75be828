"""Robust rules where updates come through other regions, between real parameter servers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.server_process import NumpyWorker, Server


@pytest.mark.processes
@pytest.mark.parametrize("rule", ["median", "centered-clipping"])
@pytest.mark.parametrize("kind", ["star", "chain"])
def test_relays_change_no_merge(
    rule: str, kind: str, servers: Callable[..., list[Server]], workers: Callable[..., NumpyWorker]
) -> None:
    """A hub and a region in the middle pass on what the rule compares, also what it does not merge."""
    names = ("east", "north", "west")
    pairs = {"star": (("east", "north"), ("north", "west")), "chain": (("east", "west"), ("north", "west"))}
    settings = {"wan_settings": {f"robust/{rule}": 1.0, "guard": 0.0}, "neighbours": pairs[kind], "rounds": 3}
    made = servers(*names, **settings)
    pool = [workers(server, push) for server, push in zip(made, (1e-3, 2e-3, -1e-1), strict=True)]
    for worker in pool:
        worker.join(40)
        assert (worker.is_alive(), worker.failure) == (False, None)
    assert len({server.status().model_digest for server in made}) == 1
    assert all(np.array_equal(worker.finals[0], pool[0].finals[0]) for worker in pool)
    # The workers' changes grow with the rounds: 1, 2, 3 times.
    assert pool[0].finals[0] == pytest.approx(1.0 + 6 * 1e-3, abs=6e-3)
