"""What a user is warned of in a plan that can run."""

from __future__ import annotations

from scheduler._configurations import TORCH_MB, needed_mb
from scheduler._cost_model import step_seconds
from scheduler._model import Demand, Plan, PlannedPartition, Snapshot
from scheduler.search import MOST_OFF
from sync.channel import channel_kinds

__all__ = ["warnings_of"]

_LONG_ROUND_SECONDS = 60.0
"""Seconds of a step from which a plan warns of an invocation's limit: predictions may be off by a factor of two."""
_COPIES = 2
"""Copies of the model in a worker's memory, at least: parameters and gradients."""


def warnings_of(chosen: Plan, demand: Demand, snapshot: Snapshot) -> tuple[str, ...]:
    """Return warnings where functions cannot hold PyTorch or the model, requests have no known price, or rounds of
    whole steps change what was asked for."""
    told = []
    asking = set(channel_kinds(lambda kind: not kind.announces))
    channels = {part.region: snapshot.by_name[part.region].channel for part in chosen.partitions}
    allowed_mb = {part.region: snapshot.by_name[part.region].capacity.memory_mb for part in chosen.partitions}
    for part in chosen.partitions:
        if part.memory_mb < TORCH_MB:
            told.append(
                f"functions of {part.memory_mb} MB in {part.region} are smaller than PyTorch, which takes about "
                f"{TORCH_MB} MB: only workers that share it, as those of the agent's own gateway do, can run; ask for "
                "more (function.memoryMb)"
            )
        if chosen.isolation.get(part.region) == "none":
            told.append(
                f"{part.region} runs job code without a sandbox: it can read and change what the agent can there"
            )
        told += _too_small(part, demand, snapshot, allowed_mb[part.region])
        if part.workers > 1 and channels[part.region] in asking and part.region not in snapshot.profiles:
            told.append(
                f"the requests of channel {channels[part.region]} in {part.region} are not part of the cost, since no "
                "profile tells their number: run `geofed profile`"
            )
        if part.clients and (seconds := step_seconds(part)) > _LONG_ROUND_SECONDS:
            told.append(
                f"a round of clients takes {part.region} about {seconds:.0f} s, and an invocation that does not answer "
                "two minutes after its slice is ended: use more workers, fewer clients or a longer function.slice"
            )
    return (*told, *_shorter(chosen, demand), *_uneven(chosen, demand))


def _too_small(part: PlannedPartition, demand: Demand, snapshot: Snapshot, most_mb: int) -> list[str]:
    """Return that a worker has less memory than a whole model needs; empty if it has enough, or holds one stage.

    ``most_mb``: what the region allows a function.
    """
    held_mb = (snapshot.held_bytes or _COPIES * (snapshot.model_bytes or 0)) / 2**20
    if part.pipeline is not None or not held_mb:
        return []
    # A profile has measured what its configurations need. Functions smaller than PyTorch can only share it.
    measured = part.merge_seconds is not None and part.region in snapshot.profiles
    torch_mb = 0 if measured or part.memory_mb < TORCH_MB else TORCH_MB
    allowed = part.memory_mb < most_mb
    remedy = "ask for more (function.memoryMb)" if allowed else "leave the region out (regions.avoid)"
    if not part.clients:
        remedy += ", or measure the task with `geofed profile`, so that it can be cut into stages"
    if part.memory_mb < held_mb + torch_mb:
        what = "tensors, gradients and sums of clients" if part.clients else "tensors and gradients"
        beside = f" beside PyTorch, which takes about {torch_mb} MB" if torch_mb else ""
        text = f"cannot hold the model: its {what} take {held_mb:.0f} MB{beside}"
    elif not (measured or demand.memory_mb) and part.memory_mb < needed_mb(snapshot, demand) - TORCH_MB + torch_mb:
        needed = needed_mb(snapshot, demand)
        text = f"may be too small, and the region allows no more: to train the model takes up to about {needed:.0f} MB"
    else:
        return []
    return [f"functions of {part.memory_mb} MB in {part.region} {text}; {remedy}"]


def _shorter(chosen: Plan, demand: Demand) -> list[str]:
    """Return that rounds are shorter than the job file's, since whole ones would make other passes over the data."""
    if demand.interval is None or chosen.rounds == 1 or chosen.interval >= demand.interval:
        return []
    return [
        f"a round has {chosen.interval} steps where advanced.wan.interval is {demand.interval}: the job makes "
        f"{chosen.rounds * chosen.interval}, and whole rounds of {demand.interval} would change that by more than "
        f"{MOST_OFF:.0%}"
    ]


def _uneven(chosen: Plan, demand: Demand) -> list[str]:
    """Return the shards over which a plan makes more or fewer passes than asked, beyond one step and `MOST_OFF`."""
    if demand.balance != "data" or demand.clients is not None:
        return []
    samples, shares = sum(part.samples for part in chosen.partitions), chosen.shares
    told = []
    longest = max(part.samples / (part.batch * part.replicas) for part in chosen.partitions)
    asked = demand.epochs if demand.epochs is not None else (demand.steps or 1) / longest
    for part in chosen.partitions:
        step = part.batch * part.replicas
        made = chosen.rounds * part.steps_per_round * step / part.samples
        if abs(made - asked) * part.samples > step * (1 + 1e-6) and abs(made / asked - 1) > MOST_OFF:
            told.append(
                f"{part.region} makes {made:.3g} passes over its data, where {asked:.3g} are asked for: a round has "
                f"{part.steps_per_round} whole steps of {step} samples there; its updates weigh "
                f"{shares[part.region]:.1%}, its data {part.samples / samples:.1%}"
            )
    return told
