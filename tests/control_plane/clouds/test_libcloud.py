"""Azure, Google Cloud and DigitalOcean: libcloud's own list, and recorded answers over HTTP through libcloud.

libcloud's transport is told to go to this machine, by the class that its connections make it of.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import libcloud.pricing
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from libcloud.common.base import Connection
from libcloud.http import LibcloudConnection

from control_plane.clouds import CloudRegion, Confidence, Purchase, open_cloud
from control_plane.clouds._libcloud import DigitalOcean, GoogleCloud, open_libcloud
from control_plane.clouds._retry import retries
from geofed_pb.errors import GeofedError
from tests.control_plane.clouds.recorded import Answer, Site, serving

AT_ONCE = retries(attempts=3, first_seconds=0.0)
ZONES = ("europe-west3-a", "europe-west3-b", "us-central1-a")
SHAPES = {"n2-standard-16": (16, 65536), "n2d-standard-16": (16, 65536), "e2-micro": (2, 1024), "zz-standard-4": (4, 1)}
SIZES = [("s-1vcpu-1gb", 0.00893, ["fra1"]), ("c-4", 0.125, ["fra1", "nyc1"]), ("gd-2vcpu", 0.1, ["nyc1"])]


def digital_ocean(environ: dict[str, Any], _: bytes) -> tuple[str, Answer]:
    path, query = environ["PATH_INFO"], urllib.parse.parse_qs(environ["QUERY_STRING"])
    if environ["HTTP_AUTHORIZATION"] != "Bearer token":
        return path, Answer({"id": "unauthorized", "message": "Unable to authenticate you"}, 401)
    if path == "/v2/regions":
        named = [("nyc1", "New York 1", True), ("fra1", "Frankfurt 1", True), ("old1", "Old 1", False)]
        regions = [{"slug": s, "name": n, "available": a, "features": [], "sizes": []} for s, n, a in named]
        return path, Answer({"regions": regions, "links": {}, "meta": {"total": 3}})
    page = int(query.get("page", ["1"])[0])
    slug, usd, places = SIZES[page - 1]
    size = {"slug": slug, "memory": 1024, "vcpus": 1, "disk": 25, "transfer": 1.0, "regions": places}
    last = f"https://api.digitalocean.com/v2/sizes?page={len(SIZES)}&per_page=1"
    links = {"pages": {"last": last}}
    body = {"sizes": [{**size, "price_monthly": 5.0, "price_hourly": usd}], "links": links, "meta": {"total": 3}}
    return path, Answer(body)


def google(environ: dict[str, Any], _: bytes) -> tuple[str, Answer]:
    path = environ["PATH_INFO"]
    base = "https://www.googleapis.com/compute/v1/projects/ours"
    if environ["REQUEST_METHOD"] == "POST":
        return "token", Answer({"access_token": "t", "expires_in": 3600, "token_type": "Bearer"})
    if path.endswith("/zones"):
        zones = [
            {
                "kind": "compute#zone",
                "id": str(index),
                "name": name,
                "status": "UP",
                "region": f"{base}/regions/{name[:-2]}",
                "selfLink": f"{base}/zones/{name}",
            }
            for index, name in enumerate(ZONES)
        ]
        return "zones", Answer({"kind": "compute#zoneList", "items": zones})
    if "/aggregated/" in path or path.endswith("/regions"):
        return "list", Answer({"items": {} if "/aggregated/" in path else []})
    zone, name = path.split("/zones/")[1].split("/")[0], path.rpartition("/")[2]
    if "/machineTypes/" not in path:
        return "zone", Answer({"id": "1", "name": zone, "status": "UP", "selfLink": f"{base}/zones/{zone}"})
    if name not in SHAPES or zone == "europe-west3-a":
        return name, Answer({"error": {"code": 404, "message": "The resource was not found"}}, 404)
    cpus, memory = SHAPES[name]
    shape = {"id": "7", "name": name, "guestCpus": cpus, "memoryMb": memory, "zone": zone}
    return name, Answer(
        {"kind": "compute#machineType", **shape, "selfLink": f"{base}/zones/{zone}/machineTypes/{name}"}
    )


@pytest.fixture
def to_here(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Site]:
    with serving(request.param) as site:
        port = int(site.url.rpartition(":")[2])

        class ToHere(LibcloudConnection):
            def __init__(self, host: str, *_: Any, **options: Any) -> None:
                super().__init__("127.0.0.1", port, secure=False, timeout=options.get("timeout"))

        monkeypatch.setattr(Connection, "conn_class", ToHere)
        yield site


@pytest.fixture
def ocean(to_here: Site, monkeypatch: pytest.MonkeyPatch) -> DigitalOcean:
    monkeypatch.setenv("DIGITALOCEAN_ACCESS_TOKEN", "token")
    return DigitalOcean(AT_ONCE)


@pytest.fixture
def google_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    pem = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    email = "prices@ours.iam.gserviceaccount.com"
    key = {"type": "service_account", "project_id": "ours", "client_email": email, "private_key": pem.decode()}
    (tmp_path / "key.json").write_text(json.dumps(key))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    return key


def test_azure_is_read_from_the_list_that_libcloud_carries() -> None:
    cloud = open_cloud("azure")
    listed = libcloud.pricing.get_pricing("compute", "azure_linux")
    price = cloud.machine_price("westeurope", "Standard_F16s_v2")
    assert price.usd == listed["standardf16sv2"]["westeurope"] > 0
    assert cloud.machine_price("westeurope", "standardf16sv2").usd == price.usd
    low = cloud.machine_price("westeurope", "Standard_F16s_v2", Purchase.PREEMPTIBLE)
    assert low.usd == listed["lowpriorityf16sv2"]["westeurope"] < price.usd
    assert date(2020, 1, 1) < date.fromisoformat(price.provenance.as_of) < date.today()
    assert price.provenance.confidence is Confidence.LIST
    assert {"westeurope", "japaneast"} <= {region.name for region in cloud.regions()}


def test_zeros_of_the_list_are_unknown() -> None:
    cloud, listed = open_cloud("azure"), libcloud.pricing.get_pricing("compute", "azure_linux")
    listed["standardfree"] = {"westeurope": 0.0}
    try:
        with pytest.raises(GeofedError, match="counts as unknown") as caught:
            cloud.machine_price("westeurope", "Standard_Free")
        assert caught.value.code == "PRICE_UNKNOWN"
    finally:
        del listed["standardfree"]


@pytest.mark.parametrize(
    ("region", "machine_type", "code"),
    [("westeurope", "Standard_Huge", "PRICE_UNKNOWN"), ("atlantis", "Standard_F16s_v2", "CLOUD_REGION_UNKNOWN")],
)
def test_azure_does_not_guess(region: str, machine_type: str, code: str) -> None:
    with pytest.raises(GeofedError) as caught:
        open_cloud("azure").machine_price(region, machine_type)
    assert caught.value.code == code


def test_machines_are_all_that_libcloud_tells() -> None:
    cloud = open_cloud("azure")
    for question in (
        lambda: cloud.function_prices("westeurope"),
        lambda: cloud.store_prices("westeurope"),
        lambda: cloud.egress_price("westeurope"),
    ):
        with pytest.raises(GeofedError) as caught:
            question()
        assert caught.value.code == "PRICE_UNKNOWN"
    with pytest.raises(GeofedError) as caught:
        cloud.shards("bucket", "")
    assert caught.value.code == "USAGE"


@pytest.mark.parametrize("to_here", [digital_ocean], indirect=True)
def test_digital_ocean_names_its_own_prices_page_by_page(ocean: DigitalOcean, to_here: Site) -> None:
    assert ocean.machine_price("fra1", "c-4").usd == 0.125
    assert to_here.asked.count("/v2/sizes") == 3
    assert ocean.regions() == (CloudRegion("fra1", "Frankfurt 1"), CloudRegion("nyc1", "New York 1"))
    for region, machine_type, purchase, code in (
        ("fra1", "gd-2vcpu", Purchase.ON_DEMAND, "PRICE_UNKNOWN"),
        ("fra1", "c-4", Purchase.PREEMPTIBLE, "PRICE_UNKNOWN"),
        ("atlantis", "c-4", Purchase.ON_DEMAND, "CLOUD_REGION_UNKNOWN"),
    ):
        with pytest.raises(GeofedError) as caught:
            ocean.machine_price(region, machine_type, purchase)
        assert caught.value.code == code


@pytest.mark.parametrize("to_here", [digital_ocean], indirect=True)
def test_later_is_asked_again(ocean: DigitalOcean, to_here: Site) -> None:
    to_here.faults += [Answer({"id": "too_many_requests", "message": "slow down"}, 429), Answer({"message": "x"}, 503)]
    assert len(ocean.regions()) == 2
    assert len(to_here.asked) == 3
    to_here.faults += [Answer({"message": "x"}, 503)] * 3
    with pytest.raises(GeofedError) as caught:
        ocean.regions()
    assert caught.value.code == "CLOUD_UNAVAILABLE"


@pytest.mark.parametrize("to_here", [digital_ocean], indirect=True)
def test_a_refusal_has_a_code(ocean: DigitalOcean, to_here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, code in ((403, "FORBIDDEN"), (422, "CLOUD_REFUSED")):
        to_here.faults.append(Answer({"message": "no"}, status))
        with pytest.raises(GeofedError) as caught:
            ocean.regions()
        assert caught.value.code == code
    monkeypatch.setenv("DIGITALOCEAN_ACCESS_TOKEN", "another")
    with pytest.raises(GeofedError) as caught:
        open_cloud("digitalocean").regions()
    assert caught.value.code == "UNAUTHENTICATED"


@pytest.mark.parametrize("to_here", [google], indirect=True)
def test_google_s_shapes_are_priced_with_the_list(google_key: Any, to_here: Site, tmp_path: Path) -> None:
    cloud = open_libcloud("gcp", AT_ONCE)
    prices = libcloud.pricing.get_pricing("compute", "gce_instances")["n2"]
    by_core, by_gb = (prices[part]["on_demand"]["europe-west3"]["price"] for part in ("cpu", "ram"))
    assert cloud.machine_price("europe-west3", "n2-standard-16").usd == pytest.approx(16 * by_core + 64 * by_gb)
    assert [region.name for region in cloud.regions()] == ["europe-west3", "us-central1"]
    assert [path.name for path in tmp_path.iterdir()] == ["key.json"], "no token is written"


@pytest.mark.parametrize("to_here", [google], indirect=True)
@pytest.mark.parametrize("machine_type", ["n2d-standard-16", "e2-micro", "zz-standard-4", "n2-huge"])
def test_google_s_types_that_libcloud_prices_wrongly_are_unknown(
    google_key: Any, to_here: Site, machine_type: str
) -> None:
    with pytest.raises(GeofedError) as caught:
        GoogleCloud(AT_ONCE).machine_price("europe-west3", machine_type)
    assert caught.value.code == "PRICE_UNKNOWN"


@pytest.mark.parametrize("to_here", [google], indirect=True)
def test_google_s_errors_have_codes(google_key: Any, to_here: Site) -> None:
    cloud = GoogleCloud(AT_ONCE)
    with pytest.raises(GeofedError) as caught:
        cloud.machine_price("atlantis-west1", "n2-standard-16")
    assert caught.value.code == "CLOUD_REGION_UNKNOWN"
    for status, code in ((403, "FORBIDDEN"), (401, "UNAUTHENTICATED"), (400, "CLOUD_REFUSED")):
        to_here.faults.append(Answer({"error": {"code": status, "message": "no"}}, status))
        with pytest.raises(GeofedError) as caught:
            cloud.regions()
        assert caught.value.code == code
    often = {"domain": "usageLimits", "reason": "rateLimitExceeded", "message": "later"}
    for status, error in ((503, {"code": 503, "message": "later"}), (403, {"code": 403, "errors": [often]})):
        to_here.asked.clear()
        to_here.faults.append(Answer({"error": error}, status))
        assert len(cloud.regions()) == 2
        assert len(to_here.asked) == 2


@pytest.mark.parametrize("name", ["digitalocean", "gcp"])
def test_without_credentials_nothing_is_asked(name: str) -> None:
    with pytest.raises(GeofedError, match=f"no credentials for {name}") as caught:
        open_cloud(name)
    assert caught.value.code == "UNAUTHENTICATED"


@pytest.mark.parametrize("text", ["", "{}", '{"type": "authorized_user"}'])
def test_a_key_of_google_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "key.json").write_text(text)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    with pytest.raises(GeofedError) as caught:
        open_cloud("gcp")
    assert caught.value.code == "UNAUTHENTICATED"
