"""Which updates are sent summed up: a region that was away shall get no more than about a model of each other's.

While a peer cannot be reached, or only over a link that carries less than there is, its updates pile up, and soon they
are more than a model is, which can say the same: policies that average or add up make of a sum of changes what they
make of the changes. A sum takes twice the bits of what it is of, for most codecs (`sync.codec.Exact`), and those of
float32 at most. So a run of a region's updates that a peer has not begun to get is replaced by one update, whose
manifest tells the first and the last round (`Manifest.first`). It is merged exactly once like any other, as the one
that follows on the watermark. Nothing of it needs to be durable where it is made: the updates themselves stay until
they are everywhere.

Two units may never overlap, or a region that has a part of one could not use the other. So a sum is made only of
updates that no bytes were sent of,

- of ours, to nobody: then all others get the same sum, from us or passed on; or
- of any region's, to the one peer that lacks them while all others have them: it is passed on to nobody.

What was tried before this process began is not known; ours of then are sent as they are. A peer that has some of
another region's nevertheless, through somebody else, says so, and gets the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sync.ps.core.actions import SumUp
from sync.transfer.manifest import Manifest

__all__ = ["Sums"]

_LEAST_UPDATES = 3
_LEAST_MORE, _LEAST_SHARE_MORE = 2, 0.25
"""Updates by which a sum grows, and the share of the model's bytes that they are."""
_LEAST_SHARE = 0.25
"""Of the model's bytes that a sum takes: a byte for each coordinate."""
_PILE_BYTES, _PILE_SHARE = 1 << 20, 0.5
"""Of updates that wait for a link that does carry, and the share of the model's bytes that they are: then it carries
too little. Fewer are gone before they are summed up."""


