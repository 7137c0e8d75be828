"""Sweeps: one job with different parameters, until the best ones are found or a budget is spent.

A sweep file names a job file, and the keys of it that vary. Trials are jobs of their own with the label ``sweep``, so
that a sweep that was interrupted continues with what the control plane has of it.
"""

from __future__ import annotations

from geofed.sweep._file import LoadedSweep, SweepFile, load_sweep
from geofed.sweep._run import planned_sweep, run_sweep

__all__ = ["LoadedSweep", "SweepFile", "load_sweep", "planned_sweep", "run_sweep"]
