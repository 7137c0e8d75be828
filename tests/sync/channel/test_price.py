"""What the use of a store costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.channel_prices import REQUEST_PRICES, cost_usd

from geofed_pb.errors import GeofedError
from sync.channel import Usage

EVERYTHING = Usage(puts=1, gets=1, misses=1, looks=1, deletes=1, lists=1, waits=1, failures=1, bytes_in=1, bytes_out=1)


def test_each_kind_of_request_has_its_price() -> None:
    usage = Usage(puts=1000, gets=600, misses=300, looks=100, deletes=10_000, lists=2, bytes_in=10**12)
    assert cost_usd(usage, REQUEST_PRICES["s3/us-east-1"]) == pytest.approx(0.005 + 0.0004 + 2 * 5e-6)


def test_bytes_have_a_price_where_the_store_asks_one() -> None:
    express = REQUEST_PRICES["s3-express/us-east-1"]
    assert cost_usd(Usage(bytes_in=10**9), express) == pytest.approx(0.0032)
    assert cost_usd(Usage(bytes_out=10**9), express) == pytest.approx(0.0006)


def test_refused_requests_are_not_charged() -> None:
    assert cost_usd(Usage(failures=1000), REQUEST_PRICES["s3/us-east-1"]) == 0


@pytest.mark.parametrize("name", ["put", "get", "list", "delete", "gb_in", "gb_out"])
def test_an_unknown_price_is_an_error_once_it_is_used(name: str) -> None:
    prices = replace(REQUEST_PRICES["s3/us-east-1"], **{name: None})
    with pytest.raises(GeofedError, match=name) as raised:
        cost_usd(EVERYTHING, prices)
    assert raised.value.code == "PRICE_UNKNOWN"
    assert cost_usd(Usage(), prices) == 0


def test_what_k_reduce_asks_of_s3_in_one_iteration_costs_what_the_formula_says() -> None:
    workers, k = 16, 4
    usage = Usage(puts=k * workers, gets=2 * k * (workers - 1))
    expected = 5e-6 * k * workers + 4e-7 * 2 * k * (workers - 1)
    assert cost_usd(usage, REQUEST_PRICES["s3/us-east-1"]) == pytest.approx(expected)
    assert cost_usd(usage, REQUEST_PRICES["cos/singapore"]) == pytest.approx(3e-7 * (usage.puts + usage.gets))


def test_every_price_says_where_it_comes_from() -> None:
    for prices in REQUEST_PRICES.values():
        assert prices.source
        assert prices.as_of
        assert prices.confidence in ("high", "low")


def test_usages_add_up() -> None:
    assert Usage(*[2] * 10) == EVERYTHING + EVERYTHING
    assert EVERYTHING.requests == 8
