"""Enrolment service: exchanges an invitation for a certificate, once."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import grpc.aio

from control_plane.core import Enrolled
from control_plane.pki import Authority, GivenAuthority, hash_secret, utc_now
from control_plane.service.state._certificates import revocations_of, unseen_region
from control_plane.service.state._federation import Federation
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import answering
from geofed_pb.v1 import control_pb2, control_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class EnrolmentService(control_pb2_grpc.EnrolmentServicer):
    """Joins regions. It requires no token: the secret of the invitation authenticates the caller."""

    def __init__(self, federation: Federation, authority: Authority | GivenAuthority, region_life: timedelta) -> None:
        self._federation = federation
        self._authority = authority
        self._region_life = region_life
        self.agent_port = 0
        """Set once the agent port is bound."""

    @answering
    async def Join(self, request: control_pb2.JoinRequest, context: Context) -> control_pb2.JoinReply:
        """Sign the region's key, and store the used invitation and the certificate in one transaction."""
        federation = self._federation
        async with federation.change() as draft:
            hashed = hash_secret(request.secret)
            invitation = await federation.read(lambda store: store.invitation(hashed))
            if invitation is None:
                raise GeofedError("TOKEN_INVALID", "the invitation is unknown")
            if invitation.used_at:
                raise GeofedError("TOKEN_INVALID", f"the invitation of {invitation.region} has been used already")
            if draft.at >= invitation.expires:
                raise GeofedError("TOKEN_INVALID", f"the invitation of {invitation.region} has expired")
            region = invitation.region
            issued = self._authority.sign_region(request.csr_pem, region, utc_now(draft.at), self._region_life)
            draft.invitations.append(replace(invitation, used_at=draft.at))
            entry = draft.region(region) or unseen_region(region)
            draft.revocations += revocations_of(entry.row)
            row = replace(entry.row, serials=(issued.serial,), certificate_expires=issued.expires)
            draft.put_region(replace(entry, row=row))
            draft.apply_to_region(region, Enrolled(draft.at))
            draft.renumbered_region = region
            draft.record("region.enrolled", f"region {region} has joined and received a certificate", region=region)
        session = federation.sessions.get(region)
        if session is not None:
            session.end(GeofedError("FENCED", f"region {region} has joined again"))
        await federation.rights_changed()
        return control_pb2.JoinReply(
            region=region,
            certificate_pem=issued.certificate_pem,
            ca_pem=self._authority.ca_pem,
            agent_port=self.agent_port,
            federation=federation.name,
        )
