"""The collective ``k-reduce``: K of W workers merge a chunk each (FasDL's K-REDUCE, 10.1109/TC.2024.3485202), uploads
overlap downloads.

Which workers own chunks and form groups: `sync/merging/_reduction_plan.py`. In which order an owner adds (by worker
number, in float64): `sync/merging/_merge_order.py`.
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
