"""The number of workers of a job over several regions, as one number.

One tuner decides for all regions together: the goal is one loss of one model, and the effect of noise depends on the
samples of all regions in a round. Separate tuners would all read the same loss and each react to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler._rescaling import CHANGE_SECONDS, RunningRegion
from scheduler.scaling._model import StepCosts

__all__ = ["federated_step_costs", "workers_by_region"]


def workers_by_region(workers: int, pool: Mapping[str, int]) -> dict[str, int]:
    """Return workers by region, in proportion to the pool.

    One for each region first, then always where the smallest share of a region's pool is used. With more workers no
    region has fewer. Raises ``ValueError`` where there are fewer than regions, or more than the pool.
    """
    if not len(pool) <= workers <= sum(pool.values()) or min(pool.values()) < 1:
        raise ValueError(f"{workers} workers cannot be partitioned over {dict(pool)}")
    given = dict.fromkeys(sorted(pool), 1)
    for _ in range(workers - len(pool)):
        open_ = [region for region in given if given[region] < pool[region]]
        given[min(open_, key=lambda region: (given[region] / pool[region], region))] += 1
    return given


def federated_step_costs(
    regions: Sequence[RunningRegion], pool: Mapping[str, int], exchange_seconds: float
) -> StepCosts:
    """Return what is known of a round, which is the tuner's step, with each possible number of workers.

    ``batch`` of a region counts the samples of ONE worker in a step, which stay the same. A round ends with its slowest
    region, followed by the exchange. The price of a worker is the mean over the pool.
    """
    most, least = sum(pool.values()), len(pool)

    def seconds(workers: int) -> float:
        given = workers_by_region(workers, pool)
        return exchange_seconds + max(
            one.steps_per_round
            * (one.batch / one.samples_per_second + (one.merge_seconds if given[one.region] > 1 else 0.0))
            for one in regions
        )

    return StepCosts(
        expected_seconds=tuple(seconds(max(least, workers)) for workers in range(1, most + 1)),
        worker_usd_per_second=sum(pool[one.region] * one.worker_usd_per_second for one in regions) / most,
        usd_per_second=sum(one.usd_per_second for one in regions),
        join_seconds=CHANGE_SECONDS,
        leave_seconds=CHANGE_SECONDS,
        least=least,
    )
