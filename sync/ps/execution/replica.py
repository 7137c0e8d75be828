"""The numbers of one parameter server, without sockets and files: its model, what its workers began with, what it owes.

Three models matter. `model` is what the updates merged so far make, this region's own as its peers got them. `view` is
the same, but for rounds of which a region's update has not come: there the updates that have come count for all of it,
so that regions which are cut off from each other train on at full pace, and what they have made meanwhile is averaged
when they meet again, not added up. `start` is what the workers began the open round from: with synchronous exchange
the model, with background exchange also their last round's change in full, which has not come back from the merge yet.
``correction()`` leads from there towards the view; the workers add it at the next end of a round (delayed application
with the own fresh term, as in eager updates, arXiv 2502.12996).

Where updates are averaged it leads half the way. It comes a round late: let e be how far a region's workers begin from
the model, s its own optimum's distance from the mean of all, and let a round's steps leave the part r of what they
begin with. Corrected by the part c, the next round begins at (r - c) e + (1 - r) s. In long rounds r is near 0, and
below it where momentum overshoots: corrected in full the regions swing about the model ever further; by half they are
stable for every r above -1/2, at a distance of at most two thirds of s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from sync.codec import Codec, ErrorFeedback, Float32, Sparse, Tensors, codec_named, with_state
from sync.layout import Vector
from sync.policy import Contribution, Policy, StateAveraged
from sync.wan import ExchangeSettings, Guard, significant

__all__ = ["Made", "Numbers", "Replica", "expanded", "fragment"]

_GUARD = "guard/"
_WHOLE, _SINCE = "view/whole", "view/rounds"
_LEAST_PRESENT = 1e-3
_BLOCK = 1 << 16
"""Coordinates that are worked on together: what arises on the way stays in the cache."""
_PULL = np.float32(0.5)
"""The part of the way to the view that a correction leads, where updates are averaged."""


@dataclass(frozen=True)
class Made:
    """An update of this region, ready to be framed."""

    tensors: Tensors
    codec: Codec
    part: slice
    """The coordinates that it covers."""
    sent: Vector
    """What the tensors decode to, shape (part,)."""
    whole: bool = False
    """That is the model itself, not a change of it."""


@dataclass(frozen=True)
class Numbers:
    """All that a replica must find again after a crash."""

    model: Vector
    start: Vector
    residual: npt.NDArray[np.float64] | None = None
    memory: Mapping[str, Vector] = field(default_factory=dict)
    """Of the policy and the guard."""


def fragment(sequence: int, fragments: int, size: int) -> slice:
    """The coordinates whose turn it is in a round, of ``size``; all of them where there is one fragment."""
    if fragments <= 1 or size < fragments:
        return slice(None)
    at = sequence % fragments
    return slice(size * at // fragments, size * (at + 1) // fragments)


class Replica:
    """One region's numbers. Not thread-safe."""

    def __init__(self, policy: Policy, exchange: ExchangeSettings, codec: Codec, numbers: Numbers) -> None:
        self._policy, self._exchange, self._guard = policy, exchange, Guard(exchange.guard)
        self._feedback = ErrorFeedback(codec, numbers.residual)
        self._model, self._memory = numbers.model, dict(numbers.memory)
        self._start = numbers.start
        self._begun: Vector | None = None
        """Where workers continued from; its memory is used again for where they continue from next."""
        self._models: list[Vector] = []
        """The same for models: at most two."""
        self._whole = self._memory.pop(_WHOLE, None)
        """The model when it last held all updates of all merged rounds; None: it does."""
        since, present = self._memory.pop(_SINCE, np.array([0, 1], np.float32))
        self._since = int(since)
        """Own rounds merged since then."""
        self._present = np.float32(present)
        """Of their weight, what has been merged."""
        self.alone = False
        """There is no other region: nothing is sent, so nothing has to be a change, which float32 would round."""
        self.trained = numbers.model.size
        """How many coordinates, from the first, gradients train; the state behind them is averaged, uncorrected."""

    @property
    def numbers(self) -> Numbers:
        memory = dict(self._memory)
        if self._whole is not None:
            memory |= {_WHOLE: self._whole, _SINCE: np.array([self._since, self._present], np.float32)}
        return Numbers(self._model, self._start, self._feedback.residual, memory)

    @property
    def model(self) -> Vector:
        """What all updates merged so far make, shape (n,); its memory is used again two merges later."""
        return self._model

    @property
    def view(self) -> Vector:
        """What the workers are led to, shape (n,)."""
        if not self._apart:
            return self._model
        view = np.empty_like(self._model)
        for block in _blocks(view.size):
            view[block] = self._view(block)
        return view

    @property
    def _apart(self) -> bool:
        """Whether the view is another than the model."""
        return self._whole is not None and self._policy.averages and bool(self._present < 1.0)

    def _view(self, block: slice) -> Vector:
        model = self._model[block]
        if self._whole is None or not self._apart:
            return model
        view, trained = model.copy(), max(0, self.trained - block.start)
        view[:trained] += (1 / self._present - 1) * (model[:trained] - self._whole[block][:trained])
        return view

    @property
    def start(self) -> Vector:
        """What the workers began the open round from; its memory is used again."""
        return self._start

    @property
    def codec(self) -> Codec:
        return self._feedback.codec

    @codec.setter
    def codec(self, codec: Codec) -> None:
        """What is held back stays, whichever codec sends it."""
        self._feedback.codec = codec

    @property
    def _keeps_own(self) -> bool:
        return self.alone and self._policy.keeps_own

    # Our own changes

    def own(self, end: Vector, sequence: int, *, last: bool = False, room: Vector | None = None) -> Made:
        """The update of a round that ended with the model ``end``; the last one holds back as little as it can.

        ``room``: memory for what it says, of its size.
        """
        exchange, codec = self._exchange, self._feedback.codec
        if self._keeps_own:
            sent = np.empty_like(end) if room is None else room
            sent[...] = end
            return Made(Float32().encode(sent), Float32(), slice(None), sent, whole=True)
        part = slice(None) if last else fragment(sequence, int(exchange.fragments), end.size)
        keep = None
        if exchange.significance and not last:
            model, threshold = self._model[part], exchange.significance
            keep = lambda change: significant(change, model, threshold, sequence)  # noqa: E731 - one expression
        used = codec
        if keep is not None:
            used = Sparse()
        elif last and codec.last:
            used = codec_named(codec.last)
        begin, stop, _ = part.indices(end.size)
        used = with_state(used, self.trained - begin, stop - begin)
        self._feedback.codec = used
        tensors, sent = self._feedback.encode(end, part, keep, self._start, room)
        self._feedback.codec = codec
        return Made(tensors, used, part, sent)

    def made_before(self, end: Vector | None, sent: Vector, part: slice) -> None:
        """Account for an update of ours that is durable already; ``end`` None: the model it came from is lost.

        What was held back of a lost model is lost with it: the round counts as if exactly the sent had been changed.
        """
        if end is not None and not self._keeps_own:
            self._feedback.settle(end - self._start, sent, part)

    def go_on(self, end: Vector, correction: Vector | None) -> None:
        """The workers begin a round from where they ended the last, plus a correction that they were given."""
        if self._begun is None:
            self._begun = np.empty_like(self._model)
        if correction is None:
            self._begun[...] = end
        else:
            np.add(end, correction, out=self._begun)
        self._start = self._begun

    def restart(self) -> None:
        """The workers begin the round from the view."""
        if self._exchange.background and self.trained < self._model.size and not self._keeps_own:
            # Their statistics jump to the mean; the sum of this region's changes must still say where they are.
            jump = np.zeros_like(self._model)
            jump[self.trained :] = (self._model - self._start)[self.trained :]
            self._feedback.settle(jump, np.zeros_like(jump))
        self._start = self.view

    def correction(self, room: Vector | None = None) -> Vector:
        """What leads from the workers' beginning of the open round towards the view, in ``room`` where there is one;
        their own statistics stay theirs.

        A running mean forgets what it was given, so a correction that comes rounds later would be made twice. Left
        alone, a region's changes of it add up to its present value, and the model's is the mean of all regions'.
        """
        correction = np.empty_like(self._model) if room is None else room
        for block in _blocks(correction.size):
            np.subtract(self._view(block), self._start[block], out=correction[block])
            if self._policy.averages:
                correction[block] *= _PULL
        correction[self.trained :] = 0.0
        return correction

    # What comes

    def merge(
        self,
        contributions: Sequence[Contribution],
        total: float | None,
        *,
        own: str,
        rounds: int = 0,
        lacking: float = 0.0,
    ) -> tuple[tuple[str, str], ...]:
        """Merge updates into the model; returns the regions whose updates were refused, each with the reason.

        ``rounds``: of this region's own that are merged herewith. ``lacking``: of all its rounds merged so far, the
        shares of a round's weight whose updates have not come, summed up.

        With background exchange (``total`` is known) the update of this region, ``own``, is not judged: its workers go
        on from what they changed in any case.
        """
        before = self._model
        if contributions and contributions[-1].whole:
            self._model = self._model_room()
            self._model[...] = contributions[-1].delta
            self._count(before, rounds, lacking)
            return ()
        passed: list[Contribution] = []
        refused: list[tuple[str, str]] = []
        judged: dict[str, Vector] = {}
        for contribution in sorted(contributions, key=lambda c: c.region):
            if total is not None and contribution.region == own:
                passed.append(contribution)
                continue
            # A counter of steps would outweigh all parameters.
            trained, state = contribution.delta[: self.trained], contribution.delta[self.trained :]
            why, known = self._guard.judge(
                contribution.region, trained, {**self._memory, **judged}, contribution.rounds
            )
            why = why or ("" if np.isfinite(state).all() else "it is not finite")
            judged[f"{_GUARD}{contribution.region}"] = known
            if why:
                refused.append((contribution.region, why))
            else:
                passed.append(contribution)
        memory = {name: v for name, v in self._memory.items() if not name.startswith(_GUARD)}
        norms = {name: v for name, v in self._memory.items() if name.startswith(_GUARD)}
        if passed:
            self._model, memory = self._merged(passed, memory, total)
        self._memory = {**memory, **norms, **judged}
        self._count(before, rounds, lacking)
        return tuple(refused)

    def _merged(
        self, passed: Sequence[Contribution], memory: Mapping[str, Vector], total: float | None
    ) -> tuple[Vector, dict[str, Vector]]:
        """The policy's next model and memory, block by block: it is elementwise, and a block stays in the cache."""
        out, made = self._model_room(), dict[str, Vector]()
        for block in _blocks(out.size):
            trained = max(0, min(self.trained, block.stop) - block.start)
            head = slice(block.start, block.start + trained)
            policy = self._policy if head == block else StateAveraged(self._policy, trained)
            parts = [
                replace(c, delta=c.delta[block], drift=None if c.drift is None else c.drift[block]) for c in passed
            ]
            known = {name: vector[head] for name, vector in memory.items()}
            outer = policy.merge(self._model[block], parts, known, total)
            out[block] = outer.model
            for name, vector in outer.memory.items():
                made.setdefault(name, np.empty(min(self.trained, out.size), np.float32))[head] = vector
        return out, made

    def _model_room(self) -> Vector:
        used = (self._model, self._start, self._whole)
        for model in self._models:
            if not any(model is one for one in used):
                return model
        self._models = [*self._models[-1:], np.empty_like(self._model)]
        return self._models[-1]

    def _count(self, before: Vector, rounds: int, lacking: float) -> None:
        """Note how much of the rounds merged since the model was last whole is there."""
        if lacking <= 0.0:
            self._whole, self._since, self._present = None, 0, np.float32(1.0)
            return
        if self._whole is None:
            self._whole = before
        self._since += rounds
        self._present = np.float32(max(1.0 - lacking / max(self._since, 1), _LEAST_PRESENT))


def _blocks(size: int) -> Iterator[slice]:
    for at in range(0, size, _BLOCK):
        yield slice(at, min(at + _BLOCK, size))


def expanded(delta: Vector, part: slice, size: int) -> Vector:
    """A part of an update as one of the whole model."""
    if part == slice(None):
        return delta
    out = np.zeros(size, np.float32)
    out[part] = delta
    return out
