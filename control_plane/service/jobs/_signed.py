"""Signatures of submissions: checked here, and passed on to the regions, which check them again by their own files."""

from __future__ import annotations

import json
from dataclasses import replace

from control_plane.service.state._draft import OPERATOR
from control_plane.service.state._federation import Federation
from control_plane.spec import JobSpec
from geofed_pb.errors import GeofedError
from geofed_pb.security.signing import require_signature, spec_digest_of, statement
from geofed_pb.v1 import common_pb2

__all__ = ["require_signed"]


async def require_signed(
    federation: Federation,
    given: common_pb2.Submission,
    user: str,
    spec_json: str,
    spec: JobSpec,
    bundle_digest: str,
) -> common_pb2.Submission:
    """Return a user's submission for the regions, with the user's name (empty: the operator).

    The first key of a user is remembered; from then on nothing is taken from the user without a signature by it.
    Raises ``GeofedError("FORBIDDEN")``.
    """
    submission = common_pb2.Submission()
    submission.CopyFrom(given)
    submission.user = user or OPERATOR
    known = federation.users[user].public_key if user in federation.users else ""
    if known and submission.public_key != known:
        what = "has another key" if submission.public_key else "is not signed"
        hint = f"copy user.key from where {user} has submitted before, or `geofed user change {user} --new-key`"
        raise GeofedError("FORBIDDEN", f"the submission of user {user} {what}", hint=hint)
    if not submission.public_key:
        return submission
    if submission.spec_digest != spec_digest_of(spec_json):
        raise GeofedError("FORBIDDEN", f"the signature of user {submission.user} is for another job file")
    task, config, initial = spec.task, json.dumps(spec.task.config), spec.train.initial_model
    adapter = initial.adapter if initial is not None else None
    submission.initial_model = (initial.digest or "") if initial is not None else ""
    submission.initial_adapter = (adapter.digest or "") if adapter is not None else ""
    signed = statement(
        submission.spec_digest, bundle_digest, task.module, config, spec.data.dataset, task.env,
        submission.initial_model, task.secrets, task.requirements or "", task.image or "",
        submission.initial_adapter,
    )  # fmt: skip
    require_signature(submission, submission.public_key, signed)
    if user and not known:
        async with federation.change() as draft:
            if (row := draft.users.get(user)) is not None and not row.public_key:
                draft.put_user(replace(row, public_key=submission.public_key))
                data = {"user": user, "public_key": submission.public_key}
                draft.record("user.key", f"user {user} signs submissions from now on", data=data)
    return submission
