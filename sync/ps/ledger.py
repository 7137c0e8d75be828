"""Which updates there are, which of them are in the model, and who else has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from sync.ps.events import Manifest, Peer, Ship
from sync.ps.routes import forwards

__all__ = ["NO_MODEL", "Ledger"]

NO_MODEL = -1
"""The sequence before round 0 is merged."""


class Ledger:
    """All updates of one job, as one region sees them. An update is named by its region and sequence."""

    def __init__(
        self, region: str, regions: tuple[str, ...], kept: Iterable[Manifest], marks: Mapping[str, int]
    ) -> None:
        self._region, self._regions = region, regions
        self.marks = {name: marks.get(name, NO_MODEL) for name in regions}
        """The last update of each region that is in the model."""
        self.kept = {(manifest.region, manifest.sequence): manifest for manifest in kept}
        """Updates that are durable here."""
        self._has: dict[tuple[str, str], int] = {}
        """(who, whose): the last update that is known to be durable there."""
        self.neighbours: tuple[tuple[str, str], ...] = ()
        """Pairs that exchange directly; empty: all do."""
        self.peers: dict[str, Peer] = {}

    def add(self, manifest: Manifest) -> None:
        """An update has become durable here."""
        if manifest.sequence > self.marks[manifest.region]:
            self.kept[manifest.region, manifest.sequence] = manifest
        for region, sequence in manifest.seen:
            self.note(manifest.region, region, sequence)

    def note(self, who: str, origin: str, sequence: int) -> None:
        """Another region has all of a region's updates up to this one."""
        self._has[who, origin] = max(self._has.get((who, origin), NO_MODEL), sequence)

    def has(self, who: str, origin: str) -> int:
        """The last update of a region that another one is known to have."""
        return self._has.get((who, origin), NO_MODEL)

    def knows(self, manifest: Manifest) -> bool:
        """Whether it is in the model or durable here."""
        return manifest.sequence <= self.marks.get(manifest.region, NO_MODEL) or (
            (manifest.region, manifest.sequence) in self.kept
        )

    def next_of(self, region: str) -> list[Manifest]:
        """A region's updates that can be merged now, without a gap, in order."""
        found, sequence = [], self.marks[region] + 1
        while (manifest := self.kept.get((region, sequence))) is not None:
            found.append(manifest)
            sequence += 1
        return found

    def newest(self, region: str) -> int:
        """The last update of a region that is here with all before it."""
        return self.marks[region] + len(self.next_of(region))

    def has_ended(self, region: str) -> bool:
        """Whether a region's last update is here, with all before it."""
        return any(manifest.last for manifest in self.next_of(region))

    def own(self, sequence: int) -> Manifest | None:
        """Our update of a round, once it is durable."""
        return self.kept.get((self._region, sequence))

    def seen(self) -> tuple[tuple[str, int], ...]:
        """What is in the model of the others', as a manifest tells it."""
        return tuple((name, mark) for name, mark in sorted(self.marks.items()) if name != self._region and mark >= 0)

    # On their way

    def ships(self, epoch: int) -> list[Ship]:
        """What each direct peer may still be without."""
        found = []
        for region, peer in sorted(self.peers.items()):
            manifests = [
                # Ours go under the present epoch, whichever it was when they were made: the older one is fenced there.
                replace(manifest, epoch=epoch) if origin == self._region else manifest
                for (origin, sequence), manifest in sorted(self.kept.items(), key=lambda item: item[0][::-1])
                if sequence > self.has(region, origin) and region in self._sends_to(origin)
            ]
            if manifests:
                found.append(Ship(peer, tuple(manifests)))
        return found

    def _sends_to(self, origin: str) -> tuple[str, ...]:
        """Regions that get the updates of a region from here."""
        if not self.neighbours:
            return tuple(name for name in self._regions if name != self._region) if origin == self._region else ()
        if origin == self._region:
            near = {b if a == origin else a for a, b in self.neighbours if origin in (a, b)}
            return tuple(sorted(near))
        return forwards(self.neighbours, self._region, origin)

    def forgettable(self, margin: int) -> tuple[tuple[str, int], ...]:
        """Up to which sequence each region's updates are needed by nobody; the last ``margin`` merged ones stay."""
        up_to = []
        for origin in self._regions:
            # Ours must be everywhere, since a relay may lose what it has not passed on; a relay's job ends with the
            # next region on the way.
            waiting = [r for r in self._regions if r != origin] if origin == self._region else self._sends_to(origin)
            everywhere = min((self.has(who, origin) for who in waiting), default=self.marks[origin])
            up_to.append((origin, min(everywhere, self.marks[origin] - margin)))
        self.kept = {key: m for key, m in self.kept.items() if key[1] > dict(up_to)[key[0]]}
        return tuple(sorted(up_to))
