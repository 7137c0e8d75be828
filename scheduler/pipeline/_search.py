"""Pareto front of pipelines: label-setting dynamic programming over cut points, from the last layer to the first.

A label is a choice of stages for the layers from a given one to the last (`_labels`). Prepending a stage to a label
gives another label. Two rules discard labels without losing a point of the front:

- A label is discarded if another one is better in every respect.
- A label is discarded if it cannot lead to a better pipeline than the known ones, by a lower bound on what the layers
  before it add, for every number of stages and every rate (`_bounds`).

The bounds are as tight as the known pipelines are good. So a coarser chain, in which a few layers at a time are
combined into one, is searched first, recursively: its pipelines are also pipelines of the full chain. A second pass
tries cuts near those of these pipelines, and the last pass tries all cuts.

For a front within a share w, a label is also discarded if a known pipeline exceeds the bound by at most w, in seconds
and in USD. Then for every pipeline p one is found that has at most (1 + w) times its seconds and its USD. Proof: follow
p's labels. If one was discarded for a better label, that label completed by p's other stages is no worse than p; follow
it instead. If one was discarded by the bound, a known pipeline is within 1 + w of the bound, and the bound is no more
than p's own values; known pipelines are only replaced by better ones. The second case ends the argument, so that the
share applies once, whatever the number of stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from scheduler.pipeline._bounds import LabelBounds
from scheduler.pipeline._evaluate import evaluate
from scheduler.pipeline._known import Front
from scheduler.pipeline._labels import Labels, Mask, ends_of, groups, joined, seconds_of, undominated
from scheduler.pipeline._model import Cut, Layer, LinearCost, PipelineOptions, PipelineProblem
from scheduler.pipeline._tables import Floats, Ints, Stages, Tables

__all__ = ["search"]

Choice = Callable[[Labels, Labels], Labels]
"""Selects the labels to continue with; its arguments are the promising labels, and the same ones raised."""

FIRST_LABELS = 2
"""Number of labels that the very first pass keeps for each way at a cut."""
DIRECT_LAYERS = 6
"""A chain of at most this many layers is searched without a coarser chain first."""
COMBINED_LAYERS = 4
"""Number of layers that are combined into one in the coarser chain."""
NEAR_LAYERS = 2
"""Number of layers by which the cuts of known pipelines are moved in the second pass."""
COARSE_WITHIN = 0.02
"""Share within which the front of the coarser chain is found."""

Found = list[tuple[PipelineOptions, tuple[Cut, ...]]]


def search(problem: PipelineProblem, ways: Sequence[PipelineOptions], within: float = 0.0) -> Found:
    """Return the ways and cuts on the front of an iteration's seconds and USD, the fastest first; one for each point.

    ``within``: for every pipeline, one is found with at most 1 + within times its seconds and its USD. 0: exact.
    """
    tables, front = Tables(problem, ways), Front()
    passes: list[Callable[[int], tuple[PipelineOptions, tuple[Cut, ...]]]] = []

    def run_pass(bounds: LabelBounds, choose: Choice, near: Mask | None = None) -> None:
        labels = _pass(tables, bounds, front, choose, near)
        passes.append(partial(_cuts, tables, labels))

    def on_front() -> Found:
        return [passes[number](row) for number, row in front.sources]

    length = tables.length
    if length > DIRECT_LAYERS:
        known = _of_coarser_chain(problem, ways, math.ceil(length / COMBINED_LAYERS), max(within, COARSE_WITHIN))
        plans = [evaluate(problem, way, cuts) for way, cuts in known]
        fitting = [(number, plan) for number, plan in enumerate(plans) if plan is not None]
        front.add(
            np.array([plan.seconds for _, plan in fitting]),
            np.array([plan.usd for _, plan in fitting]),
            np.array([number for number, _ in fitting], dtype=np.int64),
        )
        passes.append(known.__getitem__)
    if len(front.seconds) == 1:
        # The chain is too short for a coarser one, or no function has room for two layers.
        run_pass(LabelBounds(tables, front, max(within, COARSE_WITHIN)), partial(_first_labels, tables, FIRST_LABELS))
    bounds, least = LabelBounds(tables, front, within), partial(_undominated, tables)
    if length > DIRECT_LAYERS:
        run_pass(bounds, least, _near(tables, on_front()))
    run_pass(bounds, least)
    return on_front()


def _of_coarser_chain(problem: PipelineProblem, ways: Sequence[PipelineOptions], length: int, within: float) -> Found:
    """Return the front of the same model with its layers combined into `length` ones, as cuts of the original."""
    layers = problem.profile.layers
    ends = [len(layers) * number // length for number in range(length + 1)]
    taken = tuple(_combined(layers[a:b]) for a, b in pairwise(ends))
    shorter = replace(problem, profile=replace(problem.profile, layers=taken))
    if problem.stages is not None and problem.stages > length:
        return []
    found = search(shorter, ways, within)
    return [
        (way, tuple(replace(cut, first=ends[cut.first], last=ends[cut.last + 1] - 1) for cut in cuts))
        for way, cuts in found
    ]


def _combined(layers: Sequence[Layer]) -> Layer:
    """Return one layer with the sizes and costs of consecutive ones."""
    return Layer(
        layers[0].name,
        sum(layer.parameter_bytes for layer in layers),
        sum(layer.activation_bytes for layer in layers),
        layers[-1].output_bytes,
        LinearCost(sum(layer.forward.base_s for layer in layers), sum(layer.forward.sample_s for layer in layers)),
        LinearCost(sum(layer.backward.base_s for layer in layers), sum(layer.backward.sample_s for layer in layers)),
        sum(layer.update_s for layer in layers),
    )


def _near(tables: Tables, known: Found) -> Mask:
    """Return the stages near those of known pipelines, by (way, first layer, layer behind the last)."""
    near = np.zeros((len(tables.ways), tables.length + 1, tables.length + 1), dtype=bool)
    row = {way: number for number, way in enumerate(tables.ways)}
    for way, cuts in known:
        for cut in cuts:
            first, behind = (slice(max(at - NEAR_LAYERS, 0), at + NEAR_LAYERS + 1) for at in (cut.first, cut.last + 1))
            near[row[way], first, behind] = True
    return near


def _pass(tables: Tables, bounds: LabelBounds, front: Front, choose: Choice, near: Mask | None) -> Labels:
    """Build all labels, or those whose stages are all near, and add the whole pipelines to the front."""
    labels = ends_of(bounds.possible, bounds.slowest, tables.length, len(tables.problem.places) - 1)
    for first in range(tables.length - 1, -1, -1):
        found = _extended(tables, bounds, labels, tables.starting(first, bounds.alike), near)
        found = (
            choose(*bounds.promising(found)) if first else found.take(~front.beats(*_seconds_and_usd(tables, found)))
        )
        labels = joined([labels, found])
    rows = np.flatnonzero(labels.first == 0)
    front.add(*_seconds_and_usd(tables, labels.take(rows)), rows)
    return labels


def _seconds_and_usd(tables: Tables, whole: Labels) -> tuple[Floats, Floats]:
    """Return seconds and USD of an iteration of labels that are whole pipelines."""
    seconds = seconds_of(whole, tables.count[whole.way])
    return seconds, seconds * whole.rate + whole.other_usd


def _extended(tables: Tables, bounds: LabelBounds, labels: Labels, stages: Stages, near: Mask | None) -> Labels:
    """Return every label with every stage prepended that begins with the layer of `stages`, fits, and is allowed."""
    problem, first = tables.problem, stages.first
    rows = None if near is None else np.flatnonzero(near[labels.way, first, labels.first])
    labels = labels if rows is None else labels.take(rows)
    row, last = bounds.row[labels.way], labels.first - first - 1
    live = tables.count[labels.way]
    live = np.where(tables.alternates[labels.way], np.minimum(live, labels.stages + 1), live)
    may = np.ones(len(labels), dtype=bool)
    if problem.stages is not None:
        may &= (labels.stages + 1 == problem.stages) if first == 0 else (labels.stages + 1 < problem.stages)
    if problem.most_workers is not None:
        may &= (labels.stages + 1) * tables.degree[labels.way] <= problem.most_workers
    kept = _by_option(stages.fits[row, last] >= live[:, None])
    again = _by_option(stages.fits_again[row, last] >= live[:, None])
    fits = ((kept | again) if problem.rematerialise else kept) & may
    if len(problem.places) > 1:
        fits &= _joined(tables, labels, first)
    useful = _by_option(bounds.beats(first)[last, labels.way] <= labels.slowest[:, None])
    fits = tables.needed(fits, kept) & useful
    before, option = np.divmod(np.flatnonzero(fits.T), len(fits))
    found = _prepended(tables, labels, stages, before, option, ~kept[option, before], row)
    return found if rows is None else replace(found, before=rows[found.before])


def _by_option(mask: Mask) -> Mask:
    """Return the (label, option) mask as (option, label): numpy is fast along the last axis."""
    return np.ascontiguousarray(mask.T)


def _joined(tables: Tables, labels: Labels, first: int) -> Mask:
    """Return whether a stage that begins with a layer may be prepended in its place, by (option, label)."""
    place, behind = tables.place[:, None], labels.first < tables.length
    fits: Mask = (place <= labels.place) & (~behind | np.isfinite(tables.hop_s[0, place, labels.place]))
    if first == 0:
        fits &= place == 0
    if tables.problem.ends_last:
        fits &= behind | (place == len(tables.problem.places) - 1)
    return fits


def _prepended(
    tables: Tables, labels: Labels, stages: Stages, before: Ints, option: Ints, again: Mask, rows: Ints
) -> Labels:
    """Return labels with one stage prepended to each; values are added up as in `_evaluate`."""
    old, row = labels.take(before), rows[before]
    at = row, old.first - stages.first - 1, option
    forward = stages.forward[at]
    backward = stages.backward[at] + again * forward
    get_in, put_back = stages.get_in[row, option], stages.put_back[row, option]
    put_out, get_back = stages.put_out[at], stages.get_back[at]
    there, back, egress_usd = _hops(tables, old, option)
    fill_f = forward + get_in + put_out + there
    fill_b = backward + put_back + get_back + back
    alternates = tables.alternates[old.way]
    slowest_f = np.maximum(np.maximum(forward, get_in), np.maximum(put_out, there))
    slowest_b = np.maximum(np.maximum(backward, put_back), np.maximum(get_back, back))
    beat_f = np.maximum(old.beat_f, np.where(alternates, fill_f + fill_b, slowest_f))
    beat_b = np.maximum(old.beat_b, np.where(alternates, 0.0, slowest_b))
    fill_f, fill_b = old.fill_f + fill_f, old.fill_b + fill_b
    done = fill_b + (tables.count[old.way] - 1) * beat_b + stages.merge[at]
    place = tables.place[option]
    # A label without stages is in no place yet.
    moved = (old.place != place) & (old.stages > 0)
    return Labels(
        way=old.way,
        first=np.full(len(before), stages.first),
        place=place,
        fill_f=fill_f,
        beat_f=beat_f,
        fill_b=fill_b,
        beat_b=beat_b,
        ends=np.maximum(old.ends, done),
        busy=np.where(moved, 0.0, old.busy) + stages.core[at] + again * stages.core_again[at],
        busiest=np.where(moved, np.maximum(old.busiest, old.busy), old.busiest),
        rate=old.rate + tables.rate[old.way, option],
        other_usd=old.other_usd + stages.other_usd[at] + egress_usd,
        stages=old.stages + 1,
        before=before,
        option=option,
        again=again,
        slowest=np.full(len(before), np.inf),
    )


def _hops(tables: Tables, after: Labels, option: Ints) -> tuple[Floats, Floats, Floats]:
    """Return seconds in both directions, and USD of an iteration, between a stage and the label behind it."""
    pair = tables.place[option], after.place
    behind = after.first < tables.length
    if len(tables.problem.places) == 1:
        none = np.zeros(len(option))
        return none, none, none
    leaving = tables.problem.sent_share * np.where(behind, tables.passed[after.first], 0.0)
    sent = leaving * tables.micro[after.way] * tables.degree[after.way]
    there, back = (
        np.where(behind, tables.hop_s[k][pair] + sent * tables.hop_byte_s[k][pair], 0.0) for k in (0, 1)
    )  # fmt: skip
    return there, back, leaving * tables.problem.batch * tables.hop_byte_usd[pair]


def _undominated(tables: Tables, labels: Labels, raised: Labels) -> Labels:
    return undominated(labels, raised, tables.count[labels.way], alike=tables.problem.stages is not None)


def _first_labels(tables: Tables, number: int, labels: Labels, _raised: Labels) -> Labels:
    """Return the best label of each way and place by each of `number` weighted geometric means of seconds and rate."""
    seconds, rate = seconds_of(labels, tables.count[labels.way]), labels.rate
    group = groups(labels, alike=tables.problem.stages is not None)
    best: list[Ints] = [np.zeros(0, dtype=np.int64)]
    for share in np.linspace(0.0, 1.0, number):
        order = np.lexsort((rate ** (1 - share) * seconds**share, group))
        ahead = np.ones(len(order), dtype=bool)
        ahead[1:] = group[order][1:] != group[order][:-1]
        best.append(order[ahead])
    return labels.take(np.unique(np.concatenate(best)))


def _cuts(tables: Tables, labels: Labels, row: int) -> tuple[PipelineOptions, tuple[Cut, ...]]:
    way, cuts = tables.ways[labels.way[row]], []
    while labels.before[row] >= 0:
        before = int(labels.before[row])
        place, size = tables.options[labels.option[row]]
        last = int(labels.first[before]) - 1
        cuts.append(Cut(int(labels.first[row]), last, place, size, bool(labels.again[row])))
        row = before
    return way, tuple(cuts)
