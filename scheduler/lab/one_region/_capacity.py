"""The capacity of a region over time: what is held, by which job, and what is free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.deadline._curve import SpeedCurve
from scheduler.deadline._model import DeviceCapacity

_EXACT_UP_TO = 4096
"""Points of a ledger's grid up to which a constrained fill may add its own; beyond, it is rounded up to the next."""


@dataclass(slots=True)
class DeviceRequest:
    """What one job would use in an empty region: two neighbouring levels, and the instant between them."""

    curve: SpeedCurve
    deadline_s: float
    """Deadline without the margin."""
    need: float
    """Steps, with the overheads."""
    share: int
    """Devices that the job has now."""
    stay_s: float = 0.0
    """End of the job if it continued with its present share, where that is about as cheap or the only way; else 0."""
    index: int = 0
    """Index of the upper level in the curve's ladder; its length where no level is fast enough."""
    first: int = 0
    second: int = 0
    switch_s: float = 0.0

    @property
    def possible(self) -> bool:
        """Whether a level is fast enough for the deadline."""
        return self.index < len(self.curve.ladder[0])

    def device_seconds(self, now: float) -> float:
        """Devices times seconds from `now` until the deadline."""
        return self.first * (self.switch_s - now) + self.second * (self.deadline_s - self.switch_s)


@dataclass(slots=True)
class DeviceReservation:
    """What a ledger holds for one job: `first` devices, then `second` from `switch_s` to `end_s`, or as in `shares`."""

    first: int
    second: int
    switch_s: float
    end_s: float
    times: NDArray[np.float64] | None = None
    """Instants, one more than shares, where the capacity did not allow two plain levels."""
    shares: NDArray[np.int64] | None = None
    late: bool = False
    """Whether even everything that was free does not meet the deadline."""

    def share(self) -> int:
        """Devices now."""
        return self.first if self.shares is None else int(self.shares[0])

    def most(self) -> int:
        """The most devices that it ever holds."""
        return max(self.first, self.second)

    def share_at(self, at: float) -> int:
        """Devices at an instant that is not before the first."""
        if at >= self.end_s:
            return 0
        if self.shares is not None and self.times is not None:
            return int(self.shares[min(int(self.times.searchsorted(at, side="right")) - 1, len(self.shares) - 1)])
        return self.first if at < self.switch_s else self.second

    def increase_s(self, share: int) -> float:
        """Return the first instant after the begin at which it holds more than `share`; infinite: never."""
        if self.shares is not None and self.times is not None:
            above = np.flatnonzero(self.shares > share)
            return float(self.times[above[0]]) if len(above) else math.inf
        return self.switch_s if self.second > share else math.inf

    def device_seconds(self, now: float) -> float:
        """Devices times seconds from `now` until the end."""
        if self.shares is not None and self.times is not None:
            return float(np.dot(np.diff(self.times), self.shares))
        return self.first * (self.switch_s - now) + self.second * (self.end_s - self.switch_s)


