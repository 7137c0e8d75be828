"""FasDL's performance model, mended and extended: what a step takes with each configuration of a partition."""

from scheduler.tuning._fasdl import fasdl_heuristic
from scheduler.tuning._fit import (
    MergePoint,
    StepPoint,
    fit_compute,
    fit_correction,
    fit_memory,
    least_squares,
)
from scheduler.tuning._labels import SKEW_THRESHOLD, LabelCounts, label_skew
from scheduler.tuning._model import (
    ChannelProfile,
    Compute,
    Configuration,
    Convergence,
    Memory,
    PlatformCosts,
    Prediction,
    Space,
    TaskModel,
    TuningLimits,
)
from scheduler.tuning._predict import iterations, needed_mb, predict, step_seconds
from scheduler.tuning._profile import TaskProfile, space_of, task_of, worker_counts
from scheduler.tuning._progress import NormPair, noise_scale
from scheduler.tuning._search import Step, StepChoices, Steps, step_choices

__all__ = [
    "SKEW_THRESHOLD",
    "ChannelProfile",
    "Compute",
    "Configuration",
    "Convergence",
    "LabelCounts",
    "Memory",
    "MergePoint",
    "NormPair",
    "PlatformCosts",
    "Prediction",
    "Space",
    "Step",
    "StepChoices",
    "StepPoint",
    "Steps",
    "TaskModel",
    "TaskProfile",
    "TuningLimits",
    "fasdl_heuristic",
    "fit_compute",
    "fit_correction",
    "fit_memory",
    "iterations",
    "label_skew",
    "least_squares",
    "needed_mb",
    "noise_scale",
    "predict",
    "space_of",
    "step_choices",
    "step_seconds",
    "task_of",
    "worker_counts",
]
