"""Robust merges of a replica: state that is not trained, few regions, quarantine, and the same model everywhere."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from geofed_pb.errors import GeofedError
from sync.codec import codec_named
from sync.policy import Contribution
from sync.ps.execution.replica import Replica, ReplicaState
from sync.robust import robust_rules
from sync.wan import ExchangeSettings, policy_of

REGIONS = ("a", "b", "c", "d", "e")
SIZE, TRAINED = 60, 50


def replica_of(rule: str, wrong: float = 0.0, policy: str = "ma", **more: float) -> Replica:
    settings = {f"robust/{rule}": wrong, **more}
    exchange, _ = ExchangeSettings.of(settings)
    first = np.zeros(SIZE, np.float32)
    replica = Replica(policy_of(policy, settings), exchange, codec_named("fp32"), ReplicaState(first, first))
    replica.trained = TRAINED
    return replica


def updates(seed: int, liar: str = "", lie: float = -5.0) -> list[Contribution]:
    random = np.random.default_rng(seed)
    common = random.normal(size=SIZE)
    made = []
    for region in REGIONS:
        delta = (common + random.normal(scale=0.3, size=SIZE)).astype(np.float32)
        made.append(Contribution(region, 1.0, delta * np.float32(lie) if region == liar else delta))
    return made


@pytest.mark.parametrize("rule", robust_rules())
def test_a_lying_region_changes_little(rule: str) -> None:
    honest, attacked, plain = replica_of(rule), replica_of(rule), replica_of(rule)
    plain._robust = None
    for seed in range(4):
        honest.merge(updates(seed), None, own="a")
        attacked.merge(updates(seed, "e"), None, own="a")
        plain.merge(updates(seed, "e"), None, own="a")
    wrong = np.linalg.norm(plain.model - honest.model)
    assert np.linalg.norm(attacked.model - honest.model) < 0.5 * wrong


@pytest.mark.parametrize("rule", robust_rules())
@pytest.mark.parametrize("policy", ["ma", "fedavgm", "fedadam", "diloco"])
def test_all_regions_merge_to_the_same_bits_and_a_restart_changes_nothing(rule: str, policy: str) -> None:
    one, other = replica_of(rule, policy=policy), replica_of(rule, policy=policy)
    for seed in range(8):
        one.merge(updates(seed, "e"), None, own="a")
        other.merge(updates(seed, "e")[::-1], None, own="b")
        exchange = other._exchange
        settings = {f"robust/{rule}": 0.0}
        other = Replica(policy_of(policy, settings), exchange, codec_named("fp32"), other.state)
        other.trained = TRAINED
    assert one.model.tobytes() == other.model.tobytes()


def test_state_that_is_not_trained_is_merged_by_its_median() -> None:
    replica = replica_of("krum")
    made = updates(1, "e", lie=100.0)
    replica.merge(made, None, own="a")
    tails = np.stack([c.delta[TRAINED:] for c in made])
    assert np.allclose(replica.model[TRAINED:], np.median(tails, axis=0), atol=1e-6)


def test_a_region_that_is_wrong_again_and_again_is_put_in_quarantine_and_comes_back() -> None:
    replica = replica_of("median")
    refused = [replica.merge(updates(seed, "e" if seed < 12 else ""), None, own="a") for seed in range(60)]
    away = [number for number, found in enumerate(refused) if found]
    assert away == list(range(5, 25))
    assert all(region == "e" and "quarantine" in reason for found in refused for region, reason in found)


@pytest.mark.parametrize(("rounds", "away", "last"), [(0.0, 0, 20), (3.0, 6, 4), (20.0, 15, 0)])
def test_a_job_says_how_long_an_honest_region_of_unlike_data_is_away(rounds: float, away: int, last: int) -> None:
    """Its changes are several times as wide as the others'; without quarantine they count as the rule lets them."""
    replica = replica_of("median", wrong=2.0, quarantine=rounds)
    refused, suspicion = 0, []
    for seed in range(20):
        random = np.random.default_rng(100 + seed)
        unlike = random.normal(scale=5 * 0.3, size=SIZE).astype(np.float32)
        made = [dataclasses.replace(c, delta=c.delta + unlike) if c.region == "e" else c for c in updates(seed)]
        refused += len(replica.merge(made, None, own="a"))
        suspicion.append(replica.suspicion.get("e", 0))
    assert suspicion[:4] == [1, 2, 3, 4]
    assert refused == away
    assert suspicion[-1] == last
    assert not replica.suspicion.keys() & set("abcd")


def test_no_more_regions_are_in_quarantine_than_may_be_wrong() -> None:
    replica = replica_of("median", wrong=1.0)
    liars = ("d", "e")
    for seed in range(30):
        made = [dataclasses.replace(c, delta=c.delta * 9) if c.region in liars else c for c in updates(seed)]
        refused = replica.merge(made, None, own="a")
        assert len(refused) <= 1


def test_honest_regions_stay_out_of_quarantine() -> None:
    for rule in robust_rules():
        replica = replica_of(rule)
        assert not any(replica.merge(updates(seed), None, own="a") for seed in range(40)), rule


@pytest.mark.parametrize("left", [1, 2])
def test_with_too_few_updates_for_the_rule_their_median_counts(left: int) -> None:
    replica, made = replica_of("krum"), updates(3)[:left]
    replica.merge(made, None, own="a")
    assert np.allclose(replica.model, np.median(np.stack([c.delta for c in made]), axis=0), atol=1e-6)


def test_a_rule_and_a_number_that_there_are_not_are_refused() -> None:
    with pytest.raises(GeofedError, match="unknown robust rule 'none-such'"):
        replica_of("none-such")
    with pytest.raises(GeofedError, match="CONFIG_INVALID"):
        ExchangeSettings.of({"robust/median": -1.0})
