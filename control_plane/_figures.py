"""Losses and metrics as text."""

from __future__ import annotations

__all__ = ["metric_text"]

_LEAST_FIXED, _MOST_FIXED = 1e-3, 1e6
"""Numbers between these have four decimal places, which tell little of others."""


def metric_text(value: float) -> str:
    """Format a loss or a metric: 0.9861, 3.2e-05, 1.23e+09."""
    return f"{value:.4f}" if not value or _LEAST_FIXED <= abs(value) < _MOST_FIXED else f"{value:.3g}"
