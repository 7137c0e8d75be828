"""The job file as a whole: its sections, and what they require of each other.

Docstrings of attributes are the descriptions in the JSON Schema, and in the reference in `docs`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from control_plane._advanced import SECTION, as_stored, as_written
from control_plane.spec._types import TRACKING_KINDS, OneOf
from control_plane.spec.sections import (
    GUARD,
    Advanced,
    Clients,
    CollectiveSettings,
    Data,
    Function,
    Limits,
    Metadata,
    Objective,
    Parallelism,
    Privacy,
    Regions,
    Section,
    Task,
    Train,
    Wan,
)
from sync.codec import codec_named, codecs


class JobSpec(Section):
    """One training job."""

    api_version: Literal["geofed/v1"]
    """Version of the file's format."""
    kind: Literal["TrainingJob"]
    """Kind of the file."""
    metadata: Metadata
    task: Task
    data: Data
    train: Train
    clients: Clients | None = None
    """Samples belong to clients of the regions, which train one by one. `train.end.steps` and `advanced.wan.interval`
    then count rounds of clients; the interval is 1 by default. Default: samples belong to no clients."""
    objective: Objective = Field(default_factory=Objective)
    regions: Regions = Field(default_factory=Regions)
    parallelism: Literal["auto", "data"] | Parallelism = "auto"
    """`data`: each worker holds the whole model. `pipeline`: each worker holds a stage of its layers. `auto`: a
    pipeline if, by a profile (docs/tuning.md), the model does not fit into a function's memory, else `data`."""
    privacy: Privacy = Field(default_factory=Privacy)
    function: Function = Field(default_factory=Function)
    limits: Limits = Field(default_factory=Limits)
    tracking: Literal["all"] | list[Annotated[str, OneOf(*TRACKING_KINDS)]] = "all"
    """Kinds of places that the job's metrics are written to, of those that the control plane has (`serve --track`;
    docs/tracking.md). `[]`: none."""
    advanced: Advanced = Field(default_factory=Advanced)

    @model_validator(mode="before")
    @classmethod
    def _takes_what_is_stored(cls, given: Any) -> Any:
        return as_written(given) if isinstance(given, dict) and SECTION not in given else given

    @model_serializer(mode="wrap")
    def _to_stored(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return as_stored(handler(self))

    @property
    def wan(self) -> Wan:
        """How the regions exchange updates over the WAN."""
        return self.advanced.wan

    @property
    def merge(self) -> CollectiveSettings:
        """Settings of the collective."""
        return self.advanced.merge

    @property
    def collective(self) -> str:
        """How the workers of a region merge, or "auto"."""
        return self.advanced.collective

    @property
    def channel(self) -> str:
        """Kind of the channel, or "auto"."""
        return self.advanced.channel

    @property
    def evaluates_only(self) -> bool:
        """Whether the job trains nothing, and measures a model or the data alone."""
        return self.train.end.steps == 0

    @model_validator(mode="after")
    def _measures(self) -> JobSpec:
        if not self.evaluates_only:
            return self
        refused = (
            (self.clients is not None, "`clients`"),
            (isinstance(self.parallelism, Parallelism), "a pipeline"),
            (
                self.privacy.differential is not None and self.privacy.differential.level == "region",
                "`privacy.differential.level: region`; with `level: sample` the counts of its histograms have noise",
            ),
            (self.train.precision == "fp16", "`train.precision: fp16`, which scales a loss; use bf16"),
        )
        _refuse("`train.end.steps: 0` trains nothing, and cannot be used with", refused)
        return self

    @model_validator(mode="after")
    def _has_gpus(self) -> JobSpec:
        gpus, differential = self.function.gpus, self.privacy.differential
        if gpus == 1:
            return self
        key = f"`function.gpus: {gpus}`"
        refused = (
            (isinstance(self.parallelism, Parallelism), "a pipeline, whose stages have one GPU each"),
            (self.clients is not None, "`clients`, which train one after the other"),
            (
                differential is not None and differential.level == "sample",
                "`privacy.differential.level: sample`, which computes the gradient of each sample",
            ),
            (self.evaluates_only, "`train.end.steps: 0`: a worker evaluates on one GPU"),
        )
        _refuse(f"{key} cannot be used with", refused)
        if self.function.memory_mb == "auto":
            raise ValueError(f"{key} requires `function.memoryMb`: a function holds a process for each GPU")
        if gpus != "auto" and self.train.batch != "auto" and self.train.batch < gpus:
            raise ValueError(f"{key} cannot divide a `train.batch` of {self.train.batch} samples")
        return self

    @model_validator(mode="after")
    def _chooses_batch(self) -> JobSpec:
        if self.train.batch != "auto":
            return self
        train, differential = self.train, self.privacy.differential
        refused = (
            (
                train.end.steps is not None,
                "`train.end.steps`, which are of a given batch: use `train.end.epochs`",
            ),
            (self.clients is not None, "`clients`, whose local steps learn by their batch"),
            (isinstance(self.parallelism, Parallelism), "a pipeline, whose stages are cut for a given batch"),
            (
                differential is not None and differential.level == "sample",
                "`privacy.differential.level: sample`, whose noise is for a given batch",
            ),
            (
                train.scaling != "fixed",
                f"`train.scaling: {train.scaling}`, which chooses the global batch while the job trains",
            ),
            (train.accumulate > 1, "`train.accumulate`, which divides a given batch"),
            (self.function.gpus != 1, f"`function.gpus: {self.function.gpus}`, which divide a given batch"),
            (self.objective.method != "auto", f"`objective.method: {self.objective.method}`, a rule for a given batch"),
        )
        _refuse("`train.batch: auto` cannot be used with", refused)
        return self

    @model_validator(mode="after")
    def _shards(self) -> JobSpec:
        if self.function.sharding == "none":
            return self
        key = f"`function.sharding: {self.function.sharding}`"
        if self.function.gpus == 1:
            raise ValueError(f"{key} divides a model among the GPUs of a worker: set `function.gpus` to 2 or more")
        refused = (
            (self.train.compile, "`train.compile`, which compiles calls of the whole model"),
            (self.train.precision == "fp16", "`train.precision: fp16`, which scales a loss; use bf16"),
            (self.train.scaling != "fixed", f"`train.scaling: {self.train.scaling}`, which changes the workers"),
            (self.objective.method != "auto", "`objective.method`, which chooses the workers"),
            (
                bool(self.wan.traits.proximal),
                f"`advanced.wan.policy: {self.wan.policy}`, whose term needs all of it",
            ),
        )
        _refuse(f"{key} cannot be used with", refused)
        workers = self.train.workers
        if any(one != 1 for one in (workers.values() if isinstance(workers, dict) else [workers])):
            raise ValueError(f"{key} requires `train.workers: 1`: workers of a region merge whole gradients")
        return self

    @model_validator(mode="after")
    def _scales(self) -> JobSpec:
        if self.train.scaling == "fixed":
            return self
        key = f"`train.scaling: {self.train.scaling}`"
        if self.objective.method != "auto":
            raise ValueError(f"{key} chooses workers while the job runs, and `objective.method` before: give only one")
        if isinstance(self.parallelism, Parallelism):
            raise ValueError(f"{key} cannot be used with a pipeline, whose stages all need a worker")
        if self.wan.exchange == "background" or self.wan.traits.on_arrival:
            raise ValueError(
                f"{key} requires `advanced.wan.exchange: synchronous` and the policy `ma`, `diloco` or `bsp`: its "
                "batch changes between two rounds, which overlap in the background"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        if self.train.balance == "speed" and (self.wan.traits.every_step or self.wan.interval == 1):
            raise ValueError("`train.balance: speed` requires rounds of several steps")
        if self.objective.method != "auto" and (isinstance(self.parallelism, Parallelism) or self.clients is not None):
            raise ValueError("`objective.method` knows neither pipelines nor `clients`: set it to `auto`")
        if isinstance(self.parallelism, Parallelism) and (keys := self.keys_without_pipeline):
            raise ValueError(f"{keys[0]} cannot be used with a pipeline, whose stages hold parts of model and gradient")
        self._lets_overflows_through()
        return self

    @model_validator(mode="after")
    def _can_leave_out(self) -> JobSpec:
        wan, key = self.wan, "`regions.lost: continue` cannot be used with"
        if self.regions.lost == "continue":
            if wan.traits.on_arrival:
                raise ValueError(f"{key} `advanced.wan.policy: {wan.policy}`, which exchanges in the background")
            if wan.exchange == "background":
                raise ValueError(f"{key} `advanced.wan.exchange: background`: no round is the last one of all regions")
        return self

    @model_validator(mode="after")
    def _can_be_summed(self) -> JobSpec:
        if not self.privacy.secure_aggregation:
            return self
        wan, key = self.wan, "`privacy.secureAggregation` cannot be used with"
        codecs_known = ", ".join(name for name in codecs() if codec_named(name).masked)
        refused = (
            (not wan.traits.sums, f"`advanced.wan.policy: {wan.policy}`, which needs each region's update"),
            (
                wan.exchange == "background",
                "`advanced.wan.exchange: background`: a sum holds the same round of all regions",
            ),
            (wan.quorum is not None, "`advanced.wan.quorum`: a sum holds the updates of all regions"),
            (bool(wan.grace), "`advanced.wan.grace`: a sum holds the updates of all regions"),
            (wan.lead is not None, "`advanced.wan.lead`: a sum holds the same round of all regions"),
            (wan.staleness != "none", f"`advanced.wan.staleness: {wan.staleness}`, which looks at each update"),
            (wan.robust != "none", f"`advanced.wan.robust: {wan.robust}`, which looks at each update"),
            (wan.guard not in (0, GUARD), "`advanced.wan.guard`, which looks at each update"),
            (wan.fragments > 1, "`advanced.wan.fragments`"),
            (
                wan.codec != "auto" and not codec_named(wan.codec).masked,
                f"`advanced.wan.codec: {wan.codec}`: what it sends tells which coordinates change; use {codecs_known}",
            ),
            (self.train.scaling != "fixed", f"`train.scaling: {self.train.scaling}`: regions' weights must be fixed"),
            (
                bool(self.regions.use) and len(set(self.regions.use)) < self.privacy.min_regions,
                f"{len(set(self.regions.use))} regions in `regions.use`: `privacy.minRegions` is "
                f"{self.privacy.min_regions}",
            ),
        )
        _refuse(key, refused)
        return self

    @model_validator(mode="after")
    def _clips_what_is_trained(self) -> JobSpec:
        wanted = self.privacy.differential
        if wanted is not None and (wanted.clip_norm is None) is not self.evaluates_only:
            nothing = "is of what is trained, and `train.end.steps: 0` trains nothing"
            raise ValueError(f"`privacy.differential.clipNorm` {nothing if self.evaluates_only else 'is required'}")
        return self

    @model_validator(mode="after")
    def _can_be_private(self) -> JobSpec:
        wanted = self.privacy.differential
        if wanted is None:
            return self
        wan, merge, key = self.wan, self.merge, "`privacy.differential` cannot be used with"
        method = self.advanced.method
        refused = (
            (not wan.traits.sums, f"`advanced.wan.policy: {wan.policy}`, which gives out changes under way"),
            (
                wan.exchange == "background",
                "`advanced.wan.exchange: background`: workers continue from a model without noise",
            ),
            (wan.quorum is not None, "`advanced.wan.quorum`, which is for exchange in the background"),
            (wan.lead is not None, "`advanced.wan.lead`, which is for exchange in the background"),
            (bool(wan.grace), "`advanced.wan.grace`, which is for exchange in the background"),
            (
                wan.staleness != "none",
                f"`advanced.wan.staleness: {wan.staleness}`, which is for exchange in the background",
            ),
            (self.train.scaling != "fixed", f"`train.scaling: {self.train.scaling}`: what is released must be planned"),
            (isinstance(self.parallelism, Parallelism), "a pipeline"),
            (
                self.data.residency != "region",
                "`data.residency` other than `region`: only the data's own region accounts for them",
            ),
            (
                self.privacy.secure_aggregation and wan.codec not in ("auto", "fp32"),
                f"`secureAggregation` and `advanced.wan.codec: {wan.codec}`, whose rounding would add to the noise; "
                "use fp32",
            ),
        )
        of_samples = (
            (self.train.precision != "fp32", f"`train.precision: {self.train.precision}`"),
            (self.train.compile, "`train.compile`, which cannot take the gradient of each sample"),
            (merge.codec != "fp32", f"`advanced.merge.codec: {merge.codec}`"),
            (bool(merge.staleness), "`advanced.merge.staleness`"),
            (method is not None and method.shares != "mean", f"`advanced.collective: {self.collective}`"),
        )
        _refuse(key, refused)
        if wanted.level == "sample":
            _refuse("`privacy.differential.level: sample` cannot be used with", of_samples)
        return self

    @model_validator(mode="after")
    def _has_clients(self) -> JobSpec:
        if self.clients is None:
            return self
        train, wan, differential = self.train, self.wan, self.privacy.differential
        method = self.advanced.method
        refused = (
            (isinstance(self.parallelism, Parallelism), "a pipeline, whose stages share every step"),
            (
                train.learning_rate is not None and train.learning_rate.batch is not None,
                "`train.learningRate.batch`: each client steps with `train.batch` samples",
            ),
            (train.precision == "fp16", "`train.precision: fp16`, whose scale is of one optimiser; use bf16"),
            (train.scaling != "fixed", f"`train.scaling: {train.scaling}`, which changes the batch of a step"),
            (train.balance != "data", "`train.balance: speed`: all regions make the same rounds of clients"),
            (
                method is not None and method.shares != "mean",
                f"`advanced.collective: {self.collective}`, which sends parts of each step's change",
            ),
            (bool(self.merge.staleness), "`advanced.merge.staleness`: clients start from the region's present model"),
            (
                wan.exchange == "background",
                "`advanced.wan.exchange: background`: clients start from the federation's model",
            ),
            (wan.quorum is not None, "`advanced.wan.quorum`, which is for exchange in the background"),
            (bool(wan.grace), "`advanced.wan.grace`, which is for exchange in the background"),
            (
                wan.staleness != "none",
                f"`advanced.wan.staleness: {wan.staleness}`, which is for exchange in the background",
            ),
            (wan.traits.on_arrival, f"`advanced.wan.policy: {wan.policy}`, which merges updates as they arrive"),
            (
                wan.traits.normalises,
                f"`advanced.wan.policy: {wan.policy}`: all regions make the same rounds of clients",
            ),
            (
                differential is not None and differential.level == "sample",
                "`privacy.differential.level: sample`; `region` hides all clients of a region",
            ),
        )
        _refuse("`clients` cannot be used with", refused)
        return self

    @property
    def keys_without_pipeline(self) -> list[str]:
        """Settings of this job that cannot be used with a pipeline, as text for users."""
        return [
            key
            for key, used in (
                ("`train.clipNorm`", self.train.clip_norm is not None),
                (f"`train.precision: {self.train.precision}`", self.train.precision != "fp32"),
                ("`train.accumulate`", self.train.accumulate > 1),
                ("`train.compile`", self.train.compile),
                ("`train.local`", bool(self.train.local)),
                ("`advanced.merge.ratio`", self.merge.ratio != 1.0),
                ("`advanced.merge.step`", self.merge.step != "sum"),
                ("`advanced.k: 0`", self.advanced.k == 0),
                (f"`advanced.wan.policy: {self.wan.policy}`", bool(self.wan.traits.proximal)),
            )
            if used
        ]

    def _lets_overflows_through(self) -> None:
        """Raise ``ValueError`` for a setting with which workers would not all see an overflow in one of them."""
        method = self.advanced.method
        if self.train.precision != "fp16":
            return
        if self.merge.codec != "fp32":
            text = f"`train.precision: fp16` cannot be used with `advanced.merge.codec: {self.merge.codec}`"
            raise ValueError(f"{text}; use `precision: bf16`")
        if self.merge.staleness or (method is not None and method.shares == "changes"):
            key = "advanced.merge.staleness" if self.merge.staleness else f"advanced.collective: {self.collective}"
            raise ValueError(f"`train.precision: fp16` cannot be used with `{key}`; use `precision: bf16`")

    def to_json(self) -> str:
        """Return the normalised form, which is stored and sent: with all defaults, and without `advanced`."""
        return self.model_dump_json(by_alias=True)


def _refuse(begins: str, refused: Iterable[tuple[bool, str]]) -> None:
    """Raise ``ValueError`` with the first text whose condition holds, after what it begins with."""
    for is_refused, text in refused:
        if is_refused:
            raise ValueError(f"{begins} {text}")
