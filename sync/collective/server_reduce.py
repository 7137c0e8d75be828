"""The collective ``server-reduce``: the region's parameter server gets and adds the vectors of all workers, and puts
the mean, which every worker gets."""

from __future__ import annotations

import numpy as np

from sync.collective._contract import CollectiveMethod
from sync.collective._form import MergeForm, MergeTerms, total_seconds

__all__ = ["METHODS"]


def _cost(form: MergeForm) -> MergeTerms:
    """Return the terms as if the server used the channel like a worker."""
    channel, workers, size, merged = form.channel, form.workers, form.size_bytes, form.merged_bytes
    one, none = np.ones_like(workers), np.zeros_like(workers)
    everyone, reading, storing = form.load(workers, workers), form.load(one, workers), form.load(one, one)
    look = form.waiting(channel.poll_seconds / 2)
    given = form.concurrent(one, everyone.put, size / everyone.up, everyone.cpu)
    read = form.concurrent(workers, reading.get, size / reading.down, reading.cpu)
    collected = given + look + read + form.adding(workers, reading, size)
    stored = form.request(storing.put, merged / storing.up)
    pulled = form.concurrent(one, everyone.get, merged / everyone.down, everyone.cpu)
    if channel.cores:
        pulled = form.request(everyone.get, 0.0)
    waited = total_seconds(collected + stored - given)
    polls = workers * waited / channel.poll_seconds if channel.poll_seconds else none
    spans = form.whole(collected + stored + look + pulled, workers + 3)
    return MergeTerms(spans, workers + 1, 2 * workers, polls, none, none + size, none + merged)


METHODS = (
    CollectiveMethod(
        "server-reduce",
        lambda workers, k: workers,  # chunks of its configurations in profiles
        codecs=("fp32",),
        automatic=True,
        cost=_cost,
        worker="",
    ),
)
