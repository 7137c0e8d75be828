"""`region list`, `describe`, `invite`, `drain`, `undrain`, `revoke` and `remove`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._view import Data, bytes_text, region_view, time_text, usd_text
from control_plane.cli._completion import complete_region
from control_plane.cli._connect import ask_control_plane, confirm
from control_plane.cli._options import ContextFile, Output, Yes
from control_plane.cli._output import columns, emit, fields, say
from control_plane.cli._settings import Format
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient

app = typer.Typer(name="region", help="Regions of the federation.", no_args_is_help=True)
RegionName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of the region.", show_default=False, autocompletion=complete_region),
]


@app.command("list", epilog="Example: geofed region list -o json")
def list_regions(context: ContextFile = None, output: Output = Format.TABLE) -> None:
    """List the regions with their workers and datasets."""
    views = ask_control_plane(context, _regions)
    emit(views, table=regions_table, name=_name_of)
    if not views:
        say("no regions; invite one: geofed region invite NAME")


@app.command(epilog="Example: geofed region describe frankfurt")
def describe(region: RegionName, context: ContextFile = None, output: Output = Format.TABLE) -> None:
    """Show everything about a region: datasets, capacity, prices, links."""
    views = [view for view in ask_control_plane(context, _regions) if view["name"] == region]
    if not views:
        raise GeofedError("REGION_NOT_FOUND", f"region {region} not found")
    emit(views[0], table=_region_text, name=_name_of)


@app.command(epilog="Example: geofed region invite frankfurt > frankfurt.token")
def invite(
    region: RegionName,
    ttl: Annotated[str, typer.Option(help="How long the token is valid, like 1h.")] = "24h",
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Print a one-time token for a region agent to join the federation."""
    from control_plane._durations import parse_duration

    try:
        life = parse_duration(ttl)
    except ValueError as error:
        raise GeofedError("USAGE", f"--ttl: {error}") from None
    reply = ask_control_plane(context, lambda client: client.invite(region, life))
    data = {"name": region, "token": reply.token, "expires": time_text(reply.expires)}
    emit(data, table=lambda shown: str(shown["token"]), name=_name_of)
    say(f"The token is valid once, until {data['expires']}. Save it to a file on the region's machine, and run there:")
    say(f"  geofed agent join --token-file {region}.token")


Reason = Annotated[str, typer.Option(help="Reason, for the region's history.")]


