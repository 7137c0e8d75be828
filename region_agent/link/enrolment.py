"""Joining a federation: the agent creates its key, and the control plane signs a certificate for it, once for each
invitation."""

from __future__ import annotations

import contextlib
from pathlib import Path

import grpc

from geofed_pb.address import joined
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CONTROL_PLANE_NAME, channel, error_of
from geofed_pb.v1 import control_pb2, control_pb2_grpc
from region_agent.link.identity import Identity, JoinedFederation, make_request, read_invitation

__all__ = ["join_federation"]


async def join_federation(token: str, state_dir: Path, address: str | None = None) -> JoinedFederation:
    """Join a federation with an invitation; stores the region's identity and returns the federation.

    Raises ``GeofedError``: ``TOKEN_INVALID`` for an invitation that is damaged, used or expired; ``UNAVAILABLE`` if the
    control plane does not answer, after which the invitation is still valid.
    """
    invitation = read_invitation(token)
    key_pem, request = make_request(invitation.region)
    target = _address(address or invitation.address)
    async with channel(target, ca_pem=invitation.ca_pem, name=CONTROL_PLANE_NAME) as connection:
        stub = control_pb2_grpc.EnrolmentStub(connection)
        try:
            joined = await stub.Join(
                control_pb2.JoinRequest(secret=invitation.secret, csr_pem=request), timeout=20, wait_for_ready=False
            )
        except grpc.RpcError as error:
            raise error_of(error) from None
    host = target.rpartition(":")[0]
    federation = JoinedFederation(joined.region, f"{host}:{joined.agent_port}", joined.federation)
    Identity(state_dir).store(federation, key_pem, joined.certificate_pem, joined.ca_pem)
    return federation


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    with contextlib.suppress(ValueError):
        if colon and port.isdecimal():
            return joined(host, int(port))
    text = f"{text!r} is not a valid address of a control plane"
    raise GeofedError("CONFIG_INVALID", text, hint="write it like HOST:7443 or [::1]:7443")
