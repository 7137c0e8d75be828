"""Traces of jobs with deadlines under several schedulers: events, one clock, the same core as live."""

from scheduler.simulate._engine import Incidents, Pauses, PolicyDecision, RunningJob, SimulatedPolicy, simulate
from scheduler.simulate._live_policy import Live
from scheduler.simulate._outcome import JobOutcome, SimulationRun
from scheduler.simulate._report import chart, outcome_rows
from scheduler.simulate._trace import Tables, TraceError, TraceJob, read_table, read_trace

__all__ = [
    "Incidents",
    "JobOutcome",
    "Live",
    "Pauses",
    "PolicyDecision",
    "RunningJob",
    "SimulatedPolicy",
    "SimulationRun",
    "Tables",
    "TraceError",
    "TraceJob",
    "chart",
    "outcome_rows",
    "read_table",
    "read_trace",
    "simulate",
]
