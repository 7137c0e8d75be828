"""What a parameter server does with disk, channel and numbers, one action after the other, in one thread."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from geofed_pb.errors import GeofedError
from sync import chunked, framing
from sync.channel import Channel
from sync.codec import Codec, Exact, Float32, Tensors, codec_of, decoded
from sync.collective import weighted_mean
from sync.layout import Layout, Vector
from sync.policy import Contribution, Policy
from sync.ps.core.actions import Action, Apply, Forget, Keep, Log, Merge, Prepare, Reproduce, Restart, SumUp
from sync.ps.core.events import Applied, Event, Kept, Logged, Merged, Prepared, Restarted, Summed
from sync.ps.core.machine import FIRST_WEIGHT, Recovered, Setup
from sync.ps.execution.channel_store import ChannelStore
from sync.ps.execution.export import from_safetensors
from sync.ps.execution.replica import Numbers, Replica, expanded
from sync.ps.execution.storage import Draft, Entry, Storage, correction_key
from sync.transfer.manifest import Manifest
from sync.wan import ExchangeSettings

__all__ = ["ActionExecutor", "Framed", "merged_key", "step_back"]

_log = logging.getLogger("geofed.ps")
_CHECKPOINT_SHARE = 0.1
"""Of the time may go into checkpoints where the log makes them dispensable."""
_HELD_BYTES, _HELD_SHARE, _LEAST_HELD = 1 << 28, 1 / 16, 3
"""Models in the channel that a replay of the log would need: when the rounds since the last checkpoint have left more
bytes, or more than this share of what the channel can hold, and as many models, the next one is due."""
_HISTORY = 8
"""Models that are remembered for delay compensation."""
_LAYOUT, _WHOLE = "layout", "whole"
_NICE = 10
"""Of threads that code, merge and store: training on the same machine goes first."""


def merged_key(attempt: int, step: int) -> str:
    """Channel key of a step's merged gradient."""
    return f"g/{attempt}/{step}/merged"


@dataclass(frozen=True)
class Framed:
    """An update's bytes."""

    pieces: Sequence[memoryview]
    """To be written one after the other."""
    total_bytes: int
    digest: str


