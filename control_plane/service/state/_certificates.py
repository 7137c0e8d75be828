"""The certificates of regions, as the state of the federation knows them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from control_plane.core import Enrolled, RegionState, region_state_to_json
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import RegionEntry
from control_plane.store import RegionRow, Revocation

__all__ = ["Certificate", "admit_certificate", "revocations_of", "unseen_region"]

_REMEMBERED = 8
"""Certificates of the operator's own CA that are remembered for each region, to be revoked with it."""


@dataclass(frozen=True)
class Certificate:
    """A certificate that a region has shown."""

    serial: str
    """In hexadecimal."""
    expires: float
    """Unix seconds."""


def admit_certificate(draft: Draft, region: str, shown: Certificate) -> None:
    """Make a region with a certificate of the operator's own CA a member, and remember the certificate."""
    entry = draft.region(region) or unseen_region(region)
    if shown.serial in entry.row.serials:
        return
    serials = (*entry.row.serials[1 - _REMEMBERED :], shown.serial)
    expires = max(shown.expires, entry.row.certificate_expires if entry.row.serials else 0.0)
    draft.put_region(replace(entry, row=replace(entry.row, serials=serials, certificate_expires=expires)))
    draft.apply_to_region(region, Enrolled(draft.at))
    draft.record("region.enrolled", f"region {region} has shown a certificate of the operator's CA", region=region)


def revocations_of(row: RegionRow) -> list[Revocation]:
    """Return the revocations of a region's present certificates."""
    return [Revocation(serial, row.name, row.certificate_expires) for serial in row.serials]


def unseen_region(name: str) -> RegionEntry:
    """Return a region of which only the name is known."""
    state = RegionState(name)
    return RegionEntry(RegionRow(name, "", "", "", region_state_to_json(state), (), 0.0), state, None)
