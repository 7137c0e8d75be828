"""Merges by the workers of one partition over its channel: what executes the collectives of `sync.collective`."""

from sync.merging._fold import Fold
from sync.merging._members import Member, chunk_bounds, owners, succession
from sync.merging._opening import open_collective
from sync.merging._probe import probe
from sync.merging._reducing import Buckets, Reducing
from sync.merging._sharing import Sharing
from sync.merging._significance import SignificanceFilter

__all__ = [
    "Buckets",
    "Fold",
    "Member",
    "Reducing",
    "Sharing",
    "SignificanceFilter",
    "chunk_bounds",
    "open_collective",
    "owners",
    "probe",
    "succession",
]
