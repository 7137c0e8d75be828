"""Pipelines as part of a plan: whether a region needs stages, and which ones it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from scheduler._model import Demand, PipelineShape, PipelineStage, Reason, Region, Snapshot
from sync.channel import channel_kinds
from sync.codec import merged_size_factor

if TYPE_CHECKING:
    from scheduler.pipeline import PipelineProblem, PlannedPipeline
    from scheduler.tuning import TaskProfile

__all__ = ["Staged", "staged", "unstaged"]

SIZES_MB = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 16384, 32768)
"""Function sizes that are tried, in MB, up to the region's limit, which is tried too. A partition has one function, so
all stages have the same size."""
WITHIN = 0.01
"""Share by which a stage plan may miss the best one, in seconds and in USD: planning must answer soon."""
STATE_FACTOR = 2.0
"""Size of the optimiser's state in sizes of the parameters: Adam's, since the optimiser is unknown; too much memory
rather than too little."""
USUAL_BASE_MB, LEAST_BASE_MB = 300.0, 128.0
"""Memory of a worker with torch loaded, in MB: the usual one, and the lower bound of what a profile yields."""
_WHOLE = ("data", "whole")
"""What jobs ask for whose workers hold the whole model."""
WORTH = 0.95
"""Ratio of a step's time (or cost, if the job minimises it) in bfloat16 to float32 below which stages send bfloat16. It
rounds activations and their gradients to 8 bits of mantissa, so it must be worth that."""
SPARE = 0.2
"""Share of a worker's memory that is left free, as for workers that hold the whole model."""
_MOST_TOLD = 2
"""Other numbers of stages, and other function sizes, that a plan tells of."""


@dataclass(frozen=True, eq=False)
class Staged:
    """The stages of one region's part, for any number of replicas."""

    memory_mb: int
    plan: PlannedPipeline
    problem: PipelineProblem
    """Problem that the plan solves; for another number of replicas the same cuts are evaluated."""
    minimise: str
    """What the job minimises: "time" or "cost"."""
    pace: float = 1.0
    """Ratio of measured to predicted time, as in `PipelineShape`."""
    others: tuple[Staged, ...] = ()
    """The best with other numbers of stages, and with other function sizes."""

    def worth(self, plan: PlannedPipeline) -> float:
        """Return a figure by which pipelines are compared; the smallest is the best."""
        return _worth(plan, self.minimise)

    @property
    def stages(self) -> int:
        """Number of stages that the model is cut into."""
        return len(self.plan.stages)

    @property
    def most_replicas(self) -> int:
        """Largest number of replicas of each stage; 1 where what merging needs does not fit into the memory."""
        return 1 if self.plan.way.degree == 1 else 1 << 20

    def shape(self, degree: int) -> PipelineShape:
        """Return the pipeline with a number of replicas of each stage, each of which takes the job's batch in a
        step."""
        return _shape(self, degree)

    def variants(self, degree: int) -> Sequence[Staged]:
        """Return pipelines with the same cuts and replicas that differ in a respect; some may not fit."""
        return _variants(self, degree)


@lru_cache(maxsize=1024)
def _variants(cut: Staged, degree: int) -> tuple[Staged, ...]:
    """Cached, so that the shapes of these are, too."""
    from scheduler.pipeline import ORDERS

    own, problem, stages = cut.shape(degree), cut.problem, cut.plan.stages
    samples = problem.batch // cut.plan.way.degree
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    near = sorted(sizes, key=lambda size: max(size, own.micro_batch) / min(size, own.micro_batch))[1 : 1 + _MOST_TOLD]
    ways = [replace(problem, micro_batches=(size,)) for size in near]
    if len(stages) > 1:
        ways += [replace(problem, orders=(order,)) for order in ORDERS if order != own.order]
        ways.append(_sending(problem, 1.0 if problem.sent_share < 1.0 else 0.5))
    again = [tuple(replace(stage, rematerialise=so) for stage in stages) for so in (True, False)]
    return (
        *(replace(cut, problem=other) for other in ways),
        *(replace(cut, plan=replace(cut.plan, stages=other)) for other in again if other != stages),
    )


