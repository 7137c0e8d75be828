"""BatchNorm statistics over rounds: a running variance must stay above zero, or the model's outputs are not numbers.

The regions' statistics here do what BatchNorm's do: whatever a round begins with, it ends at those of the data.
"""

from __future__ import annotations

import numpy as np
import pytest

from sync.codec import codec_named
from sync.layout import Vector
from sync.policy import Contribution
from sync.ps.execution.replica import Replica, ReplicaState
from sync.wan import ExchangeSettings, policy_of

REGIONS = ("a", "b", "c")
TRAINED, VARIANCES = 128, slice(128, 160)
STEPS = 150


def first_model() -> Vector:
    """Weights, running variances of 1, and the counter num_batches_tracked."""
    model = np.zeros(161, np.float32)
    model[VARIANCES] = 1.0
    return model


def trained(begun: Vector, region: str, steps: int = STEPS) -> Vector:
    """A round of local steps."""
    end = begun.copy()
    end[:TRAINED] += 0.01
    kept = 0.9**steps
    truth = np.linspace(0.05, 0.4, 32) * {"a": 1.0, "b": 1.1, "c": 0.9}[region]
    end[VARIANCES] = kept * end[VARIANCES] + (1 - kept) * truth
    end[-1] += steps
    return end


def replicas(policy: str, codec: str, settings: dict[str, float]) -> dict[str, Replica]:
    exchange, own = ExchangeSettings.of(settings)
    numbers = ReplicaState(first_model(), first_model())
    made = {region: Replica(policy_of(policy, own), exchange, codec_named(codec), numbers) for region in REGIONS}
    for replica in made.values():
        replica.trained = TRAINED
    return made


@pytest.mark.parametrize(
    ("policy", "codec"),
    [
        ("ma", "fp32"),
        ("ma", "bf16"),
        ("ma", "int8"),
        ("ma", "topk"),
        ("diloco", "fp32"),
        ("diloco", "ternary"),
        ("asgd-ga", "fp32"),
    ],
)
def test_variances_stay_positive_where_all_wait_for_all(policy: str, codec: str) -> None:
    servers = replicas(policy, codec, {})
    for sequence in range(1, 6):
        made = [(r, s.own_update(trained(s.start, r), sequence)) for r, s in servers.items()]
        for region, server in servers.items():
            server.merge([Contribution(r, 1.0, m.sent) for r, m in made], None, own=region)
            server.restart()
            assert server.model[VARIANCES].min() > 0, f"round {sequence}"


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("policy", ["ma", "diloco", "asgd"])
def test_variances_are_the_regions_mean_with_background_exchange(policy: str, codec: str) -> None:
    servers = replicas(policy, codec, {"background": 1})
    model = {region: first_model() for region in REGIONS}
    known: dict[str, Vector | None] = dict.fromkeys(REGIONS)
    travelling: list[Contribution] = []
    for sequence in range(1, 9):
        arrived, travelling = travelling, []
        for region, server in servers.items():
            end = trained(model[region], region)
            made = server.own_update(end, sequence, last=sequence == 8)
            server.continue_from(end, known[region])
            model[region] = server.start
            ours = Contribution(region, 1 / 3, made.sent)
            server.merge([ours, *(c for c in arrived if c.region != region)], 1.0, own=region)
            known[region] = server.correction()
            travelling.append(ours)
            assert model[region][VARIANCES].min() > 0, f"round {sequence}: what {region} trains with"
            assert server.model[VARIANCES].min() > 0, f"round {sequence}: the model of {region}"
            if region == "b" and sequence == 4:
                # A new attempt of the workers begins with the mean.
                server.restart()
                model[region], known[region] = server.start, None
    mean = np.mean([model[region][VARIANCES] for region in REGIONS], axis=0)
    for region, server in servers.items():
        server.merge([c for c in travelling if c.region != region], 1.0, own=region)
        assert np.allclose(server.model[VARIANCES], mean, atol=1e-5)


def test_an_unusual_update_is_refused_whatever_the_counter_says() -> None:
    servers = replicas("ma", "fp32", {})
    steady = np.full(161, 0.01, np.float32)
    steady[-1] = STEPS
    for _ in range(4):
        assert not servers["a"].merge([Contribution("b", 1.0, steady)], None, own="a")
    odd = steady.copy()
    odd[:TRAINED] *= 200
    assert servers["a"].merge([Contribution("b", 1.0, odd)], None, own="a")
    odd = steady.copy()
    odd[-1] = np.inf
    assert servers["a"].merge([Contribution("b", 1.0, odd)], None, own="a")
