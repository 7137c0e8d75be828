"""`catalogue regions`, `prices`, `shards` and `import`: query clouds for the prices of a region file, and for data."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

from control_plane._view import Data, bytes_text
from control_plane.cli._options import Output
from control_plane.cli._output import columns, emit, say
from control_plane.cli._settings import Format
from control_plane.clouds import CLOUDS, Price, Purchase, RegionPrices, StorePrices
from geofed_pb.errors import GeofedError

app = typer.Typer(
    name="catalogue", help="Cloud regions, their prices, and shards in object stores.", no_args_is_help=True
)

_KEYS = ("functionUsdPerGbSecond", "functionUsdPerRequest", "serverUsdPerHour", "egressUsdPerGb")
"""Keys of `prices` in a region file, in the file's order."""
Cloud = Annotated[str, typer.Option("--cloud", help=f"One of {', '.join(CLOUDS)}.", show_default=False)]
RegionOfCloud = Annotated[str, typer.Option("--region", help="Region, by the cloud's name for it.", show_default=False)]
MachineType = Annotated[
    str,
    typer.Option(
        "--type", help="Machine type of the parameter server, by the cloud's name for it.", show_default=False
    ),
]
Bought = Annotated[Purchase, typer.Option("--purchase", help="How the machine is bought.")]
Profile = Annotated[str | None, typer.Option(help="Profile in the AWS configuration; aws only.")]
Endpoint = Annotated[str | None, typer.Option("--endpoint-url", help="API endpoint to use instead of the public one.")]
UsdPerCny = Annotated[
    float | None,
    typer.Option(
        "--usd-per-cny", help="Exchange rate for Tencent accounts of mainland China, whose prices are in CNY."
    ),
]


@app.command(epilog="Example: geofed catalogue regions --cloud azure")
def regions(
    cloud: Cloud,
    profile: Profile = None,
    endpoint_url: Endpoint = None,
    usd_per_cny: UsdPerCny = None,
    output: Output = Format.TABLE,
) -> None:
    """List a cloud's regions."""
    from control_plane.clouds import open_cloud

    opened = open_cloud(cloud, profile=profile, endpoint_url=endpoint_url, usd_per_cny=usd_per_cny)
    views = [{"name": region.name, "title": region.title} for region in opened.regions()]
    emit(views, table=_regions_table, name=lambda view: str(view["name"]))


@app.command(epilog="Example: geofed catalogue prices --cloud azure --region westeurope --type Standard_F16s_v2")
def prices(
    cloud: Cloud,
    region: RegionOfCloud,
    machine_type: MachineType,
    purchase: Bought = Purchase.ON_DEMAND,
    egress_to: Annotated[
        list[str] | None,
        typer.Option(
            "--egress-to",
            metavar="NAME=REGION",
            help="Also the egress price to REGION, for the region NAME of the federation.",
        ),
    ] = None,
    profile: Profile = None,
    endpoint_url: Endpoint = None,
    usd_per_cny: UsdPerCny = None,
    output: Output = Format.TABLE,
) -> None:
    """Query a cloud for a region's prices; print them as a block for the region file."""
    from control_plane.clouds import open_cloud, region_prices

    destinations = dict(_pair(text) for text in egress_to or ())
    opened = open_cloud(cloud, profile=profile, endpoint_url=endpoint_url, usd_per_cny=usd_per_cny)
    _emit_prices(region_prices(opened, region, machine_type, purchase, destinations))


@app.command(
    "import", epilog="Example: geofed catalogue import prices.csv --cloud aws --region r --type t --as-of 2026-11"
)
def import_prices(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CSV; see docs/catalogue.md.", show_default=False)],
    cloud: Annotated[str, typer.Option("--cloud", help="Cloud, as named in the file.", show_default=False)],
    region: RegionOfCloud,
    machine_type: MachineType,
    as_of: Annotated[
        str, typer.Option("--as-of", metavar="DATE", help="Date of the file's prices.", show_default=False)
    ],
    purchase: Bought = Purchase.ON_DEMAND,
    output: Output = Format.TABLE,
) -> None:
    """Read a region's prices from a price file; print them as a block for the region file."""
    from control_plane.clouds import open_price_file, region_prices

    _emit_prices(region_prices(open_price_file(file, cloud, as_of), region, machine_type, purchase))


