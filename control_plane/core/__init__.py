"""The pure machines: events in, actions out; no I/O, no clock, no database, no protobuf."""

import dataclasses
import json

from pydantic import TypeAdapter

from control_plane.core._condition import condition_of
from control_plane.core._events import (
    Begun,
    CancelAsked,
    Connected,
    Continued,
    Disconnected,
    EndSession,
    FinishAsked,
    Heard,
    JobAction,
    JobEvent,
    Overslept,
    Planned,
    Record,
    RegionAction,
    RegionEvent,
    RegionLive,
    RegionLost,
    RegionUnreachable,
    Reloaded,
    ReplanAsked,
    Reported,
    Rerouted,
    ScaleAsked,
    SendPeers,
    SendPublish,
    SendScale,
    SendShard,
    SendStart,
    SendStop,
    TellJobs,
    Tick,
    Waits,
)
from control_plane.core._goal import federated_metrics, may_end_early
from control_plane.core._job import MAX_PUBLISHES, JobMachine
from control_plane.core._links import WanLink, wan_links
from control_plane.core._meters import settled
from control_plane.core._region import RegionMachine, RegionState
from control_plane.core._state import (
    TERMINAL,
    Charge,
    Copy,
    Failure,
    Goal,
    InitialModel,
    JobState,
    Pairs,
    Partition,
    Peer,
    Report,
)

__all__ = [
    "MAX_PUBLISHES",
    "TERMINAL",
    "Begun",
    "CancelAsked",
    "Charge",
    "Connected",
    "Continued",
    "Copy",
    "Disconnected",
    "EndSession",
    "Failure",
    "FinishAsked",
    "Goal",
    "Heard",
    "InitialModel",
    "JobAction",
    "JobEvent",
    "JobMachine",
    "JobState",
    "Overslept",
    "Pairs",
    "Partition",
    "Peer",
    "Planned",
    "Record",
    "RegionAction",
    "RegionEvent",
    "RegionLive",
    "RegionLost",
    "RegionMachine",
    "RegionState",
    "RegionUnreachable",
    "Reloaded",
    "ReplanAsked",
    "Report",
    "Reported",
    "Rerouted",
    "ScaleAsked",
    "SendPeers",
    "SendPublish",
    "SendScale",
    "SendShard",
    "SendStart",
    "SendStop",
    "TellJobs",
    "Tick",
    "Waits",
    "WanLink",
    "condition_of",
    "federated_metrics",
    "job_state_from_json",
    "job_state_to_json",
    "may_end_early",
    "region_state_from_json",
    "region_state_to_json",
    "settled",
    "wan_links",
]

_JOB = TypeAdapter(JobState)
_REGION = TypeAdapter(RegionState)


def job_state_to_json(state: JobState) -> str:
    """A job's state as it is stored."""
    return json.dumps(dataclasses.asdict(state))  # a loss may be NaN, which pydantic would write as null


def job_state_from_json(text: str) -> JobState:
    """The state that `job_state_to_json` wrote."""
    return _JOB.validate_json(text)


def region_state_to_json(state: RegionState) -> str:
    """A region's state as it is stored."""
    return json.dumps(dataclasses.asdict(state))


def region_state_from_json(text: str) -> RegionState:
    """The state that `region_state_to_json` wrote."""
    return _REGION.validate_json(text)
