"""Histograms that a task's evaluation returns: samples by bins of a number, or by categories."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, islice, pairwise

from geofed_pb.bounds import clean
from geofed_pb.v1 import common_pb2

__all__ = [
    "MOST_BINS",
    "Histogram",
    "bounded",
    "by_category",
    "from_messages",
    "quantile",
    "sums_by_name",
    "to_message",
    "to_messages",
    "without_small_counts",
]

MOST_BINS = 1000
"""Most bins and categories of all histograms of one evaluation: each of a region's reports has them."""
_NAME_BYTES = 80
"""Longest name of a histogram or a category."""
_MOST_COUNT = 2**53
"""Largest count: float64, and so JSON, has no larger integers exactly. Sums stay there."""


@dataclass(frozen=True)
class Histogram:
    """Samples by bins, which have `edges`, or by categories, which have names."""

    edges: tuple[float, ...] = ()
    """Bin edges, strictly increasing, one more than counts. A bin includes its lower edge, and the last bin its upper
    edge, too. Empty: the counts are of categories."""
    categories: tuple[str, ...] = ()
    """Names, the most frequent category first."""
    counts: tuple[int, ...] = ()
    """Samples of each bin or category. 0 also stands for a bin that is not reported."""
    withheld: int = 0
    """Number of bins and categories that are not reported, added up over the regions."""

    def __post_init__(self) -> None:
        """Check that the parts fit. Raises ``ValueError`` if they do not."""
        expected = len(self.edges) - 1 if self.edges else len(self.categories)
        if len(self.counts) != expected or (self.edges and self.categories):
            text = f"{len(self.counts)} counts for {len(self.edges)} bin edges and {len(self.categories)} categories"
            raise ValueError(text)
        if not all(map(math.isfinite, self.edges)) or any(low >= high for low, high in pairwise(self.edges)):
            raise ValueError("the bin edges are not finite and strictly increasing")
        if not all(0 <= count <= _MOST_COUNT for count in (*self.counts, self.withheld)):
            raise ValueError(f"a count is not between 0 and {_MOST_COUNT}")

    @property
    def total(self) -> int:
        """Number of samples that are reported."""
        return sum(self.counts)


def by_category(counts: Iterable[tuple[str, int]], withheld: int = 0) -> Histogram:
    """Return the histogram of categories, the most frequent first. Counts of one name are added up."""
    sums: dict[str, int] = {}
    for name, count in counts:
        sums[name] = _added(sums.get(name, 0), count)
    ordered = sorted(sums.items(), key=lambda one: (-one[1], one[0]))
    return Histogram((), tuple(name for name, _ in ordered), tuple(count for _, count in ordered), withheld)


def bounded(histograms: Mapping[str, Histogram]) -> tuple[dict[str, Histogram], str]:
    """Return the histograms with clean names and at most `MOST_BINS` bins in all, and a text if some were left out.

    Small ones are kept first. Of a feature with more categories than its part of the room the most frequent are kept.
    """
    kept: dict[str, Histogram] = {}
    room, left = MOST_BINS, len(histograms)
    for name, one in sorted(histograms.items(), key=lambda item: len(item[1].counts)):
        # An empty one has a name, too.
        each = room // left
        left -= 1
        if each < 1 or (one.edges and len(one.counts) > room):
            continue
        if not one.edges:
            most = max(each, 1)
            beyond = max(0, len(one.categories) - most)
            pairs = zip(map(_name, one.categories[:most]), one.counts[:most], strict=True)
            one = by_category(pairs, _added(one.withheld, beyond))
        kept[_name(name)] = one
        room -= max(1, len(one.counts))
    text = f"the histograms have more than {MOST_BINS:,} bins, or names that differ in blanks alone: some are left out"
    ordered = {_name(name): kept[_name(name)] for name in histograms if _name(name) in kept}
    return ordered, text if len(ordered) < len(histograms) else ""


