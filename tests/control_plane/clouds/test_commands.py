"""The commands of the catalogue: what they print goes into a region's file as it is. Missing SDKs, and the page."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import boto3
import pytest
from ruamel.yaml import YAML

from region_agent.config import PricesConfig, load_config
from tests.control_plane.cli.conftest import Run, run
from tests.control_plane.clouds.recorded import Site, serving
from tests.control_plane.clouds.test_price_file import ROWS, written
from tests.control_plane.clouds.test_tencent import Cvm

__all__ = ["run"]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "catalogue.md"
REGION = """\
apiVersion: geofed/v1
kind: Region
metadata: {name: frankfurt}
cloud: aws
capacity: {workers: 8}
"""
ASK = "catalogue prices --region eu-central-1 --type c5.4xlarge --cloud aws --endpoint-url"


def prices_of(folder: Path, block: str) -> PricesConfig | None:
    (folder / "region.yaml").write_text(REGION + block)
    return load_config(folder / "region.yaml").prices


def test_the_block_goes_into_the_region_s_file(run: Run, aws_site: Site, tmp_path: Path) -> None:
    ran = run(*ASK.split(), aws_site.url, "--egress-to", "virginia=us-east-1")
    assert (ran.status, ran.err) == (0, "")
    prices = prices_of(tmp_path, ran.out)
    assert prices is not None
    assert prices.model_dump(exclude={"source"}, exclude_none=True) == {
        "as_of": "2026-11-18",
        "function_usd_per_gb_second": 0.0000166667,
        "function_usd_per_request": 0.0000002,
        "server_usd_per_hour": 0.776,
        "egress_usd_per_gb": 0.09,
        "egress_to": {"virginia": 0.02},
    }
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert ran.out.startswith(example), "the page shows what the command prints"
    channel = YAML(typ="safe").load(re.sub("^# ", "", ran.out.partition("channel`")[2].partition("\n")[2], flags=re.M))
    assert channel["prices"]["usdPerPut"] == 0.0000054
    assert channel["prices"]["usdPerGet"] == 0.00000043


@pytest.mark.slow
def test_the_envelope_has_the_block_and_where_it_comes_from(run: Run, aws_site: Site, tmp_path: Path) -> None:
    ran = run(*ASK.split(), aws_site.url, "-o", "yaml", "--purchase", "preemptible")
    assert ran.status == 0
    data = YAML(typ="safe").load(ran.out)["data"]
    block = re.search(r"^  prices:\n(?:    .*\n)+", ran.out, re.MULTILINE)
    assert block is not None
    prices = prices_of(tmp_path, textwrap.dedent(block[0]))
    assert prices is not None
    assert prices.server_usd_per_hour == data["origins"]["serverUsdPerHour"]["usd"] == 0.301
    assert data["origins"]["serverUsdPerHour"]["confidence"] == "observed"
    assert data["store_prices"]["usdPerGet"] == 0.00000043
    assert data["unknown"] == {}


def test_what_is_not_told_is_missing_and_the_file_is_refused(run: Run, tmp_path: Path) -> None:
    file = str(written(tmp_path, ROWS))
    where = ["--cloud", "gcp", "--region", "europe-west3", "--type", "n2-standard-16", "--as-of", "2025-03-02"]
    ran = run("catalogue", "import", file, *where)
    assert ran.status == 0
    assert "  # egressUsdPerGb: unknown\n" in ran.out
    assert "to be added before the region can join: functionUsdPerGbSecond, functionUsdPerRequest, egress" in ran.err
    with pytest.raises(Exception, match="egressUsdPerGb"):
        prices_of(tmp_path, ran.out)
    told = run("catalogue", "import", file, *where, "-o", "json").data
    assert told["prices"]["serverUsdPerHour"] == 1.001
    assert told["unknown"]["egressUsdPerGb"]["code"] == "PRICE_UNKNOWN"


def test_quotes_of_tencent_are_printed_with_their_rate(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENCENTCLOUD_SECRET_ID", "TENCENTCLOUD_SECRET_KEY"):
        monkeypatch.setenv(name, "AKID")
    where = ["--cloud", "tencent", "--region", "eu-frankfurt", "--type", "S5.4XLARGE64", "--usd-per-cny", "0.14"]
    with serving(Cvm().answer) as site:
        ran = run("catalogue", "prices", *where, "--endpoint-url", site.url, "-o", "json")
        assert ran.data["prices"]["serverUsdPerHour"] == pytest.approx(0.42 * 0.14)
        assert ran.data["prices"]["egressUsdPerGb"] == pytest.approx(0.12 * 0.14)
        assert set(ran.data["unknown"]) == {"functionUsdPerGbSecond", "functionUsdPerRequest"}
        assert ran.data["origins"]["serverUsdPerHour"]["confidence"] == "quoted"
        listed = run("catalogue", "regions", "--cloud", "tencent", "--endpoint-url", site.url)
    assert "eu-frankfurt  Europe (Frankfurt)\n" in listed.out


@pytest.mark.slow
def test_shards_are_told_with_bytes_and_place(run: Run, aws_site: Site) -> None:
    client = boto3.client("s3", endpoint_url=aws_site.url, region_name="eu-central-1")
    client.create_bucket(Bucket="told-shards", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    client.put_object(Bucket="told-shards", Key="digits/train.npz", Body=b"123")
    ran = run("catalogue", "shards", "s3://told-shards/digits/", "--endpoint-url", aws_site.url)
    assert ran.out == "SHARD                              BYTES\ns3://told-shards/digits/train.npz      3\n"
    assert ran.err == "1 object, 3 B, in eu-central-1\n"
    ran = run("catalogue", "shards", "s3://told-shards/none/", "--endpoint-url", aws_site.url, "-o", "json")
    assert (ran.status, ran.error["code"]) == (1, "SHARD_UNREADABLE")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("prices --cloud moon --region r --type t", 2),
        ("prices --cloud azure --region r --type t --endpoint-url http://127.0.0.1", 2),
        ("prices --cloud azure --region r --type t --usd-per-cny 0.1", 2),
        ("prices --cloud azure --region r --type t --egress-to virginia", 2),
        ("prices --cloud azure --region atlantis --type Standard_F16s_v2", 4),
        ("prices --cloud azure --region westeurope --type Standard_Huge", 9),
        ("regions --cloud tencent --profile p", 2),
        ("regions --cloud digitalocean", 5),
        ("shards bucket/prefix", 2),
        ("shards s3:///prefix", 2),
        ("shards s3://bucket/prefix --cloud azure", 2),
        ("import none.csv --cloud aws --region r --type t --as-of 2026-11", 2),
    ],
)
def test_wrong_use_has_its_exit_status(run: Run, arguments: str, status: int) -> None:
    ran = run("catalogue", *arguments.split())
    assert ran.status == status
    assert ran.err
    assert not ran.out
    assert "Traceback" not in ran.err


@pytest.mark.processes
@pytest.mark.parametrize(
    ("package", "cloud", "extra"),
    [
        ("boto3", "aws", "aws"),
        ("tencentcloud", "tencent", "tencent"),
        ("boto3", "tencent", "tencent"),
        ("libcloud", "azure", "libcloud"),
    ],
)
def test_a_missing_sdk_is_told_with_its_extra(package: str, cloud: str, extra: str) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None  # as Python marks what cannot be imported
from control_plane.cli import main
sys.argv = "control-plane catalogue regions --cloud {cloud}".split()
main.main()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "error[CLOUD_SDK_MISSING]" in ran.stderr
    assert f"hint: in a clone of geofed: pip install '.[{extra}]'" in ran.stderr


@pytest.mark.slow
def test_the_commands_of_the_page_are_understood(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as it stands there; without credentials those that need some end with that, and none with wrong use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    written(tmp_path, ROWS)
    calls = re.findall(r"^    geofed (catalogue .*)$", PAGE.read_text(), re.MULTILINE)
    assert len(calls) == 6
    statuses = {call: run(*shlex.split(call)).status for call in calls}
    assert statuses == {call: 0 if " import " in call else 5 for call in calls}
