"""Regions that lose their state at any moment: every round is still the same everywhere, and made once."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from support.budget import budget
from support.federation_in_miniature import Miniature, Pairs

from tests.sync.ps.test_machine import AnythingMayHappen

_NUMBERS = st.integers(0, 1 << 16)


class StateIsLost(AnythingMayHappen):
    """With synchronous exchange; one region at a time, which has come back before the next one's turn."""

    @initialize(
        regions=st.integers(2, 4),
        workers=st.integers(1, 2),
        rounds=st.integers(1, 4),
        ways=st.sampled_from(["mesh", "star", "chain"]),
    )
    def begin(self, regions: int, workers: int, rounds: int, ways: str) -> None:
        names = [f"r{index}" for index in range(regions)]
        pairs = {"mesh": [], "star": [(names[0], other) for other in names[1:]], "chain": [*zip(names, names[1:])]}  # noqa: B905, RUF007
        self.all = Miniature(regions, workers, rounds, 1, 0, neighbours=tuple(pairs[ways]))

    @rule(site=_NUMBERS)
    def a_state_is_lost(self, site: int) -> None:
        if not self.all.lost:
            self.all.lose_state(self._site(site).name)

    @rule(site=_NUMBERS)
    def a_region_asks_the_others(self, site: int) -> None:
        self.all.rejoin(self._site(site).name)


TestStateIsLost = StateIsLost.TestCase
TestStateIsLost.settings = settings(
    max_examples=budget(100), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("ways", [(), (("r0", "r1"), ("r0", "r2")), (("r0", "r1"), ("r1", "r2"))])
@pytest.mark.parametrize("lost", ["r0", "r1", "r2"])
def test_an_end_before_the_plan_is_known_after_a_loss(ways: Pairs, lost: str) -> None:
    """Nobody makes a round any more that could tell of it."""
    everything = Miniature(3, 1, 9, 1, 0, neighbours=ways)
    everything.sites["r1"].told_to_end = True
    everything.finish()
    ended = {site.machine.sequence for site in everything.sites.values() if site.machine}
    assert ended < set(range(9))
    everything.lose_state(lost)
    everything.finish()
    assert {site.machine.sequence for site in everything.sites.values() if site.machine} == ended
