"""Robust rules where a round's updates are of a part of the model."""

from __future__ import annotations

import numpy as np
import pytest

from geofed_pb.errors import GeofedError
from sync.codec import codec_named
from sync.layout import Vector
from sync.policy import Contribution
from sync.ps.execution.replica import Replica, ReplicaState, expanded, fragment
from sync.robust import robust_rule_named, robust_rules
from sync.wan import ExchangeSettings, policy_of
from tests.sync.robust.test_background import BY_HAND

REGIONS = ("a", "b", "c", "d", "e")
LIAR = "e"
SIZE, FRAGMENTS = 60, 3


RULES = [rule for rule in robust_rules() if not robust_rule_named(rule).from_last]


def _replica(rule: str, background: bool) -> Replica:
    settings = {f"robust/{rule}": 1.0, "fragments": float(FRAGMENTS), "guard": 0.0, "background": float(background)}
    first = np.zeros(SIZE, np.float32)
    return Replica(policy_of("ma"), ExchangeSettings.of(settings)[0], codec_named("fp32"), ReplicaState(first, first))


class Sites:
    """Regions that exchange a part of the model in each round; what they have not sent yet they keep."""

    def __init__(self, rule: str, *, background: bool = False) -> None:
        self.replicas = {region: _replica(rule, background) for region in REGIONS}
        self.sequence, self._background = 0, background
        self._corrections: dict[str, Vector | None] = dict.fromkeys(REGIONS)

    @property
    def model(self) -> Vector:
        return self.replicas["a"].model

    def round(self, changes: dict[str, Vector], lie: Vector | None) -> tuple[slice, dict[str, Vector]]:
        """Merge the changes; ``lie``: what the last region sends, of all coordinates. Returns the part, and what was
        sent of it."""
        self.sequence += 1
        updates = []
        for region, replica in self.replicas.items():
            end = replica.start + changes[region]
            made = replica.own_update(end, self.sequence)
            if self._background:
                replica.continue_from(end, self._corrections[region])
            sent = expanded(made.sent.copy(), made.part, SIZE)
            updates.append(Contribution(region, 0.2, lie if lie is not None and region == LIAR else sent))
        part = fragment(self.sequence, FRAGMENTS, SIZE)
        told = {one.region: one.delta.copy() for one in updates}
        total = 1.0 if self._background else None
        for region, replica in self.replicas.items():
            read = [Contribution(u.region, u.weight, told[u.region]) for u in updates]
            replica.merge(read, total, own=region, rounds=1)
            if self._background:
                self._corrections[region] = replica.correction()
            else:
                replica.restart()
        assert len({replica.model.tobytes() for replica in self.replicas.values()}) == 1
        return part, told


@pytest.mark.parametrize("rule", RULES)
def test_each_merge_is_the_rule_over_the_part_of_the_round(rule: str) -> None:
    sites, draw, last = Sites(rule), np.random.default_rng(5), np.zeros(SIZE)
    for _ in range(9):
        before = sites.model.copy()
        common = draw.normal(size=SIZE)
        changes = {name: (common + draw.normal(scale=0.3, size=SIZE)).astype(np.float32) for name in REGIONS}
        part, told = sites.round(changes, None)
        stacked = np.stack([told[name] for name in REGIONS]).astype(np.float64)
        assert not np.delete(stacked, np.r_[part], axis=1).any(), "the rest is sent in its turn"
        moved = sites.model - before
        last = BY_HAND[rule](stacked, last)
        assert moved == pytest.approx(last, abs=1e-3)
        assert not np.delete(moved, np.r_[part]).any(), "what nobody has sent does not move"


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_honest_regions_learn_beside_one_that_goes_the_other_way(rule: str, everywhere: bool, background: bool) -> None:
    """Also where that one sends more than the part of the round."""
    sites = Sites(rule, background=background)
    optima = dict(zip(REGIONS, (1.8, 1.9, 2.1, 2.2, 2.0), strict=True))
    # They are there after 4 merges of each part. With a plain mean they are 7 away by then, and 600 at the end.
    for _ in range(20 * FRAGMENTS):
        starts = {name: replica.start for name, replica in sites.replicas.items()}
        changes = {name: np.float32(0.2) * (np.float32(optima[name]) - starts[name]) for name in REGIONS}
        lie = np.float32(-4) * (np.float32(2) - sites.model)
        if not everywhere:
            part = fragment(sites.sequence + 1, FRAGMENTS, SIZE)
            lie = expanded(lie[part], part, SIZE)
        sites.round(changes, lie)
    assert sites.model == pytest.approx(2.0, abs=0.3)


def test_a_rule_that_starts_from_the_last_result_needs_the_whole_model() -> None:
    """That result is of another part, and would be merged a second time."""
    with pytest.raises(GeofedError, match="whole model"):
        ExchangeSettings.of({"robust/centered-clipping": 1.0, "fragments": 2.0})
    assert set(robust_rules()) - set(RULES) == {"centered-clipping"}
