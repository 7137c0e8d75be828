"""The planner's problem for one way as a mixed-integer program (HiGHS), written down apart from the planner.

For stages s = (first, last, place, size, again), binary z_s, on a path from layer 0 to the end:

    min  sum_k rate_k p_k + sum_s other_s z_s        p_k = T where the functions' rate is rate_k, else 0
    s.t. T = sum_s fill_f z_s + (n-1) F + X <= limit
         F >= beat_f z_s
         b_first >= b_after + fill_b - M (1 - z_s),  m_first >= m_after - M (1 - z_s),  m_first >= beat_b z_s
         X >= b_first + (n-1) m_first + merge_s - M (1 - z_s)
         T >= sum_s busy_s z_s
         sum_k h_k = 1,  sum_k rate_k h_k = sum_s rate_s z_s,  p_k <= M h_k,  sum_k p_k = T

The rate is one of the sums of so many function sizes, for each number of stages. In 1F1B what fits depends on the
number of stages behind, so that the program is solved for each number of stages; nodes carry the stage's number then.
Problems of one place only. What a stage takes is asked of `evaluate`, on a pipeline of which it is a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement

import highspy
import numpy as np

from scheduler.pipeline import Layer, PipelineOptions, PipelineProblem, StageRegion
from scheduler.pipeline._evaluate import exposed_apart_seconds, exposed_seconds, held_bytes, merge_seconds
from scheduler.pipeline._model import MIB, Cut


@dataclass
class _Program:
    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float, Mapping[int, float]]] = field(default_factory=list)

    def column(self, cost: float = 0.0, upper: float = math.inf, whole: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def at_most(self, high: float, terms: Mapping[int, float]) -> None:
        self.rows.append((-math.inf, high, terms))

    def equal(self, value: float, terms: Mapping[int, float]) -> None:
        self.rows.append((value, value, terms))

    def solve(self) -> float | None:
        """The least cost; None: there is no solution."""
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(self.cost), len(self.rows)
        program.col_cost_, program.col_lower_ = np.array(self.cost), np.zeros(len(self.cost))
        program.col_upper_ = np.array(self.upper)
        program.row_lower_ = np.array([row[0] for row in self.rows])
        program.row_upper_ = np.array([row[1] for row in self.rows])
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.cumsum([0] + [len(row[2]) for row in self.rows])
        program.a_matrix_.index_ = np.array([column for row in self.rows for column in row[2]])
        program.a_matrix_.value_ = np.array([value for row in self.rows for value in row[2].values()])
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        program.integrality_ = [kinds[whole] for whole in self.whole]
        solver = highspy.Highs()
        for name, value in {"output_flag": False, "threads": 1, "mip_rel_gap": 1e-9, "mip_abs_gap": 0.0}.items():
            solver.setOptionValue(name, value)
        for name in ("mip_feasibility_tolerance", "primal_feasibility_tolerance"):
            solver.setOptionValue(name, 1e-9)
        solver.passModel(program)
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        assert status == highspy.HighsModelStatus.kOptimal, status
        return float(solver.getInfo().objective_function_value)


def least_usd(problem: PipelineProblem, way: PipelineOptions, limit_seconds: float) -> float | None:
    """The cheapest iteration of one way within a limit, in USD; None: there is none."""
    most = len(problem.profile.layers)
    if problem.most_workers is not None:
        most = min(most, problem.most_workers // way.degree)
    found = [_of_stages(problem, way, stages, limit_seconds) for stages in range(1, most + 1)]
    return min((usd for usd in found if usd is not None), default=None)


@dataclass(frozen=True)
class Stage:
    number: int
    cut: Cut
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    merge_s: float
    """With the optimiser's step."""
    busy_s: float
    """Of all replicas, by the cores that they share."""
    rate: float
    other_usd: float


