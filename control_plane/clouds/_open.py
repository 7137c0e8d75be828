"""Open the adapter of a cloud, and load its SDK only then."""

from __future__ import annotations

from pathlib import Path

from control_plane.clouds._contract import Cloud
from geofed_pb.errors import GeofedError, install_hint

_THROUGH_LIBCLOUD = ("azure", "digitalocean", "gcp")
CLOUDS = ("aws", *_THROUGH_LIBCLOUD, "tencent")
_SDKS = ("boto3", "botocore", "libcloud", "tencentcloud")


def open_cloud(
    name: str,
    *,
    region: str | None = None,
    endpoint_url: str | None = None,
    profile: str | None = None,
    usd_per_cny: float | None = None,
) -> Cloud:
    """Return the adapter of one of ``CLOUDS``.

    Args:
        region: region of the object store.
        endpoint_url: API endpoint to use instead of the public one.
        profile: profile in the AWS configuration (aws only).
        usd_per_cny: exchange rate for Tencent accounts of mainland China, whose prices are in CNY.

    Raises ``GeofedError``: ``USAGE`` for an unknown cloud or an option that it does not support; ``CLOUD_SDK_MISSING``
    with the extra to install; ``UNAUTHENTICATED`` if the SDK finds no credentials.
    """
    if name not in CLOUDS:
        raise GeofedError("USAGE", f"unknown cloud {name!r}", hint=f"supported clouds: {', '.join(CLOUDS)}")
    given = {"profile": profile, "usd_per_cny": usd_per_cny, "endpoint_url": endpoint_url}
    taken = {"aws": {"profile", "endpoint_url"}, "tencent": {"usd_per_cny", "endpoint_url"}}.get(name, set())
    for option, value in given.items():
        if value is not None and option not in taken:
            raise GeofedError("USAGE", f"--{option.replace('_', '-')} is not supported for {name}")
    try:
        if name == "aws":
            from control_plane.clouds._aws import AwsCloud

            return AwsCloud(region=region, endpoint_url=endpoint_url, profile=profile)
        if name == "tencent":
            from control_plane.clouds._tencent import TencentCloud

            return TencentCloud(region=region, endpoint_url=endpoint_url, usd_per_cny=usd_per_cny)
        from control_plane.clouds._libcloud import open_libcloud

        return open_libcloud(name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _SDKS:
            raise
        extra = "libcloud" if name in _THROUGH_LIBCLOUD else name
        text = f"{name} requires {package}, which is not installed"
        raise GeofedError("CLOUD_SDK_MISSING", text, hint=install_hint(extra)) from None


def open_price_file(path: Path, cloud: str, as_of: str) -> Cloud:
    """Read a cloud's prices from a CSV file with the columns cloud, region, instance_type, purchase, usd_per_hour.

    ``as_of`` is the ISO date of the prices. Raises ``GeofedError``: ``CONFIG_INVALID`` with the line of an error;
    ``USAGE`` if the file does not have the cloud.
    """
    from control_plane.clouds._file import PriceFile

    return PriceFile.load(path, cloud, as_of)
