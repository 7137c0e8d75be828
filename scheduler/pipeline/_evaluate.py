"""What one pipeline takes: the model of time, money and memory that the planner searches over.

After FuncPipe (Proc. ACM Meas. Anal. Comput. Syst. 6(3), 2022, DOI 10.1145/3570607, section 3.3), whose planner was not
published. A stage has three lanes, which overlap: it computes, it puts, it gets. n is the number of micro-batches.

GPipe: all forward passes, then all backward passes. n equal micro-batches through a line of lanes take the sum over
all lanes once, and n - 1 times the slowest lane (a permutation flow shop). A stage merges its gradients when it has
sent its last one; an iteration ends when the last stage to merge has done so:

    T = sum_g fill_f + (n-1) max_g beat_f + max_g [ sum_{h>=g} fill_b + (n-1) max_{h>=g} beat_b + merge_g ]
    fill_f = get + forward + put,  beat_f = max(get, forward, put),  fill_b and beat_b likewise

1F1B: a stage holds at most as many micro-batches as stages follow, itself included, and alternates. Micro-batches go
around between stages g and h no faster than (h - g + 1) for each time around, so that a beat is the mean over g..h of
compute and transfers. It is at most what the slowest stage computes and transfers, one after the other:

    T = sum_g fill_f + (n-1) max_g (fill_f + fill_b) + max_g [ sum_{h>=g} fill_b + merge_g ]

That is never too little: transfers do not overlap with compute here, which is what the saved memory costs.

merge_g is what the stage's last backward pass does not hide, where gradients leave while it runs, and the optimiser's
step. Where the functions of a place share its cores, an iteration also takes no less than all that these have to do:

    T >= sum_g d core_g / cores

That is a bound from below. Schedules of 8 and 16 alike stages, played with cores shared evenly, took 1 to 9 % more than
the larger of both on 2 cores, up to 16 % on 4: the first stage begins and ends alone. So what a chosen pipeline is
said to take is its schedule's, played (`_play`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from scheduler.pipeline._model import (
    MIB,
    Cut,
    Hop,
    PipelineOptions,
    PipelineProblem,
    PlannedPipeline,
    PlannedStage,
    StageRegion,
)

__all__ = [
    "Transfers",
    "core_seconds",
    "evaluate",
    "exposed_apart_seconds",
    "exposed_seconds",
    "held_bytes",
    "hop_between",
    "late_bytes",
    "merge_core_seconds",
    "merge_seconds",
    "message_core_seconds",
    "transfers",
]

ROUNDING = 1e-9
"""Relative difference of a sum of bytes in another order of addition."""


def evaluate(problem: PipelineProblem, way: PipelineOptions, cuts: Sequence[Cut]) -> PlannedPipeline | None:
    """The pipeline of some cuts, in order, which must cover all layers; None where a stage does not fit its function.

    Raises ValueError where cuts leave layers out, or a cut crosses regions that no hop joins.
    """
    _check(problem, cuts)
    count = way.micro_batches(problem.batch)
    fill_f = beat_f = fill_b = beat_b = ends = rate = other_usd = 0.0
    stages: list[PlannedStage] = []
    busy = [0.0] * len(problem.places)
    for number, cut in reversed(list(enumerate(cuts))):
        place, size = problem.places[cut.place], problem.places[cut.place].sizes[cut.size]
        needed = held_bytes(problem, way, cut, len(cuts) - number)
        if needed > size.memory_mb * MIB:
            return None
        stage = _stage(problem, way, cut, needed, number > 0, number + 1 < len(cuts))
        busy[cut.place] += way.degree * stage.core_s / place.cores if place.cores else 0.0
        after = cuts[number + 1] if number + 1 < len(cuts) else None
        forward, backward = _lanes(problem, way, cut, after, stage)
        fill_f, fill_b = fill_f + sum(forward), fill_b + sum(backward)
        if way.order == "gpipe":
            beat_f, beat_b = max(beat_f, *forward), max(beat_b, *backward)
        else:
            beat_f = max(beat_f, sum(forward) + sum(backward))
        ends = max(ends, fill_b + (count - 1) * beat_b + stage.merge_s + stage.update_s)
        rate += way.degree * size.memory_mb / 1024 * size.usd_per_gb_second
        other_usd += _requests_usd(problem, way, count, cut, after) + _egress_usd(problem, cut, after)
        stages.insert(0, stage)
    seconds = max(fill_f + (count - 1) * beat_f + ends, *busy)
    return PlannedPipeline(tuple(stages), way, count, seconds, seconds * rate + other_usd, seconds * rate)


def held_bytes(problem: PipelineProblem, way: PipelineOptions, cut: Cut, from_end: int) -> float:
    """Return the largest memory of a stage's worker in bytes; `from_end` counts the stages from it to the end, itself
    included.

    Parameters, their gradients and the optimiser's state, what merging needs, the activations of the micro-batches in
    flight, and an input and an output in each lane, both ways.
    """
    profile, sums = problem.profile, problem.profile.sums
    live = way.micro_batches(problem.batch)
    if way.order == "1f1b":
        live = min(live, from_end)
    copies = 2.0 + profile.state_factor + (problem.merge_copies if way.degree > 1 else 0.0)
    activations = sums.activation_bytes[cut.last + 1] - sums.activation_bytes[cut.first]
    entering, leaving = input_bytes(problem, cut.first), profile.layers[cut.last].output_bytes
    kept = live * entering + activations if cut.rematerialise else live * activations
    lanes = 2 * (entering + (leaving if cut.last + 1 < len(profile.layers) else 0))
    parameters = _parameter_bytes(problem, cut)
    return profile.base_mb * MIB + copies * parameters + way.micro_batch * (kept + lanes)


def _parameter_bytes(problem: PipelineProblem, cut: Cut) -> int:
    sizes = problem.profile.sums.parameter_bytes
    return sizes[cut.last + 1] - sizes[cut.first]


def _compute_seconds(problem: PipelineProblem, way: PipelineOptions, cut: Cut) -> tuple[float, float]:
    """Return the seconds of the forward and backward pass of one micro-batch, at speed 1."""
    sums = problem.profile.sums
    forward, backward = (
        lines[cut.last + 1].seconds(way.micro_batch) - lines[cut.first].seconds(way.micro_batch)
        for lines in (sums.forward, sums.backward)
    )
    return forward, backward


def _update_seconds(problem: PipelineProblem, cut: Cut) -> float:
    """Return the seconds of the optimiser's step, at speed 1."""
    sums = problem.profile.sums.update_s
    return sums[cut.last + 1] - sums[cut.first]


