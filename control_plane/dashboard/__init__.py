"""The dashboard: pages that show the federation and its jobs, made where they are asked for. They change nothing."""

from control_plane.dashboard._pages import Dashboard

__all__ = ["Dashboard"]
