"""Warnings of a plan in addition to the scheduler's: unreachable regions and outdated prices."""

from __future__ import annotations

import json
from calendar import monthrange
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase

from control_plane.pki import utc_now
from control_plane.service.planning._tuning import profiles_of
from control_plane.service.state._entries import RegionEntry
from control_plane.spec import JobSpec
from control_plane.store import RunRow, WeightRow
from scheduler import Plan
from scheduler.tuning import SKEW_THRESHOLD, LabelCounts, TaskProfile, label_skew

__all__ = ["warnings_of"]

_NAMED = 2
"""Layers that a warning names."""
_NO_WARNING = ("live", "invited")
"""How regions stand of which nothing is to be said."""
STALE_DAYS = 90
"""Age in days from which prices count as outdated: clouds change their price lists a few times a year."""


def warnings_of(
    chosen: Plan,
    spec: JobSpec,
    regions: Mapping[str, RegionEntry],
    at: float,
    weight: WeightRow | None = None,
    runs: Sequence[RunRow] = (),
) -> tuple[str, ...]:
    """Return warnings about regions that are unreachable, lost, closed to new jobs or unreachable for each other, about
    unencrypted channels, about outdated prices, about batch statistics that regions do not share, and about labels that
    differ between regions.

    ``weight``: the task's probe; None: it was not probed. ``runs``: its runs and profiles, newest first.
    """
    taken = [*(part.region for part in chosen.partitions), *(copy.source for copy in chosen.copies)]
    return (
        *_away(taken, spec, regions),
        *_apart(chosen, regions),
        *_stale(taken, regions, at),
        *_plaintext(chosen, regions),
        *_batch_statistics(chosen, spec, weight),
        *_unlike_labels(chosen, spec, weight, runs),
    )


def _batch_statistics(chosen: Plan, spec: JobSpec, weight: WeightRow | None) -> Iterator[str]:
    """Layers that normalise by the batches of their own region (BatchNorm), with weights that all regions share."""
    if weight is None or len(chosen.partitions) < 2:
        return
    names = [
        name
        for name in json.loads(weight.batch_norms_json)
        if not any(fnmatchcase(f"{name}.running_mean", pattern) for pattern in spec.train.local)
    ]
    if names:
        named = ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
        patterns = ", ".join(f'"{name}.*"' for name in names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
        yield (
            f"the model normalises by batches ({named}), whose statistics differ between regions with unlike data: a "
            f"model averaged over them may lose accuracy; `train.local: [{patterns}]` keeps them in their region, "
            "GroupNorm has none, a shorter `advanced.wan.interval` lets them differ less"
        )


def _unlike_labels(chosen: Plan, spec: JobSpec, weight: WeightRow | None, runs: Sequence[RunRow]) -> Iterator[str]:
    """Labels that differ between the regions, as profiles or else probes have counted them, where the job does nothing
    about it.

    Not where a shard is processed elsewhere: then the counts are not those of what a region trains on.
    """
    often = spec.wan.traits.every_step or (chosen.interval == 1 and spec.clients is None)
    if often or spec.wan.traits.proximal or spec.train.local or spec.evaluates_only or chosen.copies:
        return
    known: dict[str, LabelCounts | TaskProfile] = {**_probed_labels(weight), **profiles_of(runs)}
    skew = label_skew([known[part.region] for part in chosen.partitions if part.region in known])
    if skew is not None and skew.distance > SKEW_THRESHOLD:
        by_batches = weight is not None and weight.batch_norms_json != "[]"
        yield (
            f"labels differ between regions: {100 * skew.distance:.0f} % of those of {skew.region} would have to be "
            f"others to occur as often as in all regions together (above {100 * SKEW_THRESHOLD:.0f} % a model averaged "
            "over them may lose accuracy); `train.local` with the last layers keeps these in their region, "
            "`advanced.wan.policy: fedprox` or `bsp`, or a shorter `advanced.wan.interval`, lets the regions' models "
            f"differ less{', and so does GroupNorm in place of BatchNorm' if by_batches else ''}"
        )


def _probed_labels(weight: WeightRow | None) -> dict[str, LabelCounts]:
    held = json.loads(weight.labels_json) if weight is not None else {}
    return {
        region: LabelCounts(region, samples, tuple((label, count) for label, count in counts))
        for region, (samples, counts) in held.items()
    }


def _apart(chosen: Plan, regions: Mapping[str, RegionEntry]) -> Iterator[str]:
    """Regions that others cannot reach: they state an address of their own machine, where not all others are."""
    known = {part.region: regions[part.region] for part in chosen.partitions if part.region in regions}
    hosts = {name: entry.state.address for name, entry in known.items() if entry.state.address}
    for name, entry in known.items():
        others = [other for other, host in hosts.items() if host != hosts.get(name, host)]
        if entry.catalogue is not None and entry.catalogue.loopback and others:
            yield (
                f"{others[0]} cannot reach the parameter servers of {name}, whose region file states no `advertise`, "
                "or an address of its own machine"
            )


def _plaintext(chosen: Plan, regions: Mapping[str, RegionEntry]) -> Iterator[str]:
    for part in chosen.partitions:
        entry = regions.get(part.region)
        if part.workers > 1 and entry is not None and entry.catalogue is not None and entry.catalogue.channel_plaintext:
            yield f"the workers of {part.region} exchange gradients and models over an unencrypted network connection"


def _away(taken: list[str], spec: JobSpec, regions: Mapping[str, RegionEntry]) -> Iterator[str]:
    use, avoid = spec.regions.use, spec.regions.avoid
    named = regions.keys() & {*taken, *use} if use else regions.keys()
    away = {name: phase for name in named if (phase := regions[name].state.standing) not in _NO_WARNING}
    for name, phase in sorted(away.items()):
        entry = regions[name]
        if name in taken:
            yield f"region {name} is {phase}; the job cannot start without it"
        elif name not in avoid and (samples := _samples(entry, spec.data.dataset)):
            yield f"region {name} is {phase}: its {samples:,} samples of {spec.data.dataset} are left out"


def _samples(entry: RegionEntry, dataset: str) -> int:
    """Return the samples of the training split that a region had when it was last connected."""
    held = entry.catalogue.datasets if entry.catalogue is not None else ()
    splits = [one.splits["train"] for one in held if one.name == dataset and "train" in one.splits]
    return sum(split.samples for split in splits)


def _stale(taken: list[str], regions: Mapping[str, RegionEntry], at: float) -> Iterator[str]:
    for region in taken:
        entry = regions.get(region)
        prices = entry.catalogue.prices if entry is not None and entry.catalogue is not None else None
        days = _days_since(prices.as_of, at) if prices is not None else None
        if prices is not None and days is not None and days > STALE_DAYS:
            yield f"the prices of {region} are {days:.0f} days old (as of {prices.as_of}, {prices.source})"


def _days_since(as_of: str, at: float) -> float | None:
    """Return the days since a date, YYYY-MM-DD, or since the end of a month, YYYY-MM; None if it is not a date."""
    try:
        if len(as_of) == len("2026-01"):
            year, month = (int(part) for part in as_of.split("-"))
            moment = datetime(year, month, monthrange(year, month)[1], tzinfo=UTC)
        else:
            moment = datetime.fromisoformat(as_of).replace(tzinfo=UTC)
    except ValueError:
        return None
    return (utc_now(at) - moment).total_seconds() / 86_400