@lru_cache(maxsize=1024)
def _shape(cut: Staged, degree: int) -> PipelineShape:
    """Return the same cuts with the micro-batch and order that suit a number of replicas.

    With more replicas, fewer micro-batches must be in flight to keep shared cores busy.
    """
    from scheduler.pipeline import cuts_of, evaluate, explain, pipeline_options, played

    one = cut.problem.batch // cut.plan.way.degree
    problem = replace(cut.problem, batch=one * degree, degrees=(degree,))
    cuts = cuts_of(cut.problem, cut.plan)
    tried = (evaluate(problem, way, cuts) for way in pipeline_options(problem))
    fitting = [played(problem, plan) for plan in tried if plan is not None]
    if not fitting:
        raise ValueError("stages that fit with replicas fit with any number of them")
    own = min(fitting, key=cut.worth)
    return PipelineShape(
        stages=tuple(
            PipelineStage(s.first, s.last, cut.memory_mb, s.needed_mb * (1 + SPARE), s.rematerialise)
            for s in own.stages
        ),
        degree=degree,
        micro_batch=own.way.micro_batch,
        order=own.way.order,
        step_seconds=own.seconds * cut.pace,
        pace=cut.pace,
        activation_codec="bf16" if problem.sent_share < 1.0 else "fp32",
        why=(*explain(problem, own), *_why_longer(cut.pace)),
    )


def staged(region: Region, snapshot: Snapshot, demand: Demand) -> Staged | None:
    """Return the stages of a region's part; None: its workers hold the whole model, or no stages are known to fit."""
    profile, prices = snapshot.profiles.get(region.name), region.prices
    if demand.parallelism in _WHOLE or profile is None or prices is None or not _measured(profile):
        return None
    most_mb = min(demand.memory_mb or region.capacity.memory_mb, region.capacity.memory_mb)
    workers = _most_workers(region, snapshot, demand)
    if demand.parallelism == "auto" and _fits_whole(profile, demand.batch, workers, most_mb):
        return None
    sizes = (demand.memory_mb,) if demand.memory_mb else (*(size for size in SIZES_MB if size < most_mb), most_mb)
    device_usd = region.worker_devices(demand.gpus) * prices.device_usd_per_second
    return _staged(
        profile, prices.function_usd_per_gb_second, device_usd, demand.batch, sizes, workers,
        demand.stages, demand.minimise, demand.activations, merged_size_factor(demand.merging_codec),
        region.capacity.cores, round(snapshot.stage_paces.get(region.name, 1.0), 3),
    )  # fmt: skip


def unstaged(region: Region, snapshot: Snapshot, demand: Demand) -> Reason | None:
    """Return why a region cannot run the model in stages although the demand requires it, or no function can hold the
    whole model; None: it can, or need not."""
    if demand.parallelism in _WHOLE or staged(region, snapshot, demand) is not None:
        return None
    profile, workers = snapshot.profiles.get(region.name), _most_workers(region, snapshot, demand)
    most_mb = min(demand.memory_mb or region.capacity.memory_mb, region.capacity.memory_mb)
    if demand.parallelism == "auto" and (profile is None or _fits_whole(profile, demand.batch, workers, most_mb)):
        return None
    if profile is None:
        text, remedy = "has no profile of the task", "run `geofed profile` for it first"
    elif not _measured(profile):
        text = f"knows no layers of the model{': ' if profile.layers_note else ''}{profile.layers_note}"
        remedy = "make the model an nn.Sequential or declare its layers, or take `parallelism: data`"
    else:
        text = "has no cut that fits its functions and its free workers"
        remedy = "allow more stages, memory or workers, or fewer samples in train.batch"
    if demand.parallelism == "auto":
        if most_mb < region.capacity.memory_mb:
            text = f"cannot hold the model in functions of {most_mb} MB, as function.memoryMb asks for, and {text}"
            remedy += f"; or raise function.memoryMb: the region gives {region.capacity.memory_mb} MB"
        else:
            text = f"gives a function at most {most_mb} MB, too little for the model, and {text}"
        remedy += "; `parallelism: data` tries it all the same"
    return Reason("INADMISSIBLE", f"region {region.name} {text}", remedy)


