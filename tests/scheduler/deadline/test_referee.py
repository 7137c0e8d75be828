"""Fast answers of the deadline core are those of a slow referee, bit for bit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.slow_ledger import calculated_slowly

from scheduler.deadline import Allotment, AssignmentPace, DeviceCapacity, Gang, Offer, Overhead, Rules, allot, offer


def drawn_gang(draw: random.Random, name: str, regions: Sequence[str], now: float) -> Gang:
    """One with workers in up to three regions, of some of which it needs devices, perhaps fewer at a faster pace."""
    mine = draw.sample(regions, min(len(regions), draw.choice([1, 1, 1, 2, 3])))
    fixed, counts_devices = draw.random() < 0.15, draw.random() < 0.3
    workers, paces, rate = dict.fromkeys(mine, 0), [], 0.0
    for _ in range(1 if fixed else draw.randint(1, 5)):
        workers = {region: count + draw.choice([0, 1, 1, 2, 4]) for region, count in workers.items()}
        workers = workers if any(workers.values()) else dict.fromkeys(mine, 1)
        rate += draw.uniform(0.1, 3)
        devices = {region: draw.randint(0, 3) for region in mine} if counts_devices and draw.random() < 0.9 else {}
        paces.append(AssignmentPace(workers, rate, devices))
    work = draw.uniform(1, 2000)
    deadline_s = now + 5 + work / rate * draw.choice([1.1, 1.5, 3, 10]) if draw.random() < 0.75 else math.inf
    later = [deadline_s + draw.uniform(1, 500) for _ in range(draw.choice([0, 0, 1, 2])) if deadline_s < math.inf]
    return Gang(
        name,
        tuple(paces),
        work,
        deadline_s,
        tuple(sorted(later)),
        wish=draw.randint(0, len(paces) - 1),
        fixed=fixed,
        since_s=now,
        user=f"user{draw.randint(0, 3)}",
        value=draw.choice([1.0, 2.0]),
        insists=draw.random() < 0.2,
        preemptible=draw.random() < 0.1,
    )


def drawn_capacities(draw: random.Random, size: int) -> dict[str, DeviceCapacity]:
    found = {}
    for region in ("east", "north", "west")[: draw.choice([1, 1, 3])]:
        changes = sorted((draw.uniform(1, 800), draw.randint(size // 2, size)) for _ in range(draw.choice([0, 0, 2])))
        found[region] = DeviceCapacity(size, tuple(changes))
        if draw.random() < 0.5:
            found[f"{region}/devices"] = DeviceCapacity(2 * size)
    return found


def answers(seed: int) -> list[Offer | Allotment]:
    """All answers to jobs that arrive, run and end; each depends on those before."""
    draw = random.Random(seed)
    size = draw.choice([3, 8, 20, 60])
    capacities = drawn_capacities(draw, size)
    regions = [name for name in capacities if "/" not in name]
    pause_s, margin = draw.choice([0.0, 2.0, 5.0]), draw.choice([0.0, 0.08, 0.2])
    overhead = Overhead(pause_s, pause_s / 2, everyone=draw.random() < 0.3)
    rules = Rules(overhead, margin, margin / 2, pause_s, pause_s / 2, 30.0, {"user0": 6})
    now, number, gangs, held = 0.0, 0, list[Gang](), None
    found: list[Offer | Allotment] = []
    for step in range(draw.choice([3, 6])):
        for _ in range(draw.randint(1, 4) if step else draw.choice([1, 6, size // 2])):
            gang = drawn_gang(draw, f"job{number}", regions, now)
            number += 1
            if not gang.best_effort:
                told = offer(now, capacities, gangs, gang, rules, held)
                found.append(told)
                if told.deadline_s is None and draw.random() < 0.9:
                    continue
                gang = replace(gang, deadline_s=told.deadline_s or gang.deadline_s)
                held = told.held if told.deadline_s is not None else held
            gangs.append(gang)
        answer = allot(now, capacities, gangs, rules, held)
        found.append(answer)
        held, seconds, gone = answer.held, draw.choice([0.0, 1.0, 7.3, 60.0]), list[Gang]()
        for gang in gangs:
            pace = answer.paces[gang.name]
            ready_s = now + pause_s if pace >= 0 and pace != gang.held else gang.ready_s
            ran_s = max(0.0, now + seconds - max(now, ready_s)) if pace >= 0 else 0.0
            left = gang.work - ran_s * gang.paces[pace].rate * draw.choice([1, 1, 0.7])
            if left > 0:
                gone.append(replace(gang, work=left, held=pace, ready_s=ready_s))
        gangs, now = gone, now + seconds
    return found


@pytest.mark.parametrize("part", range(6))
def test_answers_are_those_of_the_referee(part: int) -> None:
    for seed in range(10 * part, 10 * part + 10):
        with calculated_slowly():
            expected = answers(seed)
        assert repr(answers(seed)) == repr(expected)
