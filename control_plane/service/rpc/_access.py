"""Who may call the control plane's RPCs: one rule for each, and the checks of users and regions."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from control_plane.service.state._callers import Caller, caller_of
from control_plane.service.state._federation import Federation
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import peer_region, peer_serial
from geofed_pb.security.access import Rule

__all__ = ["AGENT_RULES", "CONTROL_RULES", "RegionCheck", "UserCheck", "caller_now", "region_of"]

_ALL = ("viewer", "member", "auditor", "operator")
_MEMBERS = ("member", "operator")
_CONTROL = {
    "Version": Rule(_ALL),
    "StatBlob": Rule(_MEMBERS, note="its own partial uploads"),
    "StatBlobs": Rule(_MEMBERS, note="its own partial uploads"),
    "PutBlob": Rule(_MEMBERS, note="its own partial uploads"),
    "Plan": Rule(_MEMBERS),
    "Submit": Rule(_MEMBERS),
    "Profile": Rule(_MEMBERS),
    "GetJob": Rule(_ALL, job="read"),
    "ListJobs": Rule(_ALL, note="jobs that it may not read are shown as occupied capacity only"),
    "Watch": Rule(_ALL, job="read", note="without a job: events of the jobs that it may read"),
    "Logs": Rule(_ALL, job="contents"),
    "GetModel": Rule(_ALL, job="contents"),
    "Cancel": Rule(_MEMBERS, job="change"),
    "Finish": Rule(_MEMBERS, job="change"),
    "Replan": Rule(_MEMBERS, job="change"),
    "Resume": Rule(_MEMBERS, job="change"),
    "Scale": Rule(_MEMBERS, job="change"),
    "Share": Rule(_MEMBERS, job="change"),
    "Rename": Rule(_MEMBERS, job="change"),
    "Delete": Rule(_MEMBERS, job="change"),
    "Storage": Rule(_ALL, job="read", note="without a job: members and viewers get only their own jobs"),
    "ListRegions": Rule(_ALL),
    "Invite": Rule(("operator",)),
    "ChangeRegion": Rule(("operator",)),
    "RotateAuthority": Rule(("operator",)),
    "AddUser": Rule(("operator",)),
    "ChangeUser": Rule(("operator",)),
    "RemoveUser": Rule(("operator",)),
    "ListUsers": Rule(_ALL, note="members and viewers get only their own entry"),
    "SignInOptions": Rule(("anyone",)),
    "SignIn": Rule(("anyone",), note="an ID token of the identity provider"),
    "SignOut": Rule(_ALL, note="its own sign-in"),
    "Audit": Rule(("auditor", "operator")),
    "Attest": Rule(_ALL, job="read"),
}
CONTROL_RULES = {
    **{f"/geofed.v1.Control/{name}": rule for name, rule in _CONTROL.items()},
    "/geofed.v1.Enrolment/Join": Rule(("anyone",), note="the secret of an invitation, once"),
    "/grpc.health.v1.Health/Check": Rule(("anyone",)),
    "/grpc.health.v1.Health/Watch": Rule(("anyone",)),
}
"""Rules of the control port."""
AGENT_RULES = {
    "/geofed.v1.AgentHub/Session": Rule(("region",)),
    "/geofed.v1.AgentHub/StatBlob": Rule(("region",), note="its own partial uploads"),
    "/geofed.v1.AgentHub/PutBlob": Rule(("region",), note="its own partial uploads"),
    "/geofed.v1.AgentHub/FetchBlob": Rule(("region",), note="code and first models of its own jobs"),
    "/geofed.v1.AgentHub/Renew": Rule(("region",), note="its own name only"),
}
"""Rules of the agent port."""
_caller: ContextVar[Caller] = ContextVar("caller")
_peer: ContextVar[tuple[Any, str | None, str] | None] = ContextVar("peer", default=None)
"""The present call, with the region and the serial number of the certificate that it is made with."""


def caller_now() -> Caller:
    """Return the user whose call runs."""
    return _caller.get()


class UserCheck:
    """Checks calls of users and of the operator by their bearer token."""

    def __init__(self, federation: Federation, operator_hash: str) -> None:
        self._federation, self._operator_hash = federation, operator_hash

    async def __call__(self, rule: Rule, context: Any, request: Any, *, again: bool) -> None:
        """Raise ``GeofedError``: UNAUTHENTICATED, FORBIDDEN; JOB_NOT_FOUND."""
        federation = self._federation
        headers = {str(key): value for key, value in context.invocation_metadata() or ()}
        authorization = str(headers.get("authorization", ""))
        caller = caller_of(authorization, self._operator_hash, federation.users.values(), federation.clock())
        if caller.role not in rule.callers:
            who = "the operator" if rule.callers == ("operator",) else " or ".join(map(_article, rule.callers))
            raise GeofedError("FORBIDDEN", f"only {who} may do that, not {caller.user}, {_article(caller.role)}")
        if rule.job and not caller.may_all and request is not None and request.job:
            if not again and not await self._has_deleted(caller, request.job):
                row = (await federation.lookup.find_job(request.job, caller.may_read)).row
                caller.require(rule.job, row)
                # Later checks look it up by its ID, also where it was called by its name.
                request.job = row.id
            elif (entry := federation.jobs.get(request.job)) is not None:
                caller.require(rule.job, entry.row)
        if not again:
            _caller.set(caller)

    async def _has_deleted(self, caller: Caller, job: str) -> bool:
        """Whether a job was the caller's until it was deleted; then the call itself says so."""
        gone = await self._federation.read(lambda store: store.deletion(job))
        return gone is not None and gone.user == caller.user


def _article(role: str) -> str:
    return f"{'an' if role[0] in 'ao' else 'a'} {role}"


class RegionCheck:
    """Checks calls of agents by the certificate of their region."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation

    async def __call__(self, rule: Rule, context: Any, request: Any, *, again: bool) -> None:
        """Raise ``GeofedError``: UNAUTHENTICATED, FORBIDDEN."""
        region_of(self._federation, context)


def region_of(federation: Federation, context: Any) -> str:
    """Return the region whose valid certificate the caller has shown. Raises ``GeofedError``."""
    of_call = _peer.get()
    if of_call is None or of_call[0] is not context:
        # The certificate of a connection does not change, and takes long to read.
        of_call = context, peer_region(context), peer_serial(context)
        _peer.set(of_call)
    _, region, serial = of_call
    if region is None or not serial:
        raise GeofedError("UNAUTHENTICATED", "the agent port requires the certificate of a region")
    federation.require_certificate(region, serial)
    return region
