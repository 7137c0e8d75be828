"""Sections of the job file on methods: exchange over the WAN, merging, privacy, pipelines.

Docstrings of attributes are the descriptions in the JSON Schema, and in the reference in `docs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import (
    Field,
    ValidationInfo,
    model_validator,
)

from control_plane.spec._types import BELOW, AutoOrCount, AutoOrNumber, Duration, OneOf
from control_plane.spec.sections._base import STORED, Section
from geofed_pb.errors import GeofedError
from scheduler.topology import topology_kinds
from sync.channel import channel_kinds
from sync.codec import codecs
from sync.collective import CollectiveMethod, collective_named, collectives
from sync.policy import DEFAULT, WanPolicy, policies, policy_named
from sync.robust import QUARANTINE_ROUNDS, robust_rule_named, robust_rules
from sync.secure import FEWEST_REGIONS

__all__ = ["GUARD", "Advanced", "CollectiveSettings", "Differential", "Parallelism", "PipelineStages", "Privacy", "Wan"]


def _policies_with(trait: Callable[[WanPolicy], object]) -> str:
    """Return the names of the policies that have a trait, for an error message."""
    return " or ".join(f"`policy: {name}`" for name in policies() if trait(policy_named(name)))


def _collectives_with(trait: Callable[[CollectiveMethod], object]) -> str:
    """Return the names of the collectives that have a trait, for an error message."""
    return " or ".join(f"`collective: {name}`" for name in collectives(trait))


GUARD = 100.0
"""Default of `advanced.wan.guard`."""


class Wan(Section):
    """How the regions exchange updates over the WAN."""

    policy: Annotated[str, OneOf("auto", *policies())] = "auto"
    """WAN policy (docs/wan.md#policies-advancedwanpolicy). `ma`: the regions' models are averaged, weighted by samples,
    after each round. `diloco`: the same, with an outer optimiser. `bsp`: the exact mean after every step. `asgd`,
    `asgd-ga`: each region applies the steps of all regions. `asp`: the same with Gaia's significance filter. `fedprox`:
    `ma`, and a proximal term in the workers. `fednova`: `ma` for regions with different numbers of local steps.
    `fedavgm`, `fedadagrad`, `fedadam`, `fedyogi`: server optimisers over the mean change. `auto`: `ma`."""
    outer: dict[str, float] | None = None
    """Settings of the policy. `diloco`: those of its outer optimiser, `lr` (default: 0.7) and `momentum` (default:
    0.9). `fedprox`: `mu` (0.01). `fedavgm`: `lr` (1) and `momentum` (0.9). `fedadam`, `fedyogi`, `fedadagrad`: `lr`
    (0.01), `beta1` (0.9), `beta2` (0.99; not `fedadagrad`) and `tau` (0.001)."""
    exchange: Literal["auto", "synchronous", "background"] = "auto"
    """`synchronous`: a round ends when the updates of all regions have arrived. `background`: training continues during
    the exchange. `auto`: what `objective` is better with; always background with `quorum`, `grace` or `staleness`,
    which have no effect otherwise."""
    interval: AutoOrCount = "auto"
    """Number of local steps in a round, of the region with the most steps. A plan has shorter rounds, and says so, if
    this one would change the number of steps by more than 2 %. `auto`: what `objective` is best with; longer than 20,
    or in a short job a twentieth of it, only within `objective.tolerance`."""
    codec: Annotated[str, OneOf("auto", *codecs())] = "auto"
    """Codec of updates (docs/wan.md#codecs-advancedwancodec); the residual of a lossy one is added to the next update.
    `auto`: what `objective` is best with among `fp32`, `int8`, `ternary` and `topk`, within `objective.tolerance`; in
    the background more lossy ones while links are slower than planned."""
    topology: Annotated[str, OneOf("auto", *topology_kinds())] = "auto"
    """Which regions exchange directly; updates of others are relayed (docs/wan.md#topology-advancedwantopology).
    `auto`: what `objective` is best with, by the regions' links."""
    fragments: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of parts of the model; one of them is sent in each round, in turn."""
    quorum: Annotated[int, Field(ge=1, lt=BELOW)] | None = None
    """Number of regions, including the own one, whose new updates a merge in the background waits for within `grace`.
    Default: all that keep up, each with the same round; `asgd`, `asgd-ga` and `asp` merge the updates that have
    arrived."""
    grace: Duration | None = None
    """How long a merge waits for its quorum. Default: not at all."""
    lead: Annotated[int, Field(ge=0, lt=BELOW)] | None = None
    """Number of rounds that a region may be ahead of the slowest one that keeps up, with a `quorum` or a policy that
    merges the updates that have arrived. 0: unlimited. Default: 8."""
    staleness: Literal["none", "damping", "compensation"] = "none"
    """Treatment of late updates. `damping`: they count less. `compensation`: they are corrected as in DC-ASGD."""
    significance: Annotated[float, Field(gt=0, le=1)] | None = None
    """For `asp`: relative change below which a coordinate is not sent yet. Default: 0.01."""
    guard: Annotated[float, Field(ge=0)] = GUARD
    """An update is refused if its norm exceeds its region's usual norm by more than this factor; 0: never."""
    robust: Annotated[str, OneOf("none", *robust_rules())] = "none"
    """Rule that replaces the mean of the regions' changes, so that a minority of wrong updates cannot lead the model
    (docs/wan.md#robust-aggregation-advancedwanrobust). With a policy that averages. `exchange: auto` is then
    synchronous; in the background each merge holds the same round of all regions."""
    byzantine: AutoOrCount = "auto"
    """For `robust`: number of regions whose updates may be arbitrarily wrong. `auto`: as many as the rule withstands
    with the job's regions."""
    quarantine: Annotated[int, Field(ge=0, lt=BELOW)] = QUARANTINE_ROUNDS
    """For `robust`: number of rounds for which updates of a region are not merged that lay far from the others' in five
    rounds; 0: they always are, as for regions whose data are unlike the others'."""

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> Wan:
        if self.outer is not None:
            self._check_settings(self.outer)
        if self.traits.every_step and self.interval not in ("auto", 1):
            raise ValueError(f"`policy: {self.policy}` exchanges after every step: omit `interval`")
        if self.traits.synchronous and self.exchange == "background":
            raise ValueError(f"`policy: {self.policy}` is synchronous")
        if self.significance is not None and not self.traits.significance:
            raise ValueError(f"`significance` requires {_policies_with(lambda policy: policy.significance)}")
        late = {"quorum": self.quorum, "grace": self.grace, "lead": self.lead, "staleness": self.staleness}
        odd = [name for name, value in late.items() if value not in (None, "none")]
        if self.robust != "none":
            if self.traits.on_arrival:
                text = "adds the updates that have arrived: a rule compares those of the same round"
                raise ValueError(f"`robust` requires a policy that averages; `policy: {self.policy}` {text}")
            if odd:
                text = "which merges the same round of all regions"
                raise ValueError(f"`{odd[0]}` cannot be used with `robust: {self.robust}`, {text}")
            if self.traits.normalises:
                raise ValueError(f"`robust` cannot be used with `policy: {self.policy}`, which needs each change")
            if self.fragments > 1 and robust_rule_named(self.robust).from_last and info.context != STORED:
                text = "starts from the last round's change, which is of another part of the model"
                raise ValueError(f"`fragments` cannot be used with `robust: {self.robust}`, which {text}")
        elif self.byzantine != "auto" or self.quarantine != QUARANTINE_ROUNDS:
            key = "byzantine" if self.byzantine != "auto" else "quarantine"
            raise ValueError(f"`{key}` requires `robust`")
        if self.waits and odd:
            raise ValueError(f"`{odd[0]}` requires `exchange: background`")
        if self.lead is not None and self.quorum is None and not self.traits.on_arrival:
            raise ValueError("`lead` requires `quorum`: without one a region is never more than a round ahead")
        return self

    @property
    def waits(self) -> bool:
        """Whether exchange is synchronous whatever the objective says."""
        robust = self.robust != "none" and self.exchange != "background"
        return self.exchange == "synchronous" or self.traits.synchronous or robust

    @property
    def traits(self) -> WanPolicy:
        """Properties of the policy."""
        return policy_named(DEFAULT if self.policy == "auto" else self.policy)

    def _check_settings(self, given: dict[str, float]) -> None:
        if not self.traits.settings:
            raise ValueError(f"`outer` requires {_policies_with(lambda policy: policy.settings)}")
        if unknown := sorted(set(given) - set(self.traits.settings)):
            raise ValueError(f"unknown key `{unknown[0]}` in wan.outer; valid keys: {', '.join(self.traits.settings)}")
        try:
            self.traits.make(**{**self.traits.settings, **given})
        except GeofedError as error:
            raise ValueError(error.message) from None


class Differential(Section):
    """Differential privacy (docs/privacy.md): a bound of what a single region's data, or a single sample, can change in
    what leaves its region."""

    level: Literal["region", "sample"]
    """What is protected. `region`: all data of a region; its update is clipped and has noise. `sample`: each sample; so
    has the sum of the gradients of each step (DP-SGD)."""
    epsilon: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Bound of the whole job, from which the plan computes the noise. Give this or `noiseMultiplier`."""
    noise_multiplier: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    """Standard deviation of the noise as a multiple of `clipNorm` or, of counts, of what a sample changes."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Probability with which epsilon may not hold; less than one by the number of samples."""
    clip_norm: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Largest Euclidean norm of a region's update, or of a sample's gradient; what is larger is scaled down to it.
    Required, but for `train.end.steps: 0`, where the noise is on counts."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Differential:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("give exactly one of `epsilon` and `noiseMultiplier`")
        return self


class Privacy(Section):
    """What other regions, and those who run the federation, learn of a region's updates."""

    secure_aggregation: bool = False
    """Whether updates are masked, so that only their sum over all regions can be read (docs/privacy.md). With
    synchronous exchange, and a policy that needs no more than the mean of the changes."""
    min_regions: Annotated[int, Field(ge=FEWEST_REGIONS, lt=BELOW)] = FEWEST_REGIONS
    """For `secureAggregation`: fewest regions of which a sum may be readable; with fewer the job is declined."""
    differential: Differential | None = None
    """Noise, so that what leaves a region tells little of a single sample or region. With synchronous exchange, and a
    policy that needs no more than the mean of the changes. Default: none."""

    @model_validator(mode="after")
    def _is_used(self, info: ValidationInfo) -> Privacy:
        # The normalised form, which is JSON, states all defaults.
        given = "min_regions" in self.model_fields_set and info.mode == "python"
        if (given or self.min_regions != FEWEST_REGIONS) and not self.secure_aggregation:
            raise ValueError("`minRegions` requires `secureAggregation: true`")
        return self


class PipelineStages(Section):
    """How a model is cut into pipeline stages."""

    stages: AutoOrCount = "auto"
    """Number of stages that the model's layers are divided into; the plan chooses where. `auto`: the plan chooses the
    number, too."""
    activations: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision in which stages exchange activations and their gradients. `auto`: `bf16` if that makes a step at least
    5 % shorter, or cheaper if the job minimises cost; else `fp32`."""


class Parallelism(Section):
    """Whether each worker holds the whole model, or the model is divided among several workers."""

    pipeline: PipelineStages = Field(default_factory=PipelineStages)
    """Each worker holds a stage of consecutive layers, and sends activations to the next (docs/pipelines.md)."""


def _merge_codecs() -> tuple[str, ...]:
    """Return the codecs that any collective takes."""
    return tuple(dict.fromkeys(codec for name in collectives() for codec in collective_named(name).merge_codecs))


class CollectiveSettings(Section):
    """Settings of the collective."""

    codec: Annotated[str, OneOf(*_merge_codecs())] = "fp32"
    """Codec between workers, in both directions; the residual of a lossy one is added to the next step. `fp8` and
    `int4` omit zeros if that is smaller, for sparse models. `int8` cannot be used with `isp`. Others than `fp32`
    require an explicit `collective` other than `server-reduce`."""
    staleness: Annotated[int, Field(ge=0, le=8)] = 0
    """For `k-reduce`: workers that merge no part continue with the mean from this many steps before (FasDL: 1)."""
    ratio: Annotated[float, Field(ge=1, le=64)] = 1.0
    """With `staleness`: samples in a step of a worker that merges no part, as a multiple of those of one that merges a
    part (FasDL's unequal partition). All workers of a region together process as many as with 1, the default."""
    significance: Annotated[float, Field(ge=0)] | None = None
    """For `isp`: v in the filter abs(change / weight) > v / sqrt(step + 1), step = 0, 1, ... Default: 0.7."""
    step: Literal["sum", "mean"] = "sum"
    """For `isp`: how long a step is. `sum`, as published: the changes of all W workers are added, so a step is W times
    as long as with the other collectives, which apply the mean. `mean`: each worker divides its change by W first, so
    the same learning rate suits as elsewhere."""


class Advanced(Section):
    """Methods, and their settings. What is left out, the plan chooses by the objective, the regions and their links."""

    collective: Annotated[str, OneOf("auto", *collectives())] = "auto"
    """How the workers of a region merge: `server-reduce` at its parameter server, the others among themselves
    (docs/collectives.md). `auto`: each region uses the fastest one by the measured constants of its channel, in shared
    memory `server-reduce`; for a profiled task, the choice of its profiles if all regions agree."""
    k: AutoOrNumber = "auto"
    """For `k-reduce` and `isp`: number of workers that merge a part each; limited to the number of workers. 0, for
    `isp`, as published: none merges, each worker reads the changes of all others. `auto`: by the measured constants of
    the region's channel."""
    channel: Annotated[str, OneOf("auto", *channel_kinds())] = "auto"
    """Store through which the workers of a region exchange tensors (docs/channels.md). `auto`: the region's own.
    Regions with another one are not used."""
    merge: CollectiveSettings = Field(default_factory=CollectiveSettings)
    wan: Wan = Field(default_factory=Wan)

    @model_validator(mode="after")
    def _merges_together(self) -> Advanced:
        method = self.method
        if self.k != "auto" and not (method and method.takes_k):
            raise ValueError(f"`k` requires {_collectives_with(lambda one: one.takes_k)}")
        if self.k == 0 and not (method and method.to_all):
            raise ValueError(f"`k: 0` requires {_collectives_with(lambda one: one.to_all)}")
        if self.merge.step != "sum" and (method is None or method.shares != "changes"):
            raise ValueError(f"`merge.step` requires {_collectives_with(lambda one: one.shares == 'changes')}")
        if self.merge.staleness and not (method and method.takes_staleness):
            raise ValueError(f"`merge.staleness` requires {_collectives_with(lambda one: one.takes_staleness)}")
        if self.merge.ratio != 1.0 and not self.merge.staleness:
            raise ValueError("`merge.ratio` requires `merge.staleness`: else all wait for the slowest worker")
        if self.merge.ratio != 1.0 and self.k == "auto":
            raise ValueError("`merge.ratio` requires a number as `k`: with `auto` all workers may merge a part")
        if self.merge.significance is not None and (method is None or method.significance is None):
            filtering = _collectives_with(lambda one: one.significance is not None)
            raise ValueError(f"`merge.significance` requires {filtering}")
        if self.merge.codec != "fp32" and method is None:
            raise ValueError("`merge.codec` requires an explicit `collective`")
        if method is not None and self.merge.codec not in method.merge_codecs:
            raise ValueError(
                f"`merge.codec: {self.merge.codec}` cannot be used with `collective: {method.name}`; it takes "
                + ", ".join(method.merge_codecs)
            )
        return self

    @property
    def method(self) -> CollectiveMethod | None:
        """The collective; None: the plan chooses."""
        return None if self.collective == "auto" else collective_named(self.collective)
