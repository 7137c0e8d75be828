"""`serve`: run the control plane."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane.cli._database import DEFAULT_STATE_DIR, DatabaseUrl, DatabaseUrlFile, StateDir, database_url_of
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from control_plane.oidc import OidcConfig
    from control_plane.pki import GivenAuthority
    from geofed_pb.storage import Keep

_LEAST = timedelta(hours=1)
"""Shortest time for which what belongs to no job is kept; a submission over a slow link takes less."""


def serve(
    state_dir: StateDir = DEFAULT_STATE_DIR,
    listen: Annotated[str, typer.Option(help="host:port for users and for joining regions.")] = "127.0.0.1:7443",
    agent_listen: Annotated[str, typer.Option(help="host:port for region agents.")] = "127.0.0.1:7444",
    metrics_listen: Annotated[
        str, typer.Option(help="host:port for the dashboard, /metrics and /healthz.")
    ] = "127.0.0.1:7445",
    advertise: Annotated[
        list[str] | None,
        typer.Option(help="Public host or host:port of this server; the first one goes into invitations."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="host or host:port of another control plane on the same PostgreSQL database; it goes into invitations."
        ),
    ] = None,
    database_url: DatabaseUrl = None,
    database_url_file: DatabaseUrlFile = None,
    lease: Annotated[str, typer.Option(help="Time after which a region without contact is lost.")] = "30s",
    federation: Annotated[str, typer.Option(help="Name of the federation; fixed at the first start.")] = "geofed",
    region_certificate_life: Annotated[str, typer.Option(help="Lifetime of the regions' certificates.")] = "7d",
    tls_ca_file: Annotated[
        Path | None, typer.Option(help="Certificates of your own CA; with the next two options nothing is issued here.")
    ] = None,
    tls_certificate_file: Annotated[Path | None, typer.Option(help="This server's certificate by your own CA.")] = None,
    tls_key_file: Annotated[Path | None, typer.Option(help="Key of that certificate.")] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=TIME",
            help="How long to keep ended jobs, or their models, logs and the like, as 30d or forever; see `storage`.",
        ),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLACE",
            help="Write the metrics of all jobs there, as `track` of one; may be repeated. {job} is its ID.",
        ),
    ] = None,
    oidc_issuer: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Identity provider (OpenID Connect) by which users sign in: `geofed login`."),
    ] = None,
    oidc_client_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Client that this federation is registered as there.")
    ] = None,
    oidc_client_secret_file: Annotated[
        Path | None, typer.Option(help="File with that client's secret, for sign-ins at the dashboard. Default: none.")
    ] = None,
    oidc_claim: Annotated[
        str, typer.Option(metavar="CLAIM", help="Claim of the ID token that names a user's identity.")
    ] = "email",
    dashboard_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where browsers reach the dashboard, behind an ingress; for sign-ins there."),
    ] = None,
    ready_file: Annotated[Path | None, typer.Option(help="File to write the actual ports to once all listen.")] = None,
    log_format: Annotated[str, typer.Option(help="Format of the log on stderr: text or json.")] = "text",
) -> None:
    """Run the control plane."""
    import asyncio

    from control_plane._durations import parse_duration
    from control_plane.server import ServeConfig
    from control_plane.server import serve as run
    from control_plane.tracking import check_place_of_jobs
    from geofed_pb.logs import configure_logs

    configure_logs(log_format)
    for place in track or ():
        check_place_of_jobs(place)
    try:
        lease_time, certificate_life = parse_duration(lease), parse_duration(region_certificate_life)
    except ValueError as error:
        raise GeofedError("CONFIG_INVALID", str(error)) from None
    config = ServeConfig(
        state_dir=state_dir,
        listen=listen,
        agent_listen=agent_listen,
        metrics_listen=metrics_listen,
        advertise=tuple(advertise or ()),
        peers=tuple(peer or ()),
        database_url=database_url_of(database_url, database_url_file),
        lease=lease_time,
        federation=federation,
        region_certificate_life=certificate_life,
        given=_given(tls_ca_file, tls_certificate_file, tls_key_file),
        ready_file=ready_file,
        keep=_rules(keep or []),
        track=tuple(track or ()),
        oidc=_oidc(oidc_issuer, oidc_client_id, oidc_client_secret_file, oidc_claim, dashboard_url),
        log_format=log_format,
    )
    asyncio.run(run(config))


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
