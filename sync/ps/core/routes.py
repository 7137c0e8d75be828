"""Which way updates take when not every pair of regions exchanges directly."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["forwards"]


def forwards(neighbours: Sequence[tuple[str, str]], region: str, origin: str) -> tuple[str, ...]:
    """The neighbours to which a region passes on the updates of another one, sorted.

    They are its children in the breadth-first tree from the origin, ties broken by name, so that all regions that know
    the same pairs agree, and every update reaches every region over each link at most once.
    """
    near: dict[str, list[str]] = {}
    for a, b in neighbours:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    parent = {origin: origin}
    queue = deque([origin])
    while queue:
        here = queue.popleft()
        for there in sorted(near.get(here, [])):
            if there not in parent:
                parent[there] = here
                queue.append(there)
    return tuple(sorted(child for child, above in parent.items() if above == region and child != origin))
