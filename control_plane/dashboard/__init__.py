"""The dashboard: read-only pages on the federation and its jobs, rendered on request."""

from control_plane.dashboard._pages import Dashboard

__all__ = ["Dashboard"]
