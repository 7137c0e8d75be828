"""Signatures of users over what they let regions run: the same statement is made by the client and by the agent.

A region decides by itself whose code runs on its data: it knows the public keys of users from its own file, so that the
control plane can neither invent a submission nor change its code.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably
from geofed_pb.v1 import common_pb2

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["Signer", "load_or_create_key", "public_key_text", "require_signature", "spec_digest_of", "statement"]

_PREFIX = "ed25519:"
"""Begins the text of a public key."""
_KEY_BYTES = 32
"""Length of an Ed25519 key."""


def statement(
    spec_digest: str,
    bundle_digest: str,
    module: str,
    config_json: str,
    dataset: str,
    env: Mapping[str, str] | None = None,
    initial_model: str = "",
    secrets: Sequence[str] = (),
    requirements: str = "",
    image: str = "",
    initial_adapter: str = "",
) -> bytes:
    """Return the bytes that a user signs: the job file's digest, and all that decides which code runs on which data.

    ``initial_model``: digest of the user's file that the job starts from. ``secrets``: names of the regions' secrets
    that the code may read. ``requirements``: path of its requirements file. ``image``: container image
    that it runs in. ``initial_adapter``: digest of the file whose tensors replace those of ``initial_model``.
    """
    facts: dict[str, object] = {
        "bundle": bundle_digest, "config": json.loads(config_json or "{}"), "dataset": dataset, "module": module,
        "spec": spec_digest,
    }  # fmt: skip
    # Left out where there is none, so that it is the same statement as in older versions.
    if env:
        facts["env"] = dict(env)
    if initial_model:
        facts["initial_model"] = initial_model
    if secrets:
        facts["secrets"] = sorted(secrets)
    if requirements:
        facts["requirements"] = requirements
    if image:
        facts["image"] = image
    if initial_adapter:
        facts["initial_adapter"] = initial_adapter
    return b"geofed submission 1\n" + json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


def spec_digest_of(spec_json: str) -> str:
    """Return the digest of a job file as it is submitted."""
    return f"sha256:{hashlib.sha256(spec_json.encode()).hexdigest()}"


def load_or_create_key(path: Path, *, is_new: bool) -> Ed25519PrivateKey:
    """Return the key that signs an audit log's heads, in a PEM file; create it with mode 0600.

    ``is_new``: whether the log is empty: only then the key is created.

    Raises ``GeofedError("STATE_INVALID")`` if it cannot be read, or is missing.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        if not path.exists():
            if not is_new:
                raise GeofedError(
                    "STATE_INVALID",
                    f"{path} is missing, which has signed the audit log until now",
                    hint="restore it from a backup: with another key, the log contradicts every head that others have",
                )
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            pem = Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            write_durably(path, [pem], mode=0o600)
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise GeofedError("STATE_INVALID", f"{path} is no private key: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise GeofedError("STATE_INVALID", f"{path} is no Ed25519 key")
    return key


class Signer:
    """A user's key, which never leaves the user's machine."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(key)

    @classmethod
    def load_or_create(cls, path: Path) -> Signer:
        """Read a key file, or create it with mode 0600. Raises ``GeofedError("CONFIG_INVALID")`` if it is damaged."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(base64.b64encode(os.urandom(_KEY_BYTES)) + b"\n")
        except FileExistsError:
            pass
        try:
            return cls(base64.b64decode(path.read_bytes().strip(), validate=True))
        except (ValueError, binascii.Error):
            raise GeofedError("CONFIG_INVALID", f"{path} is not the key of a user") from None

    @property
    def public_key(self) -> str:
        """The public key as text, for region files."""
        return public_key_text(self._key.public_key().public_bytes_raw())

    def sign(self, spec_json: str, bundle_digest: str) -> common_pb2.Submission:
        """Sign a job file, as it is submitted, with the digest of its code."""
        spec = json.loads(spec_json)
        digest, task = spec_digest_of(spec_json), spec["task"]
        config_json = json.dumps(task.get("config", {}))
        dataset, env = spec["data"]["dataset"], task.get("env", {})
        start = (spec.get("train") or {}).get("initialModel") or {}
        initial, adapter = start.get("digest") or "", (start.get("adapter") or {}).get("digest") or ""
        more = task.get("secrets", []), task.get("requirements") or "", task.get("image") or "", adapter
        signed = statement(digest, bundle_digest, task["module"], config_json, dataset, env, initial, *more)
        return common_pb2.Submission(
            public_key=self.public_key, signature=self._key.sign(signed), spec_digest=digest, initial_model=initial,
            initial_adapter=adapter,
        )  # fmt: skip


def public_key_text(key: bytes) -> str:
    """Return a public key as text."""
    return _PREFIX + base64.b64encode(key).decode()


def require_signature(submission: common_pb2.Submission, public_key: str, signed: bytes) -> None:
    """Raise ``GeofedError("FORBIDDEN")`` unless the holder of a key has signed a statement."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        raw = base64.b64decode(public_key.removeprefix(_PREFIX), validate=True)
        Ed25519PublicKey.from_public_bytes(raw).verify(submission.signature, signed)
    except (ValueError, binascii.Error, InvalidSignature):
        what = "is not signed" if not submission.signature else "is signed by another key, or was changed"
        raise GeofedError("FORBIDDEN", f"the submission of user {submission.user} {what}") from None
