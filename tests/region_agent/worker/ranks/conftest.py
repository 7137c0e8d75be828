"""Gateways of one's own, as in their own tests."""

from __future__ import annotations

from tests.region_agent.gateway.conftest import launch  # noqa: F401
