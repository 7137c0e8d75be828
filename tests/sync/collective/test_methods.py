"""What collectives say about themselves, and what other packages' must."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from geofed_pb.errors import GeofedError
from sync.collective import (
    DEFAULT,
    ChannelCosts,
    CollectiveMethod,
    Merges,
    Settings,
    choose,
    collective_named,
    collectives,
    merge_terms,
)
from sync.collective._registry import _check as refusal
from sync.merging._opening import check

S3 = ChannelCosts(0.1, 0.02, 1e8, 1e8, put_usd=5e-6, get_usd=4e-7, parallel=16)


@pytest.mark.parametrize("name", collectives())
def test_its_owners_are_workers(name: str) -> None:
    method = collective_named(name)
    for workers in range(1, 9):
        for k in (None, 1, 3, 100):
            assert (0 if method.shares == "changes" and k is None else 1) <= method.owners(workers, k) <= workers
        assert method.takes_k or method.owners(workers, 3) == method.owners(workers, None)


@pytest.mark.parametrize("name", collectives(lambda method: method.worker))
def test_settings_that_it_does_not_take_are_refused(name: str) -> None:
    method, plain = collective_named(name), Settings(name)
    check(plain, 4)
    for settings, taken in [
        (replace(plain, chunks=2), method.takes_k),
        (replace(plain, groups=2), method.takes_groups),
        (replace(plain, staleness=1), method.takes_staleness),
        *((replace(plain, codec=codec), codec in method.merge_codecs) for codec in ("fp32", "int8", "int4", "ternary")),
    ]:
        if taken:
            check(settings, 4)
        else:
            with pytest.raises(GeofedError) as refused:
                check(settings, 4)
            assert refused.value.code == "CONFIG_INVALID"


def test_what_workers_do_not_do_themselves_they_do_not_open() -> None:
    with pytest.raises(GeofedError, match="server-reduce"):
        check(Settings(DEFAULT), 4)


def test_costs_follow_from_the_owners() -> None:
    """A collective that adds nothing to K-REDUCE but its K is predicted like it."""
    merges = Merges.of([("k-reduce", 8, 4, 1.0), ("all-reduce", 8, 1, 1.0), ("server-reduce", 8, 8, 1.0)])
    terms = merge_terms(merges, 1e6, S3)
    assert (terms.seconds() > 0).all()
    assert terms.puts.tolist() == [32, 8, 9]
    assert np.allclose(terms.usd(S3), terms.puts * 5e-6 + (terms.gets + terms.polls) * 4e-7)
    assert collective_named(choose(8, 1e6, S3).merge.pattern).automatic


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (object(), "not a CollectiveMethod"),
        (CollectiveMethod("more", lambda workers, k: workers + 1), "its owners are 2 of 1 workers"),
        (CollectiveMethod("good", lambda workers, k: 1), ""),
    ],
)
def test_another_packages_collective_must_be_one(method: CollectiveMethod, why: str) -> None:
    assert why in refusal(method, {})
    assert why or not refusal(method, {})
