"""What ours must reach against every rival, where both were measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from contender import Run, Setting
from report import Bar

OURS = "auto"
"""The contender that the bars are about."""
BOUND = "bound"

WAN = {500.0: Setting(100.0, 30.0, 500.0), 50.0: Setting(100.0, 30.0, 50.0)}
FAT = Setting(500.0, 150.0, 50.0)
LOCAL = Setting(None, 0.0, 50.0)

RATIOS = {
    BOUND: {500.0: 0.95, 50.0: 0.95},
    "ddp": {500.0: 10.0, 50.0: 90.0},
    "ddp-fp16": {500.0: 5.0, 50.0: 48.0},
    "ddp-powersgd": {500.0: 2.0, 50.0: 11.0},
    "flower-fedavg": {500.0: 2.9, 50.0: 20.0},
    "torchft-localsgd": {500.0: 1.7, 50.0: 8.5},
    "torchft-diloco": {500.0: 1.45, 50.0: 6.0},
    "torchft-streaming": {500.0: 1.0, 50.0: 5.5},
    "hivemind-fp16": {500.0: 1.15, 50.0: 3.0},
    "hivemind-8bit": {500.0: 1.0, 50.0: 1.7},
    "asgd-ga-f4": {500.0: 1.7, 50.0: 17.0},
}
"""Ours over it, at least, by milliseconds of compute."""
FAT_SHARE = 0.95
"""Of the bound, on the long and fast links."""
LOCAL_SHARE = 0.97
"""Of every rival, where links cost nothing."""


def medians(runs: Iterable[Run]) -> dict[Setting, dict[str, float]]:
    """Steps per second of each contender in each setting, over the runs that did not fail."""
    speeds: dict[Setting, dict[str, list[float]]] = {}
    for run in runs:
        if not run.failure:
            speeds.setdefault(Setting(**run.setting), {}).setdefault(run.contender, []).append(run.steps_per_s)
    return {at: {name: statistics.median(found) for name, found in rows.items()} for at, rows in speeds.items()}


def bars(runs: Iterable[Run]) -> list[Bar]:
    """The bars that these runs allow to judge."""
    made: list[Bar] = []
    for setting, rows in medians(runs).items():
        if OURS not in rows:
            continue
        for other, speed in rows.items():
            target = _target(setting, other)
            if target is not None:
                name = f"{OURS} over {other}, {setting.name}"
                made.append(Bar.at_least(name, rows[OURS] / speed, "x", target))
    return made


def _target(setting: Setting, other: str) -> float | None:
    if setting == WAN.get(setting.compute_ms):
        return RATIOS.get(other, {}).get(setting.compute_ms)
    if setting == FAT:
        return FAT_SHARE if other == BOUND else None
    if setting == LOCAL:
        return LOCAL_SHARE if other in RATIOS and other not in (BOUND, "asgd-ga-f4") else None
    return None
