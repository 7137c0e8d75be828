"""What the operator does with a region: drain it, revoke its certificates, remove it."""

from __future__ import annotations

from dataclasses import replace

import structlog

from control_plane.core import Drained, Revoked
from control_plane.service.jobs._replanner import Replanner
from control_plane.service.state._certificates import revocations_of
from control_plane.service.state._draft import Draft
from control_plane.service.state._federation import Federation
from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import control_pb2

__all__ = ["change_region"]

_log = structlog.get_logger("geofed.regions")
_Request = control_pb2.ChangeRegionRequest


async def change_region(federation: Federation, replanner: Replanner, request: _Request, by: str) -> control_pb2.Region:
    """Change a region as the operator ``by`` has ordered; repeating it has no effect.

    Raises ``GeofedError``: REGION_NOT_FOUND; ILLEGAL_STATE if a region is to be removed that has jobs.
    """
    name, change = request.region, request.change
    # Before the change below ends calls: also those of commands that wait for stores.
    invitations = await federation.read(lambda store: store.open_invitations(name))
    async with federation.change() as draft:
        draft.by = by
        entry = draft.region(name)
        if entry is None:
            raise GeofedError("REGION_NOT_FOUND", f"region {name} not found")
        if change in (_Request.CHANGE_DRAIN, _Request.CHANGE_UNDRAIN):
            draft.apply_to_region(name, Drained(draft.at, change == _Request.CHANGE_DRAIN))
        elif change in (_Request.CHANGE_REVOKE, _Request.CHANGE_REMOVE):
            if change == _Request.CHANGE_REMOVE and (jobs := _jobs_of(draft, name)):
                hint = f"`geofed region drain {name}` keeps new jobs away; revoke fails the present ones"
                raise GeofedError("ILLEGAL_STATE", f"region {name} has jobs: {', '.join(jobs)}", hint=hint)
            draft.revocations += revocations_of(entry.row)
            draft.invitations += [replace(one, used_at=draft.at) for one in invitations]
            draft.put_region(replace(entry, row=replace(entry.row, serials=())))
            draft.apply_to_region(name, Revoked(draft.at, clean(request.reason)))
        else:
            raise GeofedError("USAGE", "the request names no change of the region")
        # The same as before where the change was made already.
        described = federation.describe_region(draft.region(name) or entry)
        if change == _Request.CHANGE_REMOVE:
            draft.removed_region = name
            draft.invitations.clear()
            draft.record("region.removed", f"region {name} was removed", region=name)
    await federation.rights_changed()
    if change == _Request.CHANGE_DRAIN and request.move:
        await _move(federation, replanner, name, by)
    return described


async def _move(federation: Federation, replanner: Replanner, region: str, by: str) -> None:
    """Replan the running jobs of a region without it; those that cannot continue elsewhere end where they are."""
    for entry in list(federation.jobs.values()):
        if entry.state.partition(region) is not None and entry.state.phase == "running":
            try:
                await replanner.replan(entry.row.id, f"region {region} is being drained", by)
            except GeofedError as error:
                _log.info("a job stays in a draining region", job=entry.row.id, region=region, error=str(error))


def _jobs_of(draft: Draft, region: str) -> list[str]:
    return sorted(
        entry.row.id
        for entry in draft.jobs.values()
        if entry.state.partition(region) is not None or entry.state.copy_from(region) is not None
    )
