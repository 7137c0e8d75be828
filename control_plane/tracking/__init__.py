"""Figures of a job's events for other tools: CSV, JSON lines, TensorBoard, MLflow, W&B."""

from control_plane.tracking._points import Point, points_of
from control_plane.tracking._sinks import KINDS, Sink, open_sink

__all__ = ["KINDS", "Point", "Sink", "open_sink", "points_of"]
