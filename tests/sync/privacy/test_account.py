"""Epsilon is `dp-accounting`'s own, and what is calibrated by it keeps within what was asked for."""

from __future__ import annotations

import builtins
from typing import Any

import dp_accounting as dp
import dp_accounting.rdp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geofed_pb.errors import GeofedError
from sync.privacy import Release, affordable, epsilon_of, noise_for

DELTA = 1e-5


@pytest.mark.parametrize(
    "made",
    [
        [(Release(1.0), 1)],
        [(Release(4.0), 30)],
        [(Release(1.1, 0.01), 1000)],
        [(Release(0.8, 0.25), 12), (Release(0.8, 0.25), 8), (Release(2.5), 3), (Release(1.3, 0.001), 5000)],
    ],
)
def test_it_is_that_of_dp_accounting_for_the_same_events(made: list[tuple[Release, int]]) -> None:
    events = []
    for release, count in made:
        event: dp.DpEvent = dp.GaussianDpEvent(release.noise)
        if release.rate < 1:
            event = dp.PoissonSampledDpEvent(release.rate, event)
        events.append(dp.SelfComposedDpEvent(event, count))
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp.ComposedDpEvent(events))
    assert epsilon_of(made, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-12)


def test_nothing_costs_nothing() -> None:
    assert epsilon_of([], DELTA) == epsilon_of([(Release(1.0), 0)], DELTA) == 0.0


def test_a_regions_update_can_change_by_twice_its_norm() -> None:
    assert Release.of(3.0, 1.0, sampled=False) == Release(1.5)
    assert Release.of(3.0, 0.1, sampled=True) == Release(3.0, 0.1)


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(
    epsilon=st.floats(0.3, 20), rate=st.sampled_from([1.0, 0.2, 0.01]), count=st.integers(1, 500), sampled=st.booleans()
)
def test_the_noise_for_an_epsilon_is_enough_and_little_more(
    epsilon: float, rate: float, count: int, sampled: bool
) -> None:
    noise = noise_for(epsilon, DELTA, rate, count, sampled=sampled)
    release = Release.of(noise, rate, sampled=sampled)
    assert epsilon_of([(release, count)], DELTA) <= epsilon
    if noise > 0.11:
        less = Release.of(noise * 0.999, rate, sampled=sampled)
        assert epsilon_of([(less, count)], DELTA) > epsilon


def test_what_no_noise_can_reach_is_refused() -> None:
    with pytest.raises(GeofedError, match="no noise makes 10 releases") as told:
        noise_for(1e-9, 1e-300, 1.0, 10, sampled=True)
    assert told.value.code == "INADMISSIBLE"


@pytest.mark.slow
def test_noise_that_was_looked_for_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three regions of one size took three times as long to plan as one, which is seconds each."""
    first = noise_for(3.25, DELTA, 0.5, 4, sampled=True)

    def again(*_: Any) -> float:
        raise AssertionError("computed again")

    monkeypatch.setattr("sync.privacy._account.epsilon_of", again)
    assert noise_for(3.25, DELTA, 0.5, 4, sampled=True) == first
    with pytest.raises(AssertionError, match="computed again"):
        noise_for(3.25, DELTA, 0.5, 5, sampled=True)


@pytest.mark.slow
@settings(deadline=None, max_examples=5)
@given(before=st.integers(0, 40), most=st.integers(0, 60), epsilon=st.floats(0.5, 10))
def test_as_many_releases_as_fit_are_affordable(before: int, most: int, epsilon: float) -> None:
    spent, release = [(Release(2.0), before)], Release(3.0, 0.3)
    count = affordable(spent, release, most, epsilon, DELTA)
    assert 0 <= count <= most
    if count:
        assert epsilon_of([*spent, (release, count)], DELTA) <= epsilon
    if count < most:
        assert epsilon_of([*spent, (release, count + 1)], DELTA) > epsilon


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *more: Any, **others: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *more, **others)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(GeofedError) as told:
        epsilon_of([(Release(1.0), 1)], DELTA)
    assert (told.value.code, told.value.hint) == ("UNAVAILABLE", "in a clone of geofed: pip install '.[privacy]'")
