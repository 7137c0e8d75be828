"""Deadlines in one region alone, whose jobs have one speed curve each: every decision is proven before it is made.

What runs live takes jobs of several regions at one pace (`scheduler.deadline.offer` and `allot`).
"""

from scheduler.lab.one_region._admit_one_region import AdmissionResult, admit
from scheduler.lab.one_region._capacity import Book
from scheduler.lab.one_region._experience import Experience
from scheduler.lab.one_region._minimum_share import least_device_seconds
from scheduler.lab.one_region._policy import Deadlines
from scheduler.lab.one_region._spread import WorkerShares, spread
from scheduler.lab.one_region._verified_decisions import Proven, prove

__all__ = [
    "AdmissionResult",
    "Book",
    "Deadlines",
    "Experience",
    "Proven",
    "WorkerShares",
    "admit",
    "least_device_seconds",
    "prove",
    "spread",
]
