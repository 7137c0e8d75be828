"""How many of a region's clients take part in a round."""

from __future__ import annotations

import math

__all__ = ["clients_of_round"]

_ROUNDING = 1e-9
"""Relative excess that is taken for a rounding error: 0.07 * 100 is 7 clients, not 8."""


def clients_of_round(clients: int, fraction: float, least: int) -> int:
    """Return the number of clients of a region that train in a round: the fraction of them, rounded up, but at least
    ``least``, and at most all (m of algorithm 1, McMahan et al. 2017, arXiv 1602.05629)."""
    return min(clients, max(1, least, math.ceil(fraction * clients * (1 - _ROUNDING))))