class Sums:
    """What one region sends summed up. An update is named by its region and sequence."""

    def __init__(self, region: str, regions: tuple[str, ...], kept: Iterable[Manifest]) -> None:
        """``kept``: updates that are here as the process begins."""
        self._region, self._regions = region, regions
        kept = tuple(kept)
        self._before = max((m.sequence for m in kept if m.region == region), default=0)
        """Of ours, whether those up to here were tried is not known; the first model is never part of a sum."""
        self._takers = {manifest.region for manifest in kept if manifest.takes_sums}
        self._tried: dict[tuple[str, str], int] = {}
        """(peer, whose): the last update that bytes may have been sent of."""
        self._unreached: set[str] = set()
        self._made: dict[tuple[str, str, int], Manifest] = {}
        """Sums by (peer, whose, first round); peer "": for all."""
        self._making = 0
        """Bytes of what is being summed up."""
        self._may_pile = True
        """Whether what piles up before a link that carries is summed up."""
        self._least_bytes = 0
        """A sum was this large, and larger than what it was of."""
        self._dropped: list[str] = []
        self.model_bytes = 0
        """Of the model in float32; 0: not known yet, and nothing is summed up."""

    # What is heard

    def heard(self, manifest: Manifest) -> None:
        """Another region's own update came."""
        if manifest.takes_sums:
            self._takers.add(manifest.region)

    def tried(self, peer: str, manifest: Manifest) -> None:
        key = peer, manifest.region
        self._tried[key] = max(self._tried.get(key, 0), manifest.sequence)
        self._may_pile = True

    def unreached(self, peer: str) -> None:
        self._unreached.add(peer)

    def reached(self, peer: str) -> None:
        self._unreached.discard(peer)

    # What is sent

    def instead(self, peer: str, run: Sequence[Manifest]) -> list[Manifest]:
        """What goes to a peer in place of a region's updates, given in order."""
        found: list[Manifest] = []
        for manifest in run:
            if not found or manifest.sequence > found[-1].sequence:
                found.append(self._sum_from(peer, manifest) or manifest)
        return found

    def _sum_from(self, peer: str, manifest: Manifest) -> Manifest | None:
        if peer not in self._takers:
            return None
        sums = [self._made.get((whom, manifest.region, manifest.begins)) for whom in (peer, "")]
        tried = self._tried.get((peer, manifest.region), 0)
        if tried >= manifest.begins:
            # It is on its way: not another one in its place.
            sums = [one for one in sums if one is not None and one.sequence <= tried]
        return max((one for one in sums if one is not None), key=lambda one: one.sequence, default=None)

    @property
    def there_are_some(self) -> bool:
        return bool(self._made)

    # What is to be made

    def wanted(
        self,
        lacking: Callable[[str, str], Sequence[Manifest]],
        has: Callable[[str, str], int],
        *,
        piles: bool = True,
    ) -> SumUp | None:
        """The next sum to make, one at a time. ``piles``: also for a peer that is reached.

        ``lacking``: a region's updates that a peer is to get from here and has not, in order. ``has``: (who, whose) the
        last update that is known to be there.
        """
        if self._making or not self.model_bytes:
            return None
        for peer in sorted(self._takers if piles else self._takers & self._unreached):
            for origin in self._regions:
                for whom, units in self._summable(peer, origin, lacking(peer, origin), has):
                    parts = self._parts(whom, units)
                    if parts and (peer in self._unreached or self._is_pile(parts)):
                        self._making = _bytes(parts)
                        return SumUp(whom, tuple(parts))
        return None

    def _summable(
        self, peer: str, origin: str, run: Sequence[Manifest], has: Callable[[str, str], int]
    ) -> list[tuple[str, list[Manifest]]]:
        """Whom a sum may be for, and of which updates."""
        others = [region for region in self._regions if region not in (self._region, peer, origin)]
        found: list[tuple[str, list[Manifest]]] = []
        if origin == self._region and self._takers >= {*self._whom("")}:
            begun = max([self._before, *(self._tried.get((who, origin), 0) for who in self._whom(""))])
            found.append(("", _gapless([m for m in run if m.begins > begun])))
        begun = self._tried.get((peer, origin), 0)
        elsewhere = min((has(who, origin) for who in others), default=None)
        alone = [m for m in run if m.begins > begun and (elsewhere is None or m.sequence <= elsewhere)]
        found.append((peer, _gapless(alone)))
        return found

    def _parts(self, whom: str, units: list[Manifest]) -> list[Manifest]:
        """What to sum up, if it is worth it: all, or what there is more than in the sum that was made before."""
        if not units or units[0].begins < 1:
            return []
        before = self._made.get((whom, units[0].region, units[0].begins))
        if before is None:
            worth = len(units) >= _LEAST_UPDATES and _bytes(units) > self._takes(units)
            return units if worth else []
        more = [manifest for manifest in units if manifest.begins > before.sequence]
        worth = len(more) >= _LEAST_MORE and _bytes(more) > _LEAST_SHARE_MORE * self.model_bytes
        return [before, *more] if worth else []

    def _is_pile(self, parts: list[Manifest]) -> bool:
        return self._may_pile and _bytes(parts) >= max(_PILE_BYTES, _PILE_SHARE * self.model_bytes)

    def _takes(self, units: list[Manifest]) -> float:
        """Bytes that a sum of these is likely to take."""
        twice = 2 * max(manifest.total_bytes for manifest in units)
        return max(min(twice, self.model_bytes), _LEAST_SHARE * self.model_bytes, self._least_bytes)

    def made(self, peer: str, manifest: Manifest | None) -> None:
        """A sum is there; it counts unless it is no smaller, or one of its updates has been tried meanwhile."""
        replaced, self._making = self._making, 0
        if manifest is None:
            # Not at once again: when the link fails the next time, or carries more.
            self._unreached.clear()
            self._may_pile = False
            return
        if manifest.total_bytes >= replaced:
            self._least_bytes = manifest.total_bytes
            self._dropped.append(manifest.digest)
            return
        if any(self._tried.get((who, manifest.region), 0) >= manifest.begins for who in self._whom(peer)):
            self._dropped.append(manifest.digest)
            return
        key = peer, manifest.region, manifest.begins
        self._drop([key])
        self._made[key] = manifest

    def _whom(self, peer: str) -> list[str]:
        """Whom a sum is for; one for all is of our own updates."""
        return [peer] if peer else [region for region in self._regions if region != self._region]

    def gone(self, manifest: Manifest) -> None:
        """Its bytes are not there any more."""
        self._drop([key for key, one in self._made.items() if one.digest == manifest.digest])

    def forget(self, has: Callable[[str, str], int]) -> tuple[str, ...]:
        """Digests of the sums that are not sent any more; whoever they are for has them."""
        done = []
        for (peer, origin, first), manifest in self._made.items():
            if all(has(who, origin) >= manifest.sequence for who in self._whom(peer)):
                done.append((peer, origin, first))
        self._drop(done)
        dropped, self._dropped = self._dropped, []
        used = {manifest.digest for manifest in self._made.values()}
        return tuple(digest for digest in dropped if digest not in used)

    def _drop(self, keys: Iterable[tuple[str, str, int]]) -> None:
        for key in keys:
            manifest = self._made.pop(key, None)
            if manifest is not None:
                self._dropped.append(manifest.digest)


def _gapless(units: list[Manifest]) -> list[Manifest]:
    """Those from the first on that follow on each other."""
    found = units[:1]
    for manifest in units[1:]:
        if manifest.begins != found[-1].sequence + 1:
            break
        found.append(manifest)
    return found


def _bytes(units: Iterable[Manifest]) -> int:
    return sum(manifest.total_bytes for manifest in units)
