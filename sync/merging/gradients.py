"""Merging of a module's gradients over all workers, during the backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from geofed_pb.errors import GeofedError
from sync.collective import Collective, Merged
from sync.flat import Apart, FlatModel
from sync.layout import Vector
from sync.merging import Buckets, MeanCollective

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
        self._parts, self._apart = dict[int, Vector](), Apart()
        """Parts of the current gradient that is merged in its memory, by the parameter's number."""
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
            self._parts, self._apart = {}, Apart()
            if self._in_place is not None:
                self._buckets = self._in_place.begin(step, weight, in_place=True)
            else:
                self._buckets = self._parted().begin(step, weight)

    def merged(self, step: int, weight: float) -> Iterator[None]:
        """Merge the gradient, after the backward pass. Yield for each merge that is complete, once its result is in the
        parameters' ``.grad``; see `Collective.merge`."""
        if self._armed:
            self._look_back()
        buckets, self._buckets, self._armed = self._buckets, None, False
        found = () if buckets is None else self._rest(buckets)
        if self._in_place is not None:
            if buckets is None:
                self._parts = dict(enumerate(self._flat.gradient_parts()))
                self._in_place.merge_parts(step, list(self._parts.values()), weight)
            self._flat.load_parts([part for _, part in sorted(self._parts.items(), key=lambda one: one[0])])
            self._parts = {}
            yield
            return
        at = 0
        for one in self._collective.merge(step, self._flat.gradient(), weight) if buckets is None else found:
            self._flat.load_gradient(one.vector, at)
            at += one.vector.size
            if at == self._flat.layout.gradient_size:
                at = 0
                yield

    @property
    def _in_place(self) -> MeanCollective | None:
        """The collective, if it merges in the memory of the gradients."""
        of_means = self._collective if isinstance(self._collective, MeanCollective) else None
        return of_means if of_means is not None and of_means.in_place else None

    def _rest(self, buckets: Buckets) -> tuple[Merged, ...]:
        """Pass what the backward pass has not passed, and return the result."""
        for at, number in self._numbers.items():
            if not self._given[at]:
                self._pass(buckets, at, number)
        tail = self._parts[len(self._numbers)] = self._flat.gradient_tail()
        if tail.size:
            buckets.give(self._flat.layout.trainable_size, tail)
        return buckets.result()

    def _pass(self, buckets: Buckets, at: int, number: int) -> None:
        part = self._flat.gradient_of(number)
        if self._in_place is not None:
            part = self._parts[number] = self._apart.of(part)
        buckets.give(at, part)

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
                self._pass(self._buckets, at, number)

        return give
