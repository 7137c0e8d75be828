"""How the workers of one partition merge."""

from sync.collective._mean import weighted_mean, weighted_sum

__all__ = ["weighted_mean", "weighted_sum"]
