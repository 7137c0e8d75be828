"""The dashboard: pages on the federation and its jobs, rendered on request."""

from control_plane.dashboard._dashboard import Dashboard

__all__ = ["Dashboard"]