class ActionExecutor:
    """Storage, channel and numbers of one partition. `do` is called from one thread at a time."""

    def __init__(
        self,
        setup: Setup,
        storage: Storage,
        channel: Channel,
        policy: Policy,
        codec: Codec,
        exchange: ExchangeSettings | None = None,
        shares: dict[str, float] | None = None,
        part_elements: int = 0,
        initial_model: Path | None = None,
    ) -> None:
        """``part_elements``: see `ChannelStore`. ``initial_model``: what the job begins with, in place of what its
        workers make."""
        self.setup, self.storage, self.channel = setup, storage, channel
        self._channel_store = ChannelStore(channel, storage, background=setup.background, part_elements=part_elements)
        self._initial_model = initial_model
        self._policy, self._exchange = policy, exchange or ExchangeSettings()
        # A region alone sends nothing, so it has nothing to gain from a lossy codec.
        self._codec = codec if len(setup.regions) > 1 else Float32()
        equal = 1.0 / len(setup.regions)
        self._shares = shares or dict.fromkeys(setup.regions, equal)
        self.replica: Replica | None = None
        self._made: tuple[str, Vector, slice, bool] | None = None
        """Digest, decoded values and place of the update that was made last, and whether it is a whole model; the
        values' memory is used again."""
        self._rooms: dict[int, Vector] = {}
        """Memory that updates are decoded into, again and again; as many as there are regions."""
        self._ended: Log | None = None
        self._history: OrderedDict[int, Vector] = OrderedDict()
        self._drafting: _Drafting | None = None
        """The checkpoint that is being made beside what else is done."""
        self._checkpoint_at, self._checkpoint_took = 0.0, 0.0
        self._checkpoint_of = 0
        """The round that it holds last, or will."""
        self._room_for_sums = True
        self._attempt = 1
        """The last that began from where the replica says."""
        self.codec_wanted = self._codec
        """Of our next update; may be set at any time, by another thread."""
        self.coding_bytes_per_second = 0.0
        """float32 bytes that became our last update in a second, making it durable included; 0: not known."""

    def copy_of_model(self) -> Vector | None:
        """What the updates merged so far make; None: not even the first is there. Called where `do` is."""
        return self.replica.model.copy() if self.replica is not None else None

    @property
    def codec_name(self) -> str:
        """Of our updates."""
        return self.replica.codec.name if self.replica is not None else self._codec.name

    def do(self, action: Action, attempt: int) -> Event | None:
        """Carry out one action; returns what is to be told of it. ``attempt``: the workers' present one."""
        match action:
            case Merge():
                return self._merge(action)
            case Log():
                self.storage.log(action)
                self._ended = action
                self._channel_store.need_end(action.sequence, action.model_key)
                return Logged(action)
            case Prepare():
                return self._prepare(action)
            case Apply():
                return self._apply(action, attempt)
            case Restart():
                return self._restart(action)
            case Keep():
                self.storage.keep_metrics(action)
                return Kept(action)
            case SumUp():
                return self._sum_up(action)
            case Forget():
                self.storage.forget(dict(action.up_to), action.sums)
        return None

    # After a crash

    def recover(self) -> Recovered:
        """As of the last checkpoint, with what the log has since done again, and the workers' model in the channel."""
        recovered, numbers, entries = self.storage.recover()
        if numbers is None:
            return recovered
        if not self.setup.background:
            prepared = max((m.sequence for m in recovered.outbox), default=recovered.sequence)
            numbers = replace(numbers, residual=self.storage.residual(max(prepared, recovered.sequence)))
        self.replica = Replica(self._policy, self._exchange, self._codec, numbers)
        self._ended, self._attempt = recovered.ended, recovered.attempt
        if self.setup.background:
            recovered = self._replay(recovered, entries)
        begins = self.replica.model if self._over(recovered) else self.replica.start
        model_key, state_key = self._channel_store.publish(recovered.sequence, begins)
        model_bytes = self.replica.model.nbytes
        return replace(recovered, model_key=model_key, state_key=state_key, model_bytes=model_bytes)

    def _over(self, recovered: Recovered) -> bool:
        """Whether nothing more will change the model."""
        ended = recovered.ended
        own = ended is not None and self.setup.is_last(ended) and ended.sequence == recovered.sequence
        return own and set(recovered.lasts) >= set(self.setup.others)

    def _replay(self, recovered: Recovered, entries: list[Entry]) -> Recovered:
        outbox = {manifest.sequence: manifest for manifest in recovered.outbox}
        lost, merged = 0, recovered.sequence > 0
        self._keep_correction(recovered.version)
        for entry in entries:
            if isinstance(entry, Apply):
                self._merge_updates(entry)
                self._keep_correction(entry.version)
                recovered, merged = _after(recovered, entry), entry.sequence > 0
                continue
            if isinstance(entry, Restart):
                self._replica().restart()
                self._attempt, merged = entry.attempt, False
                continue
            manifest = outbox.get(entry.sequence)
            end = chunked.read_vector(self.channel, entry.model_key, "model")
            if manifest is None and end is None:
                _log.warning("round %d was not sent, and its model has gone from the channel", entry.sequence)
                lost += 1
                break
            self._ended = entry
            self._channel_store.need_end(entry.sequence, entry.model_key)
            recovered = replace(recovered, ended=entry)
            if manifest is not None:
                self._account(entry, manifest, end)
                lost += end is None
        if lost:
            _log.warning("what was held back of %d rounds is lost; the open round begins anew", lost)
            self._replica().restart()
            merged = False
        # Who has begun anew since the last merge has begun with the model: nothing leads there.
        key = self._publish_last_correction(recovered.version) if merged else ""
        digest = framing.digest_of([self._replica().model.data.cast("B")])
        return replace(recovered, model_digest=digest, attempt=self._attempt, correction_key=key)

    def _account(self, entry: Log, manifest: Manifest, end: Vector | None) -> None:
        """A round of ours whose update was durable already."""
        delta, part, _ = self._decoded(manifest)
        replica = self._replica()
        replica.made_before(end, delta, part)
        if end is None:
            replica.restart()
        else:
            replica.go_on(end, self._channel_store.correction(entry.correction_key))

    # Steps

    def _merge(self, action: Merge) -> Merged:
        vectors = [self._vector(key, "gradient") for key, _ in action.parts]
        weights = [samples for _, samples in action.parts]
        merged = weighted_mean(vectors, weights)
        key = merged_key(action.attempt, action.step)
        self.channel.put(key, framing.encode({"gradient": merged}, {"samples": sum(weights)}))
        if action.step > 1:
            # All workers have pushed this step, so none of them still reads the one before.
            self.channel.delete_tree(f"g/{action.attempt}/{action.step - 1}")
        return Merged(action.attempt, action.step, key, sum(weights))

    def _vector(self, key: str, name: str) -> Vector:
        vector = chunked.read_vector(self.channel, key, name)
        if vector is None:
            raise GeofedError("INTERNAL", f"{key} has gone from the channel")
        return vector

    def _told_layout(self) -> Tensors:
        """Goes with the model that all begin with, so that each region can tell in what its own differs."""
        layout = self.storage.layout
        return {} if layout is None else {_LAYOUT: np.frombuffer(layout.to_json().encode(), np.uint8)}

    def _check_layout(self, first: Manifest) -> None:
        """Raise TASK_INVALID where our workers make another model than the one that all begin with."""
        told = framing.decode(self.storage.update(first)).tensors.get(_LAYOUT)
        if told is None:
            return
        theirs = Layout.from_json(np.asarray(told, np.uint8).tobytes().decode(errors="replace"))
        if self.storage.layout is None:
            self.storage.keep_layout(theirs)
        elif differs := self.storage.layout.difference(theirs):
            raise GeofedError("TASK_INVALID", self.setup.another_model(differs))

    def _check_finite(self, model: Vector, sequence: int) -> None:
        """Raise TASK_INVALID or TASK_FAILED with the tensor's name."""
        if _finite(model):
            return
        layout = self.storage.layout
        name = "the model" if layout is None else layout.slot_at(int(np.argmin(np.isfinite(model)))).name
        if sequence == 0:
            text = f"{name} holds values that are not finite before the first step"
            raise GeofedError("TASK_INVALID", text, hint="what is trained begins with finite values")
        text = f"{name} is not finite after round {sequence}"
        raise GeofedError("TASK_FAILED", text, hint="training diverged: lower the learning rate")

    def _replica(self) -> Replica:
        if self.replica is None:
            raise GeofedError("INTERNAL", "there is no model yet")
        self.replica.alone = len(self.setup.regions) == 1
        if self.storage.layout is not None:
            # The first model may be here before the first worker has said what it looks like.
            self.replica.trained = self.storage.layout.trainable_size
        return self.replica

    # Rounds

    def _first_model(self) -> Vector | None:
        """What another job has left for this one; None: it begins with what its workers make."""
        if self._initial_model is None:
            return None
        layout = self.storage.layout
        if layout is None:
            raise GeofedError("INTERNAL", "no worker has said what the model looks like")
        return from_safetensors(layout, self._initial_model)

    def reproduced(self, action: Reproduce) -> Framed | None:
        """The update of the model that all begin with, as our own workers make it; None: they have made none.

        Tasks are seeded alike in all regions, so that they make the same wherever torch does. Called where `do` is.
        """
        if self.replica is not None:
            return None
        begin = chunked.read_vector(self.channel, action.model_key, "model")
        if begin is None or not _finite(begin):
            return None
        codec = Float32()
        facts = {"sequence": 0, "weight": FIRST_WEIGHT, "codec": codec.mark}
        return _framed({**codec.encode(begin), **self._told_layout()}, facts)

    def _prepare(self, action: Prepare) -> Prepared:
        """Workers wait for it: the optimiser's state is stored while the update is made."""
        with _beside() as beside:
            return self._made_update(action, beside.submit(self._keep_state, action))

    def _made_update(self, action: Prepare, storing: Future[None]) -> Prepared:
        begun = time.monotonic()
        end = self._first_model() if action.sequence == 0 else None
        end = self._vector(action.model_key, "model") if end is None else end
        self._check_finite(end, action.sequence)
        facts = {"sequence": action.sequence, "weight": action.weight}
        if self.replica is None:
            # The model that all begin with travels whole.
            codec: Codec = Float32()
            tensors: Tensors
            tensors, sent = {**codec.encode(end), **self._told_layout()}, (end, slice(None), True)
        else:
            self._settle_checkpoint(written=True)
            self.replica.codec = self.codec_wanted
            room, self._made = self._made[1] if self._made is not None else None, None
            made = self._replica().own(end, action.sequence, last=action.last, room=room)
            tensors, codec = made.tensors, made.codec
            sent = made.sent, made.part, made.whole
            if made.part != slice(None):
                facts |= {"from": made.part.start, "to": made.part.stop}
            if made.whole:
                facts[_WHOLE] = 1
            residual = self.replica.numbers.residual
            if residual is not None and not self.setup.background:
                self.storage.keep_residual(action.sequence, residual)
        framed = _framed(tensors, {**facts, "codec": codec.mark})
        manifest = Manifest(
            self.setup.region,
            action.epoch,
            action.sequence,
            framed.digest,
            framed.total_bytes,
            action.weight,
            action.seen,
            action.last,
            action.stretch,
            ends=action.ends,
            takes_sums=self.setup.sums,
            round_seconds=action.round_seconds,
        )
        self.storage.keep_update(manifest, framed.pieces, storing.result)
        self._made = framed.digest, *sent
        if self.setup.background and self.replica is not None:
            self.replica.go_on(end, self._channel_store.correction(action.correction_key))
        self.coding_bytes_per_second = end.nbytes / max(time.monotonic() - begun, 1e-6)
        return Prepared(manifest)

    def _keep_state(self, action: Prepare) -> None:
        if action.state_key:
            self._channel_store.take_state(action.sequence, action.state_key)

    def _apply(self, action: Apply, attempt: int) -> Applied:
        if self.replica is None:
            made, self._made = self._made, None
            first = action.manifests[0]
            if made is not None and made[0] == first.digest:
                delta = made[1]
            else:
                self._check_layout(first)
                delta = self._decoded(first)[0]
            if not np.isfinite(delta).all():
                raise GeofedError("FRAME_INVALID", "the model that the job begins with is not finite")
            self.replica = Replica(self._policy, self._exchange, self._codec, Numbers(delta, delta))
            self._attempt = attempt
            refused: tuple[tuple[str, str], ...] = ()
        else:
            if self.setup.background:
                self.storage.log(action)
            refused = self._merge_updates(action)
        if not self.setup.background:
            self.replica.restart()
        model_key, state_key, correction = "", "", ""
        with _beside() as beside:
            # Nobody is told of what is published before it is durable.
            publish = self._channel_store.publish if action.whole else lambda *_: ("", "")
            publishing = beside.submit(publish, action.sequence, self.replica.model, attempt)
            digest = self._checkpoint(action)
            model_key, state_key = publishing.result()
        if self.setup.background and action.sequence:
            correction = self._publish_correction(action.version)
        self._channel_store.clear(action.sequence, attempt)
        return Applied(action, digest, model_key, state_key, correction, refused, self.replica.model.nbytes)

    def _merge_updates(self, action: Apply) -> tuple[tuple[str, str], ...]:
        self._settle_checkpoint(written=True)
        replica = self._replica()
        stale = action.staleness or (0,) * len(action.manifests)
        pairs = zip(action.manifests, stale, strict=True)
        contributions = [self._contribution(m, s, number) for number, (m, s) in enumerate(pairs)]
        total = 1.0 if self.setup.background else None
        rounds = sum(1 for manifest in action.manifests if manifest.region == self.setup.region)
        refused = replica.merge(
            contributions, total, own=self.setup.region, rounds=rounds, lacking=self._lacking(action)
        )
        for region, why in refused:
            _log.warning("an update of %s was not merged: %s", region, why)
        if self._exchange.compensation:
            self._history[action.sequence] = replica.model.copy()
            while len(self._history) > _HISTORY:
                self._history.popitem(last=False)
        return refused

    def _lacking(self, action: Apply) -> float:
        """Of the rounds merged up to here: the share of a round's weight that is still to come, summed over rounds."""
        if not self.setup.background:
            return 0.0
        marks = dict(action.watermarks)
        to_come = [region for region in self.setup.others if region not in action.lasts]
        return sum(self._shares[region] * max(0, action.sequence - marks[region]) for region in to_come)

    def _contribution(self, manifest: Manifest, staleness: int, number: int) -> Contribution:
        """``number``: of those that are merged together; no two of them share their memory."""
        if self._made is not None and self._made[0] == manifest.digest:
            _, delta, part, is_whole = self._made
        else:
            delta, part, is_whole = self._decoded(manifest, self._rooms.get(number))
            if number < len(self.setup.regions) and delta.flags.owndata:
                self._rooms[number] = delta
        replica = self._replica()
        whole = expanded(delta, part, replica.model.size)
        background = self.setup.background
        weight = self._shares[manifest.region] if background else manifest.weight
        drift = None
        if self._exchange.compensation and manifest.region != self.setup.region:
            then = self._history.get(manifest.saw.get(self.setup.region, 0))
            drift = None if then is None else replica.model - then
        return Contribution(manifest.region, weight, whole, staleness, drift, manifest.rounds, is_whole)

    def _sum_up(self, action: SumUp) -> Summed | None:
        if not self._room_for_sums:
            # No answer: none is asked for again.
            return None
        total = np.zeros_like(self._replica().model)
        for manifest in action.manifests:
            try:
                delta, part, _ = self._decoded(manifest)
            except FileNotFoundError:
                # It has become known meanwhile that whoever this is for has it.
                return Summed(action.peer, None)
            total[part] += delta
        last, weight = action.manifests[-1], sum(manifest.weight for manifest in action.manifests)
        codec, facts = Exact(), {"sequence": last.sequence, "weight": weight}
        pieces = framing.encode(codec.encode(total), {**facts, "codec": codec.mark})
        bytes_, digest = sum(piece.nbytes for piece in pieces), framing.digest_of(pieces)
        first = action.manifests[0].begins
        made = replace(last, digest=digest, total_bytes=bytes_, weight=weight, first=first)
        try:
            self.storage.hold_sum(made, pieces)
        except GeofedError as error:
            # The updates themselves are there: what only saves bytes on a link must not end the job.
            _log.warning("updates are not summed up any more: %s", error)
            self._room_for_sums = False
            return None
        return Summed(action.peer, made)

    def _decoded(self, manifest: Manifest, room: Vector | None = None) -> tuple[Vector, slice, bool]:
        """What an update says, in ``room`` where that fits, for which coordinates, and whether it is a whole model."""
        frame = framing.decode(self.storage.update(manifest))
        facts = frame.facts
        # The first model may arrive before the first worker has said what it looks like.
        size = self.storage.layout.size if self.storage.layout else frame.tensors["delta"].size
        part = slice(None)
        if "from" in facts:
            part = slice(int(facts["from"]), int(facts["to"]))
            if not 0 <= part.start < part.stop <= size:
                raise GeofedError("FRAME_INVALID", f"update {manifest.sequence} of {manifest.region} covers {part}")
            size = part.stop - part.start
        trained = self.storage.layout.trainable_size if self.storage.layout else None
        codec = codec_of(int(facts.get("codec", -1)), None if trained is None else trained - (part.start or 0))
        return decoded(codec, frame.tensors, size, room), part, _WHOLE in facts

    def _checkpoint(self, action: Apply) -> str:
        """Make the numbers durable; returns the model's digest, "" if the log is enough for now.

        With background exchange nothing waits for it but what would change the numbers before they are written.
        """
        now, numbers = time.monotonic(), self._replica().numbers
        if not self.setup.background:
            return self.storage.keep_checkpoint(numbers, action)
        if action.complete or action.sequence == 0:
            self._settle_checkpoint()
            return self.storage.keep_checkpoint(numbers, action, self._ended, self._attempt)
        due = now - self._checkpoint_at >= self._checkpoint_took / _CHECKPOINT_SHARE
        since = action.sequence - self._checkpoint_of
        piled = since >= _LEAST_HELD and since * numbers.model.nbytes > self._held_bytes()
        # Half of the time, at most: a slow disk is not to be waited for.
        due |= piled and now - self._checkpoint_at >= self._checkpoint_took
        if due and self._drafting is None:
            draft = self.storage.draft(numbers, action, self._ended, self._attempt)
            writer = _beside_actions()
            self._drafting = _Drafting(draft, now, writer.submit(draft.write), writer.submit(_flushed, draft))
            writer.shutdown(wait=False)
            self._checkpoint_of = action.sequence
        return ""

    def _held_bytes(self) -> float:
        total = self.channel.limits.total_bytes
        return _HELD_BYTES if total is None else min(_HELD_BYTES, _HELD_SHARE * total)

    def _settle_checkpoint(self, *, written: bool = False) -> None:
        """Wait until the one that is being made is durable, or until its numbers are ``written`` and may change."""
        drafting = self._drafting
        if drafting is None:
            return
        drafting.written.result()
        if written and not drafting.flushed.done():
            return
        self._checkpoint_at = drafting.flushed.result()
        self._drafting = None
        self.storage.keep(drafting.draft)
        self._checkpoint_took = self._checkpoint_at - drafting.begun

    def _restart(self, action: Restart) -> Restarted:
        self._settle_checkpoint(written=True)
        replica = self._replica()
        self.storage.log(action)
        replica.restart()
        self._attempt = action.attempt
        sequence = self._ended.sequence if self._ended is not None else 0
        return Restarted(action.attempt, *self._channel_store.publish_start(action.attempt, replica.start, sequence))

    # What leads the workers to the model

    def _keep_correction(self, version: int) -> str:
        given = self._ended.correction_key if self._ended is not None else ""
        return self._channel_store.keep_correction(version, given, self._replica().correction)

    def _publish_correction(self, version: int) -> str:
        key = self._keep_correction(version)
        self._channel_store.publish_correction(key)
        return key

    def _publish_last_correction(self, version: int) -> str:
        """After a crash: what the last merge leads the workers to the model with."""
        key = correction_key(version)
        if self._ended is None or self._ended.correction_key != key:
            return self._publish_correction(version)
        # The round that has ended since continues from it, and counts as if it had been added: it stays as it was.
        self._channel_store.publish_correction(key)
        return key


