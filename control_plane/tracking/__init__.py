"""Figures of a job's events for other tools: CSV, JSON lines, TensorBoard, MLflow, W&B."""

from control_plane.tracking._points import Point, points_of
from control_plane.tracking._sinks import KINDS, Sink, check_place_of_jobs, open_sink, parsed_place
from control_plane.tracking._track import track_job

__all__ = [
    "KINDS", "Point", "Sink", "check_place_of_jobs", "open_sink", "parsed_place", "points_of", "track_job",
]  # fmt: skip