def to_message(histogram: Histogram) -> common_pb2.Histogram:
    """Convert a histogram to its message."""
    return common_pb2.Histogram(**asdict(histogram))


def to_messages(histograms: Mapping[str, Histogram]) -> dict[str, common_pb2.Histogram]:
    """Convert histograms to their messages."""
    return {name: to_message(one) for name, one in histograms.items()}


def from_messages(messages: Mapping[str, common_pb2.Histogram]) -> tuple[dict[str, Histogram], str]:
    """Convert histograms of a peer from their messages, with limits; returns a text, too, if some were left out."""
    found: dict[str, Histogram] = {}
    for name, one in islice(messages.items(), MOST_BINS + 1):
        try:
            found[name] = Histogram(tuple(one.edges), tuple(one.categories), tuple(one.counts), one.withheld)
        except ValueError as error:
            return {}, f"the histogram {_name(name)} is not valid: {error}"
    return bounded(found)


def sums_by_name(parts: Iterable[Mapping[str, Histogram]]) -> tuple[dict[str, Histogram], str]:
    """Return the sum of all histograms of a name, and a text that names those left out, whose bins differ."""
    sums: dict[str, Histogram] = {}
    unlike: set[str] = set()
    for part in parts:
        for name, one in part.items():
            known = sums.setdefault(name, replace(one, counts=(0,) * len(one.counts), withheld=0))
            if known.edges != one.edges:
                unlike.add(name)
            else:
                sums[name] = _sum(known, one)
    kept = {name: one for name, one in sums.items() if name not in unlike}
    return kept, f"histograms with different bins are left out: {', '.join(sorted(unlike))}" if unlike else ""


def _sum(a: Histogram, b: Histogram) -> Histogram:
    withheld = _added(a.withheld, b.withheld)
    if a.edges:
        return replace(a, counts=tuple(map(_added, a.counts, b.counts)), withheld=withheld)
    pairs = [*zip(a.categories, a.counts, strict=True), *zip(b.categories, b.counts, strict=True)]
    return by_category(pairs, withheld)


def _added(a: int, b: int) -> int:
    """Add two counts. A sum never fails: one region's report must not stop what the others have reported."""
    return min(a + b, _MOST_COUNT)


def _name(text: str) -> str:
    """Return a name of one line."""
    return clean(" ".join(text.split()), _NAME_BYTES)


def without_small_counts(histogram: Histogram, least: int) -> Histogram:
    """Return the histogram without counts of 1 to `least` - 1 samples.

    A reader who knows the number of all samples can subtract what is shown. So further counts, the smallest first, are
    left out until `least` samples are missing, or nothing is left (complementary suppression: Cox 1980, "Suppression
    Methodology and Statistical Disclosure Control").
    """
    order = sorted((count, place) for place, count in enumerate(histogram.counts) if count)
    out: set[int] = set()
    missing = 0
    for count, place in order:
        if count >= least and not 0 < missing < least:
            break
        out.add(place)
        missing += count
    if not out:
        return histogram
    withheld = _added(histogram.withheld, len(out))
    if histogram.edges:
        counts = tuple(0 if place in out else count for place, count in enumerate(histogram.counts))
        return replace(histogram, counts=counts, withheld=withheld)
    pairs = zip(histogram.categories, histogram.counts, strict=True)
    return by_category([pair for place, pair in enumerate(pairs) if place not in out], withheld)


def quantile(histogram: Histogram, part: float) -> float | None:
    """Return the number below which a part of the samples is, 0 to 1; None: there are no samples, or no bins.

    Samples are taken as spread evenly over their bin, so the result is off by at most that bin's width.
    """
    if not histogram.edges or not histogram.total:
        return None
    wanted = part * histogram.total
    for above, count, (low, high) in zip(
        accumulate(histogram.counts), histogram.counts, pairwise(histogram.edges), strict=True
    ):
        if count and above >= wanted:
            return high - (high - low) * (above - wanted) / count
    return histogram.edges[-1]
