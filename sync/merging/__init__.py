"""Merges by the workers of one partition over its channel: what executes the collectives of `sync.collective`."""

from sync.merging._change_collective import ChangeCollective
from sync.merging._isp_filter import SignificanceFilter
from sync.merging._mean_collective import Buckets, MeanCollective
from sync.merging._members import Member, chunk_bounds, owners
from sync.merging._merge_order import OrderedSum
from sync.merging._opening import open_collective
from sync.merging._parted import PartedVector
from sync.merging._probe import probe

__all__ = [
    "Buckets",
    "ChangeCollective",
    "MeanCollective",
    "Member",
    "OrderedSum",
    "PartedVector",
    "SignificanceFilter",
    "chunk_bounds",
    "open_collective",
    "owners",
    "probe",
]
