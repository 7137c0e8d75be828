"""Which updates are sent as sums, so that a region which was unreachable receives no more than about one model from
each other region.

While a peer cannot be reached, or only over a link that is too slow, its updates pile up, until they are larger than a
model. A sum can replace them: policies that average or add up get the same result from a sum of changes as from the
changes. For most codecs a sum takes twice the bits of one update (`sync.codec.Exact`), and at most those of float32. So
a run of a region's updates that a peer has not begun to receive is replaced by one update, whose manifest states the
first and the last round (`Manifest.first`). Like any other update it is merged exactly once, if it follows on the
watermark. The sum needn't be durable where it is computed: the updates themselves stay until all regions have them.

Two units must never overlap, because a region that has a part of one could not use the other. So a sum is computed only
of updates that have not been sent,

- to any peer: then all peers get the same sum, from us or passed on; or
- to the one peer that lacks them while all others have them: it passes them on to no region.

A region sums up only its own updates, since it cannot sign for another (`sync.file_transfer.signing`).

Which updates were sent before this process started is not known, so our own ones of that time are sent as they are. A
peer that nevertheless has some of another region's updates, through a third one, reports that, and gets the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sync.file_transfer.manifest import Manifest
from sync.ps.core.actions import SumUp

__all__ = ["Sums"]

_MIN_UPDATES = 3
"""Fewest updates that are summed up."""
_MIN_NEW_UPDATES = 2
"""A sum is extended only by at least this many updates ..."""
_MIN_NEW_FRACTION = 0.25
"""... that take more than this fraction of the model's bytes."""
_MIN_SUM_FRACTION = 0.25
"""A sum is assumed to take at least this fraction of the model's bytes: one byte per coordinate."""
_BACKLOG_BYTES = 1 << 20
"""The updates that wait for a working link are summed up from this size, ..."""
_BACKLOG_FRACTION = 0.5
"""... and from this fraction of the model's bytes: the link is too slow then. Fewer are sent before they could be
summed up."""


