"""`serve`: run the control plane."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from control_plane.cli._database import DEFAULT_STATE_DIR, DatabaseUrl, DatabaseUrlFile, StateDir, database_url_of
from control_plane.cli.commands.server._serve_options import (
    AdmitByPrice,
    Advertised,
    AgentListen,
    DashboardUrl,
    FederationName,
    KeepRules,
    LeaseTime,
    Listen,
    LogFormat,
    MetricsListen,
    OidcClaim,
    OidcClientId,
    OidcClientSecretFile,
    OidcIssuer,
    Peers,
    Places,
    ReadyFile,
    RegionCertificateLife,
    TlsCaFile,
    TlsCertificateFile,
    TlsKeyFile,
)
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from control_plane.oidc import OidcConfig
    from control_plane.pki import GivenAuthority
    from geofed_pb.storage import Keep

_LEAST = timedelta(hours=1)
"""Shortest time for which what belongs to no job is kept; a submission over a slow link takes less."""


def serve(
    state_dir: StateDir = DEFAULT_STATE_DIR,
    listen: Listen = "127.0.0.1:7443",
    agent_listen: AgentListen = "127.0.0.1:7444",
    metrics_listen: MetricsListen = "127.0.0.1:7445",
    advertise: Advertised = None,
    peer: Peers = None,
    database_url: DatabaseUrl = None,
    database_url_file: DatabaseUrlFile = None,
    lease: LeaseTime = "30s",
    federation: FederationName = "geofed",
    region_certificate_life: RegionCertificateLife = "7d",
    tls_ca_file: TlsCaFile = None,
    tls_certificate_file: TlsCertificateFile = None,
    tls_key_file: TlsKeyFile = None,
    keep: KeepRules = None,
    admit_by_price: AdmitByPrice = False,
    track: Places = None,
    oidc_issuer: OidcIssuer = None,
    oidc_client_id: OidcClientId = None,
    oidc_client_secret_file: OidcClientSecretFile = None,
    oidc_claim: OidcClaim = "email",
    dashboard_url: DashboardUrl = None,
    ready_file: ReadyFile = None,
    log_format: LogFormat = "text",
) -> None:
    """Run the control plane."""
    _prepare(log_format)
    from control_plane import server

    config = server.ServeConfig(
        state_dir=state_dir,
        listen=listen,
        agent_listen=agent_listen,
        metrics_listen=metrics_listen,
        advertise=tuple(advertise or ()),
        peers=tuple(peer or ()),
        database_url=database_url_of(database_url, database_url_file),
        lease=_duration(lease),
        federation=federation,
        region_certificate_life=_duration(region_certificate_life),
        given=_given(tls_ca_file, tls_certificate_file, tls_key_file),
        ready_file=ready_file,
        keep=_rules(keep or []),
        admits_by_price=admit_by_price,
        track=_places(track or []),
        oidc=_oidc(oidc_issuer, oidc_client_id, oidc_client_secret_file, oidc_claim, dashboard_url),
        log_format=log_format,
    )
    asyncio.run(server.serve(config))


def _prepare(log_format: str) -> None:
    """Configure the log, and load the server: what is imported is not collected meanwhile, a fifth of the time."""
    from control_plane.serving._garbage import collected_later
    from geofed_pb.logs import configure_logs

    configure_logs(log_format)
    with collected_later():
        import control_plane.server  # noqa: F401


def _duration(text: str) -> timedelta:
    from control_plane._durations import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise GeofedError("CONFIG_INVALID", str(error)) from None


def _places(given: list[str]) -> tuple[str, ...]:
    """Return the places of `--track`, checked."""
    from control_plane.tracking import check_place_of_jobs

    for place in given:
        check_place_of_jobs(place)
    return tuple(given)


def _rules(given: list[str]) -> Keep:
    """Return the retention rules of `--keep`. Raises ``GeofedError("CONFIG_INVALID")``."""
    from control_plane._durations import parse_duration
    from control_plane.service import KEEP

    rules: dict[str, float | None] = {}
    for rule in given:
        kind, _, text = rule.partition("=")
        if kind not in KEEP:
            raise GeofedError("CONFIG_INVALID", f"--keep {rule}: there is no kind {kind!r}", hint=", ".join(KEEP))
        try:
            rules[kind] = None if text == "forever" else parse_duration(text).total_seconds()
        except ValueError as error:
            raise GeofedError("CONFIG_INVALID", f"--keep {rule}: {error}", hint="or forever") from None
        if kind in ("jobs", "unused", "uploads") and (rules[kind] or _LEAST.total_seconds()) < _LEAST.total_seconds():
            text = f"--keep {rule}: at least 1h, since somebody may be about to use it"
            raise GeofedError("CONFIG_INVALID", text)
    return rules


def _oidc(
    issuer: str | None, client_id: str | None, secret_file: Path | None, claim: str, dashboard_url: str | None
) -> OidcConfig | None:
    from control_plane.oidc import OidcConfig

    if issuer and client_id:
        return OidcConfig(issuer, client_id, secret_file, claim, dashboard_url or "")
    if issuer or client_id or secret_file or dashboard_url:
        raise GeofedError("USAGE", "--oidc-issuer and --oidc-client-id belong together")
    return None


def _given(ca_file: Path | None, certificate_file: Path | None, key_file: Path | None) -> GivenAuthority | None:
    from control_plane.pki import GivenAuthority

    if ca_file and certificate_file and key_file:
        return GivenAuthority(ca_file, certificate_file, key_file)
    if ca_file or certificate_file or key_file:
        raise GeofedError("USAGE", "--tls-ca-file, --tls-certificate-file and --tls-key-file belong together")
    return None
