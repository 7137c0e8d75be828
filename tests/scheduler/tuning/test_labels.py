"""How unlike the labels of regions are."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.tuning import SKEW_THRESHOLD, ChannelProfile, StepPoint, TaskProfile, label_skew


def told(region: str, samples: int, *counts: int) -> TaskProfile:
    """A profile of a region with so many labels of each class."""
    return TaskProfile(
        region=region, samples=samples, batch=8, parameters=1, model_bytes=4,
        steps=(StepPoint(8, 512, 0.1, 100.0),), update_seconds=0.0, norms=(), evaluation_peak_mb=0.0,
        channel=ChannelProfile(0.001, 0.001, 1e8, 1e8, name="file"), start_seconds=1.0, again_seconds=0.1,
        gb_seconds=1.0, usd=0.0, labels=tuple((label, count) for label, count in enumerate(counts) if count),
    )  # fmt: skip


def test_the_distance_is_the_part_that_would_have_to_be_others() -> None:
    skew = label_skew([told("a", 100, 100, 0), told("b", 100, 0, 100)])
    assert skew is not None
    assert skew.distance == pytest.approx(0.5)
    skew = label_skew([told("a", 100, 60, 40), told("b", 100, 50, 50), told("c", 100, 40, 60)])
    assert skew is not None
    assert (skew.region in "ac", skew.distance) == (True, pytest.approx(0.1))


def test_regions_count_by_their_samples_however_many_labels_were_counted() -> None:
    skew = label_skew([told("large", 18_000, 2000, 0), told("small", 2000, 0, 2000)])
    assert skew is not None
    assert (skew.region, skew.distance) == ("small", pytest.approx(0.9))


def test_a_region_that_withholds_many_labels_says_nothing() -> None:
    """What it reports would look unlike the same labels elsewhere."""
    every = told("b", 2000, *[100] * 20)
    assert label_skew([told("a", 2000, *[100] * 17), every]) is None
    skew = label_skew([told("a", 2000, *[100] * 19), every])
    assert skew is not None
    assert skew.distance < SKEW_THRESHOLD


def test_too_few_labels_or_regions_say_nothing() -> None:
    assert label_skew([]) is None
    assert label_skew([told("a", 100, 100, 0)]) is None
    assert label_skew([told("a", 100, 100, 0), told("b", 100)]) is None
    assert label_skew([told("a", 100, 100, 0), told("b", 100, 0, 99)]) is None
    assert label_skew([told("a", 100, 100, 0), told("b", 100, 0, 100)]) is not None
    many = [100] * 10
    assert label_skew([told("a", 1000, *many), told("b", 100, 100)]) is not None
    assert label_skew([told("a", 1100, *many, 100), told("b", 100, 100)]) is None


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_equal_regions_stay_below_the_threshold(classes: int) -> None:
    rng = np.random.default_rng(1)
    for counted in (max(100, 10 * classes), 2000):
        for _ in range(50):
            drawn = [np.bincount(rng.integers(0, classes, counted), minlength=classes) for _ in "abc"]
            skew = label_skew([told(name, 5000, *map(int, one)) for name, one in zip("abc", drawn, strict=True)])
            assert skew is None or skew.distance < SKEW_THRESHOLD
