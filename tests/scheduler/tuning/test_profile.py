"""What follows from a profile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.tuning_draws import cheapest, enumerated

from scheduler.tuning import (
    Configuration,
    PlatformCosts,
    Prediction,
    StepPoint,
    TaskModel,
    TuningLimits,
    predict,
    space_of,
    task_of,
    worker_counts,
)
from tests.scheduler.test_tuned import profile

PLATFORM = PlatformCosts(1.67e-5, 2e-7, slice_seconds=30.0)


def task(**more: object) -> TaskModel:
    given = {"epochs": 3.0, "steps": None, **more}
    return task_of(profile("a"), PLATFORM, **given)  # type: ignore[arg-type]


def told(of: TaskModel, workers: int, memory_mb: int = 1024) -> Prediction:
    (one,) = predict(of, [Configuration(memory_mb, workers, 32, "all-reduce", 1, "redis")])
    assert one is not None
    return one


def test_epochs_are_shared_out_and_steps_are_not() -> None:
    assert told(task(), 1).iterations == 94
    assert told(task(), 4).iterations == 24
    for workers in (1, 4):
        assert told(task(epochs=None, steps=70), workers).iterations == 70


def test_a_step_is_what_was_measured_and_a_later_run_counts_more() -> None:
    alone = told(task(), 1)
    assert alone.iteration_seconds == pytest.approx(0.01 + 0.001 * 32 + 0.001, rel=0.01)
    slower = told(task(samples_per_second=profile("a").samples_per_second / 2), 1)
    assert slower.iteration_seconds == pytest.approx(2 * 0.042 + 0.001, rel=0.01)


def test_where_memory_was_not_told_only_what_it_ran_in_is_known_to_be_enough() -> None:
    blind = replace(profile("a"), steps=tuple(replace(point, peak_mb=0.0) for point in profile("a").steps))
    of = task_of(blind, PLATFORM, epochs=1.0, steps=None)
    space = space_of(blind, workers=(1, 2), most_memory_mb=4096, batch=32)
    best = cheapest(of, space, TuningLimits())
    assert best is not None
    assert best.configuration.memory_mb == 1024


def test_what_an_evaluation_needs_is_kept() -> None:
    large = replace(profile("a"), evaluation_peak_mb=1500.0)
    of, space = (
        task_of(large, PLATFORM, epochs=1.0, steps=None),
        space_of(large, workers=(1, 2), most_memory_mb=4096, batch=32),
    )
    assert all(one.configuration.memory_mb >= 1500 for one in enumerated(of, space))


def test_of_many_numbers_of_workers_some_are_tried() -> None:
    assert worker_counts(10)[-1] == 10
    wide = worker_counts(500)
    assert (wide[0], wide[-1]) == (1, 500)
    assert len(wide) <= 65
    assert worker_counts(0) == (1,)


def test_several_memories_tell_what_memory_buys() -> None:
    steps = tuple(StepPoint(b, m, (0.01 + 0.001 * b) * max(1.0, 1769 / m), 200.0) for b in (8, 32) for m in (512, 1769))
    of = task_of(replace(profile("a"), steps=steps), PLATFORM, epochs=3.0, steps=None)
    assert of.compute.full_core_mb == 1769
    space = space_of(profile("a"), workers=(1,), most_memory_mb=3008, batch=32)
    best = min(enumerated(of, space), key=lambda one: (one.seconds, one.usd))
    assert best.configuration.memory_mb == 1769
