"""What background exchange does to training, on regions whose local rounds are known in closed form.

Each region pulls its model towards an optimum of its own; the federation's is the mean of them.
"""

from __future__ import annotations

import numpy as np
import pytest

from sync.codec import codec_named
from sync.layout import Vector
from sync.policy import Contribution
from sync.ps.execution.replica import Replica, ReplicaState
from sync.wan import ExchangeSettings, policy_of

OPTIMA = {"a": 3.0, "b": -1.0, "c": 4.0}
BEST = 2.0
SHARE = 1 / 3
START = -20.0


class Site:
    """One region: its replica, and the correction that its workers are given at their next end of a round."""

    def __init__(self, name: str, kept: float, policy: str = "ma") -> None:
        first = np.full(4, START, np.float32)
        self.name, self._kept = name, kept
        settings = ExchangeSettings(background=1.0, guard=0.0)
        self.replica = Replica(policy_of(policy), settings, codec_named("fp32"), ReplicaState(first, first))
        self._correction: Vector | None = None
        self._sequence = 0

    def makes_a_round(self) -> Contribution:
        self._sequence += 1
        optimum = np.float32(OPTIMA[self.name])
        end: Vector = (optimum + np.float32(self._kept) * (self.replica.start - optimum)).astype(np.float32)
        made = self.replica.own_update(end, self._sequence)
        self.replica.continue_from(end, self._correction)
        return Contribution(self.name, SHARE, made.sent)

    def merges(self, updates: list[Contribution], lacking: float = 0.0, rounds: int = 1) -> None:
        self.replica.merge(updates, 1.0, own=self.name, rounds=rounds, lacking=lacking)
        self._correction = self.replica.correction()


@pytest.mark.parametrize("kept", [0.9, 0.5, 0.0, -0.3])
def test_long_rounds_that_overshoot_do_not_swing_ever_further(kept: float) -> None:
    """With the whole correction, a round late, regions that keep -0.3 of their distance fly apart by 1.3 a round."""
    sites = [Site(name, kept) for name in OPTIMA]
    for _ in range(120):
        updates = [site.makes_a_round() for site in sites]
        for site in sites:
            site.merges(updates)
    for site in sites:
        assert site.replica.model == pytest.approx(BEST, abs=1e-3)
        away = np.abs(site.replica.start - BEST).max()
        assert away <= abs(OPTIMA[site.name] - BEST) * 0.75, "a region begins its rounds near the model"


def test_what_two_sides_of_a_cut_have_made_is_averaged_when_they_meet() -> None:
    """Both sides come to rest; merged later, their changes must not carry the model as far again beyond."""
    a, b, c = (Site(name, 0.5) for name in OPTIMA)
    kept: dict[str, list[Contribution]] = {name: [] for name in OPTIMA}
    for cut in range(1, 21):
        mine, *theirs = (site.makes_a_round() for site in (a, b, c))
        for update in (mine, *theirs):
            kept[update.region].append(update)
        a.merges([mine], lacking=2 * SHARE * cut)
        for site in (b, c):
            site.merges(theirs, lacking=SHARE * cut)
    assert a.replica.view == pytest.approx(OPTIMA["a"], abs=0.1), "alone it trains on its own data, at full pace"
    assert b.replica.view == pytest.approx((OPTIMA["b"] + OPTIMA["c"]) / 2, abs=0.1)
    a.merges([*kept["b"], *kept["c"]], rounds=0)
    for site in (b, c):
        site.merges(kept["a"], rounds=0)
    for site in (a, b, c):
        assert site.replica.model == pytest.approx(BEST, abs=0.1)
        assert site.replica.view is site.replica.model


def test_what_a_cut_leaves_behind_survives_a_crash() -> None:
    site = Site("a", 0.5)
    for cut in range(1, 4):
        site.merges([site.makes_a_round()], lacking=2 * SHARE * cut)
    numbers = site.replica.state
    assert site.replica.view != pytest.approx(site.replica.model)
    again = Replica(policy_of("ma"), ExchangeSettings(background=1.0), codec_named("fp32"), numbers)
    assert (again.view == site.replica.view).all()
    assert (again.correction() == site.replica.correction()).all()


def test_sums_are_not_stretched_for_those_who_are_away() -> None:
    site = Site("a", 0.5, "asgd-ga")
    site.merges([site.makes_a_round()], lacking=2.0)
    assert site.replica.view is site.replica.model
