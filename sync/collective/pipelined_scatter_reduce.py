"""The collective ``pipelined-scatter-reduce``: each worker merges one of W chunks; uploads overlap downloads (FuncPipe,
10.1145/3570607, section 4)."""

from __future__ import annotations

from sync.collective._contract import CollectiveMethod

__all__ = ["METHODS"]

METHODS = (CollectiveMethod("pipelined-scatter-reduce", lambda workers, k: workers, automatic=True),)
