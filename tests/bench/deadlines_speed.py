"""How long the core of deadlines takes, on regions that are nearly full."""

from __future__ import annotations

import gc
import random
import time

from scheduler.deadline import DeadlineJob, DeviceCapacity, Overhead, Rules, SpeedCurve
from scheduler.lab.one_region import admit, spread

_REGION = "here"
FULL, NEARLY_FULL = 1.4, 1.8
"""Devices for each job: with so many all is reserved at some time ahead; with the latter nine tenths."""
_LEVELS = (1, 2, 4, 8, 16, 32)


def admissions(active: int, asked: int, seed: int, devices_per_job: float = FULL) -> list[float]:
    """CPU seconds of each of many requests, one at a time, in a region where so many jobs have their promise."""
    draw = random.Random(seed)
    capacity = {_REGION: DeviceCapacity(int(devices_per_job * active))}
    rules = Rules(Overhead())
    promised = _jobs(active, draw, "old")
    answer = admit(0.0, capacity, promised, (), rules)
    ledgers, took = answer.ledgers, []
    gc.collect()
    for job in _jobs(asked, draw, "new"):
        begun = time.thread_time()
        answer = admit(0.0, capacity, promised, [job], rules, ledgers)
        took.append(time.thread_time() - begun)
        ledgers = answer.ledgers
        # The number of active jobs stays: whoever comes in takes the place of one that is done.
        for new in answer.promised:
            done = promised.pop(0)
            ledgers[_REGION].release(done.name)
            promised.append(new)
    return took


def plan_seconds(jobs: int, seed: int, devices_per_job: float) -> float:
    """CPU seconds to fill a region with all its jobs from nothing, and to give out what is left."""
    draw = random.Random(seed)
    capacity = {_REGION: DeviceCapacity(int(devices_per_job * jobs))}
    promised = _jobs(jobs, draw, "old")
    rules = Rules(Overhead())
    gc.collect()
    begun = time.thread_time()
    answer = admit(0.0, capacity, promised, (), rules)
    spread(answer.ledgers[_REGION], _REGION, promised, (), rules)
    return time.thread_time() - begun


def _jobs(count: int, draw: random.Random, name: str) -> list[DeadlineJob]:
    curves = []
    for _ in range(16):
        loss = draw.uniform(0.02, 0.2)
        curves.append(SpeedCurve(_LEVELS, tuple(level / (1 + loss * (level - 1) ** 0.7) for level in _LEVELS)))
    jobs = []
    for number in range(count):
        curve = draw.choice(curves)
        window_s = draw.lognormvariate(9.2, 1.0)
        work = curve.rate(draw.choice(_LEVELS[:4])) * window_s * draw.uniform(0.3, 0.9)
        jobs.append(DeadlineJob(f"{name}{number}", {_REGION: curve}, work, window_s, _REGION))
    return jobs
