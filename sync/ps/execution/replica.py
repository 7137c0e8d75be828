"""The arithmetic of one parameter server, without sockets and files: its model, its own updates, merges, corrections.

There are three models:

- `model` results from all updates merged so far, this region's own ones as its peers received them, that is after a
  lossy codec.
- `view` differs from it only while updates of merged rounds are missing. There the updates that have arrived are scaled
  up to the weight of a whole round. Regions that are cut off from each other thus keep training at full pace, and their
  changes are averaged once they are connected again, not added up.
- `start` is what the workers began the open round from. With synchronous exchange that is the model. With background
  exchange it also holds their last round's full change, which has not been merged yet.

``correction()`` leads from `start` towards the view. The workers add it when they end their next round (delayed
application with the region's own fresh term, as in eager updates, arXiv 2502.12996).

Where updates are averaged, the correction covers half of the distance, because it is applied one round late. Let e be
the distance from the model at which a region's workers begin a round, s the distance of the region's own optimum from
the mean of all regions', r the fraction of e that remains after the round's steps, and c the fraction that is
corrected. The next round then begins at (r - c) e + (1 - r) s. In long rounds r is close to 0, or below 0 where
momentum overshoots: with c = 1 the regions would oscillate about the model with growing amplitude. With c = 1/2 they
are stable for every r above -1/2, at a distance of at most two thirds of s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sync.codec import Codec, Decoding, ErrorFeedback, Float32, Sparse, Tensors, codec_named, with_state
from sync.layout import Vector
from sync.mapped_files import release, windows
from sync.policy import Contribution, Policy, StateAveraged, Values
from sync.robust import RobustMerge, robust_rule_named
from sync.secure import PairMasks, SharedScale
from sync.wan import ExchangeSettings, Guard, norm_of, significant

__all__ = ["WHOLE_MODEL", "OwnUpdate", "Replica", "ReplicaState", "expanded", "fragment"]

_GUARD = "guard/"
"""Prefix, in the memory, of what the guard knows about a region's updates."""
WHOLE_MODEL = "view/whole"
"""Name, in the memory, of the model when it last held all updates of all merged rounds."""
_SCALES = "secure/scales"
"""Name, in the memory, of the scales of masked updates."""
_SINCE = "view/rounds"
"""Name, in the memory, of two numbers: own rounds merged since then, and the fraction of their weight that is
merged."""
_MIN_PRESENT = 1e-3
"""Lower bound of that fraction, which the view divides by."""
_BLOCK_ELEMENTS = 1 << 16
"""Coordinates that are processed together, so that intermediate results stay in the CPU's cache."""
_PLAIN_ELEMENTS = 1 << 18
"""Coordinates of an update that are computed, hashed and written together: 1 MB, which stays in the CPU's cache."""
_RELEASED_BLOCKS = 16
"""Blocks after which the pages of mapped updates are given back: 4 MB of float32. A choice."""
_MOST_BLOCKS = 3 * _RELEASED_BLOCKS
"""The same of all updates together, since after a cut very many are merged at once. A choice."""
_CORRECTION_FRACTION = np.float32(0.5)
"""Fraction of the distance to the view that a correction covers, where updates are averaged; see above."""


@dataclass(frozen=True)
class OwnUpdate:
    """An encoded update of this region."""

    tensors: Tensors
    codec: Codec
    part: slice
    """The coordinates that it covers."""
    sent: Vector
    """The values that the tensors decode to, shape (part,); empty if they were not wanted."""
    whole: bool = False
    """Whether these are the model itself, not a change of it."""


@dataclass(frozen=True)
class ReplicaState:
    """The state of a replica that must survive a crash."""

    model: Vector
    start: Vector
    """What the workers began the open round from, shape (n,)."""
    residual: Vector | None = None
    """What a lossy codec has not sent yet, shape (n,)."""
    memory: Mapping[str, Vector] = field(default_factory=dict)
    """State of the WAN policy, of the guard and of the view, by name."""


