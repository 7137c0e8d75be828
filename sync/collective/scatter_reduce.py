"""The collective ``scatter-reduce``: each worker merges one of W chunks; all upload, then all download (LambdaML,
arXiv 2105.07806, section 3.2)."""

from __future__ import annotations

from sync.collective._contract import CollectiveMethod

__all__ = ["METHODS"]

METHODS = (CollectiveMethod("scatter-reduce", lambda workers, k: workers, overlapped=False),)
