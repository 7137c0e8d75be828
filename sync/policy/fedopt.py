"""The WAN policies ``fedadagrad``, ``fedadam`` and ``fedyogi``: an adaptive optimiser over the regions' mean change
(Reddi et al. 2021, arXiv 2003.00295, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from geofed_pb.errors import GeofedError
from sync.layout import Vector
from sync.policy._contract import Contribution, Outer, WanPolicy
from sync.policy.ma import mean_delta

__all__ = ["METHODS", "AdaptiveServer"]

_SETTINGS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 0.001}
"""Defaults of the settings. The paper tunes `lr` for each task, and recommends 0.001 for `tau`."""


def _adagrad(second: Vector, square: Vector, beta2: np.float32) -> Vector:
    return second + square


def _adam(second: Vector, square: Vector, beta2: np.float32) -> Vector:
    return beta2 * second + (1 - beta2) * square


def _yogi(second: Vector, square: Vector, beta2: np.float32) -> Vector:
    signs: Vector = np.sign(second - square)
    return second - (1 - beta2) * square * signs


class AdaptiveServer:
    """With d the mean of the deltas: m = beta1 * m + (1 - beta1) * d; v by the rule from d squared;
    model = base + lr * m / (sqrt(v) + tau).

    As in the paper, v begins with tau squared, m with 0, and neither is corrected for its begin.
    """

    averages = True
    keeps_own = False

    def __init__(
        self,
        rule: Callable[[Vector, Vector, np.float32], Vector],
        *,
        lr: float,
        beta1: float,
        beta2: float,
        tau: float,
    ) -> None:
        """``rule``: returns the next v from v, d squared and beta2."""
        if not 0 < lr <= 10 or not 0 <= beta1 < 1 or not 0 <= beta2 < 1 or not 0 < tau <= 1:
            text = f"outer lr {lr} must be in (0, 10], beta1 {beta1} and beta2 {beta2} in [0, 1), tau {tau} in (0, 1]"
            raise GeofedError("CONFIG_INVALID", text)
        self._rule = rule
        self._lr, self._beta1, self._beta2, self._tau = map(np.float32, (lr, beta1, beta2, tau))

    def merge(
        self,
        base: Vector,
        contributions: Sequence[Contribution],
        memory: Mapping[str, Vector],
        total: float | None = None,
    ) -> Outer:
        """Make one step of the optimiser; the memory holds "first" (m) and "second" (v), each of shape (n,)."""
        delta = mean_delta(contributions, total)
        first = memory["first"] if "first" in memory else np.zeros_like(delta)
        second = memory["second"] if "second" in memory else np.full_like(delta, self._tau * self._tau)
        first = self._beta1 * first + (1 - self._beta1) * delta
        second = self._rule(second, delta * delta, self._beta2)
        root: Vector = np.sqrt(second)
        step: Vector = self._lr * first / (root + self._tau)
        return Outer(base + step, {"first": first, "second": second})


def _policy(name: str, rule: Callable[[Vector, Vector, np.float32], Vector]) -> WanPolicy:
    settings = {key: value for key, value in _SETTINGS.items() if rule is not _adagrad or key != "beta2"}
    made = partial(AdaptiveServer, rule) if rule is not _adagrad else partial(AdaptiveServer, rule, beta2=0.0)
    return WanPolicy(name, made, settings, synchronous=True, sums=True)


METHODS = (_policy("fedadagrad", _adagrad), _policy("fedadam", _adam), _policy("fedyogi", _yogi))
