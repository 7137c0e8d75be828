"""Gradients of a module become those of all workers, while the backward pass still runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch

from geofed_pb.errors import GeofedError
from sync.collective import Buckets, Collective, Merged
from sync.flat import FlatModel

__all__ = ["GradientMerge"]


class _InParts(Protocol):
    def begin(self, step: int, weight: float) -> Buckets: ...


class GradientMerge:
    """One worker's side: hands the flat gradient to a collective of means.

    With ``overlap`` parameters are handed in as the last backward pass of a step gives them, the last layers first, and
    a chunk leaves as soon as it is whole (buckets, as in PyTorch DDP, Li et al. 2020, section 3.2.3). What is handed in
    has the bits of `FlatModel.gradient` after the pass. State that no gradient trains is handed in when the pass is
    over, since that may change it (statistics in a checkpoint). The first step is made without, and shows what the
    module does: where a pass gives a parameter its gradient in several parts (reentrant checkpoints around tied layers)
    there never is overlap.
    """

    def __init__(self, flat: FlatModel, collective: Collective, *, overlap: bool) -> None:
        """``collective``: of means; with ``overlap`` one that can `begin`."""
        self._flat, self._collective = flat, collective
        self.overlap = overlap
        """Whether gradients are handed in during the pass, from the second step on."""
        self._buckets: Buckets | None = None
        self._armed = False
        self._given: Counter[int] = Counter()
        """How often the pass that runs has given each parameter a gradient, by where it begins."""
        self._watched = False
        """A step has shown what the module does."""
        self._places: dict[int, int] = {}
        """Each trained parameter's number, by where it begins."""
        trained = [parameter for parameter in flat.module.parameters() if parameter.requires_grad]
        at = 0
        for number, parameter in enumerate(trained):
            self._places[at] = number
            if overlap:
                parameter.register_post_accumulate_grad_hook(self._giver(at, number))  # type: ignore[no-untyped-call]
            at += parameter.numel()

    def arm(self, step: int, weight: float) -> None:
        """The next backward pass is the last of the step, after all of its forward passes. ``weight``: samples."""
        if not self.overlap:
            return
        self._armed = True
        self._given.clear()
        if self._watched:
            self._buckets = self._parted().begin(step, weight)

    def merged(self, step: int, weight: float) -> tuple[Merged, ...]:
        """After the backward pass: what `Collective.merge` returns."""
        if self._armed:
            self._look_back()
        buckets, self._buckets, self._armed = self._buckets, None, False
        if buckets is None:
            return self._collective.merge(step, self._flat.gradient(), weight)
        for at, number in self._places.items():
            if not self._given[at]:
                buckets.give(at, self._flat.gradient_of(number))
        if self._flat.layout.gradient_size > self._flat.layout.trainable_size:
            buckets.give(self._flat.layout.trainable_size, self._flat.gradient_tail())
        return buckets.result()

    def _look_back(self) -> None:
        """What the pass that is over has shown of the module."""
        twice = any(count > 1 for count in self._given.values())
        if twice and self._buckets is not None:
            text = "a backward pass gave a parameter its gradient in several parts, as no pass before it did"
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
