"""Both tuners of the number of workers, on made losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler.scaling import (
    PublishedSettings,
    PublishedTuner,
    ScalingDecision,
    ScalingGoal,
    ScalingSettings,
    ScalingTuner,
    StepCosts,
    StepObservation,
    learning_rate_factor,
)
from scheduler.scaling._forecast import forecast, unseen

MOST = 16


class Job:
    """Losses that follow the law which our tuner supposes, with the time and the money that its step_costs predict."""

    def __init__(self, noise: float, compute: float, each: float, length: float, join: float = 2.0) -> None:
        self.noise, self.length = noise, length
        seconds = tuple(compute + each * (count - 1) for count in range(1, MOST + 1))
        self.step_costs = StepCosts(seconds, worker_usd_per_second=1e-5, usd_per_second=4e-5, join_seconds=join)

    def loss(self, progress: float) -> float:
        return 0.4 + 1 / (1.5 + 2.0 * progress / self.length)

    @property
    def target(self) -> float:
        return self.loss(self.length)

    def gain(self, workers: int) -> float:
        return 1 / (1 + self.noise / workers)

    def run(
        self, observe: Callable[[StepObservation], ScalingDecision], begin: int = MOST, *,
        later: float = 0.0, dearer: float = 1.0, errors: Iterator[float] | None = None, steps: int = 4000,
    ) -> tuple[list[int], float, float]:  # fmt: skip
        """Workers of each step, and seconds and dollars to the target."""
        workers, progress, seconds, usd, made = begin, 0.0, 0.0, 0.0, []
        for step in range(1, steps):
            if progress >= self.length:
                break
            made.append(workers)
            progress += self.gain(workers)
            took = self.step_costs.expected_seconds[workers - 1]
            seconds, usd = seconds + took, usd + took * self.step_costs.rate(workers)
            error = next(errors) if errors is not None else 0.0
            told = StepObservation(step, later + seconds, self.loss(progress) + error, workers, dearer * usd)
            wanted = observe(told).workers
            pause, paid = self.pause(workers, wanted), max(workers, wanted)
            seconds, usd, workers = seconds + pause, usd + pause * self.step_costs.rate(paid), wanted
        return made, seconds, usd

    def pause(self, before: int, after: int) -> float:
        if before == after:
            return 0.0
        return self.step_costs.join_seconds if after > before else self.step_costs.expected_seconds[before - 1]

    def constant(self, workers: int) -> tuple[float, float]:
        """Seconds and dollars of as many workers from first to last."""
        seconds = math.ceil(self.length / self.gain(workers) - 1e-9) * self.step_costs.expected_seconds[workers - 1]
        return seconds, seconds * self.step_costs.rate(workers)

    def switched(self, first: int, second: int, share: float) -> tuple[float, float]:
        """The same, with other workers after some share of the progress."""
        counts = [math.ceil(self.length * s / self.gain(w)) for w, s in ((first, share), (second, 1 - share))]
        parts = [n * self.step_costs.expected_seconds[w - 1] for n, w in zip(counts, (first, second), strict=True)]
        pause = self.pause(first, second)
        usd = sum(s * self.step_costs.rate(w) for s, w in zip(parts, (first, second), strict=True))
        return sum(parts) + pause, usd + pause * self.step_costs.rate(max(first, second))


class Network(Job):
    """Losses as a network's: a plateau, a fast fall, a slow end. The form that our tuner supposes has none such."""

    def loss(self, progress: float) -> float:
        return 0.2 + 2.1 / (1 + math.exp(8 * (progress / self.length - 0.45)))


class Power(Network):
    """Nor does a step follow its law: with a learning rate that goes with the root, Adam gains by a power."""

    def gain(self, workers: int) -> float:
        return (workers / MOST) ** (0.35 + self.noise / 50)


LAWS = st.sampled_from([Job, Network, Power])
JOBS = st.builds(
    Job,
    noise=st.floats(0.5, 30.0),
    compute=st.floats(0.05, 2.0),
    each=st.floats(0.0, 0.2),
    length=st.floats(100.0, 200.0),
)