class Sums:
    """The sums that one region sends. An update is identified by its region and sequence."""

    def __init__(self, region: str, regions: tuple[str, ...], kept: Iterable[Manifest]) -> None:
        """``kept``: updates that are stored here when the process starts."""
        self._region, self._regions = region, regions
        kept = tuple(kept)
        self._before = max((m.sequence for m in kept if m.region == region), default=0)
        """It is not known which of our updates up to this one have been sent. (The initial model is never part of a
        sum.)"""
        self._supporting = {manifest.region for manifest in kept if manifest.takes_sums}
        """Regions that accept sums."""
        self._tried: dict[tuple[str, str], int] = {}
        """By (peer, origin): the last update of the origin that may have been sent to the peer."""
        self._unreached: set[str] = set()
        """Peers that could not be reached at the last attempt."""
        self._sums: dict[tuple[str, str, int], Manifest] = {}
        """The sums, by (peer, origin, first round); peer "": for all peers."""
        self._making = 0
        """Bytes of the updates that are being summed up; 0: none are."""
        self._sum_backlog = True
        """Whether updates that wait for a working link are summed up."""
        self._min_sum_bytes = 0
        """Size of a sum that was no smaller than its updates: a lower bound for other sums."""
        self._dropped: list[str] = []
        """Digests of sums that are no longer sent, to be deleted."""
        self.model_bytes = 0
        """Size of the model in float32; 0: not known yet, and nothing is summed up."""

    # Reports

    def note_support(self, manifest: Manifest) -> None:
        """Record from an update whether its region accepts sums."""
        if manifest.takes_sums:
            self._supporting.add(manifest.region)

    def tried(self, peer: str, manifest: Manifest) -> None:
        """Record that an update may have been sent to a peer."""
        key = peer, manifest.region
        self._tried[key] = max(self._tried.get(key, 0), manifest.sequence)
        self._sum_backlog = True

    def unreached(self, peer: str) -> None:
        """Record that a peer could not be reached."""
        self._unreached.add(peer)

    def reached(self, peer: str) -> None:
        """Record that a peer has been reached."""
        self._unreached.discard(peer)

    def is_unreached(self, peer: str) -> bool:
        """Whether a peer could not be reached at the last attempt."""
        return peer in self._unreached

    # Sending

    def replace_with_sums(self, peer: str, run: Sequence[Manifest]) -> list[Manifest]:
        """Return what to send to a peer for a run of a region's updates: sums where there are any."""
        found: list[Manifest] = []
        for manifest in run:
            if not found or manifest.sequence > found[-1].sequence:
                found.append(self._sum_from(peer, manifest) or manifest)
        return found

    def _sum_from(self, peer: str, manifest: Manifest) -> Manifest | None:
        if peer not in self._supporting:
            return None
        sums = [self._sums.get((recipient, manifest.region, manifest.begins)) for recipient in (peer, "")]
        tried = self._tried.get((peer, manifest.region), 0)
        if tried >= manifest.begins:
            # It may have been sent already, so no longer sum may replace it.
            sums = [one for one in sums if one is not None and one.sequence <= tried]
        return max((one for one in sums if one is not None), key=lambda one: one.sequence, default=None)

    @property
    def has_any(self) -> bool:
        """Whether there are any sums."""
        return bool(self._sums)

    # Summing up

    def next_sum(
        self,
        lacking: Callable[[str, str], Sequence[Manifest]],
        has: Callable[[str, str], int],
        *,
        backlogs: bool = True,
    ) -> SumUp | None:
        """Return the next sum to compute; one at a time. ``backlogs``: also for peers that are reached.

        ``lacking(peer, origin)`` returns the updates of an origin that a peer is to get from here and lacks, in order.
        ``has(region, origin)`` returns the last update of the origin that a region is known to have.
        """
        if self._making or not self.model_bytes:
            return None
        for peer in sorted(self._supporting if backlogs else self._supporting & self._unreached):
            for recipient, units in self._summable(peer, lacking(peer, self._region), has):
                parts = self._parts(recipient, units)
                if parts and (peer in self._unreached or self._is_backlog(parts)):
                    self._making = _bytes(parts)
                    return SumUp(recipient, tuple(parts))
        return None

    def _summable(
        self, peer: str, run: Sequence[Manifest], has: Callable[[str, str], int]
    ) -> list[tuple[str, list[Manifest]]]:
        """Return which updates could be summed up, and for which peer ("": all)."""
        origin = self._region
        others = [region for region in self._regions if region not in (origin, peer)]
        found: list[tuple[str, list[Manifest]]] = []
        if self._supporting >= {*self._recipients("")}:
            begun = max([self._before, *(self._tried.get((who, origin), 0) for who in self._recipients(""))])
            found.append(("", _gapless([m for m in run if m.begins > begun])))
        begun = self._tried.get((peer, origin), 0)
        elsewhere = min((has(who, origin) for who in others), default=None)
        alone = [m for m in run if m.begins > begun and (elsewhere is None or m.sequence <= elsewhere)]
        found.append((peer, _gapless(alone)))
        return found

    def _parts(self, recipient: str, units: list[Manifest]) -> list[Manifest]:
        """Return the units to sum up, if that is worth it: all of them, or an earlier sum and the updates after it."""
        if not units or units[0].begins < 1:
            return []
        before = self._sums.get((recipient, units[0].region, units[0].begins))
        if before is None:
            worth = len(units) >= _MIN_UPDATES and _bytes(units) > self._takes(units)
            return units if worth else []
        more = [manifest for manifest in units if manifest.begins > before.sequence]
        worth = len(more) >= _MIN_NEW_UPDATES and _bytes(more) > _MIN_NEW_FRACTION * self.model_bytes
        return [before, *more] if worth else []

    def _is_backlog(self, parts: list[Manifest]) -> bool:
        return self._sum_backlog and _bytes(parts) >= max(_BACKLOG_BYTES, _BACKLOG_FRACTION * self.model_bytes)

    def _takes(self, units: list[Manifest]) -> float:
        """Estimate the bytes of a sum of these updates."""
        twice = 2 * max(manifest.total_bytes for manifest in units)
        return max(min(twice, self.model_bytes), _MIN_SUM_FRACTION * self.model_bytes, self._min_sum_bytes)

    def add(self, peer: str, manifest: Manifest | None) -> None:
        """Add a sum that has been computed. It is dropped if it is no smaller than its updates, or one of these has
        been sent meanwhile."""
        replaced, self._making = self._making, 0
        if manifest is None:
            # Don't retry immediately, but when the link breaks the next time, or carries something.
            self._unreached.clear()
            self._sum_backlog = False
            return
        if manifest.total_bytes >= replaced:
            self._min_sum_bytes = manifest.total_bytes
            self._dropped.append(manifest.digest)
            return
        if any(self._tried.get((who, manifest.region), 0) >= manifest.begins for who in self._recipients(peer)):
            self._dropped.append(manifest.digest)
            return
        key = peer, manifest.region, manifest.begins
        self._drop([key])
        self._sums[key] = manifest

    def _recipients(self, peer: str) -> list[str]:
        """Return the peers that a sum is for; a sum for all peers is of our own updates."""
        return [peer] if peer else [region for region in self._regions if region != self._region]

    def remove(self, manifest: Manifest) -> None:
        """Remove a sum whose file no longer exists."""
        self._drop([key for key, one in self._sums.items() if one.digest == manifest.digest])

    def forget(self, has: Callable[[str, str], int]) -> tuple[str, ...]:
        """Remove the sums that all their recipients have; return the digests of all sums that are no longer sent."""
        done = []
        for (peer, origin, first), manifest in self._sums.items():
            if all(has(who, origin) >= manifest.sequence for who in self._recipients(peer)):
                done.append((peer, origin, first))
        self._drop(done)
        dropped, self._dropped = self._dropped, []
        used = {manifest.digest for manifest in self._sums.values()}
        return tuple(digest for digest in dropped if digest not in used)

    def _drop(self, keys: Iterable[tuple[str, str, int]]) -> None:
        for key in keys:
            manifest = self._sums.pop(key, None)
            if manifest is not None:
                self._dropped.append(manifest.digest)


def _gapless(units: list[Manifest]) -> list[Manifest]:
    """Return the leading updates that follow on each other without a gap."""
    found = units[:1]
    for manifest in units[1:]:
        if manifest.begins != found[-1].sequence + 1:
            break
        found.append(manifest)
    return found


def _bytes(units: Iterable[Manifest]) -> int:
    return sum(manifest.total_bytes for manifest in units)
