"""What every collective does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from sync.collective._model import ChannelCosts
from sync.layout import Vector

__all__ = ["Collective", "Merged", "Settings", "Settled", "State"]

Pattern = Literal["all-reduce", "scatter-reduce", "pipelined-scatter-reduce", "k-reduce", "isp"]


@dataclass(frozen=True)
class Settings:
    """How the workers of a partition merge; the same for all of them."""

    pattern: Pattern = "k-reduce"
    chunks: int | None = None
    """K, in how many chunks the vector is merged, each by one worker; None: 1 for all-reduce, else one a worker. For
    ``isp`` None means that every worker reads every other's changes (as published)."""
    groups: int = 1
    """``k-reduce``: workers merge in so many groups, and owners what the groups have; as many as have K workers each.
    Means are then rounded once more."""
    staleness: int = 0
    """``k-reduce``: workers that own no chunk continue with the mean of so many steps before (FasDL: 1)."""
    codec: str = "fp32"
    """What chunks travel in, both ways, with error feedback: fp32, bf16, int8, or fp8 and int4, which are lists of the
    entries that are not zero, where that is less. Of ``isp``: its lists' values, fp32, bf16, fp8 or int4."""
    trained: int | None = None
    """How many coordinates, from the first, gradients train; None: all."""
    significance: float = 0.7
    """``isp``: v of the filter |change / weight| > v / sqrt(t + 1); 0 lets every change through."""
    timeout_seconds: float = 300.0
    """How long a worker waits for the others in one exchange before it gives up with ``CHANNEL_TIMEOUT``."""
    in_parts: bool = False
    """Vectors of means are handed in part by part, the last elements first, as a backward pass gives gradients. The
    first chunk, which is whole last, is then shorter than the others: nothing hides its way."""
    asked: ChannelCosts | None = None
    """The constants of a channel that tells nobody what has come, such as an object store. Whoever waits then looks for
    one value at once, again when it can be there, and for all others only once it is: looks that find nothing are
    billed. None: the channel tells."""
    faithful: bool = False
    """As published: one request after the other in one lane, discovery by polling, owners 0 to K-1, for ``isp`` lists
    of 16 bytes an entry. For comparison only."""
    poll_seconds: float = 0.1
    """``faithful``: between two looks into the channel. LambdaML: 0.1; FasDL: 0, a busy loop."""


@dataclass(frozen=True)
class Merged:
    """What one step's vectors became."""

    step: int
    """The step whose vectors these were: with staleness not always the one that is being made."""
    vector: Vector
    """Shape (n,), read-only. Of a mean: the sample-weighted mean. Of changes: the sum of the others' changes."""
    weight: float
    """Sum of the weights that came together."""


@dataclass(frozen=True)
class Settled:
    """What is left to do so that all workers hold the same."""

    merged: tuple[Merged, ...]
    """To be taken up first, in this order."""
    model: Vector | None
    """The model to continue from, shape (n,), read-only; None: the one that taking ``merged`` up has led to."""


@dataclass(frozen=True)
class State:
    """What a collective must not forget between two invocations of its worker; fits a frame of `sync.framing`."""

    tensors: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)


class Collective(Protocol):
    """One worker's side of a collective; all workers call it for the same steps in the same order.

    ``shares`` says what is handed in and what comes back:

    - ``"mean"``: any vector (gradients, or the model itself); the mean of all takes its place;
    - ``"changes"``: the worker's own change of its model, already applied; what comes back is to be added.

    Not for several threads at once. Raises ``GeofedError``: ``CHANNEL_TIMEOUT`` where a worker does not give its part
    in time, ``FRAME_INVALID`` for a value that is damaged, or where no worker has a weight above 0. After an error the
    collective must be closed: whatever was merged, the attempt is over.
    """

    @property
    def shares(self) -> Literal["mean", "changes"]: ...

    def merge(self, step: int, vector: Vector, weight: float, model: Vector | None = None) -> tuple[Merged, ...]:
        """Merge one step's vectors, shape (n,), weights in samples; what is there to take up now, oldest first.

        That is this step's own, except with staleness. Steps ascend. The vector is the caller's again when this
        returns. ``model``: what the vector is a change of, for collectives of changes.
        """

    def settle(self, step: int, model: Vector) -> Settled:
        """At the end of a WAN round, after ``step``: afterwards all workers hold the same model, bit for bit.

        ``model``, shape (n,): what this worker holds; collectives of means do not look at it.
        """

    def state(self) -> State:
        """What the next invocation of this worker hands to `restore`; between two merges only."""

    def restore(self, state: State) -> None:
        """Continue from what `state` gave; before the first merge only."""

    def close(self) -> None:
        """End the threads. What lies in the channel stays: the others may still read it."""