class CapacityLedger:
    """Free capacity of one region over time, and what is held of it. Times ascend; the last step has no end."""

    def __init__(self, now: float, capacity: DeviceCapacity, points: Sequence[float] = ()) -> None:
        changes = [(at, devices) for at, devices in capacity.changes if at > now]
        past = [devices for at, devices in capacity.changes if at <= now]
        self.now = now
        self.times: NDArray[np.float64] = np.unique(np.array([now, *(at for at, _ in changes), *points]))
        self.times = self.times[self.times >= now]
        self.free: NDArray[np.int64] = np.full(len(self.times), past[-1] if past else capacity.devices, dtype=np.int64)
        for at, devices in changes:
            self.free[self.times.searchsorted(at) :] = devices
        self.reservations: dict[str, DeviceReservation] = {}
        self.without_margin: set[str] = set()
        """Promised jobs that do not fit with their margin."""

    def copy(self) -> CapacityLedger:
        """Return a copy for trials."""
        other = CapacityLedger.__new__(CapacityLedger)
        other.now, other.times, other.free = self.now, self.times, self.free.copy()
        other.reservations, other.without_margin = dict(self.reservations), set(self.without_margin)
        return other

    def displace(self, name: str, request: DeviceRequest) -> None:
        """Hold a request's two levels even if they are not free: ``free`` may fall below zero."""
        self.point(request.switch_s)
        self.point(request.deadline_s)
        self._hold(name, DeviceReservation(request.first, request.second, request.switch_s, request.deadline_s))

    def point(self, at: float) -> int:
        """Return the index of the grid's step that begins at `at`; the step is created if needed."""
        index = int(self.times.searchsorted(at))
        if index < len(self.times) and self.times[index] == at:
            return index
        self.times = np.concatenate((self.times[:index], (at,), self.times[index:]))
        self.free = np.concatenate((self.free[:index], self.free[index - 1 : index], self.free[index:]))
        return index

    def take(self, name: str, request: DeviceRequest) -> DeviceReservation | None:
        """Hold the least that completes the work of `request`; None, and no change, where that is impossible."""
        if request.deadline_s <= self.now:
            return None
        if request.stay_s:
            end = self.point(request.stay_s)
            if self.free[:end].min() >= request.share:
                return self._hold(name, DeviceReservation(request.share, request.share, self.now, request.stay_s))
        if not request.possible:
            return None
        switch, end = self.point(request.switch_s), self.point(request.deadline_s)
        switch = min(switch, end)
        free = self.free
        if (switch == end or free[switch:end].min() >= request.second) and (
            not switch or free[:switch].min() >= request.first
        ):
            return self._hold(
                name, DeviceReservation(request.first, request.second, request.switch_s, request.deadline_s)
            )
        return self._take_in_parts(name, request, end)

    def _hold(self, name: str, reservation: DeviceReservation) -> DeviceReservation:
        """Take a plain reservation; its instants are points of the grid."""
        switch, end = self.times.searchsorted(reservation.switch_s), self.times.searchsorted(reservation.end_s)
        self.free[:switch] -= reservation.first
        self.free[switch:end] -= reservation.second
        self.reservations[name] = reservation
        return reservation

    def take_all_free(self, name: str, request: DeviceRequest) -> DeviceReservation:
        """Hold as much as fits until the deadline, and past it as long as the work takes: for a promise in danger."""
        curve, most = request.curve, request.curve.levels[-1]
        spans = np.diff(self.times, append=math.inf)
        rates = curve.rate_by_free[np.clip(self.free, 0, most)]
        with np.errstate(invalid="ignore"):
            done = np.cumsum(np.where(rates > 0, spans * rates, 0.0))
        last = int(done.searchsorted(request.need))
        if last >= len(done):
            last = len(done) - 1
        before = float(done[last - 1]) if last else 0.0
        end_s = float(self.times[last]) + (request.need - before) / float(rates[last]) if rates[last] > 0 else math.inf
        if math.isfinite(end_s) and end_s > self.times[last]:
            last = self.point(end_s) - 1
        shares = curve.level_by_free[np.clip(self.free[: last + 1], 0, most)]
        self.free[: last + 1] -= shares
        times = np.append(self.times[: last + 1], min(end_s, float(self.times[last]) + 1e9))
        reservation = DeviceReservation(int(shares[0]), int(shares.max()), self.now, end_s, times, shares, late=True)
        self.reservations[name] = reservation
        return reservation

    def _take_in_parts(self, name: str, request: DeviceRequest, end: int) -> DeviceReservation | None:
        """Fill in general: on each step the largest level up to the wished one that is free there."""
        curve = request.curve
        levels, rates = curve.ladder
        spans = self.times[1 : end + 1] - self.times[:end]
        fitting = curve.rate_by_free[np.clip(self.free[:end], 0, curve.levels[-1])]
        index = request.index
        while True:
            upper = np.minimum(fitting, rates[index])
            full = float(spans @ upper)
            if full >= request.need:
                break
            index += 1
            if index == len(levels):
                return None
        lower = np.minimum(fitting, rates[index - 1])
        gain = np.cumsum(spans * (upper - lower))
        early = request.share > 0
        goal = request.need - float(spans @ lower) if early else full - request.need
        at = min(int(gain.searchsorted(goal, side="left" if early else "right")), end - 1)
        inside = (goal - (float(gain[at - 1]) if at else 0.0)) / max(float(upper[at] - lower[at]), 1e-12)
        switch_s = float(self.times[at]) + inside
        cut = at + 1 if early else at
        if self.times[at] < switch_s < self.times[at + 1] and len(self.times) < _EXACT_UP_TO:
            cut = self.point(switch_s)
            end += 1
        first, second = (levels[index], levels[index - 1]) if early else (levels[index - 1], levels[index])
        free = np.clip(self.free[:end], 0, curve.levels[-1])
        shares = curve.level_by_free[np.minimum(free, second)]
        shares[:cut] = curve.level_by_free[np.minimum(free[:cut], first)]
        self.free[:end] -= shares
        reservation = DeviceReservation(
            first, second, switch_s, request.deadline_s, self.times[: end + 1].copy(), shares
        )
        self.reservations[name] = reservation
        return reservation

    def release(self, name: str) -> None:
        """Free what a job holds."""
        held = self.reservations.pop(name)
        if held.shares is not None and held.times is not None:
            end = self.point(float(held.times[-1]))
            step = held.times.searchsorted(self.times[:end], side="right") - 1
            self.free[:end] += held.shares[np.minimum(step, len(held.shares) - 1)]
            return
        switch, end = self.point(held.switch_s), self.point(held.end_s)
        self.free[:switch] += held.first
        self.free[switch:end] += held.second
