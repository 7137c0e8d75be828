"""Small traces, generated: many jobs on few devices, with deadlines as the published ones have them."""

from __future__ import annotations

import random

from scheduler.deadline import curve_from_table
from scheduler.simulate import TraceJob

TABLES = (
    {1: 1.0, 2: 1.9, 4: 3.4, 8: 5.4, 16: 6.0, 32: 5.5},
    {1: 0.4, 2: 0.8, 4: 1.5, 8: 2.9, 16: 5.0},
    {1: 3.0, 2: 2.4, 4: 4.0},
)


def generated(count: int = 60, seed: int = 1, every_s: float = 120.0) -> list[TraceJob]:
    draw = random.Random(seed)
    jobs, at = [], 1000.0
    for number in range(count):
        at += draw.expovariate(1 / every_s)
        table = draw.choice(TABLES)
        curve = curve_from_table(table)
        assert curve is not None
        asked = draw.choice((1, 1, 2, 4))
        duration_s = draw.lognormvariate(6.5, 1.0)
        deadline_s = at + draw.uniform(0.6, 2.0) * duration_s
        job = TraceJob(
            f"j{number}", at, duration_s * table[asked], ((deadline_s, 1.0),), asked, duration_s, curve, table,
            user=draw.choice("ab"),
        )  # fmt: skip
        jobs.append(job)
    return jobs
