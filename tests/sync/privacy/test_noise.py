"""What is clipped keeps within its norm, and the noise has the scale that was paid for."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from sync.privacy import clipped, gaussian_noise, noisy_update, standard_deviation


@given(
    change=arrays.arrays(np.float64, st.integers(1, 200), elements=st.floats(-3e38, 3e38)),
    clip=st.floats(1e-6, 1e6),
)
def test_no_norm_exceeds_the_bound(change: np.ndarray, clip: float) -> None:
    before = change.copy()
    factor = clipped(change, clip)
    assert math.hypot(*change) <= clip
    if math.hypot(*before) <= clip:
        assert factor == 1.0
        assert np.array_equal(change, before)
    else:
        assert math.hypot(*change) == pytest.approx(clip, rel=1e-9)


@pytest.mark.parametrize("size", [1, 7, 65_536, 200_001])
def test_noise_has_a_length(size: int) -> None:
    assert gaussian_noise(size, 1.0).shape == (size,)


def test_noise_is_gaussian_of_its_scale() -> None:
    noise = gaussian_noise(400_000, 2.5)
    # Four standard errors: a right generator fails once in 16,000 runs.
    assert abs(noise.mean()) < 4 * 2.5 / math.sqrt(noise.size)
    assert abs(noise.std() / 2.5 - 1) < 4 / math.sqrt(2 * noise.size)
    assert stats.kstest(noise / 2.5, "norm").pvalue > 1e-4
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 4 / math.sqrt(noise.size)
    half = noise.size // 2
    assert abs(np.corrcoef(noise[:half], noise[half:])[0, 1]) < 4 / math.sqrt(half)


def test_noise_is_never_the_same() -> None:
    assert not np.array_equal(gaussian_noise(100, 1.0), gaussian_noise(100, 1.0))


def test_an_update_is_clipped_and_then_has_noise() -> None:
    start = np.linspace(-1, 1, 100_000, dtype=np.float32)
    push = np.zeros(start.size, np.float32)
    push[0] = 300.0
    changed = noisy_update(start + push, start, clip=3.0, std=0.01).astype(np.float64) - start
    assert changed[0] == pytest.approx(3.0, abs=0.05)
    rest = changed[1:]
    assert rest.std() == pytest.approx(0.01, rel=4 / math.sqrt(2 * rest.size) + 1e-5)
    assert np.array_equal(noisy_update(start + push, start, 1e3, 0.0), start + push)


def test_regions_share_the_noise_where_only_the_sum_is_read() -> None:
    shares = {"a": 0.5, "b": 0.3, "c": 0.15, "d": 0.05}
    assert standard_deviation(2.0, 3.0, "b", shares, 0) == 6.0
    # Any three of the four add what the region with the largest share needs, whoever of them knows its own.
    parts = {name: shares[name] * standard_deviation(2.0, 3.0, name, shares, 3) for name in shares}
    for known in itertools.combinations(shares, 2):
        total = math.sqrt(sum(part**2 for name, part in parts.items() if name not in known))
        assert total == pytest.approx(2.0 * 3.0 * 0.5)
