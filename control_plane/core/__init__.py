"""State machines of jobs and regions. They take events and return actions, without I/O, clock, database or protobuf."""

import json

from pydantic import TypeAdapter

from control_plane.core._condition import condition_of
from control_plane.core._events import (
    CancelRequested,
    CatalogueChecked,
    ClockJumped,
    Connected,
    ControlPlaneRestarted,
    Disconnected,
    Drained,
    EndSession,
    Enrolled,
    FinishRequested,
    Heartbeat,
    JobAction,
    JobEvent,
    LinksMeasured,
    MeasuredLink,
    NotifyJobs,
    Planned,
    Record,
    RegionAction,
    RegionEvent,
    RegionLive,
    RegionLost,
    RegionUnreachable,
    ReplanRequested,
    Reported,
    Rerouted,
    Revoked,
    ScaleRequested,
    SendKeep,
    SendPeers,
    SendPublish,
    SendScale,
    SendShard,
    SendStart,
    SendStop,
    StartAllowed,
    StartDelayed,
    SuccessorDecided,
    Tick,
)
from control_plane.core._goal import federated_histograms, federated_metrics, may_end_early
from control_plane.core._job import MAX_PUBLISHES, JobMachine
from control_plane.core._links import WanLink, wan_links
from control_plane.core._lost_regions import why_not_without
from control_plane.core._meters import with_late_charges
from control_plane.core._models import best_model, last_model, models_of
from control_plane.core._region import RegionMachine, RegionState
from control_plane.core._report_events import loss_of_round
from control_plane.core._state import (
    ENDED_PARTITION,
    TERMINAL,
    Charge,
    Copy,
    Evaluation,
    Failure,
    Goal,
    InitialModel,
    JobState,
    Keep,
    KeptModel,
    LinkReport,
    Logged,
    MeterTotals,
    Models,
    Pairs,
    Partition,
    Peer,
    PrivacySpent,
    Report,
    ResourceUsage,
    RoundTime,
    Speed,
    Uploaded,
    WanExchange,
)

__all__ = [
    "ENDED_PARTITION",
    "MAX_PUBLISHES",
    "TERMINAL",
    "CancelRequested",
    "CatalogueChecked",
    "Charge",
    "ClockJumped",
    "Connected",
    "ControlPlaneRestarted",
    "Copy",
    "Disconnected",
    "Drained",
    "EndSession",
    "Enrolled",
    "Evaluation",
    "Failure",
    "FinishRequested",
    "Goal",
    "Heartbeat",
    "InitialModel",
    "JobAction",
    "JobEvent",
    "JobMachine",
    "JobState",
    "Keep",
    "KeptModel",
    "LinkReport",
    "LinksMeasured",
    "Logged",
    "MeasuredLink",
    "MeterTotals",
    "Models",
    "NotifyJobs",
    "Pairs",
    "Partition",
    "Peer",
    "Planned",
    "PrivacySpent",
    "Record",
    "RegionAction",
    "RegionEvent",
    "RegionLive",
    "RegionLost",
    "RegionMachine",
    "RegionState",
    "RegionUnreachable",
    "ReplanRequested",
    "Report",
    "Reported",
    "Rerouted",
    "ResourceUsage",
    "Revoked",
    "RoundTime",
    "ScaleRequested",
    "SendKeep",
    "SendPeers",
    "SendPublish",
    "SendScale",
    "SendShard",
    "SendStart",
    "SendStop",
    "Speed",
    "StartAllowed",
    "StartDelayed",
    "SuccessorDecided",
    "Tick",
    "Uploaded",
    "WanExchange",
    "WanLink",
    "best_model",
    "condition_of",
    "federated_histograms",
    "federated_metrics",
    "job_state_from_json",
    "job_state_to_json",
    "last_model",
    "loss_of_round",
    "may_end_early",
    "models_of",
    "region_state_from_json",
    "region_state_to_json",
    "wan_links",
    "why_not_without",
    "with_late_charges",
]

_JOB = TypeAdapter(JobState)
_REGION = TypeAdapter(RegionState)


def job_state_to_json(state: JobState) -> str:
    """Return a job's state as the JSON that the store keeps."""
    return json.dumps(vars(state), default=vars)  # json.dumps keeps a NaN loss; pydantic would write null


def job_state_from_json(text: str) -> JobState:
    """Parse what `job_state_to_json` returned."""
    return _JOB.validate_json(text)


def region_state_to_json(state: RegionState) -> str:
    """Return a region's state as the JSON that the store keeps."""
    return json.dumps(vars(state), default=vars)


def region_state_from_json(text: str) -> RegionState:
    """Parse what `region_state_to_json` returned."""
    return _REGION.validate_json(text)
