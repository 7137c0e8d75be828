"""The ways in which the regions of a plan may exchange updates: codec, topology, and whether training continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler._cost_model import Exchanges
from scheduler._estimate import (
    PRIOR_MODEL_BYTES,
    coding_seconds,
    contact_seconds,
    exchange_seconds,
    round_end_seconds,
    seconds_apart,
    stands_beyond,
)
from scheduler._link import line_bytes, update_bytes
from scheduler._model import Declined, Demand, PlannedPartition, Reason, Region, Snapshot
from scheduler.topology import Links, Topologies, Topology, links_of, topologies_over
from scheduler.tuning._learning import coding_points
from sync.codec import Automatic, MaskedIntegers, codec_named, codecs
from sync.policy import DEFAULT, MAX_CODEC_RATIO, WanPolicy, policy_named

__all__ = ["ExchangeOption", "ExchangeOptions", "adapted", "exchange_options", "policy_of", "share_of"]

_ONLY_IN_BACKGROUND = {"quorum", "grace_seconds", "damping", "compensation"}
"""Settings without effect where all regions wait for all: a job that sets one exchanges in the background."""


@dataclass(frozen=True)
class ExchangeOption:
    """One way to exchange."""

    codec: str
    topology: Topology
    background: bool
    seconds: float
    """Seconds of one round's exchange; if workers wait for it, everything that they wait for."""

    @property
    def exchange(self) -> str:
        """Name in job files."""
        return "background" if self.background else "synchronous"


@dataclass(frozen=True)
class ExchangeOptions:
    """All ways, those that cost least in learning first."""

    each: tuple[ExchangeOption, ...]
    figures: Exchanges
    coding: np.ndarray[tuple[int], np.dtype[np.float64]]
    """`coding_points` of each."""
    lossy: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """Whether the codec of each loses bits."""
    adapted_seconds: np.ndarray[tuple[int], np.dtype[np.float64]]
    """Of each, the seconds of one update over the slowest link, by which codec and interval are changed while the job
    runs; 0: neither is, or the model's size is unknown."""
    adapts_codec: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """Of each, whether a smaller codec would take the place of its own; else only the interval may change."""
    impossible: dict[str, str]
    """Why kinds of topology are impossible."""
    links: Links

    @property
    def optional_background(self) -> bool:
        """Whether some wait and some do not."""
        return len({way.background for way in self.each}) > 1


def policy_of(demand: Demand) -> WanPolicy:
    """Return the demand's WAN policy."""
    return policy_named(demand.wan_policy or DEFAULT)


def adapted(demand: Demand) -> tuple[bool, bool]:
    """Return whether codec and interval may be changed while the job runs, with exchange in the background."""
    policy = policy_of(demand)
    # What a published rule states holds as long as the job runs.
    free = demand.method is None
    codec = free and demand.codec is None and not policy.significance
    return codec, free and demand.interval is None and policy.adapts_interval


def share_of(snapshot: Snapshot, demand: Demand) -> float:
    """Return the part of an update that passes the policy's filter, with the numbers of coordinates; 1 as long as no
    run has told."""
    return (snapshot.sent_share or 1.0) if policy_of(demand).significance else 1.0


