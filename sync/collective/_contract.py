"""The interface of a collective, its settings, and what a planner must know about one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from sync.codec import merge_codecs
from sync.collective._by_owners import by_owners
from sync.collective._form import ChannelCosts, MergeForm, MergeTerms
from sync.layout import Vector

__all__ = ["Collective", "CollectiveMethod", "Merged", "Model", "Settings", "Settled", "State"]


@dataclass(frozen=True)
class Settings:
    """Settings of a collective; the same for all workers of a partition."""

    pattern: str = "k-reduce"
    """Name of the collective."""
    chunks: int | None = None
    """K: number of chunks of the vector, each merged by one worker; None: as `CollectiveMethod.owners` says.
    For ``isp`` None means that every worker reads every other worker's changes (as published)."""
    groups: int = 1
    """``k-reduce``: number of groups that merge first; chunk owners then merge the groups' results. Limited by the
    workers: each group has at least K. Means are then rounded once more."""
    staleness: int = 0
    """``k-reduce``: workers that own no chunk continue with the mean of this many steps before (FasDL: 1)."""
    codec: str = "fp32"
    """Codec of chunks in both directions, with error feedback, one of `CollectiveMethod.merge_codecs`. A format of
    lists, such as int4, sends the non-zero entries where that is smaller. For ``isp``: the format of its lists'
    values."""
    trained: int | None = None
    """Number of leading coordinates that gradients train; None: all."""
    significance: float = 0.0
    """``isp``: v of the filter |change / weight| > v / sqrt(t + 1); 0 passes every change. What a job gets that gives
    none is `CollectiveMethod.significance`."""
    timeout_seconds: float = 300.0
    """Timeout of a worker that waits for the others in one exchange."""
    in_parts: bool = False
    """Whether vectors of means are passed part by part, the last elements first, as a backward pass computes gradients.
    The first chunk, which is complete last, is then shorter than the others, because nothing hides its transfer."""
    asked: ChannelCosts | None = None
    """Constants of a channel that does not announce new values, such as an object store. A waiting worker then requests
    one value immediately, again when it is likely to exist, and all others only once it does: requests that find
    nothing are billed. None: the channel announces new values."""
    faithful: bool = False
    """Whether to work as published: one request after the other, discovery by polling, owners 0 to K-1, for ``isp``
    lists of 16 bytes per entry. For comparison only."""
    poll_seconds: float = 0.1
    """``faithful``: pause between two polls. LambdaML: 0.1; FasDL: 0, a busy loop."""


Model = Vector | list[Vector]
"""A model, float32 of shape (n,), or consecutive parts of it."""


@dataclass(frozen=True)
class Merged:
    """The merged vectors of one step."""

    step: int
    """The step whose vectors were merged: with staleness not always the current one."""
    vector: Vector
    """Shape (n,), read-only. The sample-weighted mean, or, for changes, the sum of the others' changes."""
    weight: float
    """Sum of the merged weights."""


@dataclass(frozen=True)
class Settled:
    """What a worker must do so that all workers hold the same model."""

    merged: tuple[Merged, ...]
    """Merged vectors to apply first, in this order."""
    model: Vector | None
    """The model to continue from, shape (n,), read-only; None: the worker's own, after applying ``merged``."""


@dataclass(frozen=True)
class State:
    """State of a collective between two invocations of its worker; fits in a frame of `sync.framing`."""

    tensors: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)


class Collective(Protocol):
    """One worker's side of a collective; all workers call it for the same steps in the same order.

    ``shares`` states what is passed and what is returned:

    - ``"mean"``: any vector (gradients, or the model itself); the result is the mean of all, which replaces it;
    - ``"changes"``: the worker's own change of its model, already applied; the result is to be added.

    Not thread-safe. Raises ``GeofedError``: ``CHANNEL_TIMEOUT`` if a worker does not deliver its part in time,
    ``FRAME_INVALID`` for a damaged value, or if no worker has a weight above 0. After an error the collective must be
    closed: the attempt is over, whatever was merged.
    """

    @property
    def shares(self) -> Literal["mean", "changes"]: ...

    def merge(self, step: int, vector: Vector, weight: float, model: Model | None = None) -> tuple[Merged, ...]:
        """Merge one step's vectors, shape (n,), with weights in samples; return the merged vectors to apply now, oldest
        first.

        That is the result of this step, except with staleness. Steps must ascend. The caller may change the vector
        again when this returns. ``model`` is what the vector is a change of, for collectives of changes, which merge
        in the memory of the vector.
        """

    def settle(self, step: int, model: Vector | None) -> Settled:
        """End a WAN round after ``step``: afterwards all workers hold the same model, bit for bit.

        ``model``, shape (n,), is the model that this worker holds; collectives of means need none, those of changes
        merge in its memory.
        """

    def state(self) -> State:
        """Return the state for `restore` in the next invocation; between two merges only."""

    def restore(self, state: State) -> None:
        """Continue from a state; before the first merge only."""

    def close(self) -> None:
        """End the threads. Values stay in the channel, since other workers may still read them."""


@dataclass(frozen=True)
class CollectiveMethod:
    """A collective as a job file names it: who merges what, what it takes, and how a worker's side is created.

    The defaults are those of a merge by owners: each of K workers merges a chunk of the vector and publishes the mean.
    """

    name: str
    owners: Callable[[int, int | None], int]
    """K, from the number of workers, at least 1, and the job file's `k`, at least 1, or None. 0: nobody merges for
    others, every worker reads every other worker's vector."""
    overlapped: bool = True
    """Whether an owner reads others' parts of its chunk while it uploads its parts of theirs."""
    takes_k: bool = False
    """Whether job files may give `k`; the fastest is chosen if they don't."""
    takes_groups: bool = False
    """Whether workers merge in groups first, if that is faster by the channel's constants."""
    takes_staleness: bool = False
    """Whether workers without a chunk may continue with the mean of earlier steps (`merge.staleness`)."""
    codecs: tuple[str, ...] | None = None
    """Codecs between workers that job files may give (`merge.codec`); None: all of `sync.codec.merge_codecs`."""
    significance: float | None = None
    """Default of `merge.significance`, the threshold of a filter of changes; None: it has no filter."""
    shares: Literal["mean", "changes"] = "mean"
    """As in `Collective`. The bytes of changes are not known beforehand: planners then predict no merge."""
    automatic: bool = False
    """Whether `collective: auto` may choose it."""
    cost: Callable[[MergeForm], MergeTerms] | None = by_owners
    """Time, requests and bytes of merges; None: unknown, planners and `auto` leave it out."""
    worker: Callable[..., Collective] | str = "sync.merging:MeanCollective"
    """Creates a worker's side from (settings, member, channel, place, size, patience), which are those of
    `sync.merging.open_collective`. "module:name" is imported when the first merge is opened, so that planners do not
    load it. Empty: the region's parameter server merges."""

    @property
    def merge_codecs(self) -> tuple[str, ...]:
        """Codecs between workers that job files may give, those of other packages included."""
        return merge_codecs() if self.codecs is None else self.codecs

    @property
    def to_all(self) -> bool:
        """Whether job files may give `k: 0`: nobody merges for others, every worker reads every other's vector."""
        return self.takes_k and self.owners(2, 0) == 0

    @property
    def predictable(self) -> bool:
        """Whether a planner can predict its merges, and learn from measured ones."""
        return self.cost is not None and self.shares == "mean"
