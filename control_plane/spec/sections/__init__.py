"""The sections of the job file."""

from control_plane.spec.sections._aims import LONGEST_SLICE, Function, Limits, Objective, Regions, SoftDeadline
from control_plane.spec.sections._base import Section
from control_plane.spec.sections._methods import (
    GUARD,
    Advanced,
    CollectiveSettings,
    Differential,
    Parallelism,
    PipelineStages,
    Privacy,
    Wan,
)
from control_plane.spec.sections._training import (
    MOST_KEPT,
    PROBED_BATCH,
    Best,
    Clients,
    Data,
    End,
    GoodEnough,
    LearningRate,
    Metadata,
    StartsFrom,
    Task,
    Train,
)

__all__ = [
    "GUARD",
    "LONGEST_SLICE",
    "MOST_KEPT",
    "PROBED_BATCH",
    "Advanced",
    "Best",
    "Clients",
    "CollectiveSettings",
    "Data",
    "Differential",
    "End",
    "Function",
    "GoodEnough",
    "LearningRate",
    "Limits",
    "Metadata",
    "Objective",
    "Parallelism",
    "PipelineStages",
    "Privacy",
    "Regions",
    "Section",
    "SoftDeadline",
    "StartsFrom",
    "Task",
    "Train",
    "Wan",
]
