"""The exact weighted mean, and the WAN policy built on it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from geofed_pb.errors import GeofedError
from sync import means
from sync.layout import Vector
from sync.means import weighted_mean
from sync.policy import Contribution, ModelAverage
from sync.wan import policy_of

_FLOATS = st.floats(-1e6, 1e6, width=32)


@st.composite
def _parts(draw: st.DrawFn) -> tuple[list[Vector], list[float]]:
    workers, size = draw(st.integers(1, 6)), draw(st.integers(0, 20))
    vectors = [draw(hnp.arrays(np.float32, size, elements=_FLOATS)) for _ in range(workers)]
    weights = draw(st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e6)), min_size=workers, max_size=workers))
    if not any(weights):
        weights[draw(st.integers(0, workers - 1))] = 1.0
    return vectors, weights


@given(_parts())
def test_it_is_the_mean_in_float64_rounded_once(parts: tuple[list[Vector], list[float]]) -> None:
    vectors, weights = parts
    reference = np.average(np.array(vectors, np.float64), axis=0, weights=weights)
    merged = weighted_mean(vectors, weights)
    assert merged.dtype == np.float32
    # One unit in the last place for the order of the sums, which differs from numpy's.
    scale = np.max(np.abs(np.array(vectors, np.float64)), axis=0, initial=0.0)
    assert np.all(np.abs(merged - reference) <= np.spacing(np.maximum(scale, np.abs(reference)).astype(np.float32)))
    assert merged.tobytes() == weighted_mean([v.copy() for v in vectors], list(weights)).tobytes()


@given(hnp.arrays(np.float32, 10, elements=_FLOATS), st.lists(st.integers(1, 1 << 20), min_size=2, max_size=8))
def test_equal_vectors_stay_what_they_are(vector: Vector, weights: list[int]) -> None:
    """Workers that agree on a number (a counter, a frozen weight) must still agree with it after the merge."""
    assert np.array_equal(weighted_mean([vector] * len(weights), [float(w) for w in weights]), vector)


def test_a_vector_longer_than_a_block_is_merged_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(means, "_BLOCK", 7)
    rng = np.random.default_rng(0)
    vectors = [rng.standard_normal(23).astype(np.float32) for _ in range(3)]
    blocked = weighted_mean(vectors, [1.0, 2.0, 3.0])
    monkeypatch.setattr(means, "_BLOCK", 1 << 18)
    assert blocked.tobytes() == weighted_mean(vectors, [1.0, 2.0, 3.0]).tobytes()


def test_what_has_no_weight_leaves_no_trace() -> None:
    broken = np.array([np.nan, np.inf], np.float32)
    assert weighted_mean([broken, np.ones(2, np.float32)], [0.0, 5.0]).tolist() == [1.0, 1.0]


def test_the_result_is_a_copy() -> None:
    vector = np.ones(3, np.float32)
    weighted_mean([vector], [1.0])[0] = 9
    assert vector.tolist() == [1, 1, 1]


_ONE = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("vectors", "weights"),
    [
        ([], []),
        ([_ONE], []),
        ([_ONE, np.ones(3, np.float32)], [1.0, 1.0]),
        ([_ONE, _ONE], [0.0, 0.0]),
        ([_ONE, _ONE], [2.0, -1.0]),
        ([_ONE, _ONE], [1.0, float("nan")]),
        ([_ONE, _ONE], [1.0, float("inf")]),
    ],
)
def test_what_cannot_be_merged_is_refused(vectors: list[Vector], weights: list[float]) -> None:
    with pytest.raises(GeofedError) as raised:
        weighted_mean(vectors, weights)
    assert raised.value.code == "FRAME_INVALID"


@given(_parts(), st.randoms(use_true_random=False))
def test_model_averaging_is_the_mean_of_the_models_in_any_order(
    parts: tuple[list[Vector], list[float]], random: object
) -> None:
    deltas, weights = parts
    base = np.linspace(-3, 3, deltas[0].size).astype(np.float32)
    contributions = [
        Contribution(f"region-{number}", weight, delta)
        for number, (delta, weight) in enumerate(zip(deltas, weights, strict=True))
    ]
    merged = ModelAverage().merge(base, contributions, {}).model
    models = np.array([base.astype(np.float64) + delta for delta in deltas])
    np.testing.assert_allclose(merged, np.average(models, axis=0, weights=weights), rtol=1e-5, atol=0.2)
    for order in itertools.islice(itertools.permutations(contributions), 24):
        assert ModelAverage().merge(base, list(order), {}).model.tobytes() == merged.tobytes()


def test_policies_are_found_by_name() -> None:
    assert isinstance(policy_of("ma"), ModelAverage)
    with pytest.raises(GeofedError, match="unknown WAN policy 'x'"):
        policy_of("x")


def test_an_update_that_is_merged_alone_counts_as_much_as_with_all_the_others() -> None:
    base = np.zeros(2, np.float32)
    west = Contribution("west", 30.0, np.array([1.0, -10.0], np.float32))
    merged = ModelAverage().merge(base, [west], {}, total=120.0).model
    assert merged.tolist() == [0.25, -2.5]
