"""Prices from a file: the real one where it is, and whatever rows else."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.budget import budget

from control_plane.clouds import Confidence, Price, PriceSource, Purchase, Unit, open_price_file, region_prices
from geofed_pb.errors import GeofedError

DATA = Path(__file__).resolve().parents[3] / ".." / "shared" / "data" / "prices" / "instance_prices.csv"
HEAD = ("cloud", "region", "instance_type", "purchase", "usd_per_hour")
ROWS = [
    ("aws", "eu-central-1", "c5.4xlarge", "on_demand", "0.776"),
    ("azure", "westeurope", "standardf16sv2", "on_demand", "0.776"),
    ("azure", "westeurope", "standardf16sv2", "low_priority", "0.155"),
    ("gcp", "europe-west3", "n2-standard-16", "on_demand", "1.001"),
    ("gcp", "europe-west3", "n2-standard-16", "preemptible", "0.242"),
    ("gcp", "europe-west3", "free", "on_demand", "0.0"),
]
words = st.text(st.sampled_from("abcdefgh-19."), min_size=1, max_size=8)


def written(folder: Path, rows: list[tuple[str, ...]], head: tuple[str, ...] = HEAD) -> Path:
    path = folder / "prices.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return path


@pytest.fixture(scope="module")
def price_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real prices, or rows like theirs."""
    return DATA if DATA.exists() else written(tmp_path_factory.mktemp("prices"), ROWS)


@pytest.mark.parametrize(
    ("cloud", "region", "machine_type"), sorted({row[:3] for row in ROWS if float(row[4])}), ids=lambda text: text
)
def test_every_row_answers_as_a_cloud_would(price_file: Path, cloud: str, region: str, machine_type: str) -> None:
    opened = open_price_file(price_file, cloud, "2025-03-02")
    with price_file.open(newline="") as file:
        stated = {
            row["purchase"]: float(row["usd_per_hour"])
            for row in csv.DictReader(file)
            if (row["cloud"], row["region"], row["instance_type"]) == (cloud, region, machine_type)
        }
    assert stated
    for word, usd in stated.items():
        purchase = Purchase.ON_DEMAND if word == "on_demand" else Purchase.PREEMPTIBLE
        price = opened.machine_price(region, machine_type, purchase)
        assert (price.usd, price.unit) == (usd, Unit.HOUR)
        assert (price.provenance.as_of, price.provenance.confidence) == ("2025-03-02", Confidence.LIST)
        assert price_file.name in price.provenance.source
    assert region in {held.name for held in opened.regions()}


def test_what_the_file_does_not_say_is_unknown(tmp_path: Path) -> None:
    opened = open_price_file(written(tmp_path, ROWS), "gcp", "2025-03")
    found = region_prices(opened, "europe-west3", "n2-standard-16", destinations={"virginia": "us-east4"})
    assert set(found.known) == {"serverUsdPerHour"}
    keys = {"functionUsdPerGbSecond", "functionUsdPerRequest", "egressUsdPerGb", "egressTo.virginia"}
    assert {key: error.code for key, error in found.unknown.items()} == dict.fromkeys(keys, "PRICE_UNKNOWN")
    assert isinstance(found.store, GeofedError)
    for region, machine_type, purchase, code in (
        ("europe-west3", "n2-huge", Purchase.ON_DEMAND, "PRICE_UNKNOWN"),
        ("europe-west3", "free", Purchase.ON_DEMAND, "PRICE_UNKNOWN"),
        ("atlantis", "n2-standard-16", Purchase.ON_DEMAND, "CLOUD_REGION_UNKNOWN"),
    ):
        with pytest.raises(GeofedError) as caught:
            opened.machine_price(region, machine_type, purchase)
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([("gcp", "r", "t", "on_demand", "cheap")], ":2: usd_per_hour is not a price: 'cheap'"),
        ([("gcp", "r", "t", "on_demand", "nan")], ":2: usd_per_hour is not a price: 'nan'"),
        ([("gcp", "r", "t", "on_demand", "-1")], ":2: usd_per_hour is not a price: '-1'"),
        ([("gcp", "r", "t", "on_demand")], ":2: usd_per_hour is not a price: None"),
        ([("gcp", "r", "t", "stolen", "1")], ":2: purchase is 'stolen'"),
        ([("gcp", "r", "t", "spot", "1"), ("gcp", "r", "t", "preemptible", "2")], ":3: another price than above"),
    ],
)
def test_a_wrong_row_is_told_with_its_line(tmp_path: Path, rows: list[tuple[str, ...]], told: str) -> None:
    with pytest.raises(GeofedError) as caught:
        open_price_file(written(tmp_path, rows), "gcp", "2025-03-02")
    assert caught.value.code == "CONFIG_INVALID"
    assert told in caught.value.message


def test_files_and_questions_that_are_none(tmp_path: Path) -> None:
    for path, code in (
        (tmp_path / "none.csv", "CONFIG_INVALID"),
        (written(tmp_path, [], ("cloud", "price")), "CONFIG_INVALID"),
    ):
        with pytest.raises(GeofedError) as caught:
            open_price_file(path, "gcp", "2025-03-02")
        assert caught.value.code == code
    path = written(tmp_path, ROWS)
    for cloud, as_of, told in (("moon", "2025-03-02", "no prices of moon"), ("gcp", "last year", "is not a date")):
        with pytest.raises(GeofedError, match=told) as caught:
            open_price_file(path, cloud, as_of)
        assert caught.value.code == "USAGE"


@settings(deadline=None, max_examples=budget(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.tuples(words, words, words, st.sampled_from(["on_demand", "spot"])),
        st.floats(0, 1e3, allow_nan=False),
        min_size=1,
    )
)
def test_every_price_above_zero_comes_back_and_no_other(
    tmp_path: Path, prices: dict[tuple[str, str, str, str], float]
) -> None:
    path = written(tmp_path, [(*key, repr(usd)) for key, usd in prices.items()])
    opened = {cloud: open_price_file(path, cloud, "2026-11-21") for cloud in {key[0] for key in prices}}
    for (cloud, region, machine_type, word), usd in prices.items():
        purchase = Purchase.ON_DEMAND if word == "on_demand" else Purchase.PREEMPTIBLE
        if usd > 0:
            assert opened[cloud].machine_price(region, machine_type, purchase).usd == usd
            continue
        with pytest.raises(GeofedError) as caught:
            opened[cloud].machine_price(region, machine_type, purchase)
        assert caught.value.code == "PRICE_UNKNOWN"


@settings(deadline=None)
@given(st.floats())
def test_a_price_is_above_zero_and_finite_or_an_error(usd: float) -> None:
    provenance = PriceSource("a test", "2026-11-21", Confidence.LIST)
    if math.isfinite(usd) and usd > 0:
        assert Price(usd, Unit.GB, provenance).usd == usd
        return
    with pytest.raises(GeofedError) as caught:
        Price(usd, Unit.GB, provenance)
    assert caught.value.code == "PRICE_UNKNOWN"