@app.command(epilog="Example: geofed region drain frankfurt --move")
def drain(
    region: RegionName,
    move: Annotated[bool, typer.Option("--move", help="Replan its running jobs without it, where possible.")] = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Let a region have no new jobs; the running ones continue to their end."""
    _change(context, region, "drain", move=move)


@app.command(epilog="Example: geofed region undrain frankfurt")
def undrain(region: RegionName, context: ContextFile = None, output: Output = Format.TABLE) -> None:
    """Give a drained region new jobs again."""
    _change(context, region, "undrain")


@app.command(epilog="Example: geofed region revoke frankfurt --yes")
def revoke(
    region: RegionName,
    reason: Reason = "",
    yes: Yes = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Revoke a region at once: its certificates and invitations become invalid everywhere, and its jobs fail."""
    confirm(f"Revoke the certificates of region {region}? Its jobs fail.", yes=yes)
    _change(context, region, "revoke", reason)


@app.command(epilog="Example: geofed region remove frankfurt --yes")
def remove(
    region: RegionName,
    reason: Reason = "",
    yes: Yes = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Revoke a region's certificates and forget the region; it must have no jobs."""
    confirm(f"Remove region {region}?", yes=yes)
    _change(context, region, "remove", reason)


def _change(context: Path | None, region: str, change: str, reason: str = "", *, move: bool = False) -> None:
    async def ask(client: ControlClient) -> Data:
        return region_view(await client.change_region(region, change, reason, move=move))

    emit(ask_control_plane(context, ask), table=_region_text, name=_name_of)


async def _regions(client: ControlClient) -> list[Data]:
    return [region_view(region) for region in await client.regions()]


def regions_table(views: list[Data]) -> str:
    """Format regions as a table, one row each; with their devices, where one states any."""
    devices = [_devices_text(view["capacity"] or {}, brief=True) for view in views]
    there = any(devices)
    return columns(
        [
            "REGION", "CLOUD", "STATE", "WORKERS", *(["DEVICES"] * there), "DATASETS", "ISOLATION", "LAST CONTACT",
            "AGENT", "CONDITION",
        ],
        [
            [
                view["name"],
                view["cloud"],
                view["state"],
                _workers_text(view["capacity"]) if view["capacity"] else "",
                *([has] * there),
                ",".join(held["name"] for held in view["datasets"]),
                view["isolation"],
                view["last_contact"] or "",
                view["agent_version"],
                view["condition"],
            ]
            for view, has in zip(views, devices, strict=True)
        ],
        leave_out=("LAST CONTACT", "AGENT", "CLOUD", "DATASETS", "CONDITION"),
    )  # fmt: skip


def _workers_text(capacity: Data) -> str:
    preemptible = capacity.get("preemptible", 0)
    return f"{capacity['workers']}" + (f" + {preemptible} preemptible" if preemptible else "")


def _devices_text(capacity: Data, *, brief: bool = False) -> str:
    """Return the region's accelerators, such as "4 x NVIDIA H100, 81920 MB each"; empty: it states none. ``brief``:
    without their memory."""
    devices = capacity.get("devices")
    if not devices:
        return ""
    memory = f", {devices['memory_mb']} MB each" if devices["memory_mb"] and not brief else ""
    return f"{devices['count']} x {devices['kind']}{memory}"


def _region_text(view: Data) -> str:
    capacity, prices = view["capacity"] or {}, view["prices"]
    parts = [
        fields(
            [
                ("region", view["name"]),
                ("cloud", view["cloud"]),
                ("state", view["state"]),
                ("condition", view["condition"]),
                ("last contact", view["last_contact"]),
                ("agent", view["agent_version"]),
                ("certificate", f"until {view['certificate_expires']}" if view["certificate_expires"] else ""),
                ("workers", _workers_text(capacity) if capacity else ""),
                ("memory", f"at most {capacity['memory_mb']} MB per function" if capacity else ""),
                ("devices", _devices_text(capacity)),
                ("samples/s", capacity.get("samples_per_second")),
                ("channel", f"{view['channel']}, unencrypted" if view["channel_plaintext"] else view["channel"]),
                ("isolation", view["isolation"]),
            ]
        )
    ]
    if view["datasets"]:
        rows = [
            [held["name"], split, part["samples"], _size(part), _residency(held["residency"])]
            for held in view["datasets"]
            for split, part in held["splits"].items()
        ]
        parts.append(columns(["DATASET", "SPLIT", "SAMPLES", "SIZE", "RESIDENCY"], rows))
    if view["links"]:
        rows = [
            [link["destination"], f"{link['rtt_ms']:g}", f"{link['mbps']:g}", link["basis"]] for link in view["links"]
        ]
        parts.append(columns(["LINK TO", "RTT MS", "MBIT/S", "BASIS"], rows))
    if prices:
        parts.append(_prices_table(prices))
    return "\n\n".join(parts)


def _size(part: Data) -> str:
    """Format the size; it is known only of datasets that other regions may process."""
    return bytes_text(part["bytes"]) if part.get("bytes") is not None else "-"


def _residency(rule: str | list[str]) -> str:
    return rule if isinstance(rule, str) else ", ".join(rule)


def _prices_table(prices: Data) -> str:
    rows = [
        ["function", usd_text(prices["function_usd_per_gb_second"]), "GB-s"],
        *([["device", usd_text(price), "s"]] if (price := prices.get("device_usd_per_second")) else []),
        ["function call", usd_text(prices["function_usd_per_request"]), "call"],
        ["parameter server", usd_text(prices["server_usd_per_hour"]), "h"],
        ["egress", usd_text(prices["egress_usd_per_gb"]), "GB"],
        *([f"egress to {other}", usd_text(price), "GB"] for other, price in prices["egress_to"].items()),
    ]
    return columns(["PRICE", "USD", "PER"], rows) + f"\n(from {prices['source']}, {prices['as_of']})"


def _name_of(view: Data) -> str:
    return str(view["name"])
