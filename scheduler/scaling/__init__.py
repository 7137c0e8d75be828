"""Scaling of workers while a job trains: the published tuner, and ours."""

from scheduler.scaling._federation import dealt, federated_terms
from scheduler.scaling._mlless_tuner import PublishedSettings, PublishedTuner
from scheduler.scaling._model import ScalingDecision, ScalingGoal, StepObservation, Terms
from scheduler.scaling._tuner import ScalingSettings, ScalingTuner, learning_rate_factor

__all__ = [
    "PublishedSettings",
    "PublishedTuner",
    "ScalingDecision",
    "ScalingGoal",
    "ScalingSettings",
    "ScalingTuner",
    "StepObservation",
    "Terms",
    "dealt",
    "federated_terms",
    "learning_rate_factor",
]