def _of_stages(problem: PipelineProblem, way: PipelineOptions, stages: int, limit: float) -> float | None:
    count = way.micro_batches(problem.batch)
    allowed = stages_of(problem, way, stages)
    program = _Program()
    chosen = [program.column(stage.other_usd, 1.0, True) for stage in allowed]
    longest = 1.0 + count * sum(sum(stage.forward) + sum(stage.backward) + stage.merge_s for stage in allowed)
    # A larger limit would only blur the products below, which are exact to a tolerance times it.
    limit = min(limit, longest)
    length = len(problem.profile.layers)
    for number in range(stages):
        for at in range(length + 1):
            ends = {c: 1.0 for c, s in zip(chosen, allowed, strict=True) if (s.number, s.cut.last + 1) == (number, at)}
            begins = {
                c: -1.0 for c, s in zip(chosen, allowed, strict=True) if (s.number, s.cut.first) == (number + 1, at)
            }
            if number + 1 < stages and (ends or begins):
                program.equal(0.0, ends | begins)
        program.equal(1.0, {c: 1.0 for c, s in zip(chosen, allowed, strict=True) if s.number == number})
    beat_f, done, total = program.column(), program.column(), program.column(0.0, limit)
    backward = [program.column() for _ in range(stages + 1)]
    beat_b = [program.column() for _ in range(stages + 1)]
    times = {total: -1.0, beat_f: count - 1.0, done: 1.0}
    for c, s in zip(chosen, allowed, strict=True):
        n, fill_b = s.number, sum(s.backward)
        slow_f, slow_b = max(s.forward), max(s.backward)
        if way.order == "1f1b":
            slow_f, slow_b = sum(s.forward) + fill_b, 0.0
        times[c] = sum(s.forward)
        program.at_most(0.0, {c: slow_f, beat_f: -1.0})
        program.at_most(0.0, {c: slow_b, beat_b[n]: -1.0})
        program.at_most(
            longest - s.merge_s, {c: longest, backward[n]: 1.0, beat_b[n]: count - 1.0, done: -1.0}
        )  # fmt: skip
    for n in range(stages):
        fills = {c: sum(s.backward) for c, s in zip(chosen, allowed, strict=True) if s.number == n}
        program.equal(0.0, fills | {backward[n + 1]: 1.0, backward[n]: -1.0})
        program.at_most(0.0, {beat_b[n + 1]: 1.0, beat_b[n]: -1.0})
    program.equal(0.0, {backward[stages]: 1.0})
    program.equal(0.0, times)
    program.at_most(0.0, {total: -1.0} | {c: s.busy_s for c, s in zip(chosen, allowed, strict=True)})
    _price(program, problem, way, stages, allowed, chosen, total, limit)
    return program.solve()


def _price(
    program: _Program,
    problem: PipelineProblem,
    way: PipelineOptions,
    stages: int,
    allowed: list[Stage],
    chosen: list[int],
    total: int,
    limit: float,
) -> None:
    """The product of time and rate, which is exact since the rate is one of few values."""
    own = sorted({stage.rate for stage in allowed})
    sums = sorted({round(sum(some), 15) for some in combinations_with_replacement(own, stages)})
    kept: list[float] = []
    for value in sums:
        if not kept or value > kept[-1] * (1 + 1e-9):
            kept.append(value)
    # Rates are near 1e-5; in units of the largest one they are as large as the other numbers here.
    unit = kept[-1] if kept else 1.0
    marks = [program.column(0.0, 1.0, True) for _ in kept]
    paid = [program.column(value) for value in kept]
    program.equal(1.0, dict.fromkeys(marks, 1.0))
    program.at_most(1e-7, _difference(marks, kept, chosen, allowed, unit, 1.0))
    program.at_most(1e-7, _difference(marks, kept, chosen, allowed, unit, -1.0))
    for mark, part in zip(marks, paid, strict=True):
        program.at_most(0.0, {part: 1.0, mark: -limit})
    program.equal(0.0, {total: -1.0} | dict.fromkeys(paid, 1.0))


def _difference(
    marks: list[int], kept: list[float], chosen: list[int], allowed: list[Stage], unit: float, sign: float
) -> dict[int, float]:
    terms = {mark: sign * value / unit for mark, value in zip(marks, kept, strict=True)}
    return terms | {c: -sign * s.rate / unit for c, s in zip(chosen, allowed, strict=True)}


