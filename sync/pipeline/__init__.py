"""Models that are larger than one function: stages of layers, run as a pipeline over a channel."""

from sync.pipeline._contract import Loss, model_input
from sync.pipeline._layers import Layers
from sync.pipeline._measure import LayerMeasure, measure_layers
from sync.pipeline._merge import GroupMerge
from sync.pipeline._order import Operation, dependencies, live_micro_batches, operations
from sync.pipeline._runner import StageRunner, StepDone
from sync.pipeline._shape import Pipeline, Position

__all__ = [
    "GroupMerge",
    "LayerMeasure",
    "Layers",
    "Loss",
    "Operation",
    "Pipeline",
    "Position",
    "StageRunner",
    "StepDone",
    "dependencies",
    "live_micro_batches",
    "measure_layers",
    "model_input",
    "operations",
]
