"""Coefficients come back from points that were made with them, outliers or not."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler.tuning import (
    ChannelProfile,
    Compute,
    Convergence,
    MergePoint,
    NormPair,
    StepPoint,
    fit_compute,
    fit_correction,
    fit_memory,
    iterations,
    least_squares,
    noise_scale,
    step_seconds,
)
from sync.collective import Correction, Merges, merge_terms

S3 = ChannelProfile(
    0.1, 0.02, 1e8, 1e8, 0.02, 0.03, 16, name="s3", merge_seconds_per_byte=3e-10, request_cpu_seconds=2e-4
)


@settings(max_examples=budget(50), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 1769.0]))
def test_compute_is_found_again_though_a_tenth_of_the_points_is_far_off(seed: int, core_mb: float) -> None:
    rng = random.Random(seed)
    truth = Compute(rng.uniform(0.01, 1), rng.uniform(0.001, 0.1), core_mb)
    points = [
        StepPoint(batch, memory, float(step_seconds(truth, batch, memory)) * rng.uniform(0.995, 1.005))
        for batch in (8, 16, 32, 64, 128)
        for memory in (512, 1024, 1769, 3008)
    ]
    for number in rng.sample(range(len(points)), 2):
        points[number] = StepPoint(points[number].batch, points[number].memory_mb, points[number].seconds * 5)
    found = fit_compute(points)
    assert found.full_core_mb == core_mb
    for batch in (4, 24, 256):
        assert float(step_seconds(found, batch, 1024)) == pytest.approx(
            float(step_seconds(truth, batch, 1024)), rel=0.05
        )


def test_one_memory_does_not_tell_what_memory_buys() -> None:
    assert fit_compute([StepPoint(8, 512, 0.1), StepPoint(16, 512, 0.2)]).full_core_mb == 0.0


def test_no_points_teach_nothing() -> None:
    with pytest.raises(ValueError, match="points"):
        fit_compute([])
    with pytest.raises(ValueError, match="points"):
        fit_correction([], S3)
    with pytest.raises(ValueError, match="finite"):
        least_squares([[1.0]], [math.nan])


def test_memory_is_never_predicted_below_a_point() -> None:
    points = [StepPoint(b, 1024, 1.0, 200 + 2.0 * b + (30 if b == 32 else 0)) for b in (8, 16, 32, 64)]
    found = fit_memory(points)
    for point in points:
        assert found.base_mb + found.mb_per_sample * point.batch >= point.peak_mb - 1e-6


@settings(max_examples=budget(30), deadline=None)
@given(st.integers(0, 2**32))
def test_a_correction_is_found_again_from_merges(seed: int) -> None:
    rng = random.Random(seed)
    truth = Correction(
        rng.uniform(0.8, 1.3), rng.uniform(0.8, 1.3), hidden=rng.uniform(0.3, 1), duplex=rng.uniform(0, 1),
        request_seconds=rng.uniform(0, 0.002), merge_seconds=rng.uniform(0, 0.05),
    )  # fmt: skip
    ways = [(c, w, k) for w in (2, 4, 8, 12) for c, k in (("all-reduce", 1), ("scatter-reduce", w))]
    ways += [("pipelined-scatter-reduce", w, w) for w in (4, 8)] + [("k-reduce", 8, k) for k in (2, 4)]
    points = [_point(way, size, truth) for way in ways for size in (3e5, 4e6, 2e7)]
    found = fit_correction(points, S3)
    for way in (("k-reduce", 12, 3), ("pipelined-scatter-reduce", 16, 16), ("all-reduce", 6, 1)):
        for size in (1e6, 1e7):
            told, true = _point(way, size, found).seconds, _point(way, size, truth).seconds
            assert told == pytest.approx(true, rel=0.06)


def _point(way: tuple[str, int, int], size: float, correction: Correction) -> MergePoint:
    seconds = merge_terms(Merges.of([(*way, 1.0)]), size, S3).seconds(correction)[0]
    return MergePoint(*way, size, float(seconds))


def test_one_point_moves_little() -> None:
    """The prior holds what a single merge cannot tell."""
    usual = _point(("all-reduce", 4, 1), 4e6, Correction())
    found = fit_correction([MergePoint("all-reduce", 4, 1, 4e6, usual.seconds * 1.2)], S3)
    assert _point(("all-reduce", 4, 1), 4e6, found).seconds == pytest.approx(usual.seconds * 1.2, rel=0.05)
    other = _point(("pipelined-scatter-reduce", 8, 8), 1e7, found).seconds
    assert other == pytest.approx(_point(("pipelined-scatter-reduce", 8, 8), 1e7, Correction()).seconds, rel=0.3)


def test_the_noise_scale_of_gaussian_gradients_is_found() -> None:
    rng = np.random.default_rng(0)
    gradient, spread, small, large = rng.standard_normal(500), 3.0, 8, 128
    pairs = []
    for _ in range(60):
        draws = gradient + spread * rng.standard_normal((large, 500))
        parts = draws.reshape(large // small, small, 500).mean(axis=1)
        pairs.append(NormPair(small, float((parts**2).sum(1).mean()), large, float((draws.mean(0) ** 2).sum())))
    truth = 500 * spread**2 / float(gradient @ gradient)
    assert noise_scale(pairs) == pytest.approx(truth, rel=0.1)
    with pytest.raises(ValueError, match="two batches"):
        noise_scale([NormPair(8, 1.0, 8, 1.0)])


def test_noise_without_a_gradient_has_no_scale() -> None:
    assert noise_scale([NormPair(1, 1.0, 10, 0.1)]) == math.inf


def test_a_larger_batch_never_needs_more_steps_and_never_fewer_samples() -> None:
    progress = Convergence(least_steps=100, noise_samples=64)
    batches = [8, 32, 128, 512]
    steps = [float(iterations(progress, b)) for b in batches]
    assert steps == sorted(steps, reverse=True)
    samples = [s * b for s, b in zip(steps, batches, strict=True)]
    assert samples == sorted(samples)
    assert iterations(Convergence(samples=1000), 100) == 10
