"""Which of the machine's devices each worker has, where all functions see all of them: pure bookkeeping."""

from __future__ import annotations

__all__ = ["DeviceBlocks"]


class DeviceBlocks:
    """Devices of one machine, numbered from 0 so that neighbours are near, and the workers that have them.

    A worker has its devices until they are released. They are an aligned block of neighbours where one is free, and
    else the largest aligned blocks that are: a worker whose devices are moved would load its model again, so none are.
    """

    def __init__(self, devices: int) -> None:
        """``devices``: how many there are; 0: the agent does not place workers."""
        self.devices = devices
        self._taken: dict[tuple[str, int], tuple[int, ...]] = {}

    def take(self, job: str, worker: int, size: int) -> tuple[int, ...]:
        """Return the numbers of a worker's devices, in ascending order; empty: so many are not free.

        A worker that has so many keeps them.
        """
        held = self._taken.pop((job, worker), ())
        numbers = held if len(held) == size else self._chosen(size)
        if numbers:
            self._taken[job, worker] = numbers
        return numbers

    def workers(self, job: str) -> tuple[int, ...]:
        """Return the workers of a job that have devices."""
        return tuple(worker for of_job, worker in self._taken if of_job == job)

    def release(self, job: str, worker: int) -> None:
        """Free the devices of a worker, if it has some."""
        self._taken.pop((job, worker), None)

    def _chosen(self, size: int) -> tuple[int, ...]:
        free = set(range(self.devices)).difference(*self._taken.values())
        if not 0 < size <= len(free):
            return ()
        whole = 1 << (size - 1).bit_length()
        chosen = set(self._block(free, size, whole) or ())
        while len(chosen) < size:
            part = 1 << (size - len(chosen)).bit_length() - 1
            while not (found := self._block(free - chosen, part, part)):
                part //= 2
            chosen |= set(found)
        return tuple(sorted(chosen))

    def _block(self, free: set[int], size: int, alignment: int) -> range | None:
        """Return free neighbours from a multiple of the alignment on, where they break up the least; None: there are
        none."""
        found = [
            range(begin, begin + size)
            for begin in range(0, self.devices, alignment)
            if free.issuperset(range(begin, begin + size))
        ]
        return min(found, key=lambda block: (self._room(free, block.start, alignment), block.start), default=None)

    def _room(self, free: set[int], begin: int, size: int) -> int:
        """Return the size of the largest free aligned block around a block."""
        while size < self.devices:
            first = begin - begin % (2 * size)
            if not free.issuperset(range(first, first + 2 * size)):
                break
            size *= 2
        return size
