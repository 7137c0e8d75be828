"""Which clients of a region train in a round, in which worker, and on which samples in which order.

Everything follows from the job's seed, the region and the round: not from slices, attempts and the number of workers.
"""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from region_agent.worker.data.order import SMALL_BYTES
from region_agent.worker.data.shard import Collate, collated, split_clients
from region_agent.worker.data.streamed import Streamed
from region_agent.worker.invocation import ClientRounds
from sync.policy import clients_of_round

__all__ = ["ClientSampler"]

_DRAW, _ORDER = 1, 2
"""Extra seeds: of which clients are drawn, and of the order of a client's samples."""
_MISSING_HINT = "docs/clients.md: state `clients` in the format of the data, or give what dataset returns `clients`"


class ClientSampler:
    """The clients of a region's training data.

    Raises ``GeofedError``: TASK_INVALID if the data do not tell whose each sample is; SAMPLES_MISMATCH if there are
    other clients than the region has stated.
    """

    def __init__(self, data: Any, seed: int, region: str, rounds: ClientRounds, collate: Collate | None = None) -> None:
        """``rounds``: how clients are drawn, and how long they train. ``collate``: as of `BatchStream`."""
        self._data, self._rounds, self._collate = data, rounds, collate
        self._seed = [seed, zlib.crc32(region.encode())]
        of_samples = split_clients(data)
        if of_samples is None:
            raise GeofedError("TASK_INVALID", "the data do not tell which client a sample is of", hint=_MISSING_HINT)
        # Sorted by client, so that the samples of one lie together; stable, so that they keep their order.
        self._samples = np.argsort(of_samples, kind="stable")
        numbers, counts = np.unique(of_samples, return_counts=True)
        self._ends = np.cumsum(counts)
        self._counts: npt.NDArray[np.int64] = counts.astype(np.int64)
        self.total = len(numbers)
        """Clients with samples."""
        if rounds.stated and rounds.stated != self.total:
            text = f"the file of region {region} states {rounds.stated} clients, the training data have {self.total}"
            hint = f"set clients: {self.total} in the file of region {region}"
            raise GeofedError("SAMPLES_MISMATCH", text, hint=hint)
        self.of_round = clients_of_round(self.total, rounds.fraction, rounds.least)
        """Clients that train in a round."""
        self.skipped = 0
        """Drawn samples that are None."""

    def samples(self, client: int) -> int:
        """Return the samples that a client has."""
        return int(self._counts[client])

    def drawn(self, step: int) -> list[int]:
        """Return the clients of a round, ascending; ``step``: its number, from 1."""
        if self.of_round == self.total:
            return list(range(self.total))
        rng = np.random.default_rng([*self._seed, _DRAW, step])
        return sorted(rng.choice(self.total, self.of_round, replace=False).tolist())

    def share(self, step: int, worker: int, workers: int) -> list[int]:
        """Return the clients of a round that a worker trains, ascending.

        Those with the most samples are given out first, each to the worker that has the fewest samples so far.
        """
        if workers == 1:
            return self.drawn(step)
        loads = [(0, number) for number in range(workers)]
        mine = []
        for client in sorted(self.drawn(step), key=lambda one: (-self._counts[one], one)):
            load, number = heapq.heappop(loads)
            heapq.heappush(loads, (load + self.samples(client), number))
            if number == worker:
                mine.append(client)
        return sorted(mine)

    def trained_samples(self, client: int) -> int:
        """Return the samples that a client processes in a round."""
        return int(self._trained(self._counts[client : client + 1])[0])

    def mean_trained_samples(self) -> float:
        """Return the samples that a client of the region processes in a round, in the mean."""
        return float(self._trained(self._counts).mean())

    def _trained(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        rounds = self._rounds
        if not rounds.steps:
            return counts * rounds.epochs
        whole, rest = np.divmod(rounds.steps, -(-counts // rounds.batch))
        trained: npt.NDArray[np.int64] = whole * counts + np.minimum(rest * rounds.batch, counts)
        return trained

    def weight(self, client: int, kept: int) -> int:
        """Return what a client counts by in the mean, if so many of the samples that it has drawn in a round are not
        None: its samples without those that are, estimated where it has not drawn each equally often."""
        drawn = self.trained_samples(client)
        return max(1, (self.samples(client) * kept + drawn // 2) // drawn)

    def batches(self, client: int, step: int, after: Sequence[int] = ()) -> Iterator[list[int]]:
        """Yield the samples of each local step of a client: in each epoch all of its samples in a new order, in batches
        of which the last may be smaller.

        ``after``: the clients that train next, of whose first batches data in blocks are read ahead, too.
        """
        if not isinstance(self._data, Streamed):
            yield from self._drawn_batches(client, step)
            return
        following = itertools.chain.from_iterable(self._drawn_batches(one, step) for one in (client, *after))
        window = deque(itertools.islice(following, self._data.prefetch + 1))
        for _ in range(self._local_steps(client)):
            self._data.expect_within(list(window), SMALL_BYTES)
            yield window.popleft()
            window.extend(itertools.islice(following, 1))

    def _local_steps(self, client: int) -> int:
        return self._rounds.steps or self._rounds.epochs * -(-self.samples(client) // self._rounds.batch)

    def _drawn_batches(self, client: int, step: int) -> Iterator[list[int]]:
        own = self._of(client)
        made, epoch = 0, 0
        while not self._over(epoch, made):
            rng = np.random.default_rng([*self._seed, _ORDER, step, client, epoch])
            order = own[rng.permutation(len(own))].tolist()
            for start in range(0, len(order), self._rounds.batch):
                yield order[start : start + self._rounds.batch]
                made += 1
                if self._over(epoch, made):
                    return
            epoch += 1

    def _over(self, epoch: int, made: int) -> bool:
        return made >= self._rounds.steps if self._rounds.steps else epoch >= self._rounds.epochs

    def _of(self, client: int) -> npt.NDArray[np.int64]:
        end = int(self._ends[client])
        return self._samples[end - self.samples(client) : end]

    def batch(self, indices: list[int], at_once: int) -> list[tuple[int, Any]]:
        """Return samples in as few batches of at most ``at_once`` as there can be (0: no limit), each with its number
        of samples. Samples that are None are left out; empty if there are no others."""
        parts = -(-len(indices) // (at_once or len(indices)))
        cut = [len(indices) * part // parts for part in range(parts + 1)]
        made = [collated(self._data, indices[a:b], self._collate) for a, b in itertools.pairwise(cut)]
        self.skipped += len(indices) - sum(count for count, _ in made)
        return [one for one in made if one[0]]
