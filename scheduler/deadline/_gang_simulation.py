"""Courses of gangs, simulated to the end: level 0 of a course is no pace, level n the pace n - 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduler.deadline._model import DeviceCapacity, Rules
from scheduler.deadline._promises import Course, Going, Ground, Plan, follow
from scheduler.deadline._reservations import Gang, Reservation

__all__ = ["as_before", "followed", "levels_held", "on_course"]


def as_before(
    now: float, gangs: Sequence[Gang], before: Mapping[str, Reservation] | None
) -> tuple[dict[str, int], dict[str, Plan]]:
    """Return paces now and later as in the last course; best effort keeps what it has as long as there is room.

    A course of paces that no longer exist is ignored. A fixed gang that runs stays as it is: its course may be from a
    time when it could change.
    """
    paces: dict[str, int] = {}
    plans: dict[str, Plan] = {}
    for gang in gangs:
        last = (before or {}).get(gang.name)
        held = last.on(gang) if last is not None else None
        paces[gang.name] = gang.held
        if gang.fixed and gang.held >= 0:
            plans[gang.name] = ((now, gang.held + 1),)
        elif held is not None and held.course:
            plans[gang.name] = tuple((at, pace + 1) for at, pace in held.course)
            paces[gang.name] = [held.course[0][1], *(pace for at, pace in held.course if at <= now + 1e-9)][-1]
    return paces, plans


def followed(
    now: float,
    capacities: Mapping[str, DeviceCapacity],
    gangs: Sequence[Gang],
    paces: Mapping[str, int],
    plans: Mapping[str, Plan],
    rules: Rules,
    ground: Ground | None,
) -> Course:
    """Play it to the end. Level 0 of ``follow`` is no pace."""
    changes = sorted({at for capacity in capacities.values() for at, _ in capacity.changes if at > now})
    room = tuple((at, tuple(_devices_at(capacity, at) for capacity in capacities.values())) for at in (now, *changes))
    going, rows = [], {row: number for number, row in enumerate(capacities)}
    for gang in gangs:
        rates = (0.0, *(pace.rate for pace in gang.paces))
        needs = tuple(_by_row(gang.needs(pace), rows) for pace in range(-1, len(gang.paces)))
        plan = plans.get(gang.name, ())
        going.append(
            Going(
                gang.name, gang.work, gang.deadline_s, gang.held + 1, gang.ready_s, plan, rates.__getitem__,
                needs.__getitem__,
            )
        )  # fmt: skip
    chosen = {name: pace + 1 for name, pace in paces.items()}
    return follow(now, room, going, chosen, rules.overhead, ground)


def _by_row(needs: Mapping[str, int], rows: Mapping[str, int]) -> tuple[int, ...]:
    """Return what is needed of each row. ``rows``: their places."""
    found = [0] * len(rows)
    for row, count in needs.items():
        if row in rows:
            found[rows[row]] = count
    return tuple(found)


def _devices_at(capacity: DeviceCapacity, at: float) -> int:
    return [capacity.devices, *(devices for since_s, devices in capacity.changes if since_s <= at)][-1]


def levels_held(held: Reservation) -> Plan:
    """Return the held paces as levels; the last one other than none lasts to the end, for jobs that are paused
    meanwhile."""
    steps = [(at, pace + 1) for at, pace in zip(held.times, held.pace_indices, strict=False)]
    while len(steps) > 1 and not steps[-1][1]:
        steps.pop()
    return tuple(steps)


def on_course(held: Mapping[str, Reservation], course: Course, gangs: Sequence[Gang]) -> dict[str, Reservation]:
    """Return what is held, each with its part of the course; a gang that is late on it is in danger."""
    promised = {gang.name: gang.paces for gang in gangs if not gang.best_effort}
    found = dict(held)
    for name, holding in held.items():
        if name not in promised:
            continue
        steps = tuple((at, level - 1) for at, level in course.plans[name])
        # Where it does not fit, it is unknown which jobs will wait: then what is held is more reliable.
        late = name in course.late if course.fits else holding.late
        found[name] = replace(holding, course=steps, ladder=promised[name], late=late)
    return found
