"""The devices of the simulated cluster: which nodes work, and where the devices of each job are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.deadline import Buddy

_BROKEN = "\0node"
"""Prefix of the names that hold broken nodes; no job has such a name."""


class ClusterNodes:
    """Nodes with devices. Shares that are no power of two lie in several blocks."""

    def __init__(self, nodes: int, devices_per_node: int) -> None:
        self.nodes, self.per_node = nodes, devices_per_node
        self.all_devices = nodes * devices_per_node
        self.buddy = Buddy(self.all_devices)
        self.broken: set[int] = set()
        self.parts: dict[str, list[str]] = {}

    @classmethod
    def of(cls, devices: int, blocks: Mapping[str, Sequence[tuple[int, int]]]) -> ClusterNodes:
        """Return a cluster without broken nodes, in which jobs have these blocks: (first device, size)."""
        cluster = cls(1, devices)
        for job, mine in blocks.items():
            cluster.parts[job] = [f"{job}\0{number}" for number in range(len(mine))]
            cluster.buddy.blocks.update(zip(cluster.parts[job], mine, strict=True))
        return cluster

    def copy(self) -> ClusterNodes:
        """Return a copy for trials."""
        other = ClusterNodes(self.nodes, self.per_node)
        other.buddy = Buddy(self.all_devices, self.buddy.blocks)
        other.buddy.fixed = set(self.buddy.fixed)
        other.broken, other.parts = set(self.broken), dict(self.parts)
        return other

    def blocks(self, job: str) -> tuple[tuple[int, int], ...]:
        """Return the location of a job's share: (first device, size)."""
        return tuple(self.buddy.blocks[part] for part in self.parts.get(job, ()))

    @property
    def devices(self) -> int:
        """Number of devices that work."""
        return self.all_devices - len(self.broken) * self.per_node

    def release(self, job: str) -> None:
        """Free a job's blocks, if it has any."""
        for part in self.parts.pop(job, ()):
            self.buddy.release(part)

    def arrange(self, changed: Sequence[tuple[str, int]]) -> set[str]:
        """Give jobs their new shares; returns the other jobs that had to move."""
        for job, _ in changed:
            self.release(job)
        moved: set[str] = set()
        for job, share in sorted(changed, key=lambda entry: -entry[1]):
            sizes = [1 << bit for bit in range(share.bit_length() - 1, -1, -1) if share >> bit & 1]
            if self.broken:
                # A broken node cannot be moved away, so that a large block may have to be of several.
                sizes = [piece for size in sizes for piece in self._cut(size)]
            self.parts[job] = []
            for number, size in enumerate(sizes):
                part = f"{job}\0{number}"
                moved.update(name.partition("\0")[0] for name in self.buddy.place(part, size).moved)
                self.parts[job].append(part)
        return moved - {job for job, _ in changed}

    def _cut(self, size: int) -> list[int]:
        return [self.per_node] * (size // self.per_node) if size > self.per_node else [size]

    def fail(self, node: int) -> set[str] | None:
        """Break a node; returns the jobs that were on it, which lose all their devices. None: it was broken already."""
        if node in self.broken:
            return None
        begin, end = node * self.per_node, (node + 1) * self.per_node
        hit = {
            name.partition("\0")[0]
            for name, (first, size) in self.buddy.blocks.items()
            if not name.startswith(_BROKEN) and first < end and begin < first + size
        }
        for job in hit:
            self.release(job)
        self.broken.add(node)
        self.buddy.blocks[f"{_BROKEN}{node}"] = (begin, self.per_node)
        self.buddy.fixed.add(f"{_BROKEN}{node}")
        return hit

    def mend(self, node: int) -> None:
        """Return a repaired node's devices to those that can be assigned."""
        self.broken.discard(node)
        self.buddy.release(f"{_BROKEN}{node}")
        self.buddy.fixed.discard(f"{_BROKEN}{node}")
