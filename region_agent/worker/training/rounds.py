"""Sums of a round in a worker, and the boundary at its end while it is exchanged in the background."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from geofed_pb.v1 import worker_pb2
from sync.layout import Vector

__all__ = ["BoundaryAnswer", "PendingBoundary", "RoundSums"]

BoundaryAnswer = tuple[worker_pb2.BoundaryReply, Vector | None]
"""The server's answer to a boundary, with the correction that belongs to it, if there is one."""


@dataclass
class RoundSums:
    """Sums of a worker over the steps of a round."""

    samples: float = 0.0
    loss_sum: float = 0.0
    """Sum of loss times samples."""
    compute_seconds: float = 0.0
    merge_seconds: float = 0.0
    """Time of the steps beyond their compute."""
    evaluate_seconds: float = 0.0

    def rescale(self, factor: float) -> None:
        """Multiply the sums, as after a change of the worker's share of each step's samples by ``factor``."""
        self.samples, self.loss_sum = self.samples * factor, self.loss_sum * factor

    @property
    def loss(self) -> float:
        """Mean loss per sample of the round; 0 without samples."""
        return self.loss_sum / self.samples if self.samples else 0.0

    def facts(self, prefix: str = "") -> dict[str, float]:
        """Return the sums as named numbers of a frame."""
        return {f"{prefix}{name}": float(getattr(self, name)) for name in _NAMES}

    @classmethod
    def of(cls, facts: Mapping[str, float], prefix: str = "") -> RoundSums:
        """Restore the sums from the result of `facts`."""
        # States that older versions have stored lack the last ones.
        return cls(*(facts.get(f"{prefix}{name}", 0.0) for name in _NAMES))


_NAMES = ("samples", "loss_sum", "compute_seconds", "merge_seconds", "evaluate_seconds")


@dataclass(frozen=True)
class PendingBoundary:
    """Boundary of a round that is exchanged in the background while the next round has begun."""

    request: worker_pb2.BoundaryRequest
    sums: RoundSums
    due: int
    """Step after which the answer is applied, in all workers of the partition."""
    reply: Future[BoundaryAnswer]
