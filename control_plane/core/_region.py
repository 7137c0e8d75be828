"""State machine of a region: invited → live ⇄ unreachable → lost → live.

Beside the phase, a region may be misconfigured, draining or revoked: then no new job is planned with it.

Every message of the agent renews the region's lease, which is kept in memory only. After a restart of the control plane
every region gets a new lease, since agents could not reach a control plane that was down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from control_plane.core._events import (
    CatalogueChecked,
    ClockJumped,
    Connected,
    ControlPlaneRestarted,
    Disconnected,
    Drained,
    EndSession,
    Enrolled,
    Heartbeat,
    LinksMeasured,
    MeasuredLink,
    NotifyJobs,
    Record,
    RegionAction,
    RegionEvent,
    RegionLive,
    RegionLost,
    RegionUnreachable,
    Revoked,
    Tick,
)

_MOST_LINKS = 256
"""Measured links of a region that are kept, the last measured ones: more than most regions' jobs use."""
UNREACHABLE_AFTER = 0.5
"""Fraction of the lease after which a silent region is unreachable. Agents send a message every third of the lease."""


@dataclass(frozen=True)
class RegionState:
    """State of a region."""

    name: str
    phase: Literal["invited", "live", "unreachable", "lost"] = "invited"
    since: float = 0.0
    """When `phase` last changed."""
    session: int = 0
    """Number of the latest session; messages of earlier ones are ignored."""
    connected: bool = False
    boot_id: str = ""
    """Identifies the agent's process."""
    last_contact: float = 0.0
    lease_ends: float = 0.0
    fault: str = ""
    """First fault of the catalogue that the agent has sent last; empty: it has none."""
    draining: bool = False
    """Whether the operator lets it have no new jobs."""
    address: str = ""
    """IP address that its agent connects from; empty: not known."""
    untold: bool = False
    """Whether its jobs are not told that it is unreachable: the control plane was restarted, and its agent will
    reconnect in a moment."""
    features: tuple[str, ...] = ()
    """What its agent can do that agents of earlier versions cannot."""
    revoked: bool = False
    """Whether the operator has revoked its certificates; it may join again with a new invitation."""
    measured: tuple[MeasuredLink, ...] = ()
    """Its links as jobs have measured them, one for each destination, the last measured ones last."""

    @property
    def standing(self) -> str:
        """The phase as shown to users; "revoked", "misconfigured" or "draining" where that keeps new jobs away."""
        if self.revoked:
            return "revoked"
        if self.phase in ("live", "unreachable"):
            return "misconfigured" if self.fault else "draining" if self.draining else self.phase
        return self.phase

    @property
    def takes_new_jobs(self) -> bool:
        """Whether jobs may be planned with it: its lease has not expired, and nothing keeps new jobs away."""
        return self.phase in ("live", "unreachable") and not (self.fault or self.draining or self.revoked)