def draws(seed: int, size: float) -> Iterator[float]:
    random = np.random.default_rng(seed)
    while True:
        yield float(random.normal(0.0, size))


@pytest.mark.slow
@given(job=JOBS, seed=st.integers(0, 99), size=st.floats(0.0, 0.2), patience=st.sampled_from([None, 0.0, 0.02, 0.5]),
       least=st.integers(1, MOST), begin=st.integers(0, MOST))  # fmt: skip
@settings(max_examples=budget(6), deadline=None)
def test_never_outside_the_bounds(
    job: Job, seed: int, size: float, patience: float | None, least: int, begin: int
) -> None:
    tuner = ScalingTuner(replace(job.step_costs, least=least), ScalingGoal(job.target, patience))
    made, _, _ = job.run(tuner.observe, max(least, begin), errors=draws(seed, size), steps=200)
    assert min(made) >= least
    assert max(made) <= MOST


@given(job=JOBS, seed=st.integers(0, 99), size=st.floats(0.0, 0.05))
@settings(max_examples=budget(10), deadline=None)
def test_the_published_one_never_adds_and_removes_one_by_one(job: Job, seed: int, size: float) -> None:
    tuner = PublishedTuner(PublishedSettings(least=5, knee_slope=-1e-3, interval_seconds=5.0, ahead_seconds=2.5))
    made, _, _ = job.run(tuner.observe, errors=draws(seed, size), steps=300)
    assert all(before - after in (0, 1) for before, after in pairwise(made))
    assert min(made) >= 5


def test_the_published_one_removes_after_the_knee_and_not_before() -> None:
    job = Job(noise=4.0, compute=1.0, each=0.0, length=400.0)
    tuner = PublishedTuner(PublishedSettings(least=5, knee_slope=-1.2e-3))
    made, _, _ = job.run(tuner.observe)
    first = next(step for step, count in enumerate(made) if count < MOST)
    gain = job.gain(MOST)
    # Of the loss where the first worker left. Averages that look ahead and back, of a curve that bends, are off.
    slope = job.loss(first * gain) - job.loss((first - 1) * gain)
    assert -2.4e-3 < slope < 0
    assert job.loss(20 * gain) - job.loss(19 * gain) < -1.2e-3
    # One in every interval, as long as the loss is predicted to be no more than 15 % worse.
    assert min(made) == 5
    changes = [step for step in range(1, len(made)) if made[step] < made[step - 1]]
    # Of 20 s: 19 steps of a second, and the last merge of who leaves.
    assert all(after - before >= 19 for before, after in pairwise(changes))


def test_the_published_one_stops_where_the_loss_would_be_worse() -> None:
    job = Job(noise=4.0, compute=1.0, each=0.0, length=400.0)
    strict = PublishedTuner(PublishedSettings(least=5, knee_slope=-1.2e-3, tolerance_percent=-1e9))
    made, _, _ = job.run(strict.observe)
    assert min(made) == MOST - 1  # the one that goes at once


@given(job=JOBS, least=st.integers(4, 40), seed=st.integers(0, 99))
@settings(max_examples=budget(10), deadline=None)
def test_no_decision_before_there_are_enough_observations(job: Job, least: int, seed: int) -> None:
    tuner = ScalingTuner(job.step_costs, ScalingGoal(job.target, None), ScalingSettings(least_observations=least))
    made, _, _ = job.run(tuner.observe, errors=draws(seed, 0.05), steps=least + 20)
    assert set(made[:least]) == {MOST}


@pytest.mark.slow
@given(job=JOBS, later=st.floats(-1e5, 1e5), dearer=st.floats(0.01, 100.0))
@settings(max_examples=budget(6), deadline=None)
def test_the_clock_and_the_currency_do_not_matter(job: Job, later: float, dearer: float) -> None:
    def made(later: float, dearer: float) -> list[int]:
        each, rest = job.step_costs.worker_usd_per_second, job.step_costs.usd_per_second
        dear = replace(job.step_costs, worker_usd_per_second=dearer * each, usd_per_second=dearer * rest)
        tuner = ScalingTuner(dear, ScalingGoal(job.target))
        return job.run(tuner.observe, later=later, dearer=dearer, steps=120)[0]

    # A power of two and whole seconds: nothing is rounded another way.
    exact = 2.0 ** round(math.log2(dearer))
    assert made(0.0, 1.0) == made(float(round(later)), exact)


