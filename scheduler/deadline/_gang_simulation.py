"""Courses of gangs, simulated to the end: level 0 of a schedule is no pace, level n the pace n - 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from scheduler.deadline._model import DeviceCapacity, Rules
from scheduler.deadline._reservations import Gang, Reservation
from scheduler.deadline._schedule_simulation import Placement, Plan, ScheduledJob, SimulatedSchedule, simulate_schedule

__all__ = ["previous_schedule", "reserved_levels", "simulate_gangs", "with_schedule"]


def previous_schedule(
    now: float, gangs: Sequence[Gang], before: Mapping[str, Reservation] | None
) -> tuple[dict[str, int], dict[str, Plan]]:
    """Return paces now and later as in the last schedule; best effort keeps its workers while they are free.

    A schedule of paces that no longer exist is ignored. A fixed gang that runs stays as it is: its schedule may be from
    a time when it could change.
    """
    paces: dict[str, int] = {}
    plans: dict[str, Plan] = {}
    for gang in gangs:
        last = (before or {}).get(gang.name)
        held = last.on(gang) if last is not None else None
        paces[gang.name] = gang.held
        if gang.fixed and gang.held >= 0:
            plans[gang.name] = ((now, gang.held + 1),)
        elif held is not None and held.schedule:
            plans[gang.name] = tuple((at, pace + 1) for at, pace in held.schedule)
            paces[gang.name] = [held.schedule[0][1], *(pace for at, pace in held.schedule if at <= now + 1e-9)][-1]
    return paces, plans


def simulate_gangs(
    now: float,
    capacities: Mapping[str, DeviceCapacity],
    gangs: Sequence[Gang],
    paces: Mapping[str, int],
    plans: Mapping[str, Plan],
    rules: Rules,
    placement: Placement | None,
) -> SimulatedSchedule:
    """Simulate all gangs to their ends, with ``paces`` now and ``plans`` later."""
    changes = sorted({at for capacity in capacities.values() for at, _ in capacity.changes if at > now})
    capacity_steps = tuple(
        (at, tuple(_devices_at(capacity, at) for capacity in capacities.values())) for at in (now, *changes)
    )
    scheduled, rows = [], {row: number for number, row in enumerate(capacities)}
    for gang in gangs:
        rates, needs = (0.0, *(pace.rate for pace in gang.paces)), cache(partial(_needs, gang, rows))
        plan = plans.get(gang.name, ())
        scheduled.append(
            ScheduledJob(
                gang.name, gang.work, gang.deadline_s, gang.held + 1, gang.ready_s, plan, rates.__getitem__, needs
            )
        )
    chosen = {name: pace + 1 for name, pace in paces.items()}
    return simulate_schedule(now, capacity_steps, scheduled, chosen, rules.overhead, placement)


def _needs(gang: Gang, rows: Mapping[str, int], level: int) -> Sequence[tuple[int, int]]:
    return [(rows[row], count) for row, count in gang.needs(level - 1).items() if row in rows]


def _devices_at(capacity: DeviceCapacity, at: float) -> int:
    return [capacity.devices, *(devices for since_s, devices in capacity.changes if since_s <= at)][-1]


def reserved_levels(held: Reservation) -> Plan:
    """Return the held paces as levels; the last one other than none lasts to the end, for jobs that are paused
    meanwhile."""
    steps = [(at, pace + 1) for at, pace in zip(held.times, held.pace_indices, strict=False)]
    while len(steps) > 1 and not steps[-1][1]:
        steps.pop()
    return tuple(steps)


def with_schedule(
    held: Mapping[str, Reservation], schedule: SimulatedSchedule, gangs: Sequence[Gang]
) -> dict[str, Reservation]:
    """Return the reservations, each with its part of the schedule; a gang that is late in it is marked as late."""
    promised = {gang.name: gang.paces for gang in gangs if not gang.best_effort}
    found = dict(held)
    for name, holding in held.items():
        if name not in promised:
            continue
        steps = tuple((at, level - 1) for at, level in schedule.plans[name])
        # Where it does not fit, it is unknown which jobs will wait: then what is held is more reliable.
        late = name in schedule.late if schedule.fits else holding.late
        found[name] = replace(holding, schedule=steps, ladder=promised[name], late=late)
    return found
