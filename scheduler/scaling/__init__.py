"""Scaling of workers while a job trains: the published tuner, and ours."""

from scheduler.scaling._federation import federated_step_costs, workers_by_region
from scheduler.scaling._mlless_tuner import PublishedSettings, PublishedTuner
from scheduler.scaling._model import ScalingDecision, ScalingGoal, StepCosts, StepObservation
from scheduler.scaling._tuner import ScalingSettings, ScalingTuner, learning_rate_factor

__all__ = [
    "PublishedSettings",
    "PublishedTuner",
    "ScalingDecision",
    "ScalingGoal",
    "ScalingSettings",
    "ScalingTuner",
    "StepCosts",
    "StepObservation",
    "federated_step_costs",
    "learning_rate_factor",
    "workers_by_region",
]
