"""The gRPC services, and the one place where state changes."""

from control_plane.service._agents import AgentHubService
from control_plane.service._control import ControlService, Door
from control_plane.service._enrolment import EnrolmentService
from control_plane.service._federation import Federation
from control_plane.service._metrics import Meter
from control_plane.service._profiling import Profiling

__all__ = ["AgentHubService", "ControlService", "Door", "EnrolmentService", "Federation", "Meter", "Profiling"]
