"""The closed form of merges by owners: each of K workers merges a chunk of the vector."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import numpy.typing as npt

from sync.collective._form import Floats, MergeForm, MergeTerms, total_seconds

__all__ = ["by_owners", "groups_that_pay", "where_either"]

_MIN_GROUP_GAIN = 0.1
"""Fraction of time that groups must save: they round means once more, and cause more requests that come too early."""


def by_owners(form: MergeForm) -> MergeTerms:
    """Return the terms of merges in which K owners merge a chunk each, in ``form.groups``, or as many as pay off."""
    if form.groups is not None:
        return _merged(form, form.groups, chained=form.chained)
    alone = _merged(form, np.ones_like(form.workers), chained=form.chained)
    groups = groups_that_pay(form)
    if not (groups > 1).any():
        return alone
    return where_either(groups > 1, _merged(form, groups, chained=form.chained), alone)


def groups_that_pay(form: MergeForm) -> Floats:
    """Return the number of groups of a K-REDUCE with this K, if groups are sufficiently faster, else 1; the requests
    are the same.

    An owner reads W / G parts and then G - 1: least for G = sqrt(W). With more than W / K groups it would wait for its
    own uploads of K chunks instead.
    """
    workers, chunks = form.workers, form.chunks
    groups = np.minimum(workers // chunks, np.round(workers / np.maximum(chunks, np.sqrt(workers))))
    one = np.ones_like(workers)
    possible = (groups > 1) & (not form.channel.cores)
    if not possible.any():
        return one
    grouped, alone = (
        total_seconds(_merged(form, count, chained=False).terms) for count in (np.where(possible, groups, one), one)
    )
    return np.where(possible & (grouped < (1 - _MIN_GROUP_GAIN) * alone), groups, one)


def _merged(form: MergeForm, groups: Floats, *, chained: bool) -> MergeTerms:
    """Return the terms; an owner reads others' parts of its chunk while it uploads its parts of theirs."""
    channel, workers, chunks = form.channel, form.workers, form.chunks
    part, merged = form.size_bytes / chunks, form.merged_bytes / chunks
    group = np.ceil(workers / groups)
    """Workers of the largest group."""
    uploads = chunks - (chunks * groups >= workers)
    """Uploads of the slowest worker: one that merges no chunk, if there is any."""
    read, published = chunks * (workers - 1), form.faithful
    # As published, requests are sequential, and their variations average out.
    giving = form.load(workers, None if published else uploads * workers)
    reading = form.load(chunks, None if published else read)
    storing = form.load(chunks, None if published else chunks)
    pulling = form.load(workers, None if published else read)
    look = form.waiting((channel.list_seconds if published else 0.0) + channel.poll_seconds / 2)
    give_one = form.request(giving.put, part / giving.up)
    read_one = form.request(reading.get, part / reading.down)
    up_one = form.request(storing.put, merged / storing.up)
    if published:
        given, parts = uploads[:, None] * give_one, (group - 1)[:, None] * read_one
        pulls = np.maximum(1, chunks - 1)
        pulled = pulls[:, None] * form.request(pulling.get, merged / pulling.down)
    else:
        given = form.concurrent(uploads, giving.put, part / giving.up, giving.cpu)
        parts = form.concurrent(group - 1, reading.get, part / reading.down, reading.cpu)
        pulls = np.maximum(1, np.where(chunks < workers, chunks, chunks - 1))
        pulled = form.concurrent(pulls, pulling.get, merged / pulling.down, pulling.cpu)
        if channel.cores:
            # The only merged chunk is the vector, which is not copied if it is in memory.
            pulled = np.where((chunks == 1)[:, None], form.request(pulling.get, 0.0), pulled)
    collected = given + parts + look + form.adding(group, reading, part)
    if form.overlapped and not published and not channel.cores:
        # In a chain of iterations an owner is ahead of the others: it has one merged chunk less to get. Meanwhile it
        # has read another owner's part, so that it need not do so while the others wait for it.
        before = (chunks > 1) & (chunks < workers) & (groups == 1) & chained
        first = total_seconds(give_one + parts) - np.where(before, part / reading.down, 0.0)
        longest = np.maximum(total_seconds(given + read_one), first)
        hidden = np.maximum(0.0, total_seconds(given + parts) - longest)
        form.hide(collected, hidden, duplex=chunks == workers)
    if (groups > 1).any():
        joint = form.request(storing.put, part / storing.up) + look
        joint += form.concurrent(groups - 1, reading.get, part / reading.down, reading.cpu)
        joint += form.adding(groups, reading, part) + form.late * (joint + up_one)
        collected += np.where(groups > 1, 1.0, 0.0)[:, None] * joint
    waited = (workers - chunks) * total_seconds(collected + up_one - given) + chunks * total_seconds(look + up_one)
    polls, lists = _polls(form, waited, groups)
    spans = form.whole(collected + up_one + look + pulled, uploads + group + pulls + (groups > 1) * groups)
    down = np.maximum((group + groups - 2) * part + (chunks - 1) * merged, chunks * merged)
    return MergeTerms(spans, chunks * workers, 2 * read, polls, lists, (chunks - 1) * part + merged, down)


def _polls(form: MergeForm, waited: Floats, groups: Floats) -> tuple[Floats, Floats]:
    """Return the gets that find nothing, and the lists; ``waited``: seconds that all workers wait."""
    channel, none = form.channel, np.zeros_like(waited)
    if form.faithful:
        pause = channel.list_seconds + channel.poll_seconds
        # A worker lists at least twice in a merge, however soon it finds a value.
        return none, form.workers + form.chunks + (waited / pause if pause else 0.0)
    if not channel.poll_seconds:
        return none, none
    # Workers request a value when it is likely to exist: at most about once too early in each of their waits.
    return np.minimum(waited / channel.poll_seconds, form.workers * np.where(groups > 1, 3.0, 2.0)), none


def where_either(where: npt.NDArray[np.bool_], one: MergeTerms, other: MergeTerms) -> MergeTerms:
    """Return the rows of ``one`` where the condition holds, else those of ``other``."""
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(MergeTerms)]
    return MergeTerms(*(np.where(where[:, None] if a.ndim > 1 else where, a, b) for a, b in pairs))
