"""What releases cost together: epsilon for a delta, by Renyi differential privacy (Mironov 2017; for random samples
Mironov, Talwar and Zhang 2019), as Google's `dp-accounting` computes it."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from geofed_pb.errors import GeofedError, install_hint

__all__ = ["Release", "affordable", "epsilon_of", "noise_for", "require_accounting"]

_NOISES = (5e-4, 1e6)
"""Noise multipliers that releases may have. Less is far below what protects anything, and the computation underflows
to an epsilon of 0 at about 1e-154."""
_LEAST_NOISE = 0.1
"""Smallest noise multiplier that is looked for: with less, a single release costs an epsilon of more than 50."""


@dataclass(frozen=True)
class Release:
    """Gaussian noise on a sum whose terms have a bounded norm."""

    noise: float
    """Standard deviation of the noise, as a multiple of the most that the data which is protected can change."""
    rate: float = 1.0
    """Probability with which each sample is in the sum, independently of others (Poisson sampling); 1: all are."""

    @classmethod
    def of(cls, noise: float, rate: float, *, sampled: bool) -> Release:
        """Return the release of a job with a noise multiplier.

        One more sample changes the sum of clipped gradients by ``clipNorm`` at most. Other data of a region can change
        its clipped update by twice that: from one side to the other.
        """
        return cls(noise, rate) if sampled else cls(noise / 2)


def require_accounting() -> Any:
    """Return the module `dp_accounting`. Raises ``GeofedError("UNAVAILABLE")`` if it is not installed."""
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        text = f"epsilon is computed by the package dp-accounting, which is not installed here: {error}"
        raise GeofedError("UNAVAILABLE", text, hint=install_hint("privacy")) from None
    # It warns of each order of Renyi's divergence that it leaves out: epsilon is the least over all others.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return dp_accounting


def epsilon_of(releases: Iterable[tuple[Release, int]], delta: float) -> float:
    """Return epsilon for a delta of releases together, each with its number; 0: nothing was released.

    Neighbours differ by one more or one less. Raises ``GeofedError``: UNAVAILABLE without `dp-accounting`;
    CONFIG_INVALID for a release that has no epsilon.
    """
    dp = require_accounting()
    counts: dict[Release, int] = {}
    for release, count in releases:
        counts[release] = counts.get(release, 0) + count
    if not any(count > 0 for count in counts.values()):
        return 0.0
    try:
        of_each = [(*_divergences(release), count) for release, count in counts.items() if count > 0]
        orders = of_each[0][0]
        found = float(dp.rdp.compute_epsilon(orders, sum(count * one for _, one, count in of_each), delta)[0])
    except (ArithmeticError, ValueError) as error:
        raise GeofedError("CONFIG_INVALID", f"the epsilon of {counts} cannot be computed: {error}") from None
    if not math.isfinite(found):
        raise GeofedError("CONFIG_INVALID", f"the epsilon of {counts} is not finite")
    return found


@functools.lru_cache(maxsize=1024)
def noise_for(epsilon: float, delta: float, rate: float, count: int, *, sampled: bool) -> float:
    """Return the smallest noise multiplier with which so many releases cost at most ``epsilon``.

    It takes seconds, and the regions of a plan, `explain` and `submit` ask for the same: answers are kept.

    Raises ``GeofedError("INADMISSIBLE")`` if no noise is enough.
    """
    low, high = _LEAST_NOISE, 1.0

    def cost(noise: float) -> float:
        return epsilon_of([(Release.of(noise, rate, sampled=sampled), count)], delta)

    while cost(high) > epsilon:
        low, high = high, 2 * high
        if high > 1e6:
            text = f"no noise makes {count} releases cost an epsilon of {epsilon:g} at a delta of {delta:g}"
            raise GeofedError("INADMISSIBLE", text, hint="use a larger epsilon or delta, or fewer rounds")
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if cost(middle) <= epsilon else (middle, high)
    return high


def affordable(spent: Iterable[tuple[Release, int]], release: Release, most: int, epsilon: float, delta: float) -> int:
    """Return how many more releases, up to ``most``, keep what is spent together within ``epsilon``."""
    spent = list(spent)

    def fits(count: int) -> bool:
        return epsilon_of([*spent, (release, count)], delta) <= epsilon

    if fits(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@functools.lru_cache(maxsize=256)
def _divergences(release: Release) -> tuple[Any, Any]:
    """Return the orders of Renyi's divergence, and that of a single release for each of them.

    Of several releases it is their sum. For a random sample it takes 60 ms to compute, and a region tells what a job
    has spent again and again: it is kept.
    """
    dp = require_accounting()
    accountant = dp.rdp.RdpAccountant()
    accountant.compose(_event(dp, release))
    return accountant.orders, accountant.rdp


def _event(dp: Any, release: Release) -> Any:
    if not (_NOISES[0] <= release.noise <= _NOISES[1] and 0 < release.rate <= 1):
        raise GeofedError("CONFIG_INVALID", f"a release with noise {release.noise} and sampling rate {release.rate}")
    event = dp.GaussianDpEvent(release.noise)
    return event if release.rate == 1 else dp.PoissonSampledDpEvent(release.rate, event)
