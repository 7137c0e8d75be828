"""The learning rate over a job's steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.optim import lr_scheduler

from geofed_pb.errors import GeofedError
from region_agent.worker.data.batches import Batches
from region_agent.worker.invocation import Schedule, Stretch
from region_agent.worker.training.learning_rate import LearningRateSchedule, factor

SCHEDULES = st.builds(
    Schedule,
    shape=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.floats(0, 0.999),
    floor=st.floats(0, 1),
)


@given(SCHEDULES, st.integers(1, 300))
def test_it_rises_to_the_whole_and_then_never_again(schedule: Schedule, steps: int) -> None:
    factors = [factor(schedule, step, steps) for step in range(1, steps + 1)]
    assert all(0 < value <= 1 for value in factors)
    top = factors.index(max(factors))
    assert factors[top] == 1
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert abs(top - schedule.warmup * steps) <= 1
    if schedule.shape != "constant":
        assert min(factors[top:]) >= schedule.floor


@given(st.integers(1, 300), st.floats(0, 1))
def test_a_cosine_is_pytorchs(steps: int, floor: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=floor)
    schedule = Schedule(shape="cosine", floor=floor)
    for step in range(1, steps + 1):
        assert factor(schedule, step, steps) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        theirs.step()


def test_all_groups_of_parameters_keep_their_proportions() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.02)]
    optimizer = torch.optim.Adam(groups)
    rate = LearningRateSchedule(optimizer, Schedule(shape="linear", warmup=0.25), 8)
    seen = []
    for step in (1, 2, 3, 8, 3):
        rate.set(step)
        seen.append([group["lr"] for group in optimizer.param_groups])
    assert seen == [pytest.approx([0.1 * by, 0.02 * by]) for by in (1 / 3, 2 / 3, 1, 1 / 6, 1)]


def test_a_rate_for_another_batch_is_scaled_in_every_step() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    rate = LearningRateSchedule(optimizer, Schedule(shape="linear", scale=0.5), 2)
    seen = []
    for step in (1, 2):
        rate.set(step)
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([0.15, 0.075])


def test_without_a_schedule_the_tasks_own_rates_stay() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    LearningRateSchedule(optimizer, None, 10).set(7)
    assert optimizer.param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize("schedule", [None, Schedule(shape="linear")])
def test_the_factor_of_a_batch_goes_beside_the_schedule(schedule: Schedule | None) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    batches = Batches(64, [Stretch(first_step=6, batch=16, rate=0.5)])
    rate = LearningRateSchedule(optimizer, schedule, 10, batches)
    for step in (5, 6, 5):  # whatever was made before
        rate.set(step)
        alone = factor(schedule, step, 10) if schedule is not None else 1.0
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3 * alone * batches.rate(step))


def test_an_optimiser_without_a_rate_is_told_of() -> None:
    class Rateless(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([torch.nn.Parameter(torch.zeros(1))], {})

    with pytest.raises(GeofedError, match="TASK_INVALID"):
        LearningRateSchedule(Rateless(), Schedule(), 10)


@pytest.mark.parametrize("wrong", [{"warmup": 1.0}, {"floor": 1.1}, {"shape": "zigzag"}, {"floor": math.nan}])
def test_what_is_no_schedule_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Schedule.model_validate(wrong)


@given(SCHEDULES, st.integers(1, 60), st.integers(0, 60))
def test_a_job_that_goes_on_goes_on_where_the_other_has_ended(schedule: Schedule, left: int, done: int) -> None:
    steps = done + left
    goes_on = schedule.model_copy(update={"begin": done / steps})
    for step in range(1, left + 1):
        assert factor(goes_on, step, left) == pytest.approx(factor(schedule, done + step, steps))


@pytest.mark.parametrize(
    "made",
    [
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20),
        lambda o: lr_scheduler.StepLR(o, 3, 0.5),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=20),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[5]
        ),
    ],
)
def test_the_tasks_own_schedule_is_as_in_one_process(made: Callable[[torch.optim.Optimizer], Any]) -> None:
    """In any order of steps, and whatever the optimiser's stored state says."""

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)

    plain, wanted = optimizer(), []
    scheduler = made(plain)
    for _ in range(12):
        wanted.append((plain.param_groups[0]["lr"], plain.param_groups[0]["momentum"]))
        plain.step()
        scheduler.step()
    ours = optimizer()
    schedule = LearningRateSchedule(ours, None, 12, own=lambda: made(optimizer()))
    ours.param_groups[0]["lr"] = 7.0
    for step in (1, 2, 3, 9, 10, 4, 4, 12):
        schedule.set(step)
        group = ours.param_groups[0]
        assert (group["lr"], group["momentum"]) == wanted[step - 1], step
    with pytest.raises(GeofedError, match=r"train\.learningRate"):
        LearningRateSchedule(ours, Schedule(), 12, own=lambda: made(optimizer()))