@app.command(epilog="Example: geofed catalogue shards s3://bucket/digits/")
def shards(
    uri: Annotated[
        str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="Bucket and prefix of the shards.", show_default=False)
    ],
    cloud: Annotated[str, typer.Option("--cloud", help="aws, or tencent for COS.")] = "aws",
    region: Annotated[str | None, typer.Option("--region", help="Region of the bucket; required for tencent.")] = None,
    profile: Profile = None,
    endpoint_url: Endpoint = None,
    output: Output = Format.TABLE,
) -> None:
    """List a dataset's shards in an object store."""
    from control_plane.clouds import open_cloud

    scheme, _, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise GeofedError("USAGE", f"{uri!r} is not an S3 address", hint="write it like s3://bucket/prefix")
    found = open_cloud(cloud, region=region, profile=profile, endpoint_url=endpoint_url).shards(bucket, prefix)
    if not found.shards:
        raise GeofedError("SHARD_UNREADABLE", f"no objects found under {uri}", hint="check the bucket and the prefix")
    data = {
        "uri": uri,
        "region": found.region,
        "bytes": found.total_bytes,
        "shards": [{"uri": f"s3://{bucket}/{shard.key}", "bytes": shard.size_bytes} for shard in found.shards],
    }
    emit(data, table=_shards_table, name=lambda view: "\n".join(shard["uri"] for shard in view["shards"]))
    count = len(found.shards)
    say(f"{count} {'object' if count == 1 else 'objects'}, {bytes_text(found.total_bytes)}, in {found.region}")


def _pair(text: str) -> tuple[str, str]:
    name, sign, place = text.partition("=")
    if not (name and sign and place):
        raise GeofedError(
            "USAGE", f"--egress-to {text!r} is not of the form NAME=REGION", hint="write it like virginia=us-east-1"
        )
    return name, place


def _emit_prices(found: RegionPrices) -> None:
    emit(_prices_view(found), table=lambda _: _block(found), name=lambda view: f"{view['region']}/{view['type']}")
    if found.unknown:
        say(f"unknown prices, to be added before the region can join: {', '.join(found.unknown)}")
        for why in dict.fromkeys(str(error.message) for error in found.unknown.values()):
            say(f"  {why}")


def _prices_view(found: RegionPrices) -> Data:
    known = found.known
    store = found.store
    return {
        "cloud": found.cloud,
        "region": found.region,
        "type": found.machine_type,
        "purchase": found.purchase.value,
        "prices": {
            "source": found.source,
            "asOf": found.as_of,
            **{key: known[key].usd for key in _KEYS if key in known},
            "egressTo": {name: price.usd for name, price in found.egress_to.items() if isinstance(price, Price)},
        },
        "store_prices": _store_view(store) if isinstance(store, StorePrices) else None,
        "origins": {key: _origin(price) for key, price in known.items()},
        "unknown": {key: why.as_dict() for key, why in found.unknown.items()},
    }


def _store_view(store: StorePrices) -> Data:
    return {
        "source": "; ".join(dict.fromkeys(price.provenance.source for price in (store.put, store.get))),
        "asOf": min(store.put.provenance.as_of, store.get.provenance.as_of),
        "usdPerPut": store.put.usd,
        "usdPerGet": store.get.usd,
    }


def _origin(price: Price) -> Data:
    provenance = price.provenance
    return {
        "usd": price.usd,
        "unit": price.unit.value,
        "source": provenance.source,
        "as_of": provenance.as_of,
        "confidence": provenance.confidence.value,
    }


def _block(found: RegionPrices) -> str:
    """Format `prices` for a region file. Unknown prices are left out, so that an incomplete file is refused."""
    known = found.known
    lines = ["prices:", f"  source: {_quoted(found.source)}", f"  asOf: {_quoted(found.as_of)}"]
    for key in _KEYS:
        if key in known:
            provenance = known[key].provenance
            value = f"  {key}: {_plain(known[key])}"
            lines.append(f"{value:<44}  # {provenance.confidence}, {provenance.as_of}: {provenance.source}")
        else:
            lines.append(f"  # {key}: unknown")
    elsewhere = {name: price for name, price in found.egress_to.items() if isinstance(price, Price)}
    if elsewhere:
        lines.append("  egressTo:")
        lines += [f"    {_quoted(name)}: {_plain(price)}" for name, price in elsewhere.items()]
    lines += [f"  # egressTo.{name}: unknown" for name in found.egress_to if name not in elsewhere]
    if isinstance(found.store, StorePrices):
        view, store = _store_view(found.store), found.store
        lines += [
            "# and for `channel`, if it is a bucket in this region:",
            "#   prices:",
            f"#     source: {_quoted(str(view['source']))}",
            f"#     asOf: {_quoted(str(view['asOf']))}",
            f"#     usdPerPut: {_plain(store.put)}",
            f"#     usdPerGet: {_plain(store.get)}",
        ]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Quote a YAML string, since YAML would parse an unquoted date as a date."""
    return json.dumps(text, ensure_ascii=False)


def _plain(price: Price) -> str:
    return format(Decimal(repr(price.usd)), "f")


def _regions_table(views: list[Data]) -> str:
    return columns(["REGION", "NAME"], [[view["name"], view["title"]] for view in views])


def _shards_table(view: Data) -> str:
    return columns(["SHARD", "BYTES"], [[shard["uri"], shard["bytes"]] for shard in view["shards"]])
