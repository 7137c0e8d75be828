"""Pipelines of functions for models that one function cannot hold: where to cut, in what memory, with what replicas."""

from scheduler.partition._evaluate import evaluate
from scheduler.partition._explain import cuts_of, explain
from scheduler.partition._front import cheapest, fastest, front, uniform, ways_of
from scheduler.partition._model import (
    Channel,
    Cut,
    FunctionSize,
    Hop,
    Layer,
    Line,
    NothingFitsError,
    Order,
    Pipeline,
    Place,
    Problem,
    Profile,
    Stage,
    Way,
)
from scheduler.partition._play import played

__all__ = [
    "Channel",
    "Cut",
    "FunctionSize",
    "Hop",
    "Layer",
    "Line",
    "NothingFitsError",
    "Order",
    "Pipeline",
    "Place",
    "Problem",
    "Profile",
    "Stage",
    "Way",
    "cheapest",
    "cuts_of",
    "evaluate",
    "explain",
    "fastest",
    "front",
    "played",
    "uniform",
    "ways_of",
]