class RegionMachine:
    """State machine of a region: `handle(event)` changes `state` and returns actions."""

    def __init__(self, state: RegionState) -> None:
        self.state = state

    def handle(self, event: RegionEvent) -> list[RegionAction]:
        """Apply one event; return the actions. Never raises; an event that does not fit the state changes nothing."""
        if isinstance(event, Connected):
            return self._connected(event)
        if isinstance(event, Heartbeat):
            return self._heartbeat(event)
        if isinstance(event, Disconnected):
            return self._disconnected(event)
        if isinstance(event, ControlPlaneRestarted):
            return self._control_plane_restarted(event)
        if isinstance(event, ClockJumped):
            return self._clock_jumped(event)
        if isinstance(event, CatalogueChecked):
            return self._checked(event.fault)
        if isinstance(event, Drained):
            return self._drained(event)
        if isinstance(event, Revoked):
            return self._revoked(event)
        if isinstance(event, Enrolled):
            self.state = replace(self.state, revoked=False)
            return []
        if isinstance(event, LinksMeasured):
            return self._measured(event.links)
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
            address=event.address,
            features=event.features,
            untold=False,
            last_contact=event.at,
            lease_ends=event.at + event.lease_seconds,
        )
        if before.phase != "live" or restarted:
            how = "reconnected with a new agent process" if restarted else "reconnected"
            actions.append(
                Record(
                    "region.live",
                    f"region {before.name} {how if before.boot_id else 'joined'}",
                    before.name,
                    {"session": self.state.session, "restarted": restarted, "before": before.phase},
                )
            )
        actions.append(NotifyJobs(RegionLive(event.at, before.name, restarted)))
        return actions + self._checked(event.fault)

    def _checked(self, fault: str) -> list[RegionAction]:
        before = self.state
        self.state = replace(before, fault=fault)
        if fault == before.fault:
            return []
        text = f"region {before.name} gets no new jobs: {fault}" if fault else f"region {before.name} is valid again"
        return [Record("region.misconfigured", text, before.name, {"fault": fault})]

    def _measured(self, links: tuple[MeasuredLink, ...]) -> list[RegionAction]:
        known = {link.destination: link for link in self.state.measured}
        new = {link.destination: link for link in links if known.get(link.destination) != link}
        if new:
            kept = [link for link in self.state.measured if link.destination not in new]
            self.state = replace(self.state, measured=(*kept, *new.values())[-_MOST_LINKS:])
        return []

    def _drained(self, event: Drained) -> list[RegionAction]:
        before = self.state
        if event.draining == before.draining:
            return []
        self.state = replace(before, draining=event.draining)
        what = "gets no new jobs; its running jobs continue" if event.draining else "gets new jobs again"
        return [Record("region.drained", f"region {before.name} {what}", before.name, {"draining": event.draining})]

    def _revoked(self, event: Revoked) -> list[RegionAction]:
        before = self.state
        if before.revoked:
            return []
        ended: list[RegionAction] = [EndSession(before.session)] if before.connected else []
        self.state = replace(before, connected=False, revoked=True)
        if before.phase in ("live", "unreachable"):
            self.state = replace(self.state, phase="lost", since=event.at, untold=False)
        text = f"region {before.name} was shut out" + (f": {event.reason}" if event.reason else "")
        record = Record("region.revoked", text, before.name, {"reason": event.reason})
        return [*ended, record, NotifyJobs(RegionLost(event.at, before.name, final=True))]

    def _heartbeat(self, event: Heartbeat) -> list[RegionAction]:
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
                f"region {before.name} is reachable again after {silent:.0f} s",
                before.name,
                {"session": before.session, "restarted": False, "before": before.phase, "silent_seconds": silent},
            ),
            NotifyJobs(RegionLive(event.at, before.name, False)),
        ]

    def _disconnected(self, event: Disconnected) -> list[RegionAction]:
        if not self.state.connected or event.session != self.state.session:
            return []
        self.state = replace(self.state, connected=False)
        return self._unreachable(event.at, "connection closed") if self.state.phase == "live" else []

    def _control_plane_restarted(self, event: ControlPlaneRestarted) -> list[RegionAction]:
        """Begin a new lease. Jobs are told only if the agent has not reconnected after a part of it."""
        if self.state.phase in ("invited", "lost"):
            self.state = replace(self.state, connected=False)
            return []
        self.state = replace(self.state, connected=False, lease_ends=event.at + event.lease_seconds)
        if self.state.phase == "unreachable":
            return []
        record, _ = self._unreachable(event.at, "the control plane was restarted")
        self.state = replace(self.state, untold=True)
        return [record]

    def _clock_jumped(self, event: ClockJumped) -> list[RegionAction]:
        if self.state.phase in ("live", "unreachable"):
            contact = event.at if self.state.connected else min(self.state.last_contact, event.at)
            self.state = replace(self.state, last_contact=contact, lease_ends=event.at + event.lease_seconds)
        return []

    def _tick(self, event: Tick) -> list[RegionAction]:
        state = self.state
        if state.phase in ("live", "unreachable") and event.at >= state.lease_ends:
            return self._lost(event.at)
        if state.untold and event.at - state.since > UNREACHABLE_AFTER * (state.lease_ends - state.since):
            self.state = replace(state, untold=False)
            return [NotifyJobs(RegionUnreachable(event.at, state.name))]
        whole_lease = state.lease_ends - state.last_contact
        if state.phase == "live" and event.at - state.last_contact > UNREACHABLE_AFTER * whole_lease:
            return self._unreachable(event.at, "no message received")
        return []

    def _unreachable(self, at: float, why: str) -> list[RegionAction]:
        name = self.state.name
        self.state = replace(self.state, phase="unreachable", since=at)
        left = max(0.0, self.state.lease_ends - at)
        return [
            Record(
                "region.unreachable",
                f"region {name} is unreachable ({why}); its lease expires in {left:.0f} s",
                name,
                {"lease_seconds_left": left},
            ),
            NotifyJobs(RegionUnreachable(at, name)),
        ]

    def _lost(self, at: float) -> list[RegionAction]:
        before = self.state
        self.state = replace(before, phase="lost", since=at, connected=False, untold=False)
        actions: list[RegionAction] = [EndSession(before.session)] if before.connected else []
        actions.append(Record("region.lost", f"region {before.name} is lost: its lease has expired", before.name))
        actions.append(NotifyJobs(RegionLost(at, before.name)))
        return actions