@pytest.mark.slow
@given(
    job=st.builds(
        Job, noise=st.floats(3.0, 30.0), compute=st.floats(0.5, 2.0), each=st.floats(0.0, 0.2),
        length=st.floats(150.0, 250.0), join=st.just(0.5),
    )
)  # fmt: skip
@settings(max_examples=budget(8), deadline=None)
def test_without_errors_it_comes_near_the_best_policy(job: Job) -> None:
    """Least money, in any time: beside all constant numbers, and all that change once from the pool.

    Where a change costs little; else it may rightly not try what it cannot tell.
    """
    tuner = ScalingTuner(job.step_costs, ScalingGoal(job.target, patience=None))
    _, _, usd = job.run(tuner.observe)
    counts = range(1, MOST + 1)
    # It knows nothing before it has seen some steps, which the pool makes; that is the policies' start, too.
    share = min(1.0, 8 * job.gain(MOST) / job.length)
    best = min(
        *(job.switched(MOST, second, share)[1] for second in counts),
        *(job.switched(MOST, second, s)[1] for second, s in product(counts, (0.25, 0.5, 0.75))),
        job.constant(MOST)[1],
    )
    assert usd <= 1.1 * best


@pytest.mark.slow
@given(job=JOBS, law=LAWS, begun=st.booleans(), size=st.sampled_from([0.0, 0.01]), seed=st.integers(0, 99))
@settings(max_examples=budget(12), deadline=None)
def test_it_about_keeps_the_time(job: Job, law: type[Job], begun: bool, size: float, seed: int) -> None:
    """A patience of 2 % is an aim, of the mean: docs/scaling.md is_informative the worst of many such jobs."""
    job.__class__ = law
    tuner = ScalingTuner(job.step_costs, ScalingGoal(job.target, patience=0.02))
    _, seconds, usd = job.run(tuner.observe, tuner.begin() if begun else MOST, errors=draws(seed, size))
    fixed = job.constant(MOST)
    assert seconds <= (1.2 if law is Power else 1.12) * fixed[0] + 2 * job.step_costs.join_seconds
    assert usd <= 1.05 * fixed[1] + 2 * job.step_costs.join_seconds * job.step_costs.rate(MOST)


def told(job: Job, workers: list[int], errors: Iterator[float]) -> list[StepObservation]:
    progress = np.cumsum([job.gain(count) for count in workers])
    return [
        StepObservation(step, float(step), job.loss(done) + next(errors), count, 0.0)
        for step, (count, done) in enumerate(zip(workers, progress.tolist(), strict=True), start=1)
    ]


@given(job=JOBS, law=st.sampled_from([Job, Network]), workers=st.integers(1, MOST), seed=st.integers(0, 99))
@settings(max_examples=budget(20), deadline=None)
def test_one_number_of_workers_tells_nothing_of_the_noise(job: Job, law: type[Job], workers: int, seed: int) -> None:
    job.__class__ = law
    found, before = forecast(told(job, [workers] * 40, draws(seed, 0.01)), MOST, job.target), unseen(MOST)
    for noise, weight in zip(before.noises, before.weights, strict=True):
        assert found.likely(found.noises == noise) == pytest.approx(weight)


@given(job=JOBS, law=st.sampled_from([Job, Network]), before=st.integers(4, 80), after=st.integers(6, 40),
       seed=st.integers(0, 99))  # fmt: skip
@settings(max_examples=budget(40), deadline=None)
def test_a_change_tells_the_noise_whatever_the_form_of_the_losses(
    job: Job, law: type[Job], before: int, after: int, seed: int
) -> None:
    """A fall that grows faster after a change is not laid to it; and it never gets surer than the noise's drift."""
    job.__class__ = law
    found = forecast(told(job, [MOST] * before + [4] * after, draws(seed, 1e-4)), MOST, job.target)
    true = min(max(job.noise, MOST / 16), MOST * 8.0)
    low, high = (found.quantile(found.noises, share) for share in (0.02, 0.98))
    assert low / 1.5 <= true <= high * 1.5
    assert high / low >= 4


