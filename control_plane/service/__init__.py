"""The gRPC services, and the one place where state changes."""

from control_plane.service._agents import AgentHubService
from control_plane.service._control import ControlService, Door
from control_plane.service._enrolment import EnrolmentService
from control_plane.service._federation import Federation
from control_plane.service._measurements import Measurements
from control_plane.service._metrics import Meter
from control_plane.service._probing import WAIT, Probing
from control_plane.service._profiling import Profiling
from control_plane.service._succession import Succession
from control_plane.service._users import Caller, caller_of
from control_plane.service._wire import event_message

__all__ = [
    "WAIT",
    "AgentHubService",
    "Caller",
    "ControlService",
    "Door",
    "EnrolmentService",
    "Federation",
    "Measurements",
    "Meter",
    "Probing",
    "Profiling",
    "Succession",
    "caller_of",
    "event_message",
]