def _worth(plan: PlannedPipeline, minimise: str) -> float:
    # With a given number of workers, fewer stages mean more replicas.
    return plan.seconds * len(plan.stages) if minimise == "time" else plan.usd


def _why_longer(pace: float) -> tuple[str, ...]:
    """Return a text on what a step's time is based on besides the profile."""
    if pace == 1.0:
        return ()
    return (f"a step is expected to take {pace:.2f} times as long as in the profile, as in earlier runs",)


def _measured(profile: TaskProfile) -> bool:
    return bool(profile.layers) and all("backward_beta_seconds" in layer for layer in profile.layers)


def _most_workers(region: Region, snapshot: Snapshot, demand: Demand) -> int:
    """Return the workers that a region has for a job, or that the job asks for there."""
    stated = demand.workers.get(region.name) if isinstance(demand.workers, Mapping) else demand.workers
    return stated or max(1, snapshot.free_workers(region, demand.gpus))


def _fits_whole(profile: TaskProfile, batch: int, workers: int, most_mb: int) -> bool:
    """Return whether functions have memory for a step of the whole model and its merge among so many workers."""
    from scheduler.tuning import fit_memory, needed_mb

    try:
        memory = fit_memory(profile.steps)
    except ValueError:
        return True
    return float(needed_mb(memory, float(batch), profile.model_bytes, workers)) <= most_mb


def _base_mb(profile: TaskProfile) -> float:
    """Return the memory of a worker without a model: what steps need with any batch, less parameters and gradients."""
    from scheduler.tuning import fit_memory

    try:
        whole = fit_memory(profile.steps).base_mb
    except ValueError:
        return USUAL_BASE_MB
    return max(LEAST_BASE_MB, whole - 2 * profile.model_bytes / 2**20)


@lru_cache(maxsize=1024)
def _staged(
    profile: TaskProfile,
    usd_per_gb_second: float,
    usd_per_second: float,
    batch: int,
    sizes_mb: tuple[int, ...],
    workers: int,
    stages: int | None,
    minimise: str,
    activations: str | None,
    merged_share: float,
    cores: float,
    pace: float,
) -> Staged | None:
    """Return the best pipeline; cached, since jobs that wait are replanned often.

    Where the plan chooses the type of activations, bfloat16 is tried only with the function size that was best in
    float32. Two replicas are planned for where there are workers for two: with the memory for merging, the stages are
    then small enough for any number of replicas.
    """
    from scheduler.pipeline import NothingFitsError, front

    def solved(size_mb: int, problem: PipelineProblem) -> list[Staged]:
        try:
            return [Staged(size_mb, plan, problem, minimise, pace) for plan in front(problem, WITHIN)]
        except NothingFitsError:
            return []

    found: list[Staged] = []
    for degree in (2, 1):
        for size_mb in sizes_mb:
            # The model of pipelines bills functions by their memory.
            price = usd_per_gb_second + usd_per_second * 1024 / size_mb
            problem = _problem(profile, price, batch, size_mb, workers, stages, degree, cores)
            sent = 0.5 if activations == "bf16" else 1.0
            found += solved(size_mb, replace(problem, sent_share=sent, merged_share=merged_share))
        if found:
            break
    if not found:
        return None
    best = min(found, key=_worth_of)
    if stages is None:
        beside = {best.stages - 1, best.stages + 1} - {0, len(profile.layers) + 1, *(one.stages for one in found)}
        found += [one for n in sorted(beside) for one in solved(best.memory_mb, replace(best.problem, stages=n))]
    others = _differing(best, found)
    if activations is None and best.stages > 1:
        shorter = min(solved(best.memory_mb, replace(best.problem, sent_share=0.5)), key=_worth_of, default=None)
        if shorter is not None and _worth_of(shorter) <= WORTH * _worth_of(best):
            best, others = shorter, tuple(replace(one, problem=_sending(one.problem, 0.5)) for one in others)
    return replace(best, others=others)


