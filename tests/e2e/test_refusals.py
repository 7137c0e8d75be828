"""Who shows no valid identity is let in nowhere, and is told what to do."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from support.failures import Told, command, told
from support.running import PRICES, Federation, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

LIFE_SECONDS = 3


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A control plane without regions, whose certificates are over after some seconds."""
    options = ["--region-certificate-life", f"{LIFE_SECONDS}s"]
    with Federation(tmp_path_factory.mktemp("refusals"), [], serve_options=options) as running:
        yield running


def _join(token: str, state: Path) -> Told:
    """A join that must fail."""
    file = state.parent / "token"
    file.write_text(token)
    refused = told(command("region-agent", "join", "--token-file", file, "--state-dir", state))
    assert not (state / "identity" / "federation.json").exists()
    return refused


def test_an_invitation_is_good_once_as_it_is_and_for_its_time(federation: Federation, tmp_path: Path) -> None:
    token = federation.control_plane("region", "invite", "oslo").stdout.strip()
    short = federation.control_plane("region", "invite", "bergen", "--ttl", "1s").stdout.strip()
    made = time.monotonic()
    body: dict[str, Any] = json.loads(base64.urlsafe_b64decode(token.removeprefix("geofed1.") + "=="))
    forged = base64.urlsafe_b64encode(json.dumps({**body, "secret": "x" * 43}).encode()).decode().rstrip("=")
    for wrong in ("nonsense", token[:-40], f"geofed1.{forged}"):
        refused = _join(wrong, tmp_path / "never")
        assert (refused.code, refused.exit_status) == ("TOKEN_INVALID", 5)
        assert "region invite" in refused.hint
    file = tmp_path / "good"
    file.write_text(token)
    assert command("region-agent", "join", "--token-file", file, "--state-dir", tmp_path / "oslo").returncode == 0
    used = _join(token, tmp_path / "again")
    assert (used.code, used.text) == ("TOKEN_INVALID", "the invitation of oslo has been used already")
    eventually(lambda: time.monotonic() > made + 1.2, "the short invitation is over", 5)
    assert "has expired" in _join(short, tmp_path / "late").text


def test_a_certificate_that_is_over_starts_no_agent(federation: Federation, tmp_path: Path) -> None:
    state, token, config = tmp_path / "state", tmp_path / "token", tmp_path / "region.yaml"
    token.write_text(federation.control_plane("region", "invite", "tromso").stdout)
    prices = json.dumps(PRICES)
    config.write_text(
        "apiVersion: geofed/v1\nkind: Region\nmetadata: {name: tromso}\ncloud: test\n"
        f"capacity: {{workers: 1}}\nprices: {prices}\n"
    )
    run = ("run", "--config", config, "--state-dir", state)
    before = told(command("region-agent", *run))
    assert (before.code, before.exit_status) == ("UNAUTHENTICATED", 5)
    assert command("region-agent", "join", "--token-file", token, "--state-dir", state).returncode == 0
    certificate = x509.load_pem_x509_certificate((state / "identity" / "certificate.pem").read_bytes())
    eventually(lambda: datetime.now(UTC) > certificate.not_valid_after_utc, "the certificate is over", 10)
    over = told(command("region-agent", *run))
    assert (over.code, over.exit_status) == ("CERTIFICATE_EXPIRED", 5)
    assert "region invite" in over.hint


def test_a_user_without_the_right_token_or_authority_sees_nothing(federation: Federation, tmp_path: Path) -> None:
    context = json.loads(federation.context_file.read_text())
    wrong, other = tmp_path / "token", tmp_path / "context.json"
    wrong.write_text("not-the-token\n")
    other.write_text(json.dumps({**context, "token_file": str(wrong)}))
    refused = told(command("control-plane", "list", GEOFED_CONTEXT=str(other)))
    assert (refused.code, refused.exit_status) == ("UNAUTHENTICATED", 5)
    with Federation(tmp_path / "foreign", []) as foreign:
        authority = json.loads(foreign.context_file.read_text())["ca_file"]
        other.write_text(json.dumps({**context, "ca_file": authority}))
        untrusted = told(command("control-plane", "list", GEOFED_CONTEXT=str(other)))
    assert (untrusted.code, untrusted.exit_status) == ("CERTIFICATE_INVALID", 5)
    other.write_text(json.dumps({**context, "token_file": str(tmp_path / "gone")}))
    assert told(command("control-plane", "list", GEOFED_CONTEXT=str(other))).code == "UNAUTHENTICATED"
    other.write_text(json.dumps({**context, "address": "127.0.0.1:9"}))
    nobody = told(command("control-plane", "list", GEOFED_CONTEXT=str(other)))
    assert (nobody.code, nobody.exit_status) == ("UNAVAILABLE", 6)
