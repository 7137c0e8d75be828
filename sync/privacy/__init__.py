"""Differential privacy: clipped updates with Gaussian noise, what that costs, and the ledger of what was spent.

`Release` is what is given out once: Gaussian noise on something of bounded norm, of all data or of a random part.
`epsilon_of` composes releases with Google's `dp-accounting`. `PrivacyLedger` is the region's own durable record.
"""

from sync.privacy._account import Release, affordable, epsilon_of, noise_for, require_accounting
from sync.privacy._ledger import LedgerRow, PrivacyLedger
from sync.privacy._noise import check_masked_noise, clipped, gaussian_noise, noisy_update, standard_deviation

__all__ = [
    "LedgerRow",
    "PrivacyLedger",
    "Release",
    "affordable",
    "check_masked_noise",
    "clipped",
    "epsilon_of",
    "gaussian_noise",
    "noise_for",
    "noisy_update",
    "require_accounting",
    "standard_deviation",
]
