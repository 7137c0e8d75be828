"""Merging of a module's gradients over all workers, during the backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch

from geofed_pb.errors import GeofedError
from sync.collective import Collective, Merged
from sync.flat import FlatModel
from sync.merging import Buckets

__all__ = ["GradientMerge"]


class _InParts(Protocol):
    def begin(self, step: int, weight: float) -> Buckets: ...


class GradientMerge:
    """Passes one worker's flat gradient to a collective of means.

    With ``overlap``, the last backward pass of a step passes on each parameter's gradient as soon as it is computed,
    the last layers first, and a chunk is sent as soon as it is complete (buckets, as in PyTorch DDP, Li et al. 2020,
    section 3.2.3). The gradient has the same bits as `FlatModel.gradient` after the pass. State that no gradient trains
    is passed on after the pass, which may still change it (statistics in a checkpoint). The first step has no overlap,
    and shows how the module behaves: there is never overlap if a pass computes a parameter's gradient in several parts
    (reentrant checkpoints around tied layers).
    """

    def __init__(self, flat: FlatModel, collective: Collective, *, overlap: bool) -> None:
        """``collective`` must compute means, and with ``overlap`` must support `begin`."""
        self._flat, self._collective = flat, collective
        self.overlap = overlap
        """Whether gradients are passed on during the pass, from the second step on."""
        self._buckets: Buckets | None = None
        self._armed = False
        self._given: Counter[int] = Counter()
        """How often the current pass has computed each parameter's gradient, by the parameter's first coordinate."""
        self._watched = False
        """Whether a step has shown how the module behaves."""
        self._numbers: dict[int, int] = {}
        """Number of each trained parameter, by its first coordinate."""
        trained = [parameter for parameter in flat.module.parameters() if parameter.requires_grad]
        at = 0
        for number, parameter in enumerate(trained):
            self._numbers[at] = number
            if overlap:
                parameter.register_post_accumulate_grad_hook(self._giver(at, number))  # type: ignore[no-untyped-call]
            at += parameter.numel()

    def arm(self, step: int, weight: float) -> None:
        """Announce that the next backward pass is the last of the step, after all its forward passes. ``weight``:
        samples."""
        if not self.overlap:
            return
        self._armed = True
        self._given.clear()
        if self._watched:
            self._buckets = self._parted().begin(step, weight)

    def merged(self, step: int, weight: float) -> tuple[Merged, ...]:
        """Return the merged gradient, after the backward pass; see `Collective.merge`."""
        if self._armed:
            self._look_back()
        buckets, self._buckets, self._armed = self._buckets, None, False
        if buckets is None:
            return self._collective.merge(step, self._flat.gradient(), weight)
        for at, number in self._numbers.items():
            if not self._given[at]:
                buckets.give(at, self._flat.gradient_of(number))
        if self._flat.layout.gradient_size > self._flat.layout.trainable_size:
            buckets.give(self._flat.layout.trainable_size, self._flat.gradient_tail())
        return buckets.result()

    def _look_back(self) -> None:
        """Check how the module behaved in the pass."""
        twice = any(count > 1 for count in self._given.values())
        if twice and self._buckets is not None:
            text = "a backward pass computed a parameter's gradient in several parts, unlike all passes before it"
            raise GeofedError("TASK_INVALID", text, hint="call checkpoint(..., use_reentrant=False) in the model")
        self.overlap = self.overlap and not twice
        self._watched = True

    def _parted(self) -> _InParts:
        collective: _InParts = self._collective  # type: ignore[assignment]  # of means, as the caller has promised
        return collective

    def _giver(self, at: int, number: int) -> Callable[[torch.Tensor], None]:
        def give(parameter: torch.Tensor) -> None:
            if not self._armed:
                return
            self._given[at] += 1
            if self._buckets is not None and self._given[at] == 1:
                self._buckets.give(at, self._flat.gradient_of(number))

        return give
