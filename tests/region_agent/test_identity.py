"""Joining and being someone: invitations, keys, certificates."""

from __future__ import annotations

import base64
import json
import math
import stat
import time
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st
from support.pki import Authority, write
from typer.testing import CliRunner

from geofed_pb.errors import GeofedError
from region_agent import cli
from region_agent.config import RegionConfig
from region_agent.link.identity import Identity, JoinedFederation, make_request, read_invitation


def _token(authority: Authority, **changed: object) -> str:
    body = {
        "address": "cp:7000", "ca": base64.b64encode(authority.der).decode(), "region": "east", "secret": "s3cret",
    } | changed  # fmt: skip
    return "geofed1." + base64.urlsafe_b64encode(json.dumps(body).encode()).decode().rstrip("=")


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_an_invitation_carries_what_the_first_contact_needs(authority: Authority) -> None:
    invitation = read_invitation(f"\n {_token(authority)}\n")
    assert (invitation.address, invitation.region, invitation.secret) == ("cp:7000", "east", "s3cret")
    assert invitation.ca_pem == authority.pem


@pytest.mark.parametrize(
    "text", ["", "geofed1.", "geofed2.e30", "geofed1.e30", "geofed1.W10", "geofed1.MQ", "geofed1.ä"]
)
def test_what_is_no_invitation_is_told(text: str) -> None:
    with pytest.raises(GeofedError) as raised:
        read_invitation(text)
    assert raised.value.code == "TOKEN_INVALID"


@given(st.binary(max_size=200))
def test_any_damage_to_an_invitation_is_told(content: bytes) -> None:
    with pytest.raises(GeofedError) as raised:
        read_invitation("geofed1." + base64.urlsafe_b64encode(content).decode())
    assert raised.value.code == "TOKEN_INVALID"


def test_a_damaged_authority_is_told(authority: Authority) -> None:
    with pytest.raises(GeofedError):
        read_invitation(_token(authority, ca="AAAA"))


def _joined(folder: Path, authority: Authority, **life: timedelta) -> Identity:
    key_pem, request = make_request("east")
    key = serialization.load_pem_private_key(key_pem, None)
    issued = authority.issue("east", "east.region.geofed", key=key, **life)  # type: ignore[arg-type]
    assert x509.load_pem_x509_csr(request).is_signature_valid
    identity = Identity(folder)
    identity.store(JoinedFederation("east", "cp:7001", "test"), key_pem, issued.certificate_pem, issued.ca_pem)
    return identity


@pytest.mark.processes
def test_an_agent_joins_with_no_invitation_of_another_region(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The log would stay with this test's standard error.
    monkeypatch.setattr("geofed_pb.logs.configure_logs", lambda *_: None)
    (token := tmp_path / "token").write_text(_token(authority, region="west"))
    (config := tmp_path / "region.yaml").write_text(
        "apiVersion: geofed/v1\nkind: Region\nmetadata: {name: east}\ncloud: local\ncapacity: {workers: 1}\n"
        "prices: {source: mine, asOf: 2026-11, functionUsdPerGbSecond: 0, functionUsdPerRequest: 0,"
        " serverUsdPerHour: 0, egressUsdPerGb: 0}\n"
    )
    options = ["run", "--config", str(config), "--state-dir", str(tmp_path / "state"), "--token-file", str(token)]
    ran = CliRunner().invoke(cli.app, options)
    assert isinstance(ran.exception, GeofedError)
    assert ran.exception.code == "CONFIG_INVALID"
    assert "the invitation is for region west" in ran.exception.message
    assert not Identity(tmp_path / "state").joined


def test_what_joining_gave_is_kept_for_this_user_only(tmp_path: Path, authority: Authority) -> None:
    identity = _joined(tmp_path, authority)
    identity.check()
    assert Identity(tmp_path).joined
    assert Identity(tmp_path).federation == JoinedFederation("east", "cp:7001", "test")
    assert stat.S_IMODE(identity.folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in identity.folder.iterdir())


def test_a_region_that_has_not_joined_is_told_how_to(tmp_path: Path) -> None:
    with pytest.raises(GeofedError) as raised:
        Identity(tmp_path).check()
    assert raised.value.code == "UNAUTHENTICATED"
    assert "geofed agent join" in raised.value.hint


def test_an_expired_certificate_is_told(tmp_path: Path, authority: Authority) -> None:
    identity = _joined(tmp_path, authority, begins=timedelta(hours=-2), life=timedelta(hours=1))
    with pytest.raises(GeofedError) as raised:
        identity.check()
    assert raised.value.code == "CERTIFICATE_EXPIRED"


def test_renewal_is_due_at_half_life(tmp_path: Path, authority: Authority) -> None:
    identity = _joined(tmp_path, authority, begins=timedelta(0), life=timedelta(hours=2))
    assert identity.renewal_due_in(time.time()) == pytest.approx(3600, abs=5)
    assert identity.renewal_due_in(time.time() + 3700) < 0


def test_a_renewal_asks_for_the_same_key_and_name(tmp_path: Path, authority: Authority) -> None:
    identity = _joined(tmp_path, authority)
    request = x509.load_pem_x509_csr(identity.renewal_request())
    assert request.public_key() == identity.certificate.public_key()
    assert request.subject.rfc4514_string() == "CN=east"
    identity.renew(authority.sign_request(identity.renewal_request(), "east"), authority.pem)
    identity.check()


def test_files_of_the_operators_ca_are_used_as_they_are(tmp_path: Path, authority: Authority) -> None:
    files = write(authority.region("east"), tmp_path / "given")
    facts = {
        "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
        "capacity": {"workers": 1}, "identity": {
            "caFile": str(files[0]), "certificateFile": str(files[1]), "keyFile": str(files[2]),
            "controlPlane": "cp:7444",
        },
    }  # fmt: skip
    identity = Identity(tmp_path / "state", RegionConfig.model_validate(facts))
    identity.check()
    assert identity.federation == JoinedFederation("east", "cp:7444", "")
    assert identity.renewal_due_in(time.time()) == math.inf
    identity.trust(b"another authority")
    assert identity.tls().ca_pem == authority.pem, "the operator's file is never written"
    identity.revoke(["abc"])
    assert identity.tls().revoked.serials == {"abc"}
    first = identity.tls().certificate_pem
    write(authority.region("east"), tmp_path / "given")
    assert identity.tls().certificate_pem != first, "a new file is used at once"
    write(authority.region("west"), tmp_path / "given")
    with pytest.raises(GeofedError, match=r"not a certificate of east\.region\.geofed"):
        identity.check()
    files[2].unlink()
    with pytest.raises(GeofedError, match="UNAUTHENTICATED"):
        identity.check()
