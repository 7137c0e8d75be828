"""The collective ``k-reduce``: K of W workers merge a chunk each (FasDL's K-REDUCE, 10.1109/TC.2024.3485202), uploads
overlap downloads.

The owners of a step, the order in which they add, and groups: `sync.merging`.
"""

from __future__ import annotations

from sync.collective._contract import CollectiveMethod

__all__ = ["METHODS"]

METHODS = (
    CollectiveMethod(
        "k-reduce",
        lambda workers, k: min(k or workers, workers),
        takes_k=True,
        takes_groups=True,
        takes_staleness=True,
        automatic=True,
    ),
)
