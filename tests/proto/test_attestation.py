"""Signed statements of where a model comes from."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from geofed_pb.security.attestation import AttestationBroken, opened, sealed
from geofed_pb.security.audit import public_key_of

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
STATEMENT: dict[str, Any] = {
    "_type": "https://in-toto.io/Statement/v1",
    "subject": [{"name": "job, round 3", "digest": {"sha256": "ab" * 32}}],
    "predicateType": "https://slsa.dev/provenance/v1",
    "predicate": {
        "buildDefinition": {
            "buildType": "urn:geofed:job:v1",
            "externalParameters": {},
            "resolvedDependencies": [{"name": "code", "digest": {"sha256": "cd" * 32}}],
        },
        "runDetails": {
            "builder": {"id": "urn:geofed:federation:north"},
            "metadata": {"invocationId": "job", "finishedOn": "2026-11-01T00:00:00.000Z"},
            "byproducts": [
                {"name": "result", "annotations": {"state": "succeeded"}},
                {"name": "audit-head", "annotations": {"seq": 4}},
            ],
        },
    },
}


def test_a_statement_is_read_by_whoever_knows_the_format() -> None:
    text = sealed(KEY, STATEMENT)
    found = opened(text, public_key_of(KEY))
    assert (found.job, found.federation, found.made_of) == ("job", "north", ("code",))
    assert (found.state, found.code) == ("succeeded", "cd" * 32)
    assert (found.models, found.head, found.public_key) == ({"ab" * 32: "job, round 3"}, {"seq": 4}, public_key_of(KEY))
    # As another implementation of DSSE checks it, by the words of its specification.
    envelope = json.loads(text)
    payload = base64.b64decode(envelope["payload"])
    kind = "application/vnd.in-toto+json"
    assert envelope["payloadType"] == kind
    signed = " ".join(["DSSEv1", str(len(kind)), kind, str(len(payload)), payload.decode()]).encode()
    signature = envelope["signatures"][0]
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["keyid"])).verify(
        base64.b64decode(signature["sig"]), signed
    )
    assert json.loads(payload) == STATEMENT


@given(st.sampled_from(["payload", "sig"]), st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_found(part: str, place: int, change: int) -> None:
    envelope = json.loads(sealed(KEY, STATEMENT))
    held = envelope if part == "payload" else envelope["signatures"][0]
    content = bytearray(base64.b64decode(held[part]))
    content[place % len(content)] ^= change
    held[part] = base64.b64encode(bytes(content)).decode()
    with pytest.raises(AttestationBroken):
        opened(json.dumps(envelope))


def test_another_signer_is_found() -> None:
    other = Ed25519PrivateKey.generate()
    with pytest.raises(AttestationBroken, match="the signature is not of the key"):
        opened(sealed(other, STATEMENT), public_key_of(KEY))
    assert opened(sealed(other, STATEMENT)).public_key == public_key_of(other)


def test_texts_of_a_signer_do_nothing_to_a_terminal() -> None:
    named = {**STATEMENT, "subject": [{"name": "a\x1b[31m\r", "digest": {"sha256": "ab" * 32}}]}
    assert opened(sealed(KEY, named)).models == {"ab" * 32: "a\\x1b[31m\\x0d"}


@pytest.mark.parametrize(
    "statement",
    [
        {}, [], 3, {**STATEMENT, "_type": "other"}, {**STATEMENT, "subject": 3}, {**STATEMENT, "subject": ["x"]},
        {**STATEMENT, "predicate": {**STATEMENT["predicate"], "runDetails": {"byproducts": []}}},
    ],
)  # fmt: skip
def test_what_is_signed_and_no_provenance_is_refused(statement: Any) -> None:
    with pytest.raises(AttestationBroken, match="is no provenance"):
        opened(sealed(KEY, statement))


@given(st.one_of(st.text(), st.recursive(st.none() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(
    st.sampled_from(["payload", "payloadType", "signatures", "keyid", "sig"]), inner)).map(json.dumps)))  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(AttestationBroken):
        opened(text)
