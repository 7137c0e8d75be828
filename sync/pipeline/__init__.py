"""Models that are larger than one function: stages of layers, run as a pipeline over a channel."""

from sync.pipeline._layers import Layers
from sync.pipeline._measure import LayerMeasure, measure_layers
from sync.pipeline._order import Operation, dependencies, live_micro_batches, operations
from sync.pipeline._shape import Pipeline, Position

__all__ = [
    "LayerMeasure",
    "Layers",
    "Operation",
    "Pipeline",
    "Position",
    "dependencies",
    "live_micro_batches",
    "measure_layers",
    "operations",
]
