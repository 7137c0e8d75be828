"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from scheduler.deadline import Overhead, Rules
from scheduler.lab.policies._elasticflow import ElasticFlow
from scheduler.lab.policies._pollux import Speedups
from scheduler.lab.policies._simple import EarliestDeadline, EarliestDeadlineWithAdmission, Tiresias
from scheduler.simulate import Live, Pauses, SimulatedPolicy

_LARGE = 256
"""Number of devices from which ElasticFlow's simulator charges more for a change."""

POLICIES: Mapping[str, Callable[[Rules, float, float], SimulatedPolicy]] = {
    "geofed": lambda rules, slot_s, error: Live(rules, error),
    "geofed-by-price": lambda rules, slot_s, error: Live(replace(rules, by_price=True), error, "geofed-by-price"),
    "elasticflow": lambda rules, slot_s, error: ElasticFlow(slot_s),
    "elasticflow-singly": lambda rules, slot_s, error: ElasticFlow(slot_s, singly=True),
    "edf": lambda rules, slot_s, error: EarliestDeadline(slot_s),
    "edf-pareto": lambda rules, slot_s, error: EarliestDeadline(0.0, pareto=True),
    "edf-admission": lambda rules, slot_s, error: EarliestDeadlineWithAdmission(),
    "tiresias": lambda rules, slot_s, error: Tiresias(slot_s),
    "pollux-like": lambda rules, slot_s, error: Speedups(slot_s),
}
"""Policies by name; made for our rules, the length of slots, and the error of curves, of which each uses what it
needs."""


def policy_named(
    name: str, devices: int, slot_s: float = 60.0, everyone: bool = True, curve_error: float = 0.0
) -> tuple[SimulatedPolicy, Pauses]:
    """Return a policy for a cluster of a number of devices, and the cost of changes there.

    A change costs what ElasticFlow's simulator charges for a cluster of this size; with `everyone` it pauses all
    running jobs, else only those that it changes. Raises ``KeyError`` for a name that is not in ``POLICIES``.
    """
    overhead = Overhead(base_s=7.0 if devices >= _LARGE else 2.0, everyone=everyone)
    return POLICIES[name](Rules(overhead=overhead), slot_s, curve_error), Pauses(overhead)
