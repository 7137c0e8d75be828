"""Collectives: how the workers of one partition merge their gradients, changes or models.

Each collective is a module of this package, which holds no machinery: `sync.merging` executes merges over a channel.
"""

from sync.collective._choice import Choice, best_groups, choose, owners_of_lists
from sync.collective._contract import Collective, CollectiveMethod, Merged, Model, Settings, Settled, State
from sync.collective._estimate import Estimate, Merge, Merges, estimate, merge_terms
from sync.collective._form import TERMS, ChannelCosts, Correction, MergeForm, MergeTerms
from sync.collective._registry import collective_named, collectives

__all__ = [
    "DEFAULT",
    "TERMS",
    "ChannelCosts",
    "Choice",
    "Collective",
    "CollectiveMethod",
    "Correction",
    "Estimate",
    "Merge",
    "MergeForm",
    "MergeTerms",
    "Merged",
    "Merges",
    "Model",
    "Settings",
    "Settled",
    "State",
    "best_groups",
    "choose",
    "collective_named",
    "collectives",
    "estimate",
    "merge_terms",
    "owners_of_lists",
]

DEFAULT = "server-reduce"
"""The collective that ``auto`` stands for where a channel's constants are not measured, as in shared memory."""
