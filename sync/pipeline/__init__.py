"""Pipelines: models that are larger than one function run as stages of consecutive layers, over a channel."""

from sync.pipeline._contract import Loss, Taken, model_input
from sync.pipeline._layers import Layers
from sync.pipeline._measure import LayerMeasure, measure_layers
from sync.pipeline._merge import GroupMerge
from sync.pipeline._messages import MessageMeasure, measure_messages
from sync.pipeline._order import Operation, operations
from sync.pipeline._replay import ReplayLog, logged_keys
from sync.pipeline._runner import StageRunner, StepDone
from sync.pipeline._shape import Pipeline, StagePosition

__all__ = [
    "GroupMerge",
    "LayerMeasure",
    "Layers",
    "Loss",
    "MessageMeasure",
    "Operation",
    "Pipeline",
    "ReplayLog",
    "StagePosition",
    "StageRunner",
    "StepDone",
    "Taken",
    "logged_keys",
    "measure_layers",
    "measure_messages",
    "model_input",
    "operations",
]
