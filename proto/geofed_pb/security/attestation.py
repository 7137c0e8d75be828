"""Signed statements of where a model comes from, in the forms that supply-chain tools read.

A statement is one of in-toto's (in-toto.io/Statement/v1) with a SLSA provenance (slsa.dev/provenance/v1), signed as a
DSSE envelope (github.com/secure-systems-lab/dsse, version 1.0) with Ed25519. This module signs and checks; it reads and
writes nothing.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from geofed_pb.bounds import clean
from geofed_pb.security.audit import public_key_of

__all__ = [
    "FEDERATION", "MOST_BYTES", "PREDICATE", "REGION_HEADS", "STATEMENT", "AttestationBroken", "Provenance",
    "data_name", "opened", "sealed",
]  # fmt: skip

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
REGION_HEADS = "region-audit-heads"
"""Name of the byproduct with the heads of the regions' own audit logs."""
FEDERATION = "urn:geofed:federation:"
"""Beginning of a builder's identity; the federation's name follows."""
MOST_BYTES = 16 << 20
"""Largest envelope that is read. A plan over a thousand regions takes some hundred kB."""
_MOST_TEXT = 256
"""Bytes of a name that are shown."""
_PAYLOAD = "application/vnd.in-toto+json"


class AttestationBroken(ValueError):
    """It is no envelope of a statement, or not signed by the key that it names; the text says what."""


@dataclass(frozen=True)
class Provenance:
    """What a statement says whose signature is right."""

    job: str
    """Identity of the job that has trained the models."""
    federation: str
    finished_at: str
    models: dict[str, str]
    """Names of the models by their SHA-256, in hexadecimal."""
    made_of: tuple[str, ...]
    """Names of what the models were made of."""
    code: str
    """SHA-256 of the job's code, in hexadecimal."""
    state: str
    """How the job ended: `succeeded`, `failed` or `cancelled`."""
    head: dict[str, Any]
    """Head of the audit log when the statement was signed, for ``geofed_pb.security.audit.Head.read``."""
    region_heads: dict[str, Any]
    """Head of each region's own audit log, as `head`; None: the region had told none."""
    data: dict[str, dict[str, str]]
    """Digests of each region's splits, as ALGORITHM:HEX; empty: the region tells none."""
    public_key: str
    """Of the signer, in hexadecimal. Whose it is must be known from elsewhere."""
    statement: dict[str, Any]


def sealed(key: Ed25519PrivateKey, statement: dict[str, Any]) -> str:
    """Return a statement's envelope, as JSON."""
    payload = json.dumps(statement).encode()
    signature = {"keyid": public_key_of(key), "sig": base64.b64encode(key.sign(_signed(payload))).decode()}
    return json.dumps(
        {"payloadType": _PAYLOAD, "payload": base64.b64encode(payload).decode(), "signatures": [signature]}
    )


def opened(text: str, public_key: str = "") -> Provenance:
    """Return the statement in an envelope.

    Args:
        text: the envelope, as JSON.
        public_key: the one that it must be signed with; empty: the one that it names.

    Raises ``AttestationBroken``.
    """
    try:
        envelope = json.loads(text)
        if envelope["payloadType"] != _PAYLOAD:
            raise AttestationBroken("it is not of in-toto")
        payload = base64.b64decode(envelope["payload"], validate=True)
        (signature,) = envelope["signatures"]
        named, signed = signature["keyid"], base64.b64decode(signature["sig"], validate=True)
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key or named))
    except AttestationBroken:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise AttestationBroken("it is no signed envelope") from None
    try:
        key.verify(signed, _signed(payload))
    except InvalidSignature:
        raise AttestationBroken(f"the signature is not of the key {public_key or named}") from None
    try:
        return _read(json.loads(payload), key.public_bytes_raw().hex())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise AttestationBroken("the statement is no provenance of a model") from None


def _read(statement: dict[str, Any], public_key: str) -> Provenance:
    if (statement["_type"], statement["predicateType"]) != (STATEMENT, PREDICATE):
        raise ValueError("another kind of statement")
    made, run = statement["predicate"]["buildDefinition"], statement["predicate"]["runDetails"]
    facts = {one["name"]: one["annotations"] for one in run["byproducts"]}
    (code,) = [one["digest"]["sha256"] for one in made["resolvedDependencies"] if one["name"] == "code"]
    return Provenance(
        job=_text(run["metadata"]["invocationId"]),
        federation=_text(run["builder"]["id"]).removeprefix(FEDERATION),
        finished_at=_text(run["metadata"]["finishedOn"]),
        models={_text(one["digest"]["sha256"]): _text(one["name"]) for one in statement["subject"]},
        made_of=tuple(_text(one["name"]) for one in made["resolvedDependencies"]),
        code=_text(code),
        state=_text(facts["result"]["state"]),
        head=dict(facts["audit-head"]),
        region_heads={_text(name): head for name, head in facts.get(REGION_HEADS, {}).items()},
        data={_text(one["name"]): _digests(one.get("data", {})) for one in facts["result"].get("regions", [])},
        public_key=public_key,
        statement=statement,
    )


def data_name(region: str, split: str = "train") -> str:
    """Return the name of a region's data in a statement."""
    return f"data of {region}" if split == "train" else f"data of {region}, {split}"


def _digests(told: dict[str, Any]) -> dict[str, str]:
    return {_text(split): _text(digest) for split, digest in told.items()}


def _text(value: Any) -> str:
    """Return a text for a terminal, whoever has signed it."""
    return clean(str(value), _MOST_TEXT)


def _signed(payload: bytes) -> bytes:
    """Return the bytes that are signed: DSSE's pre-authentication encoding of a payload."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD), _PAYLOAD.encode(), len(payload), payload)
