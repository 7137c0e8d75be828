"""Traces of jobs with deadlines under several schedulers: events, one clock, the same core as live."""

from scheduler.simulate._ceiling import Ceiling, ceiling
from scheduler.simulate._elasticflow import ElasticFlow
from scheduler.simulate._engine import Incidents, Pauses, PolicyDecision, RunningJob, SimulatedPolicy, simulate
from scheduler.simulate._outcome import JobOutcome, SimulationRun
from scheduler.simulate._policies import POLICIES, policy_named
from scheduler.simulate._proven_policy import Deadlines
from scheduler.simulate._report import chart, outcome_rows
from scheduler.simulate._trace import Tables, TraceError, TraceJob, read_table, read_trace

__all__ = [
    "POLICIES",
    "Ceiling",
    "Deadlines",
    "ElasticFlow",
    "Incidents",
    "JobOutcome",
    "Pauses",
    "PolicyDecision",
    "RunningJob",
    "SimulatedPolicy",
    "SimulationRun",
    "Tables",
    "TraceError",
    "TraceJob",
    "ceiling",
    "chart",
    "outcome_rows",
    "policy_named",
    "read_table",
    "read_trace",
    "simulate",
]
