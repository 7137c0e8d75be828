"""Routes of updates if not every pair of regions exchanges directly."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["next_hops"]


def next_hops(neighbours: Sequence[tuple[str, str]], region: str, origin: str) -> tuple[str, ...]:
    """Return the neighbours to which ``region`` passes on the updates of ``origin``, sorted.

    They are its children in the breadth-first tree from the origin, with ties broken by name. All regions that know the
    same pairs therefore agree, and every update reaches every region, over each link at most once.
    """
    near: dict[str, list[str]] = {}
    for a, b in neighbours:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    parent = {origin: origin}
    queue = deque([origin])
    while queue:
        current = queue.popleft()
        for neighbour in sorted(near.get(current, [])):
            if neighbour not in parent:
                parent[neighbour] = current
                queue.append(neighbour)
    return tuple(sorted(child for child, above in parent.items() if above == region and child != origin))