@dataclass(frozen=True)
class _Drafting:
    """A checkpoint that is being made; times in seconds of the monotonic clock."""

    draft: Draft
    begun: float
    written: Future[str]
    flushed: Future[float]
    """When it was durable."""


def _beside() -> ThreadPoolExecutor:
    """For what changes nothing that the caller's thread reads meanwhile."""
    return ThreadPoolExecutor(1, thread_name_prefix="ps-beside", initializer=step_back)


def _beside_actions() -> Executor:
    """For a checkpoint, which outlasts the action that begins it."""
    return _beside()


def _flushed(draft: Draft) -> float:
    draft.flush(beside=True)
    return time.monotonic()


def step_back() -> None:
    """Let the calling thread give way to others that compute."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _framed(tensors: Tensors, facts: Mapping[str, float]) -> Framed:
    pieces = framing.encode(tensors, facts)
    return Framed(pieces, sum(piece.nbytes for piece in pieces), framing.digest_of(pieces))


def _finite(vector: Vector) -> bool:
    # A sum of squares that is finite has no other terms; one that is not may have overflown.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(vector, vector)) or np.isfinite(vector).all())


def _after(recovered: Recovered, entry: Apply) -> Recovered:
    """What was recovered, once a merge of the log is made again."""
    return replace(
        recovered,
        sequence=entry.sequence,
        step=entry.step,
        samples=entry.samples,
        applied=entry.applied,
        version=entry.version,
        marks=entry.watermarks,
        lasts=entry.lasts,
    )
