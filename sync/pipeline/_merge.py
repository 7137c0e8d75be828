"""Gradients of the replicas of one stage become one, while the backward pass still runs."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from sync.channel import Channel
from sync.collective import Buckets, Collective, Member, Settings, State, open_collective
from sync.flat import FlatModel

__all__ = ["GroupMerge"]


class GroupMerge:
    """One replica's side. The mean is weighted by the replicas' samples; each group has a place of its own.

    With ``overlap`` parameters are handed in as the last backward pass of a step gives them, the last layers first, and
    a chunk leaves as soon as it is whole (buckets, as in PyTorch DDP, Li et al. 2020, section 3.2.3). Without, all
    leave when the pass is over, as FuncPipe has it.
    """

    def __init__(
        self, flat: FlatModel, settings: Settings, member: Member, channel: Channel, place: str, *, overlap: bool = True
    ) -> None:
        if settings.pattern == "isp" or settings.staleness:
            text = "the replicas of a stage merge gradients of one step; isp and staleness do not"
            raise GeofedError("CONFIG_INVALID", text)
        self._flat, self._overlap = flat, overlap
        self._collective: Collective | None = None
        if member.workers > 1:
            self._collective = open_collective(settings, member, channel, place, flat.layout.size)
        self._buckets: Buckets | None = None
        self._weight, self._step = 0.0, 0
        self._missing: dict[int, int] = {}
        """Of the parameters that the open buckets still lack: where each begins, and how long it is."""
        self._rest_missing = False
        self.exposed_seconds = 0.0
        """Spent waiting in `finish`, in all steps."""
        at = 0
        self._places: dict[int, int] = {}
        for parameter in flat.module.parameters():
            if parameter.requires_grad:
                self._places[at] = parameter.numel()
                if self._collective is not None and overlap:
                    parameter.register_post_accumulate_grad_hook(self._giver(at))  # type: ignore[no-untyped-call]
                at += parameter.numel()

    def arm(self, step: int, weight: float, *, counted: bool = True) -> None:
        """The next backward pass is the last of the step, after all of its forward passes. ``weight``: samples.
        ``counted``: running statistics do not change any more; they do where that pass makes its own forward pass."""
        self._step, self._weight = step, weight
        if self._collective is None or not self._overlap:
            return
        buckets = self._collective.begin(step, weight)  # type: ignore[attr-defined]  # of means, as was checked
        trained = self._flat.layout.trainable_size
        self._rest_missing = self._flat.layout.size > trained
        if self._rest_missing and counted:
            buckets.give(trained, self._flat.rest())
            self._rest_missing = False
        self._missing = dict(self._places)
        self._buckets = buckets

    def finish(self) -> None:
        """Wait for the mean, and put it where the gradients are."""
        if self._collective is None:
            return
        begun = time.monotonic()
        if self._buckets is None:
            merged = self._collective.merge(self._step, self._flat.gradient(), self._weight)
        else:
            buckets, self._buckets = self._buckets, None
            for at, count in self._missing.items():
                # What no sample's loss depends on.
                buckets.give(at, np.zeros(count, np.float32))
            self._missing = {}
            if self._rest_missing:
                buckets.give(self._flat.layout.trainable_size, self._flat.rest())
            merged = buckets.result()
        for one in merged:
            self._flat.load_gradient(one.vector)
        self.exposed_seconds += time.monotonic() - begun

    def state(self) -> State:
        return State() if self._collective is None else self._collective.state()

    def restore(self, state: State) -> None:
        if self._collective is not None:
            self._collective.restore(state)

    def close(self) -> None:
        if self._collective is not None:
            self._collective.close()

    def _giver(self, at: int) -> Callable[[torch.Tensor], None]:
        def give(parameter: torch.Tensor) -> None:
            if self._buckets is not None and parameter.grad is not None and at in self._missing:
                del self._missing[at]
                gradient = parameter.grad.detach().reshape(-1).to("cpu", torch.float32)
                self._buckets.give(at, gradient.numpy())

        return give