def stages_of(problem: PipelineProblem, way: PipelineOptions, stages: int) -> list[Stage]:
    """All that fit at their place in a pipeline of so many stages."""
    length, place = len(problem.profile.layers), problem.places[0]
    channel, mu = place.channel, way.micro_batch
    count = way.micro_batches(problem.batch)
    found = []
    for number in range(stages):
        for first in range(length):
            for last in range(first, length):
                if (number == 0) != (first == 0) or (number == stages - 1) != (last == length - 1):
                    continue
                for index, size in enumerate(place.sizes):
                    for again in (False, True) if problem.rematerialise else (False,):
                        cut = Cut(first, last, 0, index, again)
                        if held_bytes(problem, way, cut, stages - number) > size.memory_mb * MIB:
                            continue
                        held = problem.profile.layers[first : last + 1]
                        forward = [sum(layer.forward.seconds(mu) for layer in held) / size.speed]
                        backward = [sum(layer.backward.seconds(mu) for layer in held) / size.speed + again * forward[0]]
                        up = channel.up_bytes_per_s * size.bandwidth
                        down = channel.down_bytes_per_s * size.bandwidth
                        if number > 0:
                            passed = problem.sent_share * mu * problem.profile.layers[first - 1].output_bytes
                            forward.append(channel.get_s + passed / down)
                            backward.append(channel.put_s + passed / up)
                        if number + 1 < stages:
                            passed = problem.sent_share * mu * held[-1].output_bytes
                            forward.append(channel.put_s + passed / up)
                            backward.append(channel.get_s + passed / down)
                        d = way.degree
                        backward_s = backward[0] - again * forward[0]
                        sides = (number > 0) + (number + 1 < stages)
                        times = 2 if problem.merges_apart else 1
                        puts = sides * d * count + times * (d * d if d > 1 else 0)
                        gets = sides * d * count + times * 2 * d * (d - 1)
                        found.append(
                            Stage(
                                number,
                                cut,
                                tuple(forward),
                                tuple(backward),
                                _merge(problem, held, way, place, size.bandwidth, backward_s, size.speed)
                                + sum(layer.update_s for layer in held) / size.speed,
                                _busy(problem, way, cut, (number > 0, number + 1 < stages)),
                                d * size.memory_mb / 1024 * size.usd_per_gb_second,
                                puts * channel.put_usd + gets * channel.get_usd,
                            )
                        )
    return found


def _busy(problem: PipelineProblem, way: PipelineOptions, cut: Cut, sides: tuple[bool, bool]) -> float:
    """Seconds that a stage of all replicas keeps the cores of its place busy."""
    place, layers = problem.places[0], problem.profile.layers
    if not place.cores:
        return 0.0
    count, mu, d = way.micro_batches(problem.batch), way.micro_batch, way.degree
    seconds, requests, sent = 0.0, 0.0, 0.0
    for layer in layers[cut.first : cut.last + 1]:
        forwards = count * (1 + cut.rematerialise) * layer.forward.seconds(mu)
        seconds += forwards + count * layer.backward.seconds(mu) + layer.update_s
        sent += problem.merged_share * layer.parameter_bytes * ((1 + 2 * (d - 1) / d) if d > 1 else 0)
    requests += (2 if problem.merges_apart else 1) * (3 * d - 2) if d > 1 else 0
    for there, passed in zip(sides, (layers[cut.first - 1].output_bytes, layers[cut.last].output_bytes), strict=True):
        requests += 2 * count * there
        sent += 2 * count * mu * problem.sent_share * passed * there
    channel = place.channel
    return d * (seconds + requests * channel.request_core_s + sent * channel.byte_core_s) / place.cores


def _merge(
    problem: PipelineProblem,
    held: Sequence[Layer],
    way: PipelineOptions,
    place: StageRegion,
    bandwidth: float,
    backward_s: float,
    speed: float,
) -> float:
    degree, sizes = way.degree, [layer.parameter_bytes for layer in held]
    size = problem.merged_share * sum(sizes)
    if problem.merges_early:
        first = problem.merged_share * held[0].parameter_bytes
        if problem.merges_apart:
            late, late_s = max(sizes[0], sum(sizes) / degree), 0.0
            for number, layer in enumerate(held):
                if sum(sizes[: number + 1]) <= late + 1e-3:
                    late_s += layer.backward.seconds(way.micro_batch) / speed
            return exposed_apart_seconds(size, first, degree, place, bandwidth, backward_s, late_s)
        return exposed_seconds(size, first, degree, place, bandwidth, backward_s)
    return merge_seconds(size, degree, place, bandwidth)
