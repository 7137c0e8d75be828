"""What keeps a job from running as asked, and what users are warned of."""

from scheduler.checks._candidates import candidates
from scheduler.checks._refusals import refusals, unfit
from scheduler.checks._warnings import warnings_of

__all__ = ["candidates", "refusals", "unfit", "warnings_of"]
