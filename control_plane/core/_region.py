"""The life of a region as the control plane sees it: invited → live ⇄ unreachable → lost → live.

A lease is kept in memory only and is renewed by every message. After a restart of the control plane every region
gets a whole new lease, since silence towards a dead listener says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from control_plane.core._events import (
    Connected,
    Disconnected,
    EndSession,
    Heard,
    Overslept,
    Record,
    RegionAction,
    RegionEvent,
    RegionLive,
    RegionLost,
    RegionUnreachable,
    Reloaded,
    TellJobs,
    Tick,
)

SILENCE = 0.5
"""Part of the lease after which a silent region counts as unreachable; agents speak every third of it."""


@dataclass(frozen=True)
class RegionState:
    """All that the region machine knows."""

    name: str
    phase: Literal["invited", "live", "unreachable", "lost"] = "invited"
    since: float = 0.0
    """When `phase` became what it is."""
    session: int = 0
    """The last one that was given out; only it counts."""
    connected: bool = False
    boot_id: str = ""
    last_contact: float = 0.0
    lease_ends: float = 0.0


class RegionMachine:
    """`handle(event)` changes `state` and says what is to be done."""

    def __init__(self, state: RegionState) -> None:
        self.state = state

    def handle(self, event: RegionEvent) -> list[RegionAction]:
        """Take one event. Never raises; what does not fit the state changes nothing."""
        if isinstance(event, Connected):
            return self._connected(event)
        if isinstance(event, Heard):
            return self._heard(event)
        if isinstance(event, Disconnected):
            return self._disconnected(event)
        if isinstance(event, Reloaded):
            return self._reloaded(event)
        if isinstance(event, Overslept):
            return self._overslept(event)
        return self._tick(event)

    def _connected(self, event: Connected) -> list[RegionAction]:
        before = self.state
        actions: list[RegionAction] = [EndSession(before.session)] if before.connected else []
        restarted = before.boot_id != event.boot_id
        self.state = replace(
            before,
            phase="live",
            since=before.since if before.phase == "live" else event.at,
            session=before.session + 1,
            connected=True,
            boot_id=event.boot_id,
            last_contact=event.at,
            lease_ends=event.at + event.lease_seconds,
        )
        if before.phase != "live" or restarted:
            how = "with a new process" if restarted and before.boot_id else "again" if before.boot_id else "first"
            actions.append(
                Record(
                    "region.live",
                    f"region {before.name} is connected {how}" if how != "first" else f"region {before.name} joined",
                    before.name,
                    {"session": self.state.session, "restarted": restarted, "before": before.phase},
                )
            )
        actions.append(TellJobs(RegionLive(event.at, before.name, restarted)))
        return actions

    def _heard(self, event: Heard) -> list[RegionAction]:
        before = self.state
        if not before.connected or event.session != before.session:
            return []
        self.state = replace(before, last_contact=event.at, lease_ends=event.at + event.lease_seconds)
        if before.phase == "live":
            return []
        self.state = replace(self.state, phase="live", since=event.at)
        silent = event.at - before.last_contact
        return [
            Record(
                "region.live",
                f"region {before.name} is heard again after {silent:.0f} s",
                before.name,
                {"session": before.session, "restarted": False, "before": before.phase, "silent_seconds": silent},
            ),
            TellJobs(RegionLive(event.at, before.name, False)),
        ]

    def _disconnected(self, event: Disconnected) -> list[RegionAction]:
        if not self.state.connected or event.session != self.state.session:
            return []
        self.state = replace(self.state, connected=False)
        return self._unreachable(event.at, "its connection ended") if self.state.phase == "live" else []

    def _reloaded(self, event: Reloaded) -> list[RegionAction]:
        if self.state.phase in ("invited", "lost"):
            self.state = replace(self.state, connected=False)
            return []
        self.state = replace(self.state, connected=False, lease_ends=event.at + event.lease_seconds)
        if self.state.phase == "unreachable":
            return []
        return self._unreachable(event.at, "the control plane was restarted")

    def _overslept(self, event: Overslept) -> list[RegionAction]:
        if self.state.phase in ("live", "unreachable"):
            contact = event.at if self.state.connected else min(self.state.last_contact, event.at)
            self.state = replace(self.state, last_contact=contact, lease_ends=event.at + event.lease_seconds)
        return []

    def _tick(self, event: Tick) -> list[RegionAction]:
        state = self.state
        if state.phase in ("live", "unreachable") and event.at >= state.lease_ends:
            return self._lost(event.at)
        whole_lease = state.lease_ends - state.last_contact
        if state.phase == "live" and event.at - state.last_contact > SILENCE * whole_lease:
            return self._unreachable(event.at, "nothing is heard of it")
        return []

    def _unreachable(self, at: float, why: str) -> list[RegionAction]:
        name = self.state.name
        self.state = replace(self.state, phase="unreachable", since=at)
        left = max(0.0, self.state.lease_ends - at)
        return [
            Record(
                "region.unreachable",
                f"region {name} is unreachable ({why}); its lease runs for {left:.0f} s",
                name,
                {"lease_seconds_left": left},
            ),
            TellJobs(RegionUnreachable(at, name)),
        ]

    def _lost(self, at: float) -> list[RegionAction]:
        before = self.state
        self.state = replace(before, phase="lost", since=at, connected=False)
        actions: list[RegionAction] = [EndSession(before.session)] if before.connected else []
        actions.append(Record("region.lost", f"region {before.name} is lost: its lease is over", before.name))
        actions.append(TellJobs(RegionLost(at, before.name)))
        return actions
