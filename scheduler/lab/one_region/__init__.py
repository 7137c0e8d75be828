"""Promises of deadlines in one region, whose jobs have one speed curve each; each decision is simulated first.

What runs live takes jobs of several regions at one pace (`scheduler.deadline.offer` and `allot`).
"""

from scheduler.lab.one_region._admit_one_region import AdmissionResult, admit
from scheduler.lab.one_region._capacity import CapacityLedger
from scheduler.lab.one_region._job_statistics import JobStatistics
from scheduler.lab.one_region._minimum_share import least_device_seconds
from scheduler.lab.one_region._policy import OneRegionPolicy
from scheduler.lab.one_region._spread import WorkerShares, spread
from scheduler.lab.one_region._verified_decisions import VerifiedDecision, verified_decision

__all__ = [
    "AdmissionResult",
    "CapacityLedger",
    "JobStatistics",
    "OneRegionPolicy",
    "VerifiedDecision",
    "WorkerShares",
    "admit",
    "least_device_seconds",
    "spread",
    "verified_decision",
]
