"""Scaling curves: the speed of a job by its number of devices, from tables."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


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

    def capped(self, most: int) -> SpeedCurve | None:
        """The curve up to `most` devices; None: no level is that small."""
        count = bisect_right(self.levels, most)
        return SpeedCurve(self.levels[:count], self.rates[:count]) if count else None


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


def _above(left: tuple[float, int], middle: tuple[float, int], right: tuple[float, int]) -> bool:
    """Return whether `middle` takes more devices than mixing the other two takes at its rate."""
    return (middle[1] - left[1]) * (right[0] - left[0]) > (1 + 1e-9) * (right[1] - left[1]) * (middle[0] - left[0])
