"""The collective ``isp``: workers exchange the significant changes of their models (MLLess,
10.1145/3464298.3494884, section 3.1).

The filter itself is in `sync.merging.SignificanceFilter`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sync.codec import list_formats
from sync.collective._by_owners import by_owners, where_either
from sync.collective._contract import CollectiveMethod
from sync.collective._form import MergeForm, MergeTerms

__all__ = ["METHODS"]


def _cost(form: MergeForm) -> MergeTerms:
    everyone = form.chunks == 0
    if not everyone.any():
        return by_owners(form)
    if everyone.all():
        return _all_to_all(form)
    owned = replace(form, chunks=np.maximum(1.0, form.chunks))
    return where_either(everyone, _all_to_all(form), by_owners(owned))


def _all_to_all(form: MergeForm) -> MergeTerms:
    """Return the terms if every worker reads every other worker's list, as published."""
    channel, workers, size = form.channel, form.workers, form.size_bytes
    none = np.zeros_like(workers)
    load = form.load(workers)
    given = form.request(load.put, size / load.up)
    if form.faithful:
        pulled = (workers - 1)[:, None] * form.request(load.get, size / load.down)
    else:
        pulled = form.concurrent(workers - 1, load.get, size / load.down, load.cpu)
    spans = form.whole(given + form.waiting(channel.poll_seconds / 2) + pulled, workers)
    return MergeTerms(spans, workers, workers * (workers - 1), none, none, none + size, (workers - 1) * size)


METHODS = (
    CollectiveMethod(
        "isp",
        lambda workers, k: min(k, workers) if k else 0,
        takes_k=True,
        codecs=list_formats(),
        significance=0.7,  # of the published 0 to 1.2 the largest that hardly slows convergence
        shares="changes",
        cost=_cost,
        worker="sync.merging:ChangeCollective",
    ),
)
