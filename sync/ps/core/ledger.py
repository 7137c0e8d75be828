"""Which updates there are, which of them are in the model, and who else has them.

Ways that change while updates are on them. Two rules make that safe, whenever it happens:

1. Where ways may change, a region keeps every update that it has until all regions have it. (Where they may not, a
   relay is done with one once those that it passes it on to have it.) The origin is told who has what by its
   neighbours' acknowledgements and by what others' updates say they have seen, and says in its own next updates which
   are everywhere (`Manifest.settled`), so that all others may forget them.
2. Old and new ways are both in force until every region knows the new ones, so that at any moment one set of ways is
   in force in all regions, however long one of them hears of nothing.

(Some are sent summed up, `Sums`; those who have the updates themselves keep them all the same.)

Then every update reaches every region: those that have it, have it still (1), and its origin is one of them. Take the
ways that are in force everywhere (2), and a region without the update whose predecessor on the way from the origin has
it: the predecessor offers it until it has. What comes twice counts once, since a region merges only what follows on its
watermark. Nothing of this needs to be remembered over a crash beyond the updates themselves: whoever comes back offers
all that it keeps, over the ways that its agent tells it, which are durable there and numbered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from sync.ps.core.actions import Ship, SumUp
from sync.ps.core.routes import forwards
from sync.ps.core.sums import Sums
from sync.transfer.manifest import Manifest, Peer

__all__ = ["NO_MODEL", "Ledger"]

NO_MODEL = -1
"""The sequence before round 0 is merged."""


class Ledger:
    """All updates of one job, as one region sees them. An update is named by its region and sequence."""

    def __init__(
        self,
        region: str,
        regions: tuple[str, ...],
        kept: Iterable[Manifest],
        marks: Mapping[str, int],
        *,
        rerouted: bool = False,
    ) -> None:
        """``rerouted``: the ways of updates may change while the job runs."""
        self._region, self._regions, self._rerouted = region, regions, rerouted
        kept = tuple(kept)
        self.marks = {name: marks.get(name, NO_MODEL) for name in regions}
        """The last update of each region that is in the model."""
        self.kept: dict[tuple[str, int], Manifest] = {}
        """Updates that are durable here, by region and last round."""
        self._beginning: dict[tuple[str, int], Manifest] = {}
        """The same, by region and first round."""
        for manifest in sorted(kept, key=lambda one: one.rounds):
            self._keep(manifest)
        self.sums = Sums(region, regions, kept)
        self._has: dict[tuple[str, str], int] = {}
        """(who, whose): the last update that is known to be durable there."""
        self.neighbours: tuple[tuple[str, str], ...] = ()
        """Pairs that exchange directly; empty: all do."""
        self.former: tuple[tuple[str, str], ...] = ()
        """Pairs that still do, until all regions know the present ones; empty: none."""
        self.routes = 0
        """Number of these ways."""
        self.peers: dict[str, Peer] = {}

    def add(self, manifest: Manifest) -> None:
        """An update has become durable here."""
        if manifest.sequence > self.marks[manifest.region] and self.follows(manifest):
            self._keep(manifest)
        self.sums.heard(manifest)
        for region, sequence in manifest.seen:
            self.note(manifest.region, region, sequence)
        for region in self._regions:
            self.note(region, manifest.region, manifest.settled - 1)

    def _keep(self, manifest: Manifest) -> None:
        if manifest.first and manifest.first <= self.marks.get(manifest.region, NO_MODEL):
            # A part of it is in the model: nothing can be made of it any more.
            return
        key = manifest.region, manifest.begins
        self.kept[manifest.region, manifest.sequence] = manifest
        if key not in self._beginning or self._beginning[key].rounds < manifest.rounds:
            self._beginning[key] = manifest

    def note(self, who: str, origin: str, sequence: int) -> None:
        """Another region has all of a region's updates up to this one."""
        self._has[who, origin] = max(self._has.get((who, origin), NO_MODEL), sequence)

    def state_lost(self, who: str) -> None:
        """Another region has nothing any more."""
        self._has = {pair: sequence for pair, sequence in self._has.items() if pair[0] != who}

    def has(self, who: str, origin: str) -> int:
        """The last update of a region that another one is known to have."""
        return self._has.get((who, origin), NO_MODEL)

    def knows(self, manifest: Manifest) -> bool:
        """Whether it is in the model or durable here, and all before it that it sums up."""
        if manifest.sequence <= self.marks.get(manifest.region, NO_MODEL):
            return True
        held = self.kept.get((manifest.region, manifest.sequence))
        if held is not None and not held.first and not manifest.first:
            return True
        return manifest.region in self.marks and manifest.sequence <= self.newest(manifest.region)

    def follows(self, manifest: Manifest) -> bool:
        """Whether it can be merged once all that is here is; one that sums up several rounds can only then."""
        return not manifest.first or self.newest(manifest.region) == manifest.first - 1

    def next_of(self, region: str) -> list[Manifest]:
        """A region's updates that can be merged now, without a gap, in order."""
        found, sequence = [], self.marks[region] + 1
        while (manifest := self._beginning.get((region, sequence))) is not None:
            found.append(manifest)
            sequence = manifest.sequence + 1
        return found

    def newest(self, region: str) -> int:
        """The last update of a region that is here with all before it."""
        return max((manifest.sequence for manifest in self.next_of(region)), default=self.marks[region])

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

    def route(
        self, neighbours: tuple[tuple[str, str], ...], routes: int = 0, former: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """Take up the ways that the control plane has chosen, unless newer ones are known."""
        if routes >= self.routes:
            self.neighbours, self.routes, self.former = neighbours, routes, former

    def ships(self, epoch: int, *, all_peers: bool = False) -> list[Ship]:
        """What each direct peer may still be without. ``all_peers``: also those that are to get nothing from here."""
        found = []
        settled = min((self.has(who, self._region) for who in self._others()), default=NO_MODEL) + 1
        for region, peer in sorted(self.peers.items()):
            units = [m for origin in self._regions for m in self.sums.instead(region, self._lacking(region, origin))]
            manifests = [
                # Ours go under the present epoch, whichever it was when they were made: the older one is fenced there.
                replace(manifest, epoch=epoch, settled=settled) if manifest.region == self._region else manifest
                for manifest in sorted(units, key=lambda one: (one.sequence, one.region))
            ]
            if manifests or all_peers:
                found.append(Ship(peer, tuple(manifests)))
        return found

    def sum_up(self, *, piles: bool = True) -> tuple[SumUp, ...]:
        """Updates to be summed up, for a peer that has been away, or, with ``piles``, whose link carries too little."""
        wanted = self.sums.wanted(lambda peer, origin: self._lacking(peer, origin), self.has, piles=piles)
        return () if wanted is None else (wanted,)

    def _lacking(self, peer: str, origin: str) -> list[Manifest]:
        """A region's updates that a peer is to get from here and may be without, in order."""
        if peer not in self.peers or origin == peer or peer not in self._sends_to(origin):
            return []
        has = self.has(peer, origin)
        # Of one that sums up what the peer has a part of, it could use nothing: it gets the rest from somebody else.
        lacks = (m for (region, _), m in self.kept.items() if region == origin and m.sequence > has)
        return sorted((m for m in lacks if m.begins > has or not m.first), key=lambda one: one.sequence)

    def near(self) -> tuple[str, ...]:
        """Regions one of which has, or has passed on, whatever of ours anybody has."""
        if not self.neighbours or self._rerouted:
            return self._others()
        return self._along(self.neighbours, self._region)

    def _others(self) -> tuple[str, ...]:
        return tuple(name for name in self._regions if name != self._region)

    def _sends_to(self, origin: str) -> tuple[str, ...]:
        """Regions that get the updates of a region from here."""
        ways = [self.neighbours, self.former] if self.former else [self.neighbours]
        return tuple(sorted({name for pairs in ways for name in self._along(pairs, origin)}))

    def _along(self, pairs: tuple[tuple[str, str], ...], origin: str) -> tuple[str, ...]:
        if not pairs:
            return self._others() if origin == self._region else ()
        if origin == self._region:
            return tuple(b if a == origin else a for a, b in pairs if origin in (a, b))
        return forwards(pairs, self._region, origin)

    def forgettable(self, margin: int) -> tuple[tuple[str, int], ...]:
        """Up to which sequence each region's updates are needed by nobody; the last ``margin`` merged ones stay."""
        if not self.peers.keys() >= {*self._others()}:
            # A server that has come back does not know yet to whom it passes on what.
            return tuple(sorted(dict.fromkeys(self._regions, NO_MODEL).items()))
        up_to = []
        for origin in self._regions:
            # Ours must be everywhere, since a relay may lose what it has not passed on. A relay's job ends with the
            # next region on the way, if that stays the next one.
            everyone = origin == self._region or self._rerouted
            waiting = [r for r in self._others() if r != origin] if everyone else self._sends_to(origin)
            everywhere = min((self.has(who, origin) for who in waiting), default=self.marks[origin])
            up_to.append((origin, min(everywhere, self.marks[origin] - margin)))
        last = dict(up_to)
        self.kept = {key: m for key, m in self.kept.items() if key[1] > last[key[0]]}
        self._beginning = {key: m for key, m in self._beginning.items() if m.sequence > last[key[0]]}
        return tuple(sorted(up_to))