def exchange_options(
    regions: Sequence[Region], parts: Sequence[PlannedPartition], snapshot: Snapshot, demand: Demand
) -> ExchangeOptions | Declined:
    """Return the ways that the demand allows; ``parts``: any partition of each region.

    While the model's size is unknown, updates are sent in float32: nothing is lost by a guess.
    """
    model_bytes = snapshot.model_bytes or PRIOR_MODEL_BYTES
    links, evaluated, share = links_of(regions), None, share_of(snapshot, demand)
    found: list[tuple[ExchangeOption, float]] = []
    impossible: dict[str, str] = {}
    for codec in (demand.codec,) if demand.codec else _codecs(demand, snapshot, len(regions)):
        evaluated = topologies_over(links, update_bytes(model_bytes, codec, share=share), evaluated)
        wanted = _of_kind(evaluated, demand.topology if len(regions) > 1 else None)
        if not wanted:
            return _impossible(evaluated, demand.topology)
        impossible = evaluated.impossible if len(regions) > 2 else {}
        for topology in wanted:
            contact = contact_seconds(topology)
            seconds = exchange_seconds(topology, model_bytes, codec)
            for background in _modes(demand, len(regions)):
                waited = seconds + (0.0 if background else round_end_seconds(parts, model_bytes))
                found.append((ExchangeOption(codec, topology, background, waited), contact))
    each = tuple(way for way, _ in found)
    figures = Exchanges(
        seconds=np.array([way.seconds for way in each]),
        usd=np.array([way.topology.usd_per_round for way in each]),
        background=np.array([way.background for way in each]),
        apart=np.array([seconds_apart(way.topology, model_bytes, way.codec, demand.wan_settings) for way in each]),
        contact=np.array([contact for _, contact in found]),
        links=np.array([way.topology.seconds for way in each]),
        beyond=np.array([stands_beyond(snapshot, model_bytes, background=way.background) for way in each]),
    )
    changes, interval = adapted(demand)
    smaller = np.array([way.background and changes and _smaller_pays(way, model_bytes) for way in each])
    told = smaller | (figures.background & interval) if snapshot.model_bytes else np.zeros(len(each), bool)
    return ExchangeOptions(
        each,
        figures,
        coding=np.array([coding_points(way.codec) for way in each]),
        lossy=np.array([codec_named(way.codec).lossy for way in each]),
        adapted_seconds=told * np.array([_update_seconds(way.topology, model_bytes, way.codec) for way in each]),
        adapts_codec=smaller,
        impossible=impossible,
        links=links,
    )


def _update_seconds(topology: Topology, model_bytes: int, codec: str) -> float:
    """Return the seconds to encode an update and to send it over the slowest link, as they are measured in a job."""
    line = line_bytes(update_bytes(model_bytes, codec))
    return coding_seconds(model_bytes, codec) + line / topology.least_bytes_per_second + topology.longest_rtt_seconds


def _smaller_pays(way: ExchangeOption, model_bytes: int) -> bool:
    """Return whether a smaller codec would be chosen in a job whose links do not carry a way's."""
    known = codecs(Automatic.UNDER_WAY)
    others = known[known.index(way.codec) + 1 :] if way.codec in known else ()
    most = MAX_CODEC_RATIO * _update_seconds(way.topology, model_bytes, way.codec)
    return any(_update_seconds(way.topology, model_bytes, other) < most for other in others)


def _codecs(demand: Demand, snapshot: Snapshot, regions: int) -> tuple[str, ...]:
    """Return the codecs to evaluate where the demand names none, the least lossy first."""
    policy = policy_of(demand)
    known = policy.significance or snapshot.model_bytes is None
    # Who asks for the mean of every step is not given a coarse one.
    names = codecs(Automatic.ALWAYS if known or policy.synchronous else Automatic.UNDER_WAY)
    if demand.wan_settings.get("secure"):
        masked = [codec_named(codec_named(name).masked) for name in names if codec_named(name).masked]
        names = tuple(one.name for one in masked if isinstance(one, MaskedIntegers) and regions <= one.most_regions)
    return names[:1] if known or demand.method else names


def _modes(demand: Demand, regions: int) -> tuple[bool, ...]:
    """Return whether exchange in the background is allowed, and whether waiting is."""
    policy = policy_of(demand)
    if regions == 1 or policy.synchronous or demand.exchange == "synchronous":
        return (False,)
    if demand.exchange or policy.on_arrival or not _ONLY_IN_BACKGROUND.isdisjoint(demand.wan_settings):
        return (True,)
    return (False, True)


def _of_kind(evaluated: Topologies, kind: str | None) -> tuple[Topology, ...]:
    """Return the topologies of a kind, or all; of several with the same links only the first."""
    found: list[Topology] = []
    for one in reversed([one for one in evaluated.possible if kind in (None, one.kind)]):
        # Compared, not hashed: a mesh of a thousand regions has half a million links.
        same = next((place for place, other in enumerate(found) if other.links == one.links), len(found))
        found[same : same + 1] = [one]
    return tuple(found[::-1])


def _impossible(evaluated: Topologies, kind: str | None) -> Declined:
    if evaluated.possible and kind is not None:
        able = ", ".join(topology.kind for topology in evaluated.possible)
        text = f"topology {kind} cannot be made: {evaluated.impossible[kind]}"
        return Declined((Reason("INADMISSIBLE", text, f"set advanced.wan.topology to auto, or to one of: {able}"),))
    text = f"the regions cannot exchange: {next(iter(evaluated.impossible.values()))}"
    remedy = "state a link between them in the regions' configurations, or take some out with regions.avoid"
    return Declined((Reason("INADMISSIBLE", text, remedy),))