def fragment(sequence: int, fragments: int, size: int) -> slice:
    """Return the coordinates, of ``size``, that are sent in a round: the fragments take turns."""
    if fragments <= 1 or size < fragments:
        return slice(None)
    at = sequence % fragments
    return slice(size * at // fragments, size * (at + 1) // fragments)


class Replica:
    """The model of one region and its changes. Not thread-safe."""

    def __init__(
        self,
        policy: Policy,
        exchange: ExchangeSettings,
        codec: Codec,
        state: ReplicaState,
        *,
        owned: bool = False,
        aside: Callable[[Vector], Vector] = np.copy,
    ) -> None:
        """
        ``owned``: nothing else uses the model and the start of the state, so their memory may take the next ones.
        ``aside``: copies a vector that is hardly ever read, to where it takes no memory that others lack.
        """
        self._policy, self._exchange, self._guard = policy, exchange, Guard(exchange.guard)
        self._robust = (
            RobustMerge(
                robust_rule_named(exchange.robust),
                int(exchange.byzantine),
                background=bool(exchange.background),
                quarantine=int(exchange.quarantine),
            )
            if exchange.robust
            else None
        )
        self._feedback = ErrorFeedback(codec, state.residual)
        self._model, self._memory = state.model, dict(state.memory)
        self._start = state.start
        self._buffers = list({id(one): one for one in (state.model, state.start)}.values()) if owned else []
        """Memory of the model and of `start`, which is used again: two vectors, or one where both are the same."""
        self._aside = aside
        self._scales = self._memory.pop(_SCALES, None)
        """With secure aggregation: the scales of the next round's updates; None in the first round, and without."""
        self._whole = self._memory.pop(WHOLE_MODEL, None)
        """The model when it last held all updates of all merged rounds; None: it does now."""
        since, present = self._memory.pop(_SINCE, np.array([0, 1], np.float32))
        self._since = int(since)
        """This region's rounds merged since then."""
        self._present = np.float32(present)
        """The fraction of their weight that has been merged."""
        self.alone = False
        """Whether there is no other region. Then updates are not sent, and can hold the model itself: a change, added
        to the model again, would be rounded to float32."""
        self.trained = state.model.size
        """Number of leading coordinates that gradients train. The coordinates behind them (such as running means) are
        averaged, and never corrected."""

    @property
    def suspicion(self) -> dict[str, int]:
        """Suspect rounds of each region by the robust rule, less those that were not; all regions judge alike."""
        return RobustMerge.suspicion(self._memory)

    @property
    def state(self) -> ReplicaState:
        """The state to store in a checkpoint; it shares the memory of this replica."""
        memory = dict(self._memory)
        if self._whole is not None:
            memory |= {WHOLE_MODEL: self._whole, _SINCE: np.array([self._since, self._present], np.float32)}
        if self._scales is not None:
            memory[_SCALES] = self._scales
        return ReplicaState(self._model, self._start, self._feedback.residual, memory)

    @property
    def model(self) -> Vector:
        """The model after all merges so far, shape (n,); the next merge may overwrite its memory."""
        return self._model

    @property
    def view(self) -> Vector:
        """The model that corrections lead the workers to, shape (n,)."""
        if not self._view_differs:
            return self._model
        view = np.empty_like(self._model)
        self._write_view(view)
        return view

    def _write_view(self, out: Vector) -> None:
        for block in self._blocks():
            out[block] = self._view(block)

    def _blocks(self) -> Iterator[slice]:
        """Yield blocks of all coordinates, for which `_view` reads files a part at a time."""
        return _read([] if self._whole is None else [self._whole], slice(0, self._model.size))

    @property
    def _view_differs(self) -> bool:
        """Whether the view differs from the model."""
        return self._whole is not None and self._policy.averages and bool(self._present < 1.0)

    def _view(self, block: slice) -> Vector:
        model = self._model[block]
        if self._whole is None or not self._view_differs:
            return model
        view, trained = model.copy(), max(0, self.trained - block.start)
        view[:trained] += (1 / self._present - 1) * (model[:trained] - self._whole[block][:trained])
        return view

    @property
    def start(self) -> Vector:
        """What the workers began the open round from, shape (n,); its memory is overwritten in the next round."""
        return self._start

    @property
    def codec(self) -> Codec:
        """Codec of this region's next update. The residual stays when it changes."""
        return self._feedback.codec

    @codec.setter
    def codec(self, codec: Codec) -> None:
        self._feedback.codec = codec

    @property
    def _keeps_own(self) -> bool:
        """Whether the merged model is what this region's workers ended the round with."""
        return self.alone and self._policy.keeps_own

    # Our own changes

    def plain_update(self, end: Vector, sequence: int, *, last: bool = False) -> Iterator[tuple[Vector, Vector]] | None:
        """Return the update of a round that ended with the model ``end``, block by block, where the codec sends what
        the round has changed as it is; None: `own_update` is needed.

        Yields blocks of ``end`` and of the update; the next one overwrites the memory of the latter.
        """
        exchange = self._exchange
        part = slice(None) if last else fragment(sequence, int(exchange.fragments), end.size)
        filtered = exchange.significance and not last
        held = self._keeps_own or self._feedback.residual is not None
        if held or filtered or part != slice(None) or not self._used(last=last, part=part, size=end.size).verbatim:
            return None
        return self._changes(end)

    def _changes(self, end: Vector) -> Iterator[tuple[Vector, Vector]]:
        change = np.empty(min(_PLAIN_ELEMENTS, end.size), np.float32)
        for window in windows(end.size, end):
            for at in range(window.start, window.stop, _PLAIN_ELEMENTS):
                block = slice(at, min(at + _PLAIN_ELEMENTS, window.stop))
                yield end[block], np.subtract(end[block], self._start[block], out=change[: block.stop - block.start])

    def _used(self, *, last: bool, part: slice, size: int) -> Codec:
        """Return the codec of an update that covers a part of ``size`` coordinates."""
        codec = self._feedback.codec
        begin, stop, _ = part.indices(size)
        return with_state(codec_named(codec.last) if last and codec.last else codec, self.trained - begin, stop - begin)

    def own_update(
        self, end: Vector, sequence: int, *, last: bool = False, buffer: Vector | None = None, decoded: bool = True
    ) -> OwnUpdate:
        """Encode the update of a round that ended with the model ``end``.

        The ``last`` update covers all coordinates, with as small a residual as the codec allows. ``buffer`` receives
        the update's decoded values, if it has their size. Without ``decoded``, they are not kept for a lossy codec.
        """
        exchange, codec = self._exchange, self._feedback.codec
        if self._keeps_own:
            sent = np.empty_like(end) if buffer is None else buffer
            sent[...] = end
            return OwnUpdate(Float32().encode(sent), Float32(), slice(None), sent, whole=True)
        part = slice(None) if last else fragment(sequence, int(exchange.fragments), end.size)
        keep = None
        if exchange.significance and not last:
            model, threshold = self._model[part], exchange.significance
            keep = lambda change: significant(change, model, threshold, sequence)  # noqa: E731 - one expression
        begin, stop, _ = part.indices(end.size)
        used = self._used(last=last, part=part, size=end.size)
        if keep is not None:
            used = with_state(Sparse(), self.trained - begin, stop - begin)
        self._feedback.codec = used
        tensors, sent = self._feedback.encode(end, part, keep, self._start, buffer, decoded=decoded)
        self._feedback.codec = codec
        return OwnUpdate(tensors, used, part, sent)

    def masked_update(self, end: Vector, sequence: int, scale: SharedScale, masks: PairMasks) -> Tensors:
        """Encode the update of a round that ended with the model ``end`` for secure aggregation."""
        if self._feedback.residual is None:
            self._feedback.residual = np.zeros(end.size, np.float32)
        residual = self._feedback.residual
        return scale.encode(end, self._start, residual, self.trained, self._scales, masks, sequence)

    def account_sent(self, end: Vector | None, sent: Vector | Decoding, part: slice) -> None:
        """Account for an update that is durable already, in place of `own_update`.

        ``end`` is the model that the round ended with. If it is lost (None), so is the residual of the round: the round
        counts as if its change had been exactly what was sent.
        """
        if end is not None and not self._keeps_own:
            self._feedback.settle(end, self._start, sent, part)

    def continue_from(self, end: Vector, correction: Vector | None) -> None:
        """Record that the workers begin a round from the model ``end`` of their last round, plus a correction."""
        begun = self._start_buffer()
        read = (end,) if correction is None else (end, correction)
        for window in windows(end.size, *read):
            if correction is None:
                begun[window] = end[window]
            else:
                np.add(end[window], correction[window], out=begun[window])
        self._start = begun

    def restart(self) -> None:
        """Record that the workers begin the open round from the view."""
        if self._exchange.background and self.trained < self._model.size and not self._keeps_own:
            # The workers' untrained state jumps to the mean of all regions. The residual takes up the jump, so that
            # this region's updates still add up to its state.
            self._feedback.add(self._model, self._start, self.trained)
        start = self._model
        if self._view_differs:
            start = self._start_buffer()
            self._write_view(start)
        self._start = start

    def correction(self) -> Vector:
        """Return all blocks of `correction_blocks`, shape (n,)."""
        return np.concatenate([block.copy() for block in self.correction_blocks()])

    def correction_blocks(self) -> Iterator[Vector]:
        """Yield what leads from `start` towards the view, shape (n,), in consecutive blocks, each valid until the next.

        It is 0 where gradients do not train. A running mean forgets where it started, so that a correction which is
        applied a round later would be applied to a difference that has shrunk by itself. Uncorrected, the changes of a
        region's running mean add up to its current value, and the model holds the mean of all regions' values.
        """
        held = np.empty(min(_BLOCK_ELEMENTS, self._model.size), np.float32)
        for block in self._blocks():
            correction = np.subtract(self._view(block), self._start[block], out=held[: block.stop - block.start])
            if self._policy.averages:
                correction *= _CORRECTION_FRACTION
            correction[max(0, self.trained - block.start) :] = 0.0
            yield correction

    # Merging

    def merge(
        self,
        contributions: Sequence[Contribution],
        total: float | None,
        *,
        own: str,
        rounds: int = 0,
        lacking: float = 0.0,
    ) -> tuple[tuple[str, str], ...]:
        """Merge updates into the model; return the regions whose updates the guard refused, each with the reason.

        ``own`` is the name of this region, and ``rounds`` the number of its rounds that this merge adds. ``lacking`` is
        the weight of the updates that are missing from its rounds merged so far, in units of one round's weight.

        ``total`` is the weight of a whole round with background exchange, else None. With background exchange the guard
        does not judge this region's own update, because its workers have continued from it in any case. With a robust
        rule it does: all regions make the same merges, and corrections lead the workers back.
        """
        if lacking > 0.0 and self._whole is None:
            self._whole = self._aside(self._model)
        # A checkpoint that has to be written of the present model is written before.
        in_place = total is None or self._model is not self._start
        total = None if self._robust is not None else total
        if contributions and contributions[-1].whole:
            self._model = self._model_buffer(in_place)
            self._model[...] = contributions[-1].delta
            self._count(rounds, lacking)
            return ()
        passed: list[Contribution] = []
        refused: list[tuple[str, str]] = []
        judged: dict[str, Vector] = {}
        for contribution in sorted(contributions, key=lambda c: c.region):
            if total is not None and contribution.region == own:
                passed.append(contribution)
                continue
            # Only the norm of the trained coordinates counts: a counter of steps would outweigh all parameters.
            read = _values_of(contribution)
            norm = norm_of(read[part] for part in _read([read], slice(0, min(self.trained, self._model.size))))
            why, known = self._guard.judge(contribution.region, norm, {**self._memory, **judged}, contribution.rounds)
            states = (read[part] for part in _read([read], slice(self.trained, self._model.size)))
            why = why or ("" if all(np.isfinite(state).all() for state in states) else "it is not finite")
            judged[f"{_GUARD}{contribution.region}"] = known
            if why:
                refused.append((contribution.region, why))
            else:
                passed.append(contribution)
        memory = {name: v for name, v in self._memory.items() if not _is_of_regions(name)}
        of_regions = {name: v for name, v in self._memory.items() if _is_of_regions(name)} | judged
        if self._robust is not None and passed:
            passed, kept, quarantined = self._robust.merge(passed, of_regions, self.trained)
            of_regions, refused = {**of_regions, **kept}, [*refused, *quarantined]
        if passed:
            self._model, memory = self._merged(passed, memory, total, in_place)
        self._memory = {**memory, **of_regions}
        self._count(rounds, lacking)
        return tuple(refused)

    def merge_masked(self, updates: Sequence[Tensors], scale: SharedScale) -> None:
        """Merge the masked updates of a round of all regions: their sum is the mean of the changes.

        What guard and robust rule look at is not known. No region can move a coordinate further than its scale allows.
        """
        delta, self._scales = scale.decode(updates, self.trained, self._scales)
        self._model, memory = self._merged([Contribution("", 1.0, delta)], self._memory, None, in_place=True)
        self._memory = memory

    def _merged(
        self, passed: Sequence[Contribution], memory: Mapping[str, Vector], total: float | None, in_place: bool
    ) -> tuple[Vector, dict[str, Vector]]:
        """Return the policy's next model and memory.

        Policies work elementwise, so they are applied block by block, and a block stays in the CPU's cache.
        """
        out, made = self._model_buffer(in_place), dict[str, Vector]()
        values = [_values_of(c) for c in passed]
        for block in _read(values, slice(0, out.size)):
            trained = max(0, min(self.trained, block.stop) - block.start)
            head = slice(block.start, block.start + trained)
            policy = self._policy if head == block else StateAveraged(self._policy, trained)
            parts = [
                replace(c, delta=read[block], later=None, drift=None if c.drift is None else c.drift[block])
                for c, read in zip(passed, values, strict=True)
            ]
            known = {name: vector[head] for name, vector in memory.items()}
            outer = policy.merge(self._model[block], parts, known, total)
            out[block] = outer.model
            for name, vector in outer.memory.items():
                if name not in made:
                    again = memory.get(name) if in_place else None
                    made[name] = np.empty(min(self.trained, out.size), np.float32) if again is None else again
                made[name][head] = vector
        return out, made

    def _model_buffer(self, in_place: bool) -> Vector:
        """Return memory for the next model. ``in_place``: nothing needs the present one any longer than a merge does,
        which reads each block before it writes it."""
        return self._model if in_place and self._is_own(self._model) else self._spare_buffer()

    def _start_buffer(self) -> Vector:
        """Return memory for the next `start`, which may be that of the present one."""
        own = self._start is not self._model and self._is_own(self._start)
        return self._start if own else self._spare_buffer()

    def _spare_buffer(self) -> Vector:
        for buffer in self._buffers:
            if buffer is not self._model and buffer is not self._start:
                return buffer
        self._buffers.append(np.empty_like(self._model))
        return self._buffers[-1]

    def _is_own(self, vector: Vector) -> bool:
        return any(vector is buffer for buffer in self._buffers)

    def _count(self, rounds: int, lacking: float) -> None:
        """Update the fraction of merged weight since the model last held all updates; see `merge`."""
        if lacking <= 0.0:
            self._whole, self._since, self._present = None, 0, np.float32(1.0)
            return
        self._since += rounds
        self._present = np.float32(max(1.0 - lacking / max(self._since, 1), _MIN_PRESENT))


def _is_of_regions(name: str) -> bool:
    """Whether an entry of the memory is of the guard or of the robust merge, not of the policy."""
    return name.startswith(_GUARD) or RobustMerge.owns(name)


def _blocks(size: int) -> Iterator[slice]:
    for at in range(0, size, _BLOCK_ELEMENTS):
        yield slice(at, min(at + _BLOCK_ELEMENTS, size))


def _values_of(contribution: Contribution) -> Vector | Values:
    return contribution.delta if contribution.later is None else contribution.later


def _read(values: Sequence[Vector | Values], part: slice) -> Iterator[slice]:
    """Yield the blocks of a part, and free the memory of what was read of mapped files from time to time."""
    every = max(1, min(_RELEASED_BLOCKS, _MOST_BLOCKS // max(1, len(values))))
    for number, block in enumerate(_blocks(part.stop - part.start), 1):
        yield slice(part.start + block.start, part.start + block.stop)
        if number % every == 0:
            release(*values)
    release(*values)


def expanded(delta: Vector, part: slice, size: int) -> Vector:
    """Extend an update of some coordinates with zeros to all coordinates, shape (size,)."""
    if part == slice(None):
        return delta
    out = np.zeros(size, np.float32)
    out[part] = delta
    return out
