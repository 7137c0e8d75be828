"""Scaling curves: the speed of a job by its number of devices, from tables or from measured step times."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

_GAMMAS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_FIT_ROUNDS = 4
"""Rounds of the coordinate search; each halves the steps, so that the last tries values an eighth as far apart.

A choice that balances accuracy and time.
"""


@dataclass(frozen=True)
class SpeedCurve:
    """Measured speed by number of devices; only levels that are faster than every smaller one.

    Nothing is promised on a level without a measurement: a curve is never read between or beyond its levels. Use
    ``curve_from_table`` where a table may have levels that do not pay.

    Raises ``ValueError`` where levels or rates do not ascend from above zero.
    """

    levels: tuple[int, ...]
    """Devices, ascending."""
    rates: tuple[float, ...]
    """Steps a second on each level, ascending."""

    def __post_init__(self) -> None:
        if not self.levels or len(self.levels) != len(self.rates):
            raise ValueError("a curve has at least one level, and a rate for each")
        ascends = all(a < b for values in (self.levels, self.rates) for a, b in zip((0, *values), values, strict=False))
        if not ascends or not all(map(math.isfinite, self.rates)):
            raise ValueError("levels and rates of a curve ascend from above zero")

    def rate(self, share: int) -> float:
        """Return the steps a second with `share` devices; devices above the largest level that fits are idle."""
        index = bisect_right(self.levels, share)
        return self.rates[index - 1] if index else 0.0

    def fitting(self, free: int) -> int:
        """The largest level that fits into `free` devices; 0: none does."""
        index = bisect_right(self.levels, free)
        return self.levels[index - 1] if index else 0

    @cached_property
    def lean(self) -> tuple[int, ...]:
        """Indices of the levels that no mixture in time of two others beats in device time for the same work.

        Tables are not always concave; filling between neighbours on this hull costs the least device time.
        """
        hull: list[int] = []
        at = [(0.0, 0), *zip(self.rates, self.levels, strict=True)]
        for index in range(1, len(at)):
            while hull and _above(at[hull[-2]] if len(hull) > 1 else at[0], at[hull[-1]], at[index]):
                hull.pop()
            hull.append(index)
        return tuple(index - 1 for index in hull)

    @cached_property
    def ladder(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Levels and rates of the hull, each after a leading zero."""
        return (
            (0, *(self.levels[index] for index in self.lean)),
            (0.0, *(self.rates[index] for index in self.lean)),
        )

    @cached_property
    def rate_by_free(self) -> NDArray[np.float64]:
        """The rate by number of free devices, up to the largest level."""
        return np.array([self.rate(free) for free in range(self.levels[-1] + 1)])

    @cached_property
    def level_by_free(self) -> NDArray[np.int64]:
        """The largest level that fits, by number of free devices, up to the largest level."""
        return np.array([self.fitting(free) for free in range(self.levels[-1] + 1)])

    def capped(self, most: int) -> SpeedCurve | None:
        """The curve up to `most` devices; None: no level is that small."""
        count = bisect_right(self.levels, most)
        return SpeedCurve(self.levels[:count], self.rates[:count]) if count else None

    def scaled(self, factor: float) -> SpeedCurve:
        """The curve of a job that is `factor` times as fast everywhere."""
        return SpeedCurve(self.levels, tuple(rate * factor for rate in self.rates))


def curve_from_table(rates: Mapping[int, float]) -> SpeedCurve | None:
    """The Pareto levels of a table of steps a second by devices; None: nothing in it was measured.

    A level that is slower than a smaller one is left out, as are those that are blank (nan) or zero.
    """
    levels: list[int] = []
    kept: list[float] = []
    for level, rate in sorted(rates.items()):
        if math.isfinite(rate) and rate > (kept[-1] if kept else 0.0):
            levels.append(level)
            kept.append(rate)
    return SpeedCurve(tuple(levels), tuple(kept)) if levels else None


def fit_curve(samples: Iterable[tuple[int, float]]) -> SpeedCurve | None:
    """Fit a curve to measured step times: pairs of devices and seconds per step, several for a level where available.

    The form is Pollux's (OSDI'21, §3.2), with the global batch fixed: a step takes (T_grad^γ + T_sync^γ)^(1/γ), where
    T_grad = a + b/g, and T_sync = 0 for one device, else c + d·(g - 2). The coefficients are nonnegative and fitted to
    the logarithm of the times. The curve has only the measured levels, so that nothing is promised beyond what was
    seen; the fit only removes noise. Returns None without samples.
    """
    taken: dict[int, list[float]] = {}
    for devices, seconds in samples:
        if devices > 0 and seconds > 0 and math.isfinite(seconds):
            taken.setdefault(devices, []).append(seconds)
    if not taken:
        return None
    levels = np.array(sorted(taken), dtype=float)
    medians = np.array([float(np.median(taken[int(level)])) for level in levels])
    fitted = medians if len(levels) < 3 else _fit(levels, medians)
    return curve_from_table({int(level): 1 / float(second) for level, second in zip(levels, fitted, strict=True)})


def _above(left: tuple[float, int], middle: tuple[float, int], right: tuple[float, int]) -> bool:
    """Return whether `middle` takes more devices than mixing the other two takes at its rate."""
    return (middle[1] - left[1]) * (right[0] - left[0]) > (1 + 1e-9) * (right[1] - left[1]) * (middle[0] - left[0])


def _fit(levels: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Times of the model that is nearest; a coordinate search over scales, finer by the round."""
    single = float(seconds[0] * levels[0])
    best, error = np.array([0.0, single, 0.0, 0.0]), math.inf
    gamma = 1.0
    steps = np.array([0.0, 0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0])
    for start, power in product((0.01, 0.1, 0.5), _GAMMAS):
        trial = np.array([start * seconds[-1], single, start * seconds[-1], 0.01 * start * seconds[-1]])
        for fineness in range(_FIT_ROUNDS):
            for index in range(4):
                options = trial[index] * (1 + (steps - 1) / 2**fineness)
                errors = [_off(_with(trial, index, option), power, levels, seconds) for option in options]
                trial = _with(trial, index, options[int(np.argmin(errors))])
        off = _off(trial, power, levels, seconds)
        if off < error:
            best, error, gamma = trial, off, power
    return _times(best, gamma, levels)


def _with(values: NDArray[np.float64], index: int, value: float) -> NDArray[np.float64]:
    changed = values.copy()
    changed[index] = value
    return changed


def _times(values: NDArray[np.float64], gamma: float, levels: NDArray[np.float64]) -> NDArray[np.float64]:
    grad = values[0] + values[1] / levels
    sync = np.where(levels > 1, values[2] + values[3] * np.maximum(levels - 2, 0), 0.0)
    scale = np.maximum(grad, sync)
    times: NDArray[np.float64] = scale * ((grad / scale) ** gamma + (sync / scale) ** gamma) ** (1 / gamma)
    return times


def _off(values: NDArray[np.float64], gamma: float, levels: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    if values[0] + values[1] <= 0:
        return math.inf
    return float(np.sum((np.log(_times(values, gamma, levels)) - np.log(seconds)) ** 2))
