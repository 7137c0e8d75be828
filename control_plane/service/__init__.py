"""The control plane's gRPC services, and the federation's state behind them."""

from control_plane.service._metrics import MetricsExporter
from control_plane.service.jobs._commands import cancel, finish, rename, replan, share
from control_plane.service.jobs._replanner import Replanner
from control_plane.service.jobs._resume import resume
from control_plane.service.jobs._submission import answer_plan, scale, submit
from control_plane.service.measuring._measurements import Measurements
from control_plane.service.measuring._probing import WAIT, Probing
from control_plane.service.measuring._profiling import Profiling
from control_plane.service.planning._initial_model import kept_model
from control_plane.service.rpc._access import AGENT_RULES, CONTROL_RULES, RegionCheck, UserCheck
from control_plane.service.rpc._agents import AgentHubService
from control_plane.service.rpc._control import DAILY_CODE_BYTES, AccessConfig, ControlService
from control_plane.service.rpc._enrolment import EnrolmentService
from control_plane.service.rpc._signin import SignInService
from control_plane.service.rpc._wire import event_message, log_message
from control_plane.service.state._callers import Caller, caller_of, caller_with
from control_plane.service.state._draft import OPERATOR
from control_plane.service.state._entries import JobEntry, newest, reported_workers
from control_plane.service.state._federation import Federation
from control_plane.service.state._job_lookup import active_jobs
from control_plane.service.state._leadership import SILENT_SECONDS, LeaderSilence, LeaderState, StoreThreads
from control_plane.service.storage._deletion import require_deletable
from control_plane.service.storage._inventory import KEEP
from control_plane.service.storage._sweeper import Sweeper

__all__ = [
    "AGENT_RULES",
    "CONTROL_RULES",
    "DAILY_CODE_BYTES",
    "KEEP",
    "OPERATOR",
    "SILENT_SECONDS",
    "WAIT",
    "AccessConfig",
    "AgentHubService",
    "Caller",
    "ControlService",
    "EnrolmentService",
    "Federation",
    "JobEntry",
    "LeaderSilence",
    "LeaderState",
    "Measurements",
    "MetricsExporter",
    "Probing",
    "Profiling",
    "RegionCheck",
    "Replanner",
    "SignInService",
    "StoreThreads",
    "Sweeper",
    "UserCheck",
    "active_jobs",
    "answer_plan",
    "caller_of",
    "caller_with",
    "cancel",
    "event_message",
    "finish",
    "kept_model",
    "log_message",
    "newest",
    "rename",
    "replan",
    "reported_workers",
    "require_deletable",
    "resume",
    "scale",
    "share",
    "submit",
]
