"""The replacement of the federation's certificate authority, in three steps with both trusted in between."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from control_plane.pki import Authority, GivenAuthority, not_issued, utc_now
from control_plane.service.state._federation import Federation
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import control_pb2

__all__ = ["rotate_authority"]


async def rotate_authority(
    federation: Federation,
    authority: Authority | GivenAuthority,
    life: timedelta,
    request: control_pb2.RotateAuthorityRequest,
    by: str,
) -> control_pb2.RotateAuthorityReply:
    """Take the next step, and tell all connected agents which authorities are trusted.

    Raises ``GeofedError``: ILLEGAL_STATE while a region's certificate is of before the present stage, unless forced;
    CERTIFICATE_INVALID if the operator's own CA signs.
    """
    if isinstance(authority, GivenAuthority):
        raise not_issued()
    if authority.stage != "single" and not request.force:
        _require_renewed(federation, authority, life)
    async with federation.change() as draft:
        draft.by = by
        stage = await asyncio.to_thread(authority.advance, federation.name, utc_now(draft.at))
        text = {
            "prepared": "a new certificate authority is trusted beside the present one, which still signs",
            "switched": "the new certificate authority signs; the former one is still trusted",
            "single": "only the new certificate authority is trusted",
        }[stage]
        draft.record("authority.rotated", text, data={"stage": stage})
    await federation.read(lambda store: store.put_meta("authority", authority.fingerprint))
    federation.tell_certificates()
    return control_pb2.RotateAuthorityReply(stage=stage, ca_pem=authority.ca_pem.decode())


def _require_renewed(federation: Federation, authority: Authority, life: timedelta) -> None:
    since = authority.stage_since + life.total_seconds()
    late = [
        name
        for name, entry in sorted(federation.regions.items())
        if entry.row.serials and not entry.state.revoked and entry.row.certificate_expires < since
    ]
    if late:
        text = f"regions whose certificates are of before this stage: {', '.join(late)}"
        hint = "they renew them within half of the certificates' life; or revoke them, or force the step"
        raise GeofedError("ILLEGAL_STATE", text, hint=hint)
