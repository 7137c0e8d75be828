"""The collective ``all-reduce``: one worker merges the whole vector (LambdaML, arXiv 2105.07806, section 3.2)."""

from __future__ import annotations

from sync.collective._contract import CollectiveMethod

__all__ = ["METHODS"]

METHODS = (CollectiveMethod("all-reduce", lambda workers, k: 1, automatic=True),)
