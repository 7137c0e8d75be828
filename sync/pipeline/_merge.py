"""Gradients of the replicas of one stage become one, while the backward pass still runs."""

from __future__ import annotations

import time

from geofed_pb.errors import GeofedError
from sync.channel import Channel
from sync.collective import Collective, Member, Settings, State, open_collective
from sync.flat import FlatModel
from sync.gradients import GradientMerge

__all__ = ["GroupMerge"]


class GroupMerge:
    """One replica's side. The mean is weighted by the replicas' samples; each group has a place of its own.

    With ``overlap`` gradients leave while the last backward pass of a step gives them (`GradientMerge`). Without, all
    leave when the pass is over, as FuncPipe has it.
    """

    def __init__(
        self, flat: FlatModel, settings: Settings, member: Member, channel: Channel, place: str, *, overlap: bool = True
    ) -> None:
        if settings.pattern == "isp" or settings.staleness:
            text = "the replicas of a stage merge gradients of one step; isp and staleness do not"
            raise GeofedError("CONFIG_INVALID", text)
        self._flat = flat
        self._collective: Collective | None = None
        self._merge: GradientMerge | None = None
        if member.workers > 1:
            self._collective = open_collective(settings, member, channel, place, flat.layout.size)
            self._merge = GradientMerge(flat, self._collective, overlap=overlap)
        self._weight, self._step = 0.0, 0
        self.exposed_seconds = 0.0
        """Spent waiting in `finish`, in all steps."""

    def arm(self, step: int, weight: float) -> None:
        """The next backward pass is the last of the step, after all of its forward passes. ``weight``: samples."""
        self._step, self._weight = step, weight
        if self._merge is not None:
            self._merge.arm(step, weight)

    def finish(self) -> None:
        """Wait for the mean, and put it where the gradients are."""
        if self._merge is None:
            return
        begun = time.monotonic()
        for one in self._merge.merged(self._step, self._weight):
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
