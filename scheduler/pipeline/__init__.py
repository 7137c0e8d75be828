"""Pipelines of functions for models that one function cannot hold: cuts, memory sizes and replicas."""

from scheduler.pipeline._evaluate import evaluate
from scheduler.pipeline._event_simulation import played
from scheduler.pipeline._explain import cuts_of, explain
from scheduler.pipeline._model import (
    ORDERS,
    Cut,
    FunctionSize,
    Hop,
    Layer,
    LayerProfile,
    LinearCost,
    NothingFitsError,
    Order,
    PipelineOptions,
    PipelineProblem,
    PlannedPipeline,
    PlannedStage,
    StageChannel,
    StageRegion,
)
from scheduler.pipeline._planner import front, pipeline_options

__all__ = [
    "ORDERS",
    "Cut",
    "FunctionSize",
    "Hop",
    "Layer",
    "LayerProfile",
    "LinearCost",
    "NothingFitsError",
    "Order",
    "PipelineOptions",
    "PipelineProblem",
    "PlannedPipeline",
    "PlannedStage",
    "StageChannel",
    "StageRegion",
    "cuts_of",
    "evaluate",
    "explain",
    "front",
    "pipeline_options",
    "played",
]