def _sending(problem: PipelineProblem, share: float) -> PipelineProblem:
    return replace(problem, sent_share=share)


def _worth_of(one: Staged) -> float:
    return one.worth(one.plan)


def _differing(best: Staged, found: Sequence[Staged]) -> tuple[Staged, ...]:
    """Return the best with other numbers of stages, and with other function sizes."""
    kept: dict[Staged, None] = {}
    values: tuple[Callable[[Staged], int], ...] = (lambda one: one.stages, lambda one: one.memory_mb)
    for value in values:
        others: dict[int, Staged] = {}
        for one in sorted(found, key=_worth_of):
            others.setdefault(value(one), one)
        others.pop(value(best), None)
        kept |= dict.fromkeys([*others.values()][:_MOST_TOLD])
    return tuple(kept)


def _problem(
    profile: TaskProfile,
    usd_per_gb_second: float,
    batch: int,
    size_mb: int,
    workers: int,
    stages: int | None,
    degree: int,
    cores: float,
) -> PipelineProblem:
    from scheduler.pipeline import FunctionSize, Layer, LinearCost, PipelineProblem, StageChannel, StageRegion
    from scheduler.pipeline import LayerProfile as Chain

    numbers = [{name: value for name, value in layer.items() if not isinstance(value, str)} for layer in profile.layers]
    layers = tuple(
        Layer(
            str(layer["name"]),
            round(n["parameter_bytes"] + n["state_bytes"]),
            round(n["activation_bytes"]),
            round(n["output_bytes"]),
            LinearCost(max(0.0, n["forward_alpha_seconds"]), max(0.0, n["forward_beta_seconds"])),
            LinearCost(max(0.0, n["backward_alpha_seconds"]), max(0.0, n["backward_beta_seconds"])),
            max(0.0, n.get("update_seconds", 0.0)),
        )
        for layer, n in zip(profile.layers, numbers, strict=True)
    )
    # What a sample takes is not measured; the first layer keeps it, so that it is no more than that.
    chain = Chain(layers, layers[0].activation_bytes, STATE_FACTOR, _base_mb(profile))
    size = FunctionSize(int(size_mb / (1 + SPARE)), 1.0, usd_per_gb_second * (1 + SPARE))
    its = profile.channel
    # In the memory of one machine a transfer is a copy, which a core makes.
    copying = (1 / its.up_bytes_per_second + 1 / its.down_bytes_per_second) / 2 if its.cores else 0.0
    # A message is a put and a get, and what it takes to hand it from thread to thread and to tell who waits for it.
    handing = max(0.0, profile.message_seconds - its.put_seconds - its.get_seconds) / 2
    request_core_s = max(its.request_cpu_seconds, profile.message_core_seconds / 2)
    channel = StageChannel(
        its.put_seconds + handing, its.get_seconds + handing, its.up_bytes_per_second, its.down_bytes_per_second,
        its.parallel, its.put_usd, its.get_usd, request_core_s, copying,
    )  # fmt: skip
    # Workers that have to ask for values save requests, and merge all in one.
    announced = its.name in channel_kinds(lambda kind: kind.announces)
    return PipelineProblem(
        chain, batch * degree, (StageRegion(profile.region, (size,), channel, cores),), degrees=(degree,),
        stages=stages, most_workers=workers, merges_early=True, merges_apart=announced,
    )  # fmt: skip
