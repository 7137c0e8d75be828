"""Options of `serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AdmitByPrice",
    "Advertised",
    "AgentListen",
    "DashboardUrl",
    "FederationName",
    "KeepRules",
    "LeaseTime",
    "Listen",
    "LogFormat",
    "MetricsListen",
    "OidcClaim",
    "OidcClientId",
    "OidcClientSecretFile",
    "OidcIssuer",
    "Peers",
    "Places",
    "ReadyFile",
    "RegionCertificateLife",
    "TlsCaFile",
    "TlsCertificateFile",
    "TlsKeyFile",
]

Listen = Annotated[str, typer.Option(help="host:port for users and for joining regions.")]

AgentListen = Annotated[str, typer.Option(help="host:port for region agents.")]

MetricsListen = Annotated[str, typer.Option(help="host:port for the dashboard, /metrics and /healthz.")]

Advertised = Annotated[
    list[str] | None,
    typer.Option(help="Public host or host:port of this server; the first one goes into invitations."),
]

Peers = Annotated[
    list[str] | None,
    typer.Option(
        help="host or host:port of another control plane on the same PostgreSQL database; it goes into invitations."
    ),
]

LeaseTime = Annotated[str, typer.Option(help="Time after which a region without contact is lost.")]

FederationName = Annotated[str, typer.Option(help="Name of the federation; fixed at the first start.")]

RegionCertificateLife = Annotated[str, typer.Option(help="Lifetime of the regions' certificates.")]

TlsCaFile = Annotated[
    Path | None, typer.Option(help="Certificates of your own CA; with the next two options nothing is issued here.")
]

TlsCertificateFile = Annotated[Path | None, typer.Option(help="This server's certificate by your own CA.")]

TlsKeyFile = Annotated[Path | None, typer.Option(help="Key of that certificate.")]

KeepRules = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND=TIME",
        help="How long to keep ended jobs, or their models, logs and the like, as 30d or forever; see `storage`.",
    ),
]

Places = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PLACE",
        help="Write the metrics of all jobs there, as `track` of one; may be repeated. {job} is its ID.",
    ),
]

OidcIssuer = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Identity provider (OpenID Connect) by which users sign in: `geofed login`."),
]

OidcClientId = Annotated[
    str | None, typer.Option(metavar="ID", help="Client that this federation is registered as there.")
]

OidcClientSecretFile = Annotated[
    Path | None, typer.Option(help="File with that client's secret, for sign-ins at the dashboard. Default: none.")
]

OidcClaim = Annotated[str, typer.Option(metavar="CLAIM", help="Claim of the ID token that names a user's identity.")]

DashboardUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Where browsers reach the dashboard, behind an ingress; for sign-ins there."),
]

AdmitByPrice = Annotated[
    bool,
    typer.Option(
        "--admit-by-price",
        help="While little is free, refuse deadlines of jobs far larger than usual, so that more deadlines are met.",
    ),
]

ReadyFile = Annotated[Path | None, typer.Option(help="File to write the actual ports to once all listen.")]

LogFormat = Annotated[str, typer.Option(help="Format of the log on stderr: text or json.")]
