"""Deadlines: admission with promises, their cost, and the use of what is left. The same core runs live and in
simulations."""

from scheduler.deadline._admission import LIVE, Allotment, Offer, allot, offer, promised_at_once
from scheduler.deadline._buddy import Buddy, BuddyPlacement
from scheduler.deadline._curve import SpeedCurve, curve_from_table
from scheduler.deadline._model import DeviceCapacity, Overhead, Rules
from scheduler.deadline._preemptible import KindAllotment, LatestExit, allot_kinds, latest_exit, preemptible_share
from scheduler.deadline._reservations import AssignmentPace, Gang, Reservation, devices_of
from scheduler.deadline._schedule_simulation import Placement, SimulatedSchedule

__all__ = [
    "LIVE",
    "Allotment",
    "AssignmentPace",
    "Buddy",
    "BuddyPlacement",
    "DeviceCapacity",
    "Gang",
    "KindAllotment",
    "LatestExit",
    "Offer",
    "Overhead",
    "Placement",
    "Reservation",
    "Rules",
    "SimulatedSchedule",
    "SpeedCurve",
    "allot",
    "allot_kinds",
    "curve_from_table",
    "devices_of",
    "latest_exit",
    "offer",
    "preemptible_share",
    "promised_at_once",
]
