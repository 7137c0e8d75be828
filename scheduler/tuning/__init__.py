"""FasDL's performance model, mended and extended, and the search for the best configuration of a partition."""

from scheduler.tuning._baselines import as_published, fasdl_batch, fasdl_heuristic, lambdaml
from scheduler.tuning._fit import (
    MergePoint,
    StepPoint,
    error_of,
    fit_compute,
    fit_correction,
    fit_memory,
    least_squares,
)
from scheduler.tuning._model import (
    ChannelProfile,
    Compute,
    Configuration,
    Convergence,
    Memory,
    Platform,
    Prediction,
    Space,
    TaskModel,
    TuningLimits,
)
from scheduler.tuning._predict import iterations, needed_mb, predict, step_seconds
from scheduler.tuning._profile import TaskProfile, space_of, task_of
from scheduler.tuning._progress import NormPair, RunPoint, fit_progress, noise_scale
from scheduler.tuning._search import cheapest, configurations, fastest, front

__all__ = [
    "ChannelProfile",
    "Compute",
    "Configuration",
    "Convergence",
    "Memory",
    "MergePoint",
    "NormPair",
    "Platform",
    "Prediction",
    "RunPoint",
    "Space",
    "StepPoint",
    "TaskModel",
    "TaskProfile",
    "TuningLimits",
    "as_published",
    "cheapest",
    "configurations",
    "error_of",
    "fasdl_batch",
    "fasdl_heuristic",
    "fastest",
    "fit_compute",
    "fit_correction",
    "fit_memory",
    "fit_progress",
    "front",
    "iterations",
    "lambdaml",
    "least_squares",
    "needed_mb",
    "noise_scale",
    "predict",
    "space_of",
    "step_seconds",
    "task_of",
]
