"""The updates of a job, as one region knows them: which exist, which are in the model, and which regions have them.

Routes of updates may change while updates are being sent. Two rules make that safe at any time:

1. If routes may change, a region keeps every update that it has until all regions have it. (If they may not, a relay
may delete an update once the regions that it passes it on to have it.) The origin learns who has what from its
neighbours' acknowledgements, and from what others' updates state that they have seen. Its own next updates then state
which of its updates all regions have (`Manifest.settled`), so that all others may delete them.
2. Old and new routes are both in use until every region knows the new ones. So at any moment there is one set of routes
that all regions use, however long one of them receives no news.

(Some updates are sent as sums, see `Sums`; regions that have the updates themselves keep them nevertheless.)

Then every update reaches every region. By rule 1, all regions that have an update still have it, and its origin is one
of them. Take the routes that all regions use (rule 2), and a region without the update whose predecessor on the route
from the origin has it: the predecessor offers it until the region has it. An update that arrives twice is merged once,
since a region merges only what follows on its watermark. After a crash nothing but the updates themselves needs to be
remembered: a restarted region offers all that it keeps, over the routes that its agent reports; the agent stores these
durably, with a version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from sync.file_transfer.manifest import Manifest, PeerAddress
from sync.ps.core.actions import SendUpdates, SumUp
from sync.ps.core.routes import next_hops
from sync.ps.core.summed_updates import Sums

__all__ = ["NO_MODEL", "Ledger"]

NO_MODEL = -1
"""Sequence while there is no model, not even that of round 0."""


class Ledger:
    """All updates of one job, as one region knows them. An update is identified by its region and sequence."""

    def __init__(
        self,
        region: str,
        regions: tuple[str, ...],
        kept: Iterable[Manifest],
        marks: Mapping[str, int],
        *,
        rerouted: bool = False,
    ) -> None:
        """``rerouted``: whether the routes of updates may change while the job runs."""
        self._region, self._regions, self._rerouted = region, regions, rerouted
        kept = tuple(kept)
        self.marks = {name: marks.get(name, NO_MODEL) for name in regions}
        """The last update of each region that is in the model."""
        self.kept: dict[tuple[str, int], Manifest] = {}
        """Updates that are stored here, by region and last round."""
        self._beginning: dict[tuple[str, int], Manifest] = {}
        """The same updates, by region and first round."""
        for manifest in sorted(kept, key=lambda one: one.rounds):
            self._keep(manifest)
        self.sums = Sums(region, regions, kept)
        self._has: dict[tuple[str, str], int] = {}
        """By (region, origin): the last update of the origin that the region is known to have."""
        self.neighbours: tuple[tuple[str, str], ...] = ()
        """Pairs of regions that exchange directly; empty: all pairs do."""
        self.former: tuple[tuple[str, str], ...] = ()
        """Pairs that still exchange directly until all regions know the current pairs; empty: none."""
        self.routes = 0
        """Version of these pairs."""
        self.peers: dict[str, PeerAddress] = {}
        """The other regions' servers, by region, as far as they are known."""

    def add(self, manifest: Manifest) -> None:
        """Add an update after its transfer has written it durably (`sync.file_transfer.file_receiver`)."""
        if manifest.sequence > self.marks[manifest.region] and self.follows(manifest):
            self._keep(manifest)
        self.sums.note_support(manifest)
        for region, sequence in manifest.seen:
            self.note(manifest.region, region, sequence)
        for region in self._regions:
            self.note(region, manifest.region, manifest.settled - 1)

    def _keep(self, manifest: Manifest) -> None:
        if manifest.first and manifest.first <= self.marks.get(manifest.region, NO_MODEL):
            # The model holds a part of this sum already, so it cannot be merged any more.
            return
        key = manifest.region, manifest.begins
        self.kept[manifest.region, manifest.sequence] = manifest
        if key not in self._beginning or self._beginning[key].rounds < manifest.rounds:
            self._beginning[key] = manifest

    def note(self, who: str, origin: str, sequence: int) -> None:
        """Record that a region has all updates of an origin up to this sequence."""
        self._has[who, origin] = max(self._has.get((who, origin), NO_MODEL), sequence)

    def state_lost(self, who: str) -> None:
        """Record that a region has lost all updates."""
        self._has = {pair: sequence for pair, sequence in self._has.items() if pair[0] != who}

    def has(self, who: str, origin: str) -> int:
        """Return the last update of an origin that a region is known to have."""
        return self._has.get((who, origin), NO_MODEL)

    def knows(self, manifest: Manifest) -> bool:
        """Whether an update is in the model or stored here, including all earlier ones that it sums up."""
        if manifest.sequence <= self.marks.get(manifest.region, NO_MODEL):
            return True
        held = self.kept.get((manifest.region, manifest.sequence))
        if held is not None and not held.first and not manifest.first:
            return True
        return manifest.region in self.marks and manifest.sequence <= self.newest(manifest.region)

    def follows(self, manifest: Manifest) -> bool:
        """Whether an update can be merged after all that are stored here. A sum is useful only then."""
        return not manifest.first or self.newest(manifest.region) == manifest.first - 1

    def next_of(self, region: str) -> list[Manifest]:
        """Return a region's updates that can be merged now: in order, without a gap."""
        found, sequence = [], self.marks[region] + 1
        while (manifest := self._beginning.get((region, sequence))) is not None:
            found.append(manifest)
            sequence = manifest.sequence + 1
        return found

    def newest(self, region: str) -> int:
        """Return the sequence of the last update of a region that is stored here with all before it."""
        return max((manifest.sequence for manifest in self.next_of(region)), default=self.marks[region])

    def has_ended(self, region: str) -> bool:
        """Whether a region's last update is stored here with all before it."""
        return any(manifest.last for manifest in self.next_of(region))

    def own(self, sequence: int) -> Manifest | None:
        """Return our update of a round, or None until it is durable."""
        return self.kept.get((self._region, sequence))

    def seen(self) -> tuple[tuple[str, int], ...]:
        """Return which updates of the other regions are in the model, as a manifest states it."""
        return tuple((name, mark) for name, mark in sorted(self.marks.items()) if name != self._region and mark >= 0)

    def is_routed(self, via: str, origin: str) -> bool:
        """Whether a region sends the updates of an origin to this one, by the present pairs or the former ones."""
        routes = [self.neighbours, self.former] if self.former else [self.neighbours]
        return via == origin or any(self._region in next_hops(pairs, via, origin) for pairs in routes)

    # Sending

    def route(
        self, neighbours: tuple[tuple[str, str], ...], routes: int = 0, former: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """Use the routes that the control plane has chosen, unless newer ones are known."""
        if routes >= self.routes:
            self.neighbours, self.routes, self.former = neighbours, routes, former

    def ships(self, epoch: int, *, all_peers: bool = False) -> list[SendUpdates]:
        """Return the updates that each direct peer may lack. ``all_peers``: also for peers that get nothing from
        here."""
        found = []
        settled = min((self.has(who, self._region) for who in self._others()), default=NO_MODEL) + 1
        for region, peer in sorted(self.peers.items()):
            units = [
                m
                for origin in self._regions
                for m in self.sums.replace_with_sums(region, self._lacking(region, origin))
            ]
            manifests = [
                # Ours are sent with the current epoch, since peers refuse the older one that they may have been made
                # in.
                replace(manifest, epoch=epoch, settled=settled) if manifest.region == self._region else manifest
                for manifest in sorted(units, key=lambda one: (one.sequence, one.region))
            ]
            if manifests or all_peers:
                found.append(SendUpdates(peer, tuple(manifests)))
        return found

    def sum_up(self, *, backlogs: bool = True) -> tuple[SumUp, ...]:
        """Return updates to sum up: for a peer that was unreachable, or, with ``backlogs``, one whose link is too
        slow."""
        wanted = self.sums.next_sum(lambda peer, origin: self._lacking(peer, origin), self.has, backlogs=backlogs)
        return () if wanted is None else (wanted,)

    @property
    def sends(self) -> bool:
        """Whether a direct peer that can be reached is not known to have our newest update."""
        newest, own = self.newest(self._region), self._region
        return any(
            peer in self.peers and not self.sums.is_unreached(peer) and self.has(peer, own) < newest
            for peer in self._sends_to(own)
        )

    def _lacking(self, peer: str, origin: str) -> list[Manifest]:
        """Return the updates of an origin that a peer is to get from here and may lack, in order."""
        if peer not in self.peers or origin == peer or peer not in self._sends_to(origin):
            return []
        has = self.has(peer, origin)
        # A sum of which the peer has a part is useless to it: it gets the rest from another region.
        lacks = (m for (region, _), m in self.kept.items() if region == origin and m.sequence > has)
        return sorted((m for m in lacks if m.begins > has or not m.first), key=lambda one: one.sequence)

    def regions_to_ask(self) -> tuple[str, ...]:
        """Return a set of regions that together know which of our updates any other region has."""
        if not self.neighbours or self._rerouted:
            return self._others()
        return self._along(self.neighbours, self._region)

    def _others(self) -> tuple[str, ...]:
        return tuple(name for name in self._regions if name != self._region)

    def _sends_to(self, origin: str) -> tuple[str, ...]:
        """Return the regions that get the updates of an origin from here."""
        routes = [self.neighbours, self.former] if self.former else [self.neighbours]
        return tuple(sorted({name for pairs in routes for name in self._along(pairs, origin)}))

    def _along(self, pairs: tuple[tuple[str, str], ...], origin: str) -> tuple[str, ...]:
        if not pairs:
            return self._others() if origin == self._region else ()
        if origin == self._region:
            return tuple(b if a == origin else a for a, b in pairs if origin in (a, b))
        return next_hops(pairs, self._region, origin)

    def forgettable(self, margin: int) -> tuple[tuple[str, int], ...]:
        """Return, for each region, the last update that no region needs any more, and forget these.

        The last ``margin`` merged updates of each region stay.
        """
        if not self.peers.keys() >= {*self._others()}:
            # A restarted server does not know yet to which regions it passes on what.
            return tuple(sorted(dict.fromkeys(self._regions, NO_MODEL).items()))
        up_to = []
        for origin in self._regions:
            # Our own updates stay until all regions have them, since a relay may lose what it has not passed on. A
            # relay needs an update only until the next region on the route has it, if routes don't change.
            everyone = origin == self._region or self._rerouted
            waiting = [r for r in self._others() if r != origin] if everyone else self._sends_to(origin)
            everywhere = min((self.has(who, origin) for who in waiting), default=self.marks[origin])
            up_to.append((origin, min(everywhere, self.marks[origin] - margin)))
        last = dict(up_to)
        self.kept = {key: m for key, m in self.kept.items() if key[1] > last[key[0]]}
        self._beginning = {key: m for key, m in self._beginning.items() if m.sequence > last[key[0]]}
        return tuple(sorted(up_to))
