"""What the ranks of a worker tell each other, besides tensors: as pickles, since both ends are one job's code in one
sandbox."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from geofed_pb.user_code.recording import Sums
from region_agent.worker.data.loading import DrawnSamples
from sync.framing import Array

__all__ = [
    "Begin",
    "Evaluate",
    "Fault",
    "Gather",
    "Load",
    "Made",
    "Piece",
    "RankStep",
    "Ready",
    "Request",
    "Restore",
    "Scatter",
    "Update",
]


@dataclass(frozen=True)
class Load:
    """Load the task and the data, and join the others."""

    body: str
    """The invocation, as JSON."""
    folder: Path
    """The unpacked task folder."""
    fetched: Path
    """Folder with the files of the data that were downloaded."""
    device: str
    rank: int
    ranks: int
    meeting: Path
    """File by which the ranks find each other."""


@dataclass(frozen=True)
class Begin:
    """Create the model of an invocation."""

    body: str
    model: list[tuple[str, str, tuple[int, ...], bool]]
    """What rank 0's model is: see `described`."""
    base: frozenset[str]
    """Names of the tensors that never change."""


@dataclass(frozen=True)
class RankStep:
    """Compute the gradients of a step."""

    own: tuple[DrawnSamples, ...]
    """This rank's samples of the step, and of the next ones."""
    all: tuple[DrawnSamples, ...]
    """Samples of each rank in the step."""
    seeds: tuple[int, ...]
    """What the random numbers of the step follow from."""
    scale: dict[str, float] = field(default_factory=dict)
    """State of the loss's scale."""


@dataclass(frozen=True)
class Piece:
    """One tensor whose parts the ranks hold."""

    number: int
    """Of the parameter, in the order of the model; of a state, in the order of the optimiser."""
    key: str = ""
    """Key in the parameter's optimiser state; empty: the parameter itself."""
    dtype: torch.dtype | None = None
    """Type of a state that is new to the ranks."""


@dataclass(frozen=True)
class Gather:
    """Send a tensor's parts to rank 0."""

    piece: Piece


@dataclass(frozen=True)
class Scatter:
    """Receive a part of a tensor from rank 0."""

    piece: Piece


@dataclass(frozen=True)
class Update:
    """Make the optimiser's step."""

    step: int


@dataclass(frozen=True)
class Restore:
    """Load a state of the optimiser."""

    held: dict[str, Array]
    """Arrays of what all ranks hold alike, named as in a dumped state."""
    pieces: tuple[Piece, ...]
    """What follows from rank 0, one after the other."""


@dataclass(frozen=True)
class Evaluate:
    """Evaluate the model, together with the others."""

    seeds: tuple[int, ...]
    """What its random numbers follow from."""
    at_once: int
    """Samples of a batch."""


@dataclass(frozen=True)
class Ready:
    """What was asked for is done."""


@dataclass(frozen=True)
class Made:
    """The gradients of a step are computed."""

    value: float
    """The rank's part of the loss."""
    sums: Sums
    """What the task has logged."""
    cpu_seconds: float
    """CPU time of the process and of those that make its samples, so far."""
    memory_bytes: int
    """Peak of its memory, and of that of those processes."""


@dataclass(frozen=True)
class Fault:
    """The rank has failed, and ends."""

    code: str
    message: str
    hint: str | None


Request = Load | Begin | RankStep | Gather | Scatter | Update | Restore | Evaluate
