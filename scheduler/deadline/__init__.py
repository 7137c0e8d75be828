"""Deadlines: admission with promises, their cost, and the use of what is left. The same core runs live and in
simulations."""

from scheduler.deadline._admit_one_region import Admission, admit
from scheduler.deadline._allot import LIVE, Allotment, Offer, allot, offer, promised_at_once
from scheduler.deadline._book import Book
from scheduler.deadline._buddy import Buddy, BuddyPlacement
from scheduler.deadline._course import Course, Ground
from scheduler.deadline._curve import SpeedCurve, curve_from_table
from scheduler.deadline._experience import Experience
from scheduler.deadline._fill import least_device_seconds
from scheduler.deadline._kinds import Kinds, Refuge, allot_kinds, refuge, spot_share
from scheduler.deadline._ledger import Gang, Held, StaffingPace
from scheduler.deadline._model import DeadlineJob, DeviceCapacity, Overhead, Rules
from scheduler.deadline._proven import Proven, prove
from scheduler.deadline._spread import WorkerShares, spread

__all__ = [
    "LIVE",
    "Admission",
    "Allotment",
    "Book",
    "Buddy",
    "BuddyPlacement",
    "Course",
    "DeadlineJob",
    "DeviceCapacity",
    "Experience",
    "Gang",
    "Ground",
    "Held",
    "Kinds",
    "Offer",
    "Overhead",
    "Proven",
    "Refuge",
    "Rules",
    "SpeedCurve",
    "StaffingPace",
    "WorkerShares",
    "admit",
    "allot",
    "allot_kinds",
    "curve_from_table",
    "least_device_seconds",
    "offer",
    "promised_at_once",
    "prove",
    "refuge",
    "spot_share",
    "spread",
]