@given(job=JOBS, law=st.sampled_from([Job, Network]), seed=st.integers(0, 99))
@settings(max_examples=budget(20), deadline=None)
def test_changes_that_follow_closely_do_not_make_it_surer_than_it_may_be(job: Job, law: type[Job], seed: int) -> None:
    """Each loss is_informative once, however many changes it is near."""
    job.__class__ = law
    found = forecast(told(job, [4] * 8 + [4, 5] * 20, draws(seed, 0.01)), MOST, job.target)
    true = min(max(job.noise, MOST / 16), MOST * 8.0)
    low, high = (found.quantile(found.noises, share) for share in (0.02, 0.98))
    assert low / 1.5 <= true <= high * 1.5


def test_what_workers_make_of_a_step_is_seen_where_few_were_tried() -> None:
    for noise, few in ((0.5, False), (120.0, True)):
        job = Network(noise, compute=1.0, each=0.0, length=60.0)
        found = forecast(told(job, [MOST] * 10 + [4] * 8, draws(1, 1e-4)), MOST, job.target)
        assert (found.likely(found.noises > MOST) > 0.8) is few


@pytest.mark.slow
def test_it_adds_workers_for_a_deadline() -> None:
    job = Job(noise=30.0, compute=1.0, each=0.0, length=400.0)
    deadline = 0.6 * job.constant(4)[0]
    tuner = ScalingTuner(job.step_costs, ScalingGoal(job.target, patience=None, deadline_seconds=deadline))
    made, seconds, usd = job.run(tuner.observe, begin=4)
    assert max(made) > 4
    assert seconds <= deadline
    enough = min(usd for took, usd in map(job.constant, range(1, MOST + 1)) if took <= deadline)
    assert usd <= 1.1 * enough


def test_it_stays_while_it_cannot_tell() -> None:
    """Losses that are nothing but noise say nothing of the noise scale: no change keeps the time for sure."""
    job = Job(noise=8.0, compute=1.0, each=0.0, length=1e6)
    tuner, errors = ScalingTuner(job.step_costs, ScalingGoal(0.1, patience=0.02)), draws(3, 0.5)
    made, _, _ = job.run(tuner.observe, errors=errors, steps=150)
    assert set(made) == {MOST}


def test_the_forecast_holds_what_comes() -> None:
    job = Job(noise=8.0, compute=1.0, each=0.05, length=300.0)
    # Of one number of workers: it is predicted for those that it has chosen.
    tuner, told = ScalingTuner(replace(job.step_costs, least=MOST), ScalingGoal(job.target)), []

    def observe(one: StepObservation) -> ScalingDecision:
        told.append((one, tuner.observe(one)))
        return told[-1][1]

    _, seconds, usd = job.run(observe, errors=draws(1, 1e-3))
    one, said = next((one, said) for one, said in told if one.step >= 250 and said.seconds_left is not None)
    assert said.usd_left is not None
    assert said.seconds_left is not None
    assert said.seconds_left[0] * 0.9 <= seconds - one.at_seconds <= said.seconds_left[1] * 1.1
    assert said.usd_left[0] * 0.9 <= usd - one.usd <= said.usd_left[1] * 1.1


def test_steps_out_of_order_are_refused() -> None:
    step_costs = Job(8.0, 1.0, 0.0, 100.0).step_costs
    for tuner in (ScalingTuner(step_costs, ScalingGoal(0.1)), PublishedTuner()):
        tuner.observe(StepObservation(2, 5.0, 1.0, MOST, 0.1))
        with pytest.raises(ValueError, match="order"):
            tuner.observe(StepObservation(2, 6.0, 1.0, MOST, 0.1))
    with pytest.raises(ValueError, match="workers"):
        ScalingTuner(step_costs, ScalingGoal(0.1)).observe(StepObservation(1, 5.0, 1.0, MOST + 1, 0.1))


def test_the_learning_rate_goes_with_the_square_root() -> None:
    assert learning_rate_factor(4, 16) == 0.5


