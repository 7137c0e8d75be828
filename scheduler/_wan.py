"""The exchange of a plan's regions: codec and topology, chosen together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler._estimate import (
    PRIOR_MODEL_BYTES,
    exchange_seconds,
    round_compute_seconds,
    round_end_seconds,
    speeds_known,
    waiting_usd_per_second,
)
from scheduler._link import link_table, update_bytes
from scheduler._model import Alternative, Declined, Demand, PlannedPartition, Reason, Region, Snapshot
from scheduler.topology import HIDDEN_SHARE, Topologies, Topology, choose_topology, evaluate_topologies
from sync.codec import Automatic, codecs
from sync.policy import DEFAULT, WanPolicy, policy_named

__all__ = ["WanChoice", "choose_wan"]

WORTH_WAITING = 0.05
"""Share of a round's compute: below it, waiting for the exchange costs less than what waiting is worth, which is the
same bits in every region."""
FEWEST_ROUNDS = 20
"""Number of rounds below which updates that are one round late are a notable part of all: then regions wait."""
FEWEST_TERNARY_ROUNDS = 20
"""Number of rounds below which a codec of few bits would send too much of its residual only in the last update."""
_ONLY_IN_BACKGROUND = {"quorum", "grace_seconds", "damping", "compensation"}
"""Settings without effect where all regions wait for all: a job that sets one exchanges in the background."""
WORTH_CODING = 0.9
"""An update is coded only if the exchange then takes at most this share of its time."""


@dataclass(frozen=True)
class WanChoice:
    """What is exchanged in a round, and over which links."""

    codec: str
    topology: Topology
    exchange_seconds: float
    """Seconds of one round, coding included; if the workers wait for it, everything that they wait for."""
    settings: dict[str, float]
    """Settings of policy and exchange, as the plan carries them."""
    alternatives: tuple[Alternative, ...]
    """The other topologies."""


def choose_wan(
    regions: Sequence[Region],
    parts: Sequence[PlannedPartition],
    snapshot: Snapshot,
    demand: Demand,
    rounds: int,
    known: dict[str, Topologies] | None = None,
) -> WanChoice | Declined:
    """Return the demanded codec and kind of topology, or those that make the exchange shortest.

    In the background the least lossy codec that hides the exchange behind the round's compute is chosen. If none does,
    and if all wait, a lossy one is chosen only where it makes the exchange notably shorter. While the model's size is
    unknown, float32 is chosen. ``known`` holds earlier results for these regions by codec, and gets the new ones.
    """
    known = {} if known is None else known
    model_bytes = snapshot.model_bytes or PRIOR_MODEL_BYTES
    table, slowest = link_table(regions), max(round_compute_seconds(part) for part in parts)
    named, policy = {region.name: region for region in regions}, _policy(demand)
    compute = slowest if speeds_known(named, snapshot) else None
    waiting = waiting_usd_per_second(parts, named)
    choices: list[WanChoice] = []
    for codec in (demand.codec,) if demand.codec else _codecs(demand, rounds, snapshot):
        if codec not in known:
            clouds = {region.name: region.cloud for region in regions}
            known[codec] = evaluate_topologies(sorted(named), table, update_bytes(model_bytes, codec), clouds)
        evaluated = known[codec]
        wanted = _of_kind(evaluated, demand.topology) if len(regions) > 1 else evaluated
        topology = choose_topology(
            wanted,
            minimise=demand.minimise,
            round_compute_seconds=compute,
            waiting_usd_per_second=waiting,
        )
        if topology is None:
            return _impossible(evaluated, demand.topology)
        seconds = exchange_seconds(topology, model_bytes, codec)
        alternatives = _alternatives(topology, evaluated, demand, compute)
        waited = seconds + round_end_seconds(parts, model_bytes)
        background = len(regions) > 1 and _in_background(demand, waited, slowest, rounds)
        settings = demand.wan_settings | ({"background": 1.0} if background else {})
        if background and demand.codec is None and not policy.significance:
            settings["choose_codec"] = 1.0
        if background and demand.interval is None and policy.adapts_interval:
            settings["choose_interval"] = 1.0
        if demand.topology is None and len(regions) > 2:
            settings["choose_topology"] = 1.0
        choices.append(WanChoice(codec, topology, seconds if background else waited, settings, alternatives))
    return _best(choices, slowest)


def _policy(demand: Demand) -> WanPolicy:
    return policy_named(demand.wan_policy or DEFAULT)


def _best(choices: Sequence[WanChoice], compute: float) -> WanChoice:
    """Return the best of one choice for each codec, the least lossy first."""
    waiting = [choice for choice in choices if not choice.settings.get("background")]
    if len(waiting) == len(choices):
        return _worth_coding(choices)
    short = [c for c in waiting if c.codec in codecs(Automatic.ALWAYS)]
    hidden = [c for c in choices if c.settings.get("background") and c.exchange_seconds <= HIDDEN_SHARE * compute]
    return [*short, *hidden, _worth_coding(choices)][0]


def _worth_coding(choices: Sequence[WanChoice]) -> WanChoice:
    """Return the least lossy choice that no lossier one beats notably: most of a small update's time is the round
    trip."""
    best = choices[0]
    for choice in choices[1:]:
        if choice.exchange_seconds < best.exchange_seconds * WORTH_CODING:
            best = choice
    return best


def _codecs(demand: Demand, rounds: int, snapshot: Snapshot) -> tuple[str, ...]:
    """Return the codecs to evaluate where the demand names none, the least lossy first."""
    policy = _policy(demand)
    if policy.significance or snapshot.model_bytes is None:
        # By a guess of the model's size nothing is lost; in the background what is measured is followed at once.
        return codecs(Automatic.ALWAYS)[:1]
    # Where all wait, fewer bits are for the user to choose; in the background they are better than to fall behind.
    # top-k, with fewer still, costs more accuracy than it is worth where the user does not ask for it.
    waits = demand.exchange == "synchronous" or policy.synchronous or rounds < FEWEST_TERNARY_ROUNDS
    return codecs(Automatic.ALWAYS if waits else Automatic.BACKGROUND)


def _in_background(demand: Demand, seconds: float, compute: float, rounds: int) -> bool:
    if demand.exchange is not None:
        return demand.exchange == "background"
    policy = _policy(demand)
    if policy.on_arrival or not _ONLY_IN_BACKGROUND.isdisjoint(demand.wan_settings):
        return True
    return not policy.synchronous and rounds >= FEWEST_ROUNDS and seconds > WORTH_WAITING * compute


def _of_kind(evaluated: Topologies, kind: str | None) -> Topologies:
    if kind is None:
        return evaluated
    return Topologies(tuple(t for t in evaluated.possible if t.kind == kind), evaluated.impossible)


def _impossible(evaluated: Topologies, kind: str | None) -> Declined:
    if evaluated.possible and kind is not None:
        able = ", ".join(topology.kind for topology in evaluated.possible)
        text = f"topology {kind} cannot be made: {evaluated.impossible[kind]}"
        return Declined((Reason("INADMISSIBLE", text, f"set wan.topology to auto, or to one of: {able}"),))
    text = f"the regions cannot exchange: {next(iter(evaluated.impossible.values()))}"
    remedy = "state a link between them in the regions' configurations, or take some out with regions.avoid"
    return Declined((Reason("INADMISSIBLE", text, remedy),))


def _alternatives(
    chosen: Topology, evaluated: Topologies, demand: Demand, compute: float | None
) -> tuple[Alternative, ...]:
    """Return why each of the others lost; those with the same links as the chosen one are omitted."""
    out = []
    for other in evaluated.possible:
        if other.kind == chosen.kind or other.links == chosen.links:
            continue
        text = f"{other.name}: {other.seconds:.2f} s and ${other.usd_per_round:.4f} a round"
        out.append(Alternative(text, _why_not(other, chosen, demand, compute)))
    if len(chosen.links) > 1:
        out += [Alternative(kind, why) for kind, why in evaluated.impossible.items() if kind != chosen.kind]
    return tuple(out)


def _why_not(other: Topology, chosen: Topology, demand: Demand, compute: float | None) -> str:
    if demand.topology is not None:
        return f"the job file says {demand.topology}"
    slower = other.seconds / chosen.seconds - 1
    dearer = other.usd_per_round - chosen.usd_per_round
    words = []
    if slower > 0.0005:
        words.append(f"an exchange takes {slower:.0%} longer" if slower >= 0.01 else "an exchange takes longer")
    if dearer > 1e-9:
        words.append(f"costs ${dearer:.4f} more a round")
    if demand.minimise == "cost" and compute is not None and other.seconds > HIDDEN_SHARE * compute >= chosen.seconds:
        words.append("takes longer than the steps that are made meanwhile")
    return " and ".join(words) or "saves nothing that counts"
