"""`doctor`: what it says of a healthy federation, and of each thing that is wrong."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from control_plane.cli.commands.server.doctor import _clock, _disk, _link, _region, _versions
from control_plane.client import ControlClient
from tests.control_plane.cli.conftest import Federation, Run

pytestmark = pytest.mark.processes
REGION: dict[str, Any] = {
    "name": "home", "state": "live", "condition": "", "agent_version": "1.0", "certificate_expires": None,
    "capacity": {"workers": 2}, "channel": "redis", "channel_plaintext": False, "prices": {"source": "list"},
}  # fmt: skip


def _in(days: float) -> str:
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)).isoformat()


def test_a_healthy_federation_and_the_links_that_its_jobs_measured(live: Federation, run: Run, job_file: str) -> None:
    ran = run("doctor", "-o", "json")
    assert (ran.status, ran.err) == (0, "")
    found = {one["name"]: one for one in ran.data}
    assert all(one["ok"] for one in found.values())
    assert {"authority", "control plane", "clock", "versions", "disk", "region a", "region b"} <= set(found)
    assert {"link a > b", "link b > a"} <= set(found)
    assert found["clock"]["text"] == "within 1 s of the control plane's"
    table = run("doctor").out
    assert "\nok    clock " in table
    assert "FAIL" not in table


def test_a_wrong_clock_is_a_finding_and_an_exit_status(
    live: Federation, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ping(_: ControlClient) -> tuple[float, float | None]:
        return 0.01, 125.0

    monkeypatch.setattr(ControlClient, "ping", ping)
    ran = run("doctor")
    assert ran.status == 1
    (line,) = [line for line in ran.out.splitlines() if line.startswith("FAIL")]
    assert line.split(maxsplit=2)[1:] == ["clock", "this machine's clock is 125 s ahead of the control plane's"]
    assert "hint: correct the wrong clock, best with NTP" in ran.out


def test_a_control_plane_that_does_not_answer_and_an_authority_near_its_end(
    live: Federation, run: Run, tmp_path: Path
) -> None:
    context = {**json.loads(live.context.read_text()), "address": "127.0.0.1:1", "ca_file": str(tmp_path / "ca.crt")}
    (tmp_path / "context.json").write_text(json.dumps(context))
    name, key = x509.Name([]), ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=30))
    (tmp_path / "ca.crt").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    ran = run("doctor", "--context", str(tmp_path / "context.json"), "-o", "json")
    assert ran.status == 1
    assert [(one["name"], one["ok"]) for one in ran.data] == [("authority", False), ("control plane", False)]
    assert "rotate-ca" in ran.data[0]["hint"]
    assert "127.0.0.1:1" in ran.data[1]["text"]
    (tmp_path / "ca.crt").unlink()
    without = run("doctor", "--context", str(tmp_path / "context.json"), "-o", "json")
    assert without.status == 1
    assert without.data[0]["text"].startswith(f"cannot read {tmp_path / 'ca.crt'}")


@pytest.mark.parametrize(
    ("change", "ok", "told", "hint"),
    [
        ({"certificate_expires": _in(6)}, True, "live, 2 workers, certificate valid for 6.0 days", ""),
        ({"certificate_expires": _in(0.5)}, False, "its certificate is valid until", "should have renewed it"),
        ({"state": "lost", "condition": "no message"}, False, "lost: no message", "`geofed agent doctor` on the"),
        ({"state": "misconfigured", "condition": "price -1"}, False, "misconfigured: price -1", "machine of home"),
        ({"state": "invited"}, True, "invited", ""),
        ({"certificate_expires": _in(6), "channel_plaintext": True}, True, "channel redis unencrypted", "use TLS"),
        ({"certificate_expires": _in(6), "prices": None}, True, "no prices", "state `prices` in its region file"),
    ],
)
def test_what_is_wrong_with_a_region_is_told(change: dict[str, Any], ok: bool, told: str, hint: str) -> None:
    found = _region({**REGION, **change})
    assert (found["name"], found["ok"]) == ("region home", ok)
    assert told in found["text"]
    assert hint in found["hint"]
    assert bool(hint) == bool(found["hint"])


def test_versions_disk_and_links() -> None:
    assert _versions("1.0", "1.0", [REGION])["text"] == "control plane 1.0, and so is everything else"
    others = _versions("1.1", "1.2", [REGION, {**REGION, "name": "new", "agent_version": ""}])
    assert (others["text"], others["ok"]) == ("control plane 1.1; home 1.0, this command 1.2", True)
    assert others["hint"].startswith("upgrade the control plane first")
    assert (_disk(1 << 20)["ok"], _disk(1 << 40)["ok"]) == (False, True)
    assert _clock(None)["ok"]
    assert _link("a", "b", None)["text"] == "not measured yet: the first job over it does"
    measured = _link("a", "b", {"rtt_ms": 90.25, "goodput_mbps": 12.0, "job": "digits-1"})
    assert measured["text"] == "90.2 ms, 12.0 Mbit/s, measured by job digits-1"