@given(job=JOBS, patience=st.sampled_from([None, 0.0, 0.02, 0.5]), least=st.integers(1, MOST))
def test_it_begins_with_fewer_only_where_that_is_cheaper(job: Job, patience: float | None, least: int) -> None:
    begin = ScalingTuner(replace(job.step_costs, least=least), ScalingGoal(job.target, patience)).begin()
    assert least <= begin <= MOST
    # Of a noise in the middle of what is believed.
    job.noise = float(MOST)
    assert job.constant(begin)[1] <= 1.01 * job.constant(MOST)[1]
    if patience is not None:
        believed, late = unseen(MOST), 0.0
        for noise, weight in zip(believed.noises, believed.weights, strict=True):
            step = job.step_costs.expected_seconds
            longer = (1 + noise / begin) * step[begin - 1] / ((1 + noise / MOST) * step[MOST - 1]) - 1
            late += weight * max(0.0, longer)
        assert late <= patience + 1e-9


def test_it_begins_with_fewer_where_merging_more_takes_longer() -> None:
    job = Job(noise=8.0, compute=0.01, each=0.2, length=100.0)
    assert ScalingTuner(job.step_costs, ScalingGoal(job.target)).begin() < MOST
    assert ScalingTuner(job.step_costs, ScalingGoal(job.target, deadline_seconds=1e3)).begin() == MOST


@pytest.mark.slow
def test_where_patience_binds_it_soon_knows_whether_fewer_will_do() -> None:
    """Fewer than it dares before it knows the noise are best: half of those that it begins with leave, and tell it."""
    job = Job(noise=4.0, compute=0.5, each=0.2, length=300.0)
    tuner = ScalingTuner(job.step_costs, ScalingGoal(job.target, patience=0.02))
    begin = tuner.begin()
    made, seconds, usd = job.run(tuner.observe, begin)
    told = ScalingSettings().least_observations
    assert set(made[:told]) == {begin}
    assert made[told] == begin // 2
    assert seconds <= 1.02 * job.constant(MOST)[0]
    fixed = [job.constant(count) for count in range(1, MOST + 1)]
    assert usd <= 1.1 * min(usd for took, usd in fixed if took <= 1.02 * fixed[-1][0])


def test_it_begins_with_no_more_than_it_wants_where_time_does_not_matter() -> None:
    """Or where it does, but binds nothing; or where to leave costs more than a merge."""
    slow, free = (Job(noise=4.0, compute=compute, each=0.2, length=300.0) for compute in (0.5, 0.1))
    assert ScalingTuner(slow.step_costs, ScalingGoal(slow.target, patience=None)).begin() == 2
    assert ScalingTuner(slow.step_costs, ScalingGoal(slow.target, patience=0.02)).begin() == 8
    assert (
        ScalingTuner(replace(slow.step_costs, leave_seconds=2.0), ScalingGoal(slow.target, patience=0.02)).begin() == 4
    )
    assert ScalingTuner(free.step_costs, ScalingGoal(free.target, patience=0.02)).begin() == 1


@pytest.mark.parametrize("follows", ["ours", "mlless"])
@settings(max_examples=budget(60), deadline=None)
@given(data=st.data())
def test_no_loss_whatever_breaks_a_tuner(follows: str, data: st.DataObject) -> None:
    job = Job(noise=4.0, compute=1.0, each=0.02, length=60.0)
    tuner: ScalingTuner | PublishedTuner = PublishedTuner(PublishedSettings(least=2))
    if follows == "ours":
        tuner = ScalingTuner(job.step_costs, ScalingGoal(0.5))
    losses = data.draw(st.lists(st.floats() | st.sampled_from([1e59, 1e99, 1e300, -1e300]), min_size=9, max_size=60))
    workers = MOST
    for step, loss in enumerate(losses, start=1):
        answer = tuner.observe(StepObservation(step, float(step), loss, workers, step * 1e-3))
        assert 1 <= answer.workers <= MOST
        assert abs(loss) <= 1e60 or answer == ScalingDecision(workers, False, "")
        workers = answer.workers
