"""Learning rates and thresholds of the ISP benchmark: out of as many values for each method, on a seed of their own."""

from __future__ import annotations

__all__ = ["SEED", "tuned"]

SEED = 100

_SYNCHRONOUS = {
    "clicks": {2: 0.02, 4: 0.02, 8: 0.02, 16: 0.02},
    "ratings": {2: 0.04, 4: 0.06, 8: 0.06, 16: 0.06},
}
"""Learning rates by number of workers. The batch grows with them. With 16: out of 0.01 to 0.08, 0.01 to 0.1."""
_ALL_TO_ALL = {
    "clicks": {2: (0.008, 0.2), 4: (0.004, 0.2), 8: (0.003, 0.2), 16: (0.002, 0.2)},
    "ratings": {2: (0.04, 0.7), 4: (0.03, 0.7), 8: (0.02, 0.7), 16: (0.015, 0.7)},
}
"""Learning rates and v, which belong together: the workers' changes are added up, and what is held back breaks out at
once. With 16: out of 0.0005 to 0.004 and 0.002 to 0.02, by 0.05, 0.2 and 0.7; fewer workers: that, scaled."""
_RANGES = {
    "clicks": {2: (0.01, 0.7), 4: (0.006, 0.7), 8: (0.004, 0.7), 16: (0.003, 0.7)},
    "ratings": {2: (0.04, 1.5), 4: (0.03, 1.5), 8: (0.02, 1.5), 16: (0.015, 1.5)},
}
"""The same for owners that filter: v is theirs, the workers' is v / P."""


def tuned(task: str, method: str, workers: int) -> tuple[float, float]:
    """Learning rate and v of a method."""
    if method.endswith("synchronous") or method.startswith("K-REDUCE of"):
        return _SYNCHRONOUS[task][workers], 0.0
    # With the filter of the owners switched off, or all filters, a method is as one of all to all.
    by_ranges = "K-REDUCE" in method and "no filter" not in method
    return (_RANGES if by_ranges else _ALL_TO_ALL)[task][workers]
