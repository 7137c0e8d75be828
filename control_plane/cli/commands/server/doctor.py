"""`doctor`: what is wrong with a federation, as far as one of its users can see."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from control_plane._view import Data, bytes_text, job_view, region_view, time_text
from control_plane.cli._connect import ask_control_plane, find_context
from control_plane.cli._options import ContextFile, Output
from control_plane.cli._output import after, emit
from control_plane.cli._settings import Format
from geofed_pb.errors import OUTAGE, Exit, GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient

_MAX_SKEW_SECONDS = 60.0
"""Largest difference of the clocks, as of `geofed agent doctor`."""
_LEAST_FREE_BYTES = 1 << 30
"""Least free space for the control plane's state."""
_AUTHORITY_DAYS = 90.0
"""Time that is needed to replace the certificate authority in all regions without haste."""
_CERTIFICATE_DAYS = 1.0
"""Regions renew their certificates long before this."""
_JOBS = 10
"""Newest jobs whose links are looked at."""
_WRONG_STATES = ("misconfigured", "unreachable", "lost")


def doctor(context: ContextFile = None, output: Output = Format.TABLE) -> None:
    """Check the federation: control plane, clock, versions, certificates, disk, regions, and the links between them."""
    from control_plane.client import Context

    path = find_context(context)
    findings = [_authority(Context.load(path).ca_file)]
    try:
        findings += ask_control_plane(context, _asked)
    except GeofedError as error:
        if error.code not in (*OUTAGE, "UNAUTHENTICATED"):
            raise
        # Said like any other finding: what else there is to check needs its answer.
        findings.append(_finding("control plane", error.message, wrong=True, hint=error.hint))
    emit(findings, table=lambda _: _text(findings), name=lambda one: str(one["name"]))
    if not all(one["ok"] for one in findings):
        raise typer.Exit(int(Exit.JOB_ENDED_BADLY))


async def _asked(client: ControlClient) -> list[Data]:
    """Return what can be told once the control plane answers."""
    from importlib.metadata import version

    seconds, ahead = await client.ping()
    about, storage = await client.version(), await client.storage("", 0)
    regions = [region_view(region) for region in await client.regions()]
    found = [
        _finding("control plane", f"{about.federation}, answers in {seconds * 1e3:.0f} ms"),
        _clock(ahead),
        _versions(about.version, version("geofed"), regions),
    ]
    if storage.free_bytes:
        found.append(_disk(storage.free_bytes))
    found += [_region(region) for region in regions] or [
        _finding("regions", "none has joined", hint="`geofed region invite NAME` lets one join")
    ]
    return [*found, *await _links(client, [region["name"] for region in regions if region["state"] == "live"])]


def _finding(name: str, text: str, *, wrong: bool = False, hint: str = "") -> Data:
    return {"name": name, "ok": not wrong, "text": text, "hint": hint}


def _authority(ca_file: Path) -> Data:
    from cryptography import x509

    try:
        certificates = x509.load_pem_x509_certificates(ca_file.read_bytes())
    except (OSError, ValueError) as error:
        hint = "get a new context.json with its files from the control plane's operator"
        return _finding("authority", f"cannot read {ca_file}: {error}", wrong=True, hint=hint)
    until = max(one.not_valid_after_utc.timestamp() for one in certificates)
    text = f"valid until {time_text(until)}"
    if until - time.time() < _AUTHORITY_DAYS * 86_400:
        return _finding("authority", text, wrong=True, hint="replace it with `geofed rotate-ca`")
    return _finding("authority", text)


def _clock(ahead: float | None) -> Data:
    if ahead is None:
        return _finding("clock", "unknown: the control plane is of an older version, which does not report its clock")
    if abs(ahead) <= _MAX_SKEW_SECONDS:
        return _finding("clock", f"within {max(1.0, abs(ahead)):.0f} s of the control plane's")
    text = f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the control plane's"
    return _finding("clock", text, wrong=True, hint="correct the wrong clock, best with NTP")


def _versions(server: str, own: str, regions: list[Data]) -> Data:
    others = {f"{one['name']} {one['agent_version']}" for one in regions if one["agent_version"] not in ("", server)}
    others |= {f"this command {own}"} if own != server else set()
    text = f"control plane {server}" + (f"; {', '.join(sorted(others))}" if others else ", and so is everything else")
    return _finding("versions", text, hint="upgrade the control plane first, then the agents" if others else "")


def _disk(free: int) -> Data:
    text = f"{bytes_text(free)} free at the control plane"
    if free < _LEAST_FREE_BYTES:
        return _finding("disk", text, wrong=True, hint="free space there; `geofed storage` shows what is kept")
    return _finding("disk", text)


def _region(region: Data) -> Data:
    name, state = f"region {region['name']}", region["state"]
    told = f"{state}: {region['condition']}" if region["condition"] else str(state)
    if state in _WRONG_STATES:
        return _finding(name, told, wrong=True, hint=f"`geofed agent doctor` on the machine of {region['name']}")
    if state != "live":
        return _finding(name, told)
    expires: str | None = region["certificate_expires"]
    if expires is None:
        return _finding(name, told)
    days = (datetime.fromisoformat(expires).timestamp() - time.time()) / 86_400
    if days < _CERTIFICATE_DAYS:
        hint = f"`geofed agent doctor` on the machine of {region['name']}: its agent should have renewed it"
        return _finding(name, f"its certificate is valid until {expires}", wrong=True, hint=hint)
    facts = [f"{region['capacity']['workers']} workers", f"certificate valid for {days:.1f} days"]
    hint = ""
    if region["channel_plaintext"]:
        facts.append(f"channel {region['channel']} unencrypted")
        hint = "use TLS for the channel, unless its network is private"
    if not region["prices"]:
        facts.append("no prices")
        hint = "state `prices` in its region file: plans with it have no cost"
    return _finding(name, ", ".join([told, *facts]), hint=hint)


async def _links(client: ControlClient, live: list[str]) -> list[Data]:
    """Return a finding for each pair of live regions, with what the newest job over it has measured."""
    measured: dict[tuple[str, str], Data] = {}
    for job in await client.jobs(ended=True, limit=_JOBS):
        for link in job_view(await client.job(job.id))["links"]:
            if link["rtt_ms"]:
                measured.setdefault((link["source"], link["destination"]), {**link, "job": job.id})
    return [
        _link(source, destination, measured.get((source, destination)))
        for source in live
        for destination in live
        if source != destination
    ]


def _link(source: str, destination: str, link: Data | None) -> Data:
    name = f"link {source} > {destination}"
    if link is None:
        return _finding(name, "not measured yet: the first job over it does")
    rate = f", {link['goodput_mbps']:.1f} Mbit/s" if link["goodput_mbps"] else ""
    return _finding(name, f"{link['rtt_ms']:.1f} ms{rate}, measured by job {link['job']}")


def _text(findings: list[Data]) -> str:
    return "\n".join(_lines(findings))


def _lines(findings: list[Data]) -> Iterator[str]:
    width = max(len(one["name"]) for one in findings)
    for one in findings:
        level = "FAIL" if not one["ok"] else "note" if one["hint"] else "ok"
        yield after(f"{level:<4}  {one['name']:<{width}}  ", one["text"])
        if one["hint"]:
            yield after(" " * (width + 8), f"hint: {one['hint']}")
