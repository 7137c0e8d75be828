"""Policies for traces by name: what runs live, and published schedulers to compare it with."""

from scheduler.lab.policies._ceiling import Ceiling, ceiling
from scheduler.lab.policies._elasticflow import ElasticFlow
from scheduler.lab.policies._named import POLICIES, policy_named

__all__ = ["POLICIES", "Ceiling", "ElasticFlow", "ceiling", "policy_named"]
