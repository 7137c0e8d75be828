"""Robust merges with background exchange: each region continues from its own model, and all make the same merges."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from geofed_pb.errors import GeofedError
from sync.codec import codec_named
from sync.layout import Vector
from sync.policy import Contribution
from sync.ps.execution.replica import Replica, ReplicaState
from sync.robust import robust_rules
from sync.wan import ExchangeSettings, policy_of

REGIONS = ("a", "b", "c", "d", "e")
LIAR = "e"
TRAINED, STATE = 40, 6
SHARE = 1 / len(REGIONS)


class Site:
    """One region: its replica, and the correction that its workers add at their next end of a round."""

    def __init__(self, name: str, rule: str) -> None:
        first = np.concatenate([np.linspace(-1, 1, TRAINED), np.ones(STATE)]).astype(np.float32)
        self.name = name
        self._exchange = ExchangeSettings.of({f"robust/{rule}": 1.0, "background": 1.0, "guard": 0.0})[0]
        self._correction: Vector | None = None
        self._sequence = 0
        self._use(ReplicaState(first, first))

    def _use(self, state: ReplicaState) -> None:
        self.replica = Replica(policy_of("ma"), self._exchange, codec_named("fp32"), state)
        self.replica.trained = TRAINED

    def makes_a_round(self, change: Vector) -> Contribution:
        self._sequence += 1
        end = self.replica.start + change
        made = self.replica.own_update(end, self._sequence)
        self.replica.continue_from(end, self._correction)
        return Contribution(self.name, SHARE, made.sent.copy())

    def merges(self, updates: Sequence[Contribution]) -> tuple[tuple[str, str], ...]:
        refused = self.replica.merge(updates, 1.0, own=self.name, rounds=1)
        self._correction = self.replica.correction()
        return refused

    def starts_again(self) -> None:
        """From what a checkpoint holds."""
        self._use(self.replica.state)


def _median(changes: np.ndarray, _: np.ndarray) -> np.ndarray:
    return np.asarray(np.median(changes, axis=0))


def _trimmed(changes: np.ndarray, _: np.ndarray) -> np.ndarray:
    return np.asarray(np.delete(np.sort(changes, axis=0), [0, len(changes) - 1], axis=0).mean(axis=0))


def _scores(changes: np.ndarray) -> np.ndarray:
    squares = ((changes[:, None] - changes[None]) ** 2).sum(axis=2)
    return np.sort(squares, axis=1)[:, 1 : len(changes) - 2].sum(axis=1)


def _krum(changes: np.ndarray, _: np.ndarray) -> np.ndarray:
    return np.asarray(changes[_scores(changes).argmin()])


def _multi_krum(changes: np.ndarray, _: np.ndarray) -> np.ndarray:
    return np.asarray(changes[np.argsort(_scores(changes))[: len(changes) - 3]].mean(axis=0))


def _geometric_median(changes: np.ndarray, _: np.ndarray) -> np.ndarray:
    point = np.median(changes, axis=0)
    for _step in range(2000):
        inverse = 1 / np.maximum(np.linalg.norm(changes - point, axis=1), 1e-9)
        point = (inverse[:, None] * changes).sum(axis=0) / inverse.sum()
    return np.asarray(point)


def _clipped(changes: np.ndarray, last: np.ndarray) -> np.ndarray:
    away = changes - last
    lengths = np.linalg.norm(away, axis=1)
    return np.asarray(last + (away * np.minimum(1, np.sort(lengths)[2] / lengths)[:, None]).mean(axis=0))


BY_HAND: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "median": _median,
    "trimmed-mean": _trimmed,
    "krum": _krum,
    "multi-krum": _multi_krum,
    "geometric-median": _geometric_median,
    "centered-clipping": _clipped,
}


def _changes(draw: np.random.Generator, lie: float) -> dict[str, Vector]:
    """What each region's workers make of their model in a round; the liar's is turned round and enlarged."""
    common = draw.normal(size=TRAINED + STATE)
    made = {region: (common + draw.normal(scale=0.3, size=common.size)).astype(np.float32) for region in REGIONS}
    for change in made.values():
        change[TRAINED:] *= 0.1
    made[LIAR] = made[LIAR] * np.float32(lie)
    return made


def test_all_rules_are_here() -> None:
    assert set(BY_HAND) == set(robust_rules())


@pytest.mark.slow
@pytest.mark.parametrize("rule", robust_rules())
@settings(max_examples=budget(20))
@given(seed=st.integers(0, 1 << 32), lie=st.sampled_from([-1.0, -4.0, 50.0, -300.0]))
def test_each_merge_is_the_rule_over_the_changes_of_one_round(rule: str, seed: int, lie: float) -> None:
    """To the same bits everywhere, also where a server has started again; one region of five cannot lead it away."""
    sites, draw = [Site(region, rule) for region in REGIONS], np.random.default_rng(seed)
    last = np.zeros(TRAINED)
    for number in range(4):
        before = sites[0].replica.model.copy()
        updates = [site.makes_a_round(change) for site, change in zip(sites, _changes(draw, lie).values(), strict=True)]
        for site in sites:
            site.merges(draw.permutation(np.array(updates, object)).tolist())
        models = {site.replica.model.tobytes() for site in sites}
        assert len(models) == 1, "all regions have the same model, bit for bit"
        changes = np.stack([one.delta[:TRAINED] for one in updates]).astype(np.float64)
        moved = (sites[0].replica.model - before)[:TRAINED]
        last = BY_HAND[rule](changes, last)
        assert moved == pytest.approx(last, abs=2e-4 * max(1.0, float(np.abs(last).max())))
        _bounded(rule, moved, changes[:-1])
        sites[number % 5].starts_again()


def _bounded(rule: str, moved: np.ndarray, honest: np.ndarray) -> None:
    if rule in ("median", "trimmed-mean"):
        assert (moved >= honest.min(axis=0) - 1e-4).all()
        assert (moved <= honest.max(axis=0) + 1e-4).all()
        return
    middle = honest.mean(axis=0)
    spread = np.linalg.norm(honest - middle, axis=1).max()
    reach = np.linalg.norm(honest, axis=1).max() if rule == "centered-clipping" else 3 * spread
    assert np.linalg.norm(moved - middle) <= reach + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("rule", robust_rules())
def test_honest_regions_learn_beside_one_that_goes_the_other_way(rule: str) -> None:
    """Each is drawn to an optimum of its own, near 2; the liar runs away from where it would be drawn."""
    sites = [Site(region, rule) for region in REGIONS]
    optima = dict(zip(REGIONS, (1.8, 1.9, 2.1, 2.2, 2.0), strict=True))
    for _ in range(60):
        updates = []
        for site in sites:
            change = np.float32(0.3) * (np.float32(optima[site.name]) - site.replica.start)
            change[TRAINED:] = 0
            updates.append(site.makes_a_round(-4 * change if site.name == LIAR else change))
        for site in sites:
            site.merges(updates)
    for site in sites[:-1]:
        assert site.replica.model[:TRAINED] == pytest.approx(2.0, abs=0.25)
        assert site.replica.start[:TRAINED] == pytest.approx(2.0, abs=0.4), "corrections keep its workers near"


def test_state_that_is_not_trained_is_the_median_of_the_regions_values() -> None:
    """Also while a region is in quarantine, and after it. The sum of the medians of the changes would leave them."""
    sites, draw = [Site(region, "median") for region in REGIONS], np.random.default_rng(3)
    values = {site.name: np.ones(STATE, np.float32) for site in sites}
    quarantined, summed = 0, np.ones(STATE)
    for number in range(60):
        made = _changes(draw, -5.0 if number < 12 else 1.0)
        for region in REGIONS:
            aim = np.float32(100.0) if region == LIAR else draw.gamma(1.0, 0.5, STATE).astype(np.float32)
            made[region][TRAINED:] = np.float32(0.5) * (aim - values[region])
            values[region] = values[region] + made[region][TRAINED:]
        summed += np.median([made[region][TRAINED:] for region in REGIONS], axis=0)
        updates = [site.makes_a_round(made[site.name]) for site in sites]
        refused = [site.merges(updates) for site in sites]
        away = [region for region, _ in refused[0]]
        quarantined += len(away)
        expected = np.median([value for region, value in values.items() if region not in away], axis=0)
        assert sites[0].replica.model[TRAINED:] == pytest.approx(expected, abs=1e-3)
        assert (sites[0].replica.model[TRAINED:] > 0).all()
        assert len({site.replica.model.tobytes() for site in sites}) == 1
        sites[number % 5].starts_again()
    assert quarantined == 20
    assert (summed < 0).any()


@pytest.mark.parametrize("late", ["quorum", "lead", "grace_seconds", "damping", "compensation"])
def test_what_would_merge_rounds_in_parts_is_refused(late: str) -> None:
    with pytest.raises(GeofedError, match="same round of all regions"):
        ExchangeSettings.of({"robust/median": 1.0, "background": 1.0, late: 1.0})
