"""What users sign, and what a signature is good for."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from geofed_pb.errors import GeofedError
from geofed_pb.security.signing import Signer, require_signature, spec_digest_of, statement
from geofed_pb.v1 import common_pb2

SPEC = json.dumps({"task": {"module": "task.py", "config": {"b": 1.5, "a": [1, "x"]}}, "data": {"dataset": "digits"}})
FACTS = (spec_digest_of(SPEC), "sha256:b", "task.py", json.dumps({"a": [1, "x"], "b": 1.5}), "digits")


def test_a_signature_is_for_this_code_on_this_data_alone(tmp_path: Path) -> None:
    signer = Signer.load_or_create(tmp_path / "user.key")
    assert stat.S_IMODE((tmp_path / "user.key").stat().st_mode) == 0o600
    signed = signer.sign(SPEC, "sha256:b")
    signed.user = "ann"
    require_signature(signed, signer.public_key, statement(*FACTS))
    assert Signer.load_or_create(tmp_path / "user.key").public_key == signer.public_key
    others = ["sha256:other", "sha256:c", "evil.py", '{"a": [1, "x"], "b": 2}', "patients"]
    for number, other in enumerate(others):
        changed = [*FACTS[:number], other, *FACTS[number + 1 :]]
        with pytest.raises(GeofedError, match="by another key, or was changed"):
            require_signature(signed, signer.public_key, statement(*changed))
    with pytest.raises(GeofedError, match="by another key"):
        require_signature(signed, Signer.load_or_create(tmp_path / "other.key").public_key, statement(*FACTS))
    with pytest.raises(GeofedError, match="user ann is not signed"):
        require_signature(common_pb2.Submission(user="ann"), signer.public_key, statement(*FACTS))


def test_variables_are_signed_and_none_are_what_older_versions_have_signed(tmp_path: Path) -> None:
    signer = Signer.load_or_create(tmp_path / "user.key")
    assert statement(*FACTS) == statement(*FACTS, {})
    spec = json.loads(SPEC)
    spec["task"]["env"] = {"MODE": "fast"}
    text = json.dumps(spec)
    signed, facts = signer.sign(text, "sha256:b"), (spec_digest_of(text), *FACTS[1:])
    require_signature(signed, signer.public_key, statement(*facts, {"MODE": "fast"}))
    for other in ({}, {"MODE": "slow"}, {"MODE": "fast", "LD_PRELOAD": "x"}):
        with pytest.raises(GeofedError, match="was changed"):
            require_signature(signed, signer.public_key, statement(*facts, other))


def test_the_image_of_a_task_is_signed(tmp_path: Path) -> None:
    signer, spec = Signer.load_or_create(tmp_path / "user.key"), json.loads(SPEC)
    spec["task"]["image"] = "r/worker:1"
    text = json.dumps(spec)
    signed, facts = signer.sign(text, "sha256:b"), (spec_digest_of(text), *FACTS[1:])
    require_signature(signed, signer.public_key, statement(*facts, image="r/worker:1"))
    assert statement(*FACTS) == statement(*FACTS, image="")
    for other in ("", "r/worker:2"):
        with pytest.raises(GeofedError, match="was changed"):
            require_signature(signed, signer.public_key, statement(*facts, image=other))


@pytest.mark.parametrize("key", ["", "ed25519:", "ed25519:AAAA", "rsa:x", "ed25519:ä"])
def test_what_is_no_key_verifies_nothing(key: str) -> None:
    with pytest.raises(GeofedError, match="FORBIDDEN"):
        require_signature(common_pb2.Submission(user="ann", signature=b"x"), key, b"")


def test_a_damaged_key_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "user.key").write_text("not a key")
    with pytest.raises(GeofedError, match="CONFIG_INVALID"):
        Signer.load_or_create(tmp_path / "user.key")
