"""The daemon of a region: `agent` starts and ends it, `jobs` carries out the control plane's commands."""

from region_agent.daemon.agent import Agent, run

__all__ = ["Agent", "run"]
