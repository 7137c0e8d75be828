"""What the benchmarks of collectives hold against ours: the lower bound, and the published choices of K and batch."""

from __future__ import annotations

import math

from sync.collective import ChannelCosts, Merge, estimate


def least_seconds(workers: int, size_bytes: float, costs: ChannelCosts) -> float:
    """Return the lower bound: through a store that does not compute, each of W workers must download 2 S (W - 1) / W,
    or upload S."""
    if workers < 2:
        return 0.0
    down = 2 * size_bytes * (workers - 1) / workers / costs.down_bytes_per_second
    return max(down, size_bytes / costs.up_bytes_per_second)


def best_chunks(
    workers: int, size_bytes: float, costs: ChannelCosts, *, usd_per_worker_second: float | None = None
) -> int:
    """Return the best K of K-REDUCE for sequential requests: T(K) = const + K P + Q / K, so K = sqrt(Q / P).

    With a price of time it is the cheapest K: every chunk costs W puts and 2 (W - 1) gets. It is the better of the two
    integers around the optimum, compared with K = 1 and 2, as K = 1 reads one merged chunk where the formula has none,
    and with K = W, where every worker keeps its part of its own chunk.
    """
    latency = costs.put_seconds + costs.get_seconds
    bytes_term = size_bytes * (1 / costs.up_bytes_per_second + (workers - 2) / costs.down_bytes_per_second)
    if usd_per_worker_second is not None:
        rate = workers * usd_per_worker_second
        latency = latency * rate + workers * costs.put_usd + 2 * (workers - 1) * costs.get_usd
        bytes_term *= rate
    around = math.sqrt(max(0.0, bytes_term) / latency) if latency > 0 else float(workers)
    candidates = {max(1, min(workers, k)) for k in (1, 2, math.floor(around), math.ceil(around), workers)}

    # Polls are ignored: they depend on who waits for whom, hardly on K.
    costs_without_polls = ChannelCosts(
        costs.put_seconds, costs.get_seconds, costs.up_bytes_per_second, costs.down_bytes_per_second,
        put_usd=costs.put_usd, get_usd=costs.get_usd,
    )  # fmt: skip

    def worth(chunks: int) -> float:
        one = estimate(Merge("k-reduce", workers, size_bytes, chunks, faithful=True), costs_without_polls)
        return one.seconds if usd_per_worker_second is None else one.usd(workers, usd_per_worker_second)

    return min(sorted(candidates), key=worth)


def unequal_batches(
    batch: int, chunks: int, workers: int, *, aggregation_seconds: float, seconds_per_sample: float, most: int
) -> int:
    """Return the batch of a worker that owns no chunk, such that it computes as long as an owner computes and
    aggregates.

    FasDL's A = min(round((T_agg + T_train(B)) (M + m) / a - b), floor((most - B K) / (W - K))), whose first term is B +
    T_agg / (seconds per sample). ``batch``: B, an owner's; ``most``: the largest global batch. At least B if the global
    batch allows it, and at least 1; B if every worker owns a chunk.
    """
    if chunks >= workers:
        return batch
    equal = round(batch + aggregation_seconds / seconds_per_sample)
    return max(1, min(equal, (most - batch * chunks) // (workers - chunks)))
