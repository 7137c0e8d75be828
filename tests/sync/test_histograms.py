"""Histograms of an evaluation: sums over regions, limits, counts that are withheld, quantiles."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geofed_pb.v1 import common_pb2
from sync.histograms import (
    MOST_BINS,
    Histogram,
    bounded,
    by_category,
    from_messages,
    quantile,
    sums_by_name,
    to_messages,
    without_small_counts,
)

EDGES = (0.0, 1.0, 2.0, 4.0)
_COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=8)
_LEVELS = st.dictionaries(st.text("abcdé", min_size=1, max_size=3), st.integers(1, 40), max_size=6)


def _numbers(counts: list[int]) -> Histogram:
    return Histogram(edges=tuple(map(float, range(len(counts) + 1))), counts=tuple(counts))


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"edges": EDGES, "counts": (1, 2)}, "2 counts for 4 bin edges"),
        ({"edges": (0.0, 0.0), "counts": (1,)}, "not finite and strictly increasing"),
        ({"edges": (0.0, float("inf")), "counts": (1,)}, "not finite and strictly increasing"),
        ({"edges": EDGES, "categories": ("a",), "counts": (1, 2, 3)}, "3 counts for 4 bin edges and 1 categories"),
        ({"categories": ("a",), "counts": (-1,)}, "not between 0 and"),
        ({"categories": ("a",), "counts": (2**60,)}, "not between 0 and"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Histogram(**parts)  # type: ignore[arg-type]


@given(parts=st.lists(_LEVELS, min_size=1, max_size=5), order=st.randoms())
def test_sums_of_levels_are_those_of_all_samples_in_any_order(parts: list[dict[str, int]], order: object) -> None:
    expected: dict[str, int] = {}
    for part in parts:
        for level, count in part.items():
            expected[level] = expected.get(level, 0) + count
    shuffled = list(parts)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    sums, told = sums_by_name([{"kind": by_category(part.items())} for part in shuffled])
    assert (sums, told) == ({"kind": by_category(expected.items())}, "")
    assert list(sums["kind"].counts) == sorted(sums["kind"].counts, reverse=True)


def test_histograms_with_other_bins_are_left_out_and_named() -> None:
    sums, told = sums_by_name(
        [
            {"age": Histogram(EDGES, counts=(1, 0, 2)), "size": _numbers([1])},
            {"age": Histogram(EDGES, counts=(4, 0, 0)), "size": _numbers([1, 2])},
            {"age": Histogram(EDGES, counts=(0, 0, 1), withheld=2), "size": _numbers([1])},
        ]
    )
    assert sums == {"age": Histogram(EDGES, counts=(5, 0, 3), withheld=2)}
    assert told == "histograms with different bins are left out: size"


@given(counts=_COUNTS, least=st.integers(2, 20))
def test_no_small_count_leaves_and_none_is_what_is_missing(counts: list[int], least: int) -> None:
    shown = without_small_counts(_numbers(counts), least)
    left_out = [a for a, b in zip(counts, shown.counts, strict=True) if a != b]
    assert all(count == 0 or count >= least for count in shown.counts)
    assert all(b in (0, a) for a, b in zip(counts, shown.counts, strict=True))
    assert shown.withheld == len(left_out)
    # Who knows the number of all samples learns the sum of what is left out: it is not small, or nothing else is left.
    assert not left_out or sum(left_out) >= least or not shown.total
    if all(count == 0 or count >= least for count in counts):
        assert shown == _numbers(counts)


def test_a_level_with_few_samples_is_not_named() -> None:
    shown = without_small_counts(by_category({"monthly": 40, "yearly": 12, "rare": 3}.items()), 5)
    assert shown == Histogram(categories=("monthly",), counts=(40,), withheld=2)
    assert without_small_counts(by_category({"rare": 3}.items()), 5) == Histogram(withheld=1)


@given(
    values=st.lists(st.floats(0, 10, exclude_max=True), min_size=1, max_size=200),
    part=st.sampled_from([0.05, 0.5, 0.9]),
)
def test_a_quantile_is_within_a_bin_of_that_of_the_samples(values: list[float], part: float) -> None:
    edges = np.linspace(0, 10, 21)
    counts, _ = np.histogram(values, edges)
    found = quantile(Histogram(tuple(edges.tolist()), counts=tuple(counts.tolist())), part)
    assert found is not None
    exact = float(np.quantile(values, part, method="inverted_cdf"))
    assert abs(found - exact) <= 0.5 + 1e-9


def test_no_samples_and_levels_have_no_quantile() -> None:
    assert quantile(_numbers([0, 0]), 0.5) is None
    assert quantile(by_category({"a": 3}.items()), 0.5) is None
    assert quantile(_numbers([0, 4, 0]), 1.0) == 2.0


def test_histograms_are_bounded_and_small_ones_stay() -> None:
    many = by_category((f"level {number:05}", 1 + number % 7) for number in range(2 * MOST_BINS))
    first, wide = _numbers([1, 2]), _numbers([1] * 600)
    kept, told = bounded({"ids": many, "wide": wide, "first": first, "other ids": many})
    assert (list(kept), kept["first"], kept["wide"]) == (["ids", "wide", "first", "other ids"], first, wide)
    assert sum(len(one.counts) for one in kept.values()) <= MOST_BINS
    assert (len(kept["ids"].counts) + kept["ids"].withheld, told) == (2 * MOST_BINS, "")
    assert min(kept["ids"].counts) == 7
    kept, told = bounded({"wide": _numbers([1] * 700), "wider": _numbers([1] * 701)})
    assert list(kept) == ["wide"]
    assert told.startswith("the histograms have more than 1,000 bins")
    named = {str(number): Histogram() for number in range(3 * MOST_BINS)}
    assert len(bounded(named)[0]) <= MOST_BINS


def test_sums_never_fail_whatever_a_region_reports() -> None:
    """One region's report must not stop what the others have reported."""
    most = Histogram((0.0, 1.0), counts=(2**53,), withheld=2**53)
    sums, _ = sums_by_name([{"age": most, "ward": by_category([("a", 2**53)], 2**53)}] * 3)
    assert sums["age"] == most
    assert sums["ward"] == by_category([("a", 2**53)], 2**53)
    ids = Histogram((), tuple(map(str, range(MOST_BINS + 1))), (1,) * (MOST_BINS + 1), 2**53)
    assert from_messages(to_messages({"ids": ids}))[0]["ids"].withheld == 2**53
    assert without_small_counts(most, 2**53).counts == (2**53,)
    assert without_small_counts(Histogram((0.0, 1.0), counts=(1,), withheld=2**53), 5).withheld == 2**53


def test_names_have_one_line_and_equal_ones_are_added_up() -> None:
    kept, _ = bounded({"a\nb": by_category([("x\n y", 2), ("x y", 3), ("z" * 500, 1)])})
    (one,) = kept.values()
    assert list(kept) == ["a b"]
    assert (one.categories[0], one.counts) == ("x y", (5, 1))
    assert len(one.categories[1]) < 100


def test_messages_of_a_peer_are_checked() -> None:
    whole = {"age": Histogram(EDGES, counts=(1, 0, 2), withheld=1), "kind": by_category({"a": 2, "b": 1}.items())}
    assert from_messages(to_messages(whole)) == (whole, "")
    bad = {"x": common_pb2.Histogram(edges=[1.0, 0.0], counts=[1])}
    assert from_messages(bad) == (
        {},
        "the histogram x is not valid: the bin edges are not finite and strictly increasing",
    )
    control = {"a\x1b[2J": common_pb2.Histogram(categories=["b\x1b"], counts=[1])}
    (name,), (one,) = zip(*from_messages(control)[0].items(), strict=True)
    assert not any("\x1b" in text for text in itertools.chain([name], one.categories))
