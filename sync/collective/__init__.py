"""Collectives: how the workers of one partition merge their gradients, changes or models."""

from sync.collective._contract import Collective, Merged, Settings, Settled, State
from sync.collective._fold import Fold
from sync.collective._members import Member, chunk_bounds, owners, succession
from sync.collective._model import (
    PATTERNS,
    ChannelCosts,
    Choice,
    Estimate,
    Merge,
    best_chunks,
    best_groups,
    choose,
    estimate,
    least_seconds,
    unequal_batches,
)
from sync.collective._opening import open_collective
from sync.collective._probe import probe
from sync.collective._reducing import Buckets, Reducing
from sync.collective._sharing import Sharing
from sync.collective._significance import SignificanceFilter
from sync.means import weighted_mean, weighted_sum

__all__ = [
    "PATTERNS",
    "Buckets",
    "ChannelCosts",
    "Choice",
    "Collective",
    "Estimate",
    "Fold",
    "Member",
    "Merge",
    "Merged",
    "Reducing",
    "Settings",
    "Settled",
    "Sharing",
    "SignificanceFilter",
    "State",
    "best_chunks",
    "best_groups",
    "choose",
    "chunk_bounds",
    "estimate",
    "least_seconds",
    "open_collective",
    "owners",
    "probe",
    "succession",
    "unequal_batches",
    "weighted_mean",
    "weighted_sum",
]
