"""Joining a federation: the agent creates its key, and the control plane signs a certificate for it, once for each
invitation."""

from __future__ import annotations

import contextlib
from pathlib import Path

import grpc

from geofed_pb.address import addresses_of, joined
from geofed_pb.errors import OUTAGE, GeofedError
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
    targets = [_address(text) for text in addresses_of(address or invitation.address) or ("",)]
    for target in targets:
        async with channel(target, ca_pem=invitation.ca_pem, name=CONTROL_PLANE_NAME) as connection:
            stub = control_pb2_grpc.EnrolmentStub(connection)
            question = control_pb2.JoinRequest(secret=invitation.secret, csr_pem=request)
            try:
                joined = await stub.Join(question, timeout=20, wait_for_ready=False)
                break
            except grpc.RpcError as raised:
                error = error_of(raised)
                if error.code not in OUTAGE or target == targets[-1]:
                    raise error from None
    # The control planes of a federation have the same agent port.
    agents = ",".join(f"{target.rpartition(':')[0]}:{joined.agent_port}" for target in targets)
    federation = JoinedFederation(joined.region, agents, joined.federation)
    Identity(state_dir).store(federation, key_pem, joined.certificate_pem, joined.ca_pem)
    return federation


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    with contextlib.suppress(ValueError):
        if colon and port.isdecimal():
            return joined(host, int(port))
    text = f"{text!r} is not a valid address of a control plane"
    raise GeofedError("CONFIG_INVALID", text, hint="write it like HOST:7443 or [::1]:7443")
