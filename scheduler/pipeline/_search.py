"""All best pipelines: label-setting dynamic programming over cut points, from the last layer to the first.

A label is a choice of stages for the layers from one on (`_labels`). Putting a stage in front of it gives another one.
Two things keep labels few, and lose no point of the front: a label that another one is better than in every respect
goes, and so does one that cannot end better than a whole pipeline that is known already, by a bound on what the layers
before it still add in any number of stages and at any rate (`_bounds`). The bounds are as good as what is known: first
the same is done for a shorter chain, where layers are taken together a few at a time, whose pipelines are pipelines of
the longer one too; and for that one with a shorter one still. Then cuts are tried that are near those of these
pipelines, and only then all.

A front within a share w: a label also goes where a known pipeline is worse than the bound by no more than w, in seconds
and in USD. Every pipeline p is then covered by one that is found, with at most (1+w) times its seconds and its USD. For
follow p's labels: where one goes for a better label, that one's completion by p's other stages is no worse than p, and
is followed instead; where one goes by the bound, a known pipeline is within 1+w of the bound, which is no more than p's
own values, and known pipelines only make room for better ones. Nothing is followed beyond the bound, so that the share
is paid once, however many stages there are.
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
"""Choice among promising labels, given with the same ones raised: those to continue with."""

FEW = 2
"""Labels of each way that the very first pass keeps at a cut."""
FEWEST_LAYERS = 6
"""Layers of a chain up to which it is searched without shortening it first."""
SHORTER = 4
"""Layers that are combined into one in the shorter chain that is searched first."""
NEAR = 2
"""Layers by which the cuts of its pipelines are then moved, before everything is tried."""
ROUGH = 0.02
"""Share within which these are found."""

Found = list[tuple[PipelineOptions, tuple[Cut, ...]]]


def search(problem: PipelineProblem, ways: Sequence[PipelineOptions], within: float = 0.0) -> Found:
    """The ways and cuts on the front of seconds and USD of an iteration, the fastest first; one for each point.

    ``within``: for every pipeline, one is found that takes at most 1 + within times its seconds and its USD. 0: exact.
    """
    tables, front = Tables(problem, ways), Front()
    passes: list[Callable[[int], tuple[PipelineOptions, tuple[Cut, ...]]]] = []

    def go(bounds: LabelBounds, choose: Choice, near: Mask | None = None) -> None:
        labels = _pass(tables, bounds, front, choose, near)
        passes.append(partial(_cuts, tables, labels))

    def best() -> Found:
        return [passes[number](row) for number, row in front.sources]

    length = tables.length
    if length > FEWEST_LAYERS:
        known = _of_shorter(problem, ways, math.ceil(length / SHORTER), max(within, ROUGH))
        plans = [evaluate(problem, way, cuts) for way, cuts in known]
        fitting = [(number, plan) for number, plan in enumerate(plans) if plan is not None]
        front.add(
            np.array([plan.seconds for _, plan in fitting]),
            np.array([plan.usd for _, plan in fitting]),
            np.array([number for number, _ in fitting], dtype=np.int64),
        )
        passes.append(known.__getitem__)
    if len(front.seconds) == 1:
        # Too short for a shorter chain, or no two layers fit a function together.
        go(LabelBounds(tables, front, max(within, ROUGH)), partial(_few, tables, FEW))
    bounds, least = LabelBounds(tables, front, within), partial(_undominated, tables)
    if length > FEWEST_LAYERS:
        go(bounds, least, _near(tables, best()))
    go(bounds, least)
    return best()


def _of_shorter(problem: PipelineProblem, ways: Sequence[PipelineOptions], length: int, within: float) -> Found:
    """Return pipelines of the same model with layers combined to a given number."""
    layers = problem.profile.layers
    ends = [len(layers) * number // length for number in range(length + 1)]
    taken = tuple(_as_one(layers[a:b]) for a, b in pairwise(ends))
    shorter = replace(problem, profile=replace(problem.profile, layers=taken))
    if problem.stages is not None and problem.stages > length:
        return []
    found = search(shorter, ways, within)
    return [
        (way, tuple(replace(cut, first=ends[cut.first], last=ends[cut.last + 1] - 1) for cut in cuts))
        for way, cuts in found
    ]


def _as_one(layers: Sequence[Layer]) -> Layer:
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
    """(way, first layer, layer behind the last): stages about where known pipelines have theirs."""
    near = np.zeros((len(tables.ways), tables.length + 1, tables.length + 1), dtype=bool)
    row = {way: number for number, way in enumerate(tables.ways)}
    for way, cuts in known:
        for cut in cuts:
            first, behind = (slice(max(at - NEAR, 0), at + NEAR + 1) for at in (cut.first, cut.last + 1))
            near[row[way], first, behind] = True
    return near


def _pass(tables: Tables, bounds: LabelBounds, front: Front, choose: Choice, near: Mask | None) -> Labels:
    """Extend all labels, or those with stages that are near; what is known of the front grows."""
    labels = ends_of(bounds.possible, bounds.slowest, tables.length, len(tables.problem.places) - 1)
    for first in range(tables.length - 1, -1, -1):
        found = _extended(tables, bounds, labels, tables.starting(first, bounds.alike), near)
        found = choose(*bounds.promising(found)) if first else found.take(~front.beats(*_worth(tables, found)))
        labels = joined([labels, found])
    rows = np.flatnonzero(labels.first == 0)
    front.add(*_worth(tables, labels.take(rows)), rows)
    return labels


def _worth(tables: Tables, whole: Labels) -> tuple[Floats, Floats]:
    seconds = seconds_of(whole, tables.count[whole.way])
    return seconds, seconds * whole.rate + whole.other_usd


def _extended(tables: Tables, bounds: LabelBounds, labels: Labels, stages: Stages, near: Mask | None) -> Labels:
    """Return every label with every stage in front of it that begins with a layer, fits, and is allowed."""
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
    found = _put_in_front(tables, labels, stages, before, option, ~kept[option, before], row)
    return found if rows is None else replace(found, before=rows[found.before])


def _by_option(mask: Mask) -> Mask:
    """(option, label), of (label, option): numpy is fast along the last axis."""
    return np.ascontiguousarray(mask.T)


def _joined(tables: Tables, labels: Labels, first: int) -> Mask:
    """(option, label): where a stage that begins with a layer may be, in front of a label."""
    place, behind = tables.place[:, None], labels.first < tables.length
    fits: Mask = (place <= labels.place) & (~behind | np.isfinite(tables.hop_s[0, place, labels.place]))
    if first == 0:
        fits &= place == 0
    if tables.problem.ends_last:
        fits &= behind | (place == len(tables.problem.places) - 1)
    return fits


def _put_in_front(
    tables: Tables, labels: Labels, stages: Stages, before: Ints, option: Ints, again: Mask, rows: Ints
) -> Labels:
    """Return labels with one stage in front of each, added up as in `_evaluate`."""
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
    # Nothing yet is in every place.
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


def _few(tables: Tables, few: int, labels: Labels, _raised: Labels) -> Labels:
    """Return of each way and place the labels that a few mixtures of seconds and rate rank best, as far as there are
    any."""
    seconds, rate = seconds_of(labels, tables.count[labels.way]), labels.rate
    group = groups(labels, alike=tables.problem.stages is not None)
    best: list[Ints] = [np.zeros(0, dtype=np.int64)]
    for share in np.linspace(0.0, 1.0, few):
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