def input_bytes(problem: PipelineProblem, first: int) -> int:
    """Return the bytes of one sample's input to a stage that begins with this layer."""
    return problem.profile.layers[first - 1].output_bytes if first else problem.profile.input_bytes


def hop_between(problem: PipelineProblem, source: int, destination: int) -> Hop | None:
    """Return the hop between two places; free within a region. None: there is none."""
    a, b = problem.places[source].name, problem.places[destination].name
    return _HERE if a == b else problem.hops.get((a, b))


def merge_seconds(size_bytes: float, degree: int, place: StageRegion, bandwidth: float = 1.0) -> float:
    """Return the seconds of a pipelined scatter-reduce of one vector by replicas (FuncPipe, section 3.2), requests in
    parallel.

    Each puts the others' parts and gets its own ones at the same time, puts the merged part, and gets the others'. This
    is `sync.collective.merge_terms` of that collective in one formula: the search needs it for each cut, and arrays of
    terms take a thousand times as long.
    """
    if degree == 1:
        return 0.0
    channel, part = place.channel, size_bytes / degree
    up, down = part / (channel.up_bytes_per_s * bandwidth), part / (channel.down_bytes_per_s * bandwidth)
    others = degree - 1
    turns = -(-others // channel.parallel)
    puts = max(channel.put_s + others * up, turns * (channel.put_s + up))
    gets = max(channel.get_s + others * down, turns * (channel.get_s + down))
    one_up, one_down = channel.put_s + up, channel.get_s + down
    return max(puts + one_down, one_up + gets) + one_up + gets


def exposed_seconds(
    size_bytes: float, first_bytes: float, degree: int, place: StageRegion, bandwidth: float, backward_s: float
) -> float:
    """Return a lower bound of what follows the last backward pass, of a merge that overlaps with it.

    The first layer's gradients (``first_bytes`` of all) are complete when the pass ends, and a part that contains any
    of them is not complete before. All put these; the replica that merges such a part gets it from all the others and
    puts the sum, and all get that. The rest can be merged by then, if the pass is long enough.
    """
    if degree == 1:
        return 0.0
    channel, part = place.channel, size_bytes / degree
    up, down = channel.up_bytes_per_s * bandwidth, channel.down_bytes_per_s * bandwidth
    left, others = max(first_bytes, part), degree - 1
    turns = -(-others // channel.parallel)
    gets = max(channel.get_s + others * part / down, turns * (channel.get_s + part / down))
    one_up = channel.put_s + part / up
    last = max(channel.put_s + left / up + channel.get_s + part / down, one_up + gets)
    last += one_up + channel.get_s + left / down
    whole = merge_seconds(size_bytes, degree, place, bandwidth)
    return min(whole, max(whole - backward_s, last))


def exposed_apart_seconds(
    size_bytes: float,
    first_bytes: float,
    degree: int,
    place: StageRegion,
    bandwidth: float,
    backward_s: float,
    late_s: float,
) -> float:
    """Return the same where the first layers' gradients are merged as a vector of their own
    (``PipelineProblem.merges_apart``).

    ``late_s``: the part of the last backward pass in layers that belong to it entirely. When that begins, all others'
    parts of the rest's last chunk have yet to reach its owner, and so have the merged chunks for which the pass had no
    time after the first one of them was complete.
    """
    if degree == 1:
        return 0.0
    late = late_bytes(size_bytes, first_bytes, degree)
    channel, early = place.channel, (size_bytes - late) / degree
    up, down = channel.up_bytes_per_s * bandwidth, channel.down_bytes_per_s * bandwidth
    others = degree - 1
    turns = -(-others // channel.parallel)
    one_up, one_down = channel.put_s + early / up, channel.get_s + early / down
    first = 2 * one_up + max(channel.get_s + others * early / down, turns * one_down)
    rest = others * early / down - max(0.0, backward_s - late_s - first)
    left = first + channel.get_s + max(early / down, rest) - late_s if late < size_bytes else 0.0
    whole = merge_seconds(size_bytes, degree, place, bandwidth)
    return min(whole, max(whole - backward_s, max(0.0, left) + merge_seconds(late, degree, place, bandwidth)))


def late_bytes(size_bytes: float, first_bytes: float, degree: int) -> float:
    """Return the bytes of a gradient that are merged apart: the first layer's, and at least a replica's share of
    all."""
    return max(first_bytes, size_bytes / degree)


def core_seconds(problem: PipelineProblem, way: PipelineOptions, cut: Cut, sides: int) -> float:
    """Return the core seconds of a stage's replica in an iteration; ``sides``: those on which it has another stage.

    Its layers at a whole core's speed, the optimiser's step, and the messages through the channel.
    """
    count = way.micro_batches(problem.batch)
    forward, backward = _compute_seconds(problem, way, cut)
    entering, leaving = message_core_seconds(problem, way, cut)
    moved = 2 * count * ((entering if cut.first else 0.0) + (leaving if sides > (cut.first > 0) else 0.0))
    moved += merge_core_seconds(problem, way, cut)
    return count * (forward * (2 if cut.rematerialise else 1) + backward) + _update_seconds(problem, cut) + moved


def message_core_seconds(problem: PipelineProblem, way: PipelineOptions, cut: Cut) -> tuple[float, float]:
    """Return the core seconds of one request for a micro-batch's input, and of one for its output; the same in both
    directions."""
    channel, share = problem.places[cut.place].channel, problem.sent_share * way.micro_batch
    entering = share * (input_bytes(problem, cut.first) if cut.first else 0)
    leaving = share * problem.profile.layers[cut.last].output_bytes
    each, byte = channel.request_core_s, channel.byte_core_s
    return each + entering * byte, each + leaving * byte


def merge_core_seconds(problem: PipelineProblem, way: PipelineOptions, cut: Cut) -> float:
    """The same of a replica's merge: as many requests as are paid for, one put of each part, and of all but the own one
    two gets."""
    channel, d = problem.places[cut.place].channel, way.degree
    if d == 1:
        return 0.0
    merged = problem.merged_share * _parameter_bytes(problem, cut)
    requests, sent = (d + 2 * (d - 1)) * (2 if problem.merges_apart else 1), merged * (1 + 2 * (d - 1) / d)
    return requests * channel.request_core_s + sent * channel.byte_core_s


def _check(problem: PipelineProblem, cuts: Sequence[Cut]) -> None:
    starts = [cut.first for cut in cuts] + [len(problem.profile.layers)]
    if not cuts or starts[0] != 0 or any(cut.last + 1 != after for cut, after in zip(cuts, starts[1:], strict=True)):
        raise ValueError("the stages must cover all layers, each once and in order")
    if any(cut.last < cut.first for cut in cuts):
        raise ValueError("a stage has at least one layer")
    for cut, after in pairwise(cuts):
        there, back = hop_between(problem, cut.place, after.place), hop_between(problem, after.place, cut.place)
        if after.place < cut.place or there is None or back is None:
            raise ValueError(f"no cut may cross from place {cut.place} to place {after.place}")


def _stage(
    problem: PipelineProblem, way: PipelineOptions, cut: Cut, needed: float, entered: bool, left: bool
) -> PlannedStage:
    place, size = problem.places[cut.place], problem.places[cut.place].sizes[cut.size]
    forward, backward = (alone / size.speed for alone in _compute_seconds(problem, way, cut))
    merged = problem.merged_share * _parameter_bytes(problem, cut)
    merge_s = merge_seconds(merged, way.degree, place, size.bandwidth)
    if problem.merges_early:
        first = problem.merged_share * problem.profile.layers[cut.first].parameter_bytes
        if problem.merges_apart:
            late = _late_seconds(problem, way, cut) / size.speed
            merge_s = exposed_apart_seconds(merged, first, way.degree, place, size.bandwidth, backward, late)
        else:
            merge_s = exposed_seconds(merged, first, way.degree, place, size.bandwidth, backward)
    return PlannedStage(
        first=cut.first,
        last=cut.last,
        place=place.name,
        memory_mb=size.memory_mb,
        rematerialise=cut.rematerialise,
        needed_mb=needed / MIB,
        forward_s=forward,
        backward_s=backward + (forward if cut.rematerialise else 0.0),
        merge_s=merge_s,
        update_s=_update_seconds(problem, cut) / size.speed,
        core_s=core_seconds(problem, way, cut, entered + left),
    )


def _late_seconds(problem: PipelineProblem, way: PipelineOptions, cut: Cut) -> float:
    """Backward pass of the first layers that are whole in what is merged apart, at speed 1."""
    first = problem.profile.layers[cut.first].parameter_bytes
    late = late_bytes(float(_parameter_bytes(problem, cut)), float(first), way.degree)
    sizes = problem.profile.sums.parameter_bytes
    reach = sizes[cut.first] + late * (1 + ROUNDING)
    within = bisect_right(sizes, reach, cut.first + 1, cut.last + 2) - 1
    return _compute_seconds(problem, way, replace(cut, last=within - 1))[1]


@dataclass(frozen=True)
class Transfers:
    """Seconds of one micro-batch's messages on both sides of a stage; 0 where there is no other stage."""

    get: float
    """To get the input."""
    give: float
    """To put the input's gradient, for the stage before."""
    put: float
    """To put the output."""
    back: float
    """To get the output's gradient, from the stage behind."""
    there: float
    """On the way between regions, after the put; 0 within one."""
    away: float
    """The same of the gradient, from the stage behind."""


def transfers(problem: PipelineProblem, way: PipelineOptions, cut: Cut, after: Cut | None) -> Transfers:
    """``after``: the stage behind it; None: it is the last."""
    channel, width = problem.places[cut.place].channel, problem.places[cut.place].sizes[cut.size].bandwidth
    up, down = channel.up_bytes_per_s * width, channel.down_bytes_per_s * width
    get = give = put = back = over = away = 0.0
    if cut.first:
        entering = problem.sent_share * input_bytes(problem, cut.first) * way.micro_batch
        get, give = channel.get_s + entering / down, channel.put_s + entering / up
    if after is not None:
        leaving = problem.sent_share * problem.profile.layers[cut.last].output_bytes * way.micro_batch
        put, back = channel.put_s + leaving / up, channel.get_s + leaving / down
        hops = hop_between(problem, cut.place, after.place), hop_between(problem, after.place, cut.place)
        over, away = (
            hop.latency_s + way.degree * leaving / hop.bytes_per_s if hop is not None else 0.0 for hop in hops
        )
    return Transfers(get, give, put, back, over, away)


def _lanes(
    problem: PipelineProblem, way: PipelineOptions, cut: Cut, after: Cut | None, stage: PlannedStage
) -> tuple[list[float], list[float]]:
    """Seconds of one micro-batch in each lane that a stage uses, and in the hop after it: forward, backward."""
    takes = transfers(problem, way, cut, after)
    forward, backward = [stage.forward_s], [stage.backward_s]
    if cut.first:
        forward.append(takes.get)
        backward.append(takes.give)
    if after is not None:
        forward.append(takes.put)
        backward.append(takes.back)
        if hop_between(problem, cut.place, after.place) is not _HERE:
            forward.append(takes.there)
            backward.append(takes.away)
    return forward, backward


def _requests_usd(problem: PipelineProblem, way: PipelineOptions, count: int, cut: Cut, after: Cut | None) -> float:
    sides = (cut.first > 0) + (after is not None)
    passed, d = sides * way.degree * count, way.degree
    merged = (d * d, 2 * d * (d - 1)) if d > 1 else (0, 0)
    times, channel = 2 if problem.merges_apart else 1, problem.places[cut.place].channel
    puts, gets = passed + times * merged[0], passed + times * merged[1]
    return puts * channel.put_usd + gets * channel.get_usd


def _egress_usd(problem: PipelineProblem, cut: Cut, after: Cut | None) -> float:
    if after is None:
        return 0.0
    there, back = hop_between(problem, cut.place, after.place), hop_between(problem, after.place, cut.place)
    if there is None or back is None:
        return 0.0
    sent_gb = problem.sent_share * problem.batch * problem.profile.layers[cut.last].output_bytes / 1e9
    return sent_gb * (there.usd_per_gb + back.usd_per_gb)


_HERE = Hop(0.0, float("inf"), 0.0)
