"""Executes the actions of a parameter server's state machine, one after the other, in one thread: it merges, encodes,
stores and publishes."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from geofed_pb.errors import GeofedError
from sync import chunked_values, framing
from sync.channel import Channel
from sync.codec import Codec, Decoding, Exact, Float32, decoded
from sync.file_transfer.manifest import Manifest
from sync.layout import LOCAL, Layout, Vector
from sync.means import weighted_mean
from sync.policy import Contribution, Policy
from sync.ps.core.actions import (
    Action,
    CheckInitialModel,
    Forget,
    LogRoundEnd,
    MergeGradients,
    MergeUpdates,
    Restart,
    StoreMetrics,
    StoreOwnUpdate,
    SumUp,
)
from sync.ps.core.events import (
    Event,
    GradientsMerged,
    MetricsStored,
    OwnUpdateStored,
    Restarted,
    RoundEndLogged,
    Summed,
    UpdatesMerged,
)
from sync.ps.core.machine import Recovered, Setup
from sync.ps.execution.base import BaseFiles
from sync.ps.execution.channel_store import ChannelStore
from sync.ps.execution.checkpoint_file import correction_key
from sync.ps.execution.checkpoints import Checkpoints
from sync.ps.execution.export import from_safetensors, to_safetensors
from sync.ps.execution.frames import UpdateShape, sent_layout, shape_of
from sync.ps.execution.own_updates import FramedUpdate, OwnUpdates, is_finite
from sync.ps.execution.records import Entry
from sync.ps.execution.releases import CountReleases, Releases
from sync.ps.execution.replica import Replica, ReplicaState, expanded
from sync.ps.execution.storage import Storage
from sync.ps.execution.threads import background_thread
from sync.secure import SharedScale
from sync.wan import ExchangeSettings

__all__ = ["ActionExecutor", "merged_key"]

_log = logging.getLogger("geofed.ps")
_HISTORY_ROUNDS = 8
"""Rounds whose models are kept in memory for delay compensation."""
_NOTHING: Vector = np.empty(0, np.float32)


def merged_key(attempt: int, step: int) -> str:
    """Channel key of a step's merged gradient."""
    return f"g/{attempt}/{step}/merged"


class ActionExecutor:
    """Executes actions on the storage, the channel and the replica of one partition. `do` must be called from one
    thread at a time."""

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
        initial_own_model: Path | None = None,
        initial_holds: str = "",
        releases: Releases | None = None,
        counts: CountReleases | None = None,
        *,
        weighs_by_shares: bool = False,
        local_steps: Mapping[str, float] | None = None,
        data_shares: Mapping[str, float] | None = None,
        initial_adapter: Path | None = None,
    ) -> None:
        """
        ``shares``: each region's weight in a merge, with background exchange or ``weighs_by_shares``; None: all the
        same. Otherwise the samples of its round are its weight.
        ``local_steps``, ``data_shares``: see `PsConfig`.
        ``part_elements``: see `ChannelStore`.
        ``initial_model``: safetensors file of the model to begin with; None: the one that the workers initialise.
        ``initial_own_model``: the same for the tensors that stay in the region.
        ``initial_holds``, ``initial_adapter``: see `PsConfig`.
        ``releases``: what makes our updates private; None: nothing does. ``counts``: the same for histograms.
        """
        self.setup, self.storage, self.channel = setup, storage, channel
        self._channel_store = ChannelStore(channel, storage, background=setup.background, part_elements=part_elements)
        self._initial_model, self._initial_holds, self._initial_adapter = initial_model, initial_holds, initial_adapter
        self._releases, self._counts = releases, counts
        self.base = BaseFiles(
            storage.folder, channel, initial_model, initial_own_model, initial_holds, initial_adapter
        )  # fmt: skip
        self._policy, self._exchange = policy, exchange or ExchangeSettings()
        # A lossy codec saves nothing where only one region takes part, because no update is sent.
        self._codec = codec if len(setup.regions) > 1 else Float32()
        equal = 1.0 / len(setup.regions)
        self._shares = shares or dict.fromkeys(setup.regions, equal)
        self._weighs_by_shares = weighs_by_shares
        self._local_steps, self._data_shares = local_steps or {}, data_shares or {}
        self.replica: Replica | None = None
        self._decode_buffers: dict[int, Vector] = {}
        """Buffers that updates are decoded into, by their position in a merge; at most one per region."""
        self._ended: LogRoundEnd | None = None
        """The last round that the workers have ended; background exchange only."""
        self._history: OrderedDict[int, Vector] = OrderedDict()
        """The model after each of the last rounds, for delay compensation."""
        self._checkpoints = Checkpoints(storage, channel)
        self._sums_fit = True
        """Whether the disk had space for every sum of updates so far."""
        self._attempt = 1
        """The last attempt whose workers began from `Replica.start`."""
        self._scale = SharedScale(setup.region, self._shares, setup.masked) if setup.masked else None
        self.own_updates = OwnUpdates(setup, storage, self._checkpoints, self._codec, self._scale, releases)
        self.coding_bytes_per_second = 0.0
        """float32 bytes per second that became our last update, including making it durable; 0: not known yet."""

    def copy_of_model(self, sequence: int = 0) -> Vector | None:
        """Return a copy of the model after the last merge, shape (n,), or None before the first one; it is read from a
        file if it is large.

        ``sequence``: instead, an evaluated round; None if its model is not kept (any more). Must be called in the
        thread of `do`.
        """
        if sequence:
            return self.storage.model_of(sequence)
        return self.storage.aside(self.replica.model) if self.replica is not None else None

    @property
    def codec_name(self) -> str:
        """Name of the codec of our last update, or of the configured one before that."""
        return self.replica.codec.name if self.replica is not None else self._codec.name

    @property
    def suspicion(self) -> dict[str, int]:
        """Suspect rounds of each region, as of the last merge (`Replica.suspicion`)."""
        return self.replica.suspicion if self.replica is not None else {}

    def do(self, action: Action, attempt: int) -> Event | None:
        """Execute one action and return the event that reports its result, if any.

        ``attempt`` is the workers' current attempt.
        """
        match action:
            case MergeGradients():
                return self._merge(action)
            case LogRoundEnd():
                # Before the log: if the channel is full, the round has not ended yet.
                self._channel_store.give_correction(action.correction_key, self._replica())
                self.storage.log(action)
                self._ended = action
                self._channel_store.need_end(action.sequence, action.model_key)
                return RoundEndLogged(action)
            case StoreOwnUpdate():
                return self._prepare(action)
            case MergeUpdates():
                return self._apply(action, attempt)
            case Restart():
                return self._restart(action)
            case StoreMetrics():
                if self.setup.evaluate_every and self.replica is not None:
                    self.storage.keep_model(action.sequence, self.replica.model)
                self._keep_own_model(action.sequence)
                if self._counts is not None:
                    action = self._counts.released(action)
                self.storage.keep_metrics(action)
                if self._counts is not None:
                    self._counts.stored(action)
                return MetricsStored(action)
            case SumUp():
                return self._sum_up(action)
            case Forget():
                self.storage.forget(dict(action.up_to), action.sums)
        return None

    def _keep_own_model(self, sequence: int) -> None:
        """Keep the model that this region has evaluated, with the tensors that stay here, if there are such."""
        layout, state = self.storage.layout, self.storage.newest_state(sequence)
        if layout is None or not layout.local or self.replica is None or state is None:
            return
        tensors = framing.decode(state).tensors
        local = {slot.name: tensors[f"{LOCAL}{slot.name}"] for slot in layout.local if f"{LOCAL}{slot.name}" in tensors}
        facts = {"region": self.setup.region, "round": str(sequence)}
        self.storage.keep_own_model(
            to_safetensors(layout, self.replica.model, facts, self.base.contents(layout), local)
        )

    # After a crash

    def recover(self) -> Recovered:
        """Restore the last checkpoint, replay the log, and publish in the channel the model that workers continue from.

        Raises ``GeofedError("STATE_INVALID")`` if the stored state is damaged.
        """
        recovered, numbers, entries = self.storage.recover()
        if numbers is None:
            return recovered
        prepared = max([recovered.sequence, *(manifest.sequence for manifest in recovered.outbox)])
        if self._releases is not None:
            # The process may have ended after that update was durable, and before the ledger knew.
            self._releases.stored(prepared)
        if self._counts is not None and recovered.metrics is not None:
            self._counts.stored(recovered.metrics)
        if not self.setup.background:
            numbers = replace(numbers, residual=self.storage.residual(prepared))
        self.replica = self._made(numbers)
        self._ended, self._attempt = recovered.ended, recovered.attempt
        if self.setup.background:
            recovered = self._replay(recovered, entries)
        begins = self.replica.model if self._over(recovered) else self.replica.start
        model_key, state_key = self._channel_store.publish(recovered.sequence, begins)
        model_bytes = self.replica.model.nbytes
        return replace(recovered, model_key=model_key, state_key=state_key, model_bytes=model_bytes)

    def _over(self, recovered: Recovered) -> bool:
        """Whether the model is final: all regions' last updates are merged."""
        ended = recovered.ended
        own = ended is not None and self.setup.is_last(ended) and ended.sequence == recovered.sequence
        return own and set(recovered.lasts) >= set(self.setup.others)

    def _replay(self, recovered: Recovered, entries: list[Entry]) -> Recovered:
        outbox = {manifest.sequence: manifest for manifest in recovered.outbox}
        # merged: there was a merge since the workers last began from the model, so that a correction leads there.
        # gap: what the workers began the open round from is not known, as a model that they ended with is missing.
        lost, gap, merged = 0, False, recovered.sequence > 0
        if recovered.ended is not None:
            self._channel_store.given = recovered.ended.correction_key
        for entry in entries:
            if isinstance(entry, MergeUpdates):
                self._merge_updates(entry)
                recovered, merged = _after(recovered, entry), entry.sequence > 0
                continue
            if isinstance(entry, Restart):
                self._replica().restart()
                self._attempt, gap, merged = entry.attempt, False, False
                continue
            manifest = outbox.get(entry.sequence)
            end = None if gap else chunked_values.read_vector(self.channel, entry.model_key, "model")
            if manifest is None and end is None:
                _log.warning("round %d was not sent, and its model is no longer in the channel", entry.sequence)
                lost, gap = lost + 1, True
                break
            if not gap:
                # The one of the last end is the one that the workers have been given, and may still have to read.
                self._channel_store.give_correction(entry.correction_key, self._replica())
            self._ended = entry
            self._channel_store.need_end(entry.sequence, entry.model_key)
            recovered = replace(recovered, ended=entry)
            if manifest is not None:
                self._account(entry, manifest, end)
                lost, gap = lost + (end is None), end is None
        if lost:
            _log.warning("the residual of %d rounds is lost", lost)
        if gap:
            self._replica().restart()
            recovered, merged = replace(recovered, start_lost=True), False
        # Workers that have started again since the last merge began with the model and need no correction.
        key = correction_key(recovered.version) if merged else ""
        digest = framing.digest_of([self._replica().model.data.cast("B")])
        return replace(recovered, model_digest=digest, attempt=self._attempt, correction_key=key)

    def _account(self, entry: LogRoundEnd, manifest: Manifest, end: Vector | None) -> None:
        """Account for an ended round whose update was durable before the crash.

        ``end`` is the model that the workers ended it with; None: it is lost.
        """
        sent, part = self._sent(manifest)
        replica = self._replica()
        replica.account_sent(end, sent, part)
        if end is None:
            replica.restart()
        else:
            replica.continue_from(end, self._channel_store.correction(entry.correction_key))

    # Steps

    def _merge(self, action: MergeGradients) -> GradientsMerged:
        vectors = [self._vector(key, "gradient") for key, _ in action.parts]
        weights = [samples for _, samples in action.parts]
        merged = weighted_mean(vectors, weights)
        key = merged_key(action.attempt, action.step)
        self.channel.put(key, framing.encode({"gradient": merged}, {"samples": sum(weights)}))
        if action.step > 1:
            # All workers have pushed this step, so none of them still reads the previous step's gradients.
            self.channel.delete_tree(f"g/{action.attempt}/{action.step - 1}")
        return GradientsMerged(action.attempt, action.step, key, sum(weights))

    def _vector(self, key: str, name: str) -> Vector:
        vector = chunked_values.read_vector(self.channel, key, name)
        if vector is None:
            raise GeofedError("INTERNAL", f"{key} is no longer in the channel")
        return vector

    def _check_layout(self, first: Manifest) -> None:
        """Raise ``GeofedError("TASK_INVALID")`` if our workers' model has another layout than the initial model."""
        theirs = sent_layout(framing.decode(self.storage.update(first)))
        if theirs is None:
            return
        if self.storage.layout is None:
            self.storage.keep_layout(theirs)
        elif differs := self.storage.layout.difference(theirs):
            raise GeofedError("TASK_INVALID", self.setup.model_mismatch_text(differs))

    def agree(self, layout: Layout, base_key: str, *, begins: bool) -> tuple[str, str]:
        """Compare a worker's layout with the job's, and take the base that the worker has made.

        ``begins``: if the job has none yet, it is the worker's. Returns how they differ ("": not at all), and the
        channel key of the base that the worker must load ("": it keeps its own). Must be called in the thread of `do`.
        """
        layout = self.base.completed(layout)
        known = self.storage.layout
        if known is None and begins:
            self.storage.keep_layout(layout)
        elif known is not None and not (differs := layout.difference(known)):
            self.storage.keep_layout(known.with_digests(layout.base_digests))
        if known is not None and differs:
            return differs, ""
        if base_key:
            self.base.take(base_key)
        return "", self.base.publish(layout)

    def _made(self, state: ReplicaState) -> Replica:
        return Replica(self._policy, self._exchange, self._codec, state, owned=True, aside=self.storage.aside)

    def _replica(self) -> Replica:
        if self.replica is None:
            raise GeofedError("INTERNAL", "there is no model yet")
        self.replica.alone = len(self.setup.regions) == 1
        if self.storage.layout is not None:
            # The initial model may arrive from another region before the first worker has reported the layout.
            self.replica.trained = self.storage.layout.trainable_size
        return self.replica

    # Rounds

    def _first_model(self, model_key: str) -> Vector | None:
        """Return the model that the job begins with: that of a file, and what it lacks as the workers initialised it
        (``model_key``); None: theirs is missing."""
        path, own = self._initial_model, None
        if path is None or self._initial_holds == "some":
            own = chunked_values.read_vector(self.channel, model_key, "model")
            if path is None or own is None:
                return own
        layout = self.storage.layout
        if layout is None:
            raise GeofedError("INTERNAL", "no worker has reported the model's layout")
        return from_safetensors(layout, path, self._initial_holds, own, self._initial_adapter)

    def reproduced(self, action: CheckInitialModel) -> FramedUpdate | None:
        """Return the update that sends the initial model, built from the file of it or, without one, from the model
        that our own workers initialised.

        Tasks have the same seed in all regions, so it mostly equals the first region's update, which then needn't be
        sent. None: there is a model already, or the workers' is missing or not finite. Must be called in the thread of
        `do`.
        """
        if self.replica is not None:
            return None
        begin = self._first_model(action.model_key)
        return self.own_updates.initial(begin) if begin is not None and is_finite(begin) else None

    def _prepare(self, action: StoreOwnUpdate) -> OwnUpdateStored:
        """Store the optimiser's state concurrently with making the update, because workers wait for both."""
        with background_thread() as background:
            storing = background.submit(self._keep_state, action)
            begun = time.monotonic()
            end = self._end(action)
            replica = self._replica() if self.replica is not None else None
            manifest = self.own_updates.make(end, replica, action, storing)
            if self.setup.background and replica is not None:
                replica.continue_from(end, self._channel_store.correction(action.correction_key))
                self._channel_store.clear_ends()
            self.coding_bytes_per_second = end.nbytes / max(time.monotonic() - begun, 1e-6)
        return OwnUpdateStored(manifest)

    def _end(self, action: StoreOwnUpdate) -> Vector:
        """Return the model that a round ended with."""
        end = self._first_model(action.model_key) if action.sequence == 0 else None
        return self._vector(action.model_key, "model") if end is None else end

    def _keep_state(self, action: StoreOwnUpdate) -> None:
        if action.state_key:
            self._channel_store.take_state(action.sequence, action.state_key)

    def _apply(self, action: MergeUpdates, attempt: int) -> UpdatesMerged:
        if self.replica is None:
            made, self.own_updates.last = self.own_updates.last, None
            first = action.manifests[0]
            if made is not None and made[0] == first.digest:
                delta = made[1]
            else:
                self._check_layout(first)
                frame, shape = self._shaped(first)
                delta = decoded(shape.codec, frame.tensors, shape.size)
            if not is_finite(delta):
                raise GeofedError("FRAME_INVALID", "the model that the job begins with is not finite")
            begin = np.array(delta)
            self.replica = self._made(ReplicaState(begin, begin))
            self._attempt = attempt
            refused: tuple[tuple[str, str], ...] = ()
        else:
            if self.setup.background:
                self.storage.log(action)
            refused = self._merge_updates(action)
        if not self.setup.background:
            self.replica.restart()
        model_key, state_key, correction = "", "", ""
        with background_thread() as background:
            # The model may be published before it is durable: no worker learns its key before this action is done.
            publish = self._channel_store.publish if action.whole else lambda *_: ("", "")
            publishing = background.submit(publish, action.sequence, self.replica.model, attempt)
            digest = self._checkpoint(action)
            model_key, state_key = publishing.result()
        if self.setup.background and action.sequence:
            # It is made when the workers are given it, at their next end of a round: until then nothing changes it.
            correction = correction_key(action.version)
        self._channel_store.clear(action.sequence, attempt)
        return UpdatesMerged(action, digest, model_key, state_key, correction, refused, self.replica.model.nbytes)

    def _merge_updates(self, action: MergeUpdates) -> tuple[tuple[str, str], ...]:
        self._checkpoints.settle(written=True)
        replica = self._replica()
        if self._scale is not None:
            frames = [framing.decode(self.storage.update(manifest)) for manifest in action.manifests]
            replica.merge_masked([frame.tensors for frame in frames], self._scale)
            return ()
        stale = action.staleness or (0,) * len(action.manifests)
        pairs = zip(action.manifests, stale, strict=True)
        contributions = [self._contribution(m, s, number) for number, (m, s) in enumerate(pairs)]
        total = 1.0 if self.setup.background else None
        rounds = sum(1 for manifest in action.manifests if manifest.region == self.setup.region)
        refused = replica.merge(
            contributions, total, own=self.setup.region, rounds=rounds, lacking=self._lacking(action)
        )
        for region, why in refused:
            _log.warning("an update of %s was refused: %s", region, why)
        if self._exchange.compensation:
            self._history[action.sequence] = replica.model.copy()
            while len(self._history) > _HISTORY_ROUNDS:
                self._history.popitem(last=False)
        return refused

    def _lacking(self, action: MergeUpdates) -> float:
        """Return the weight of updates that are missing from the rounds merged so far, in units of one round's
        weight."""
        if not self.setup.background:
            return 0.0
        marks = dict(action.watermarks)
        unfinished = [region for region in self.setup.others if region not in action.lasts]
        return sum(self._shares[region] * max(0, action.sequence - marks[region]) for region in unfinished)

    def _contribution(self, manifest: Manifest, staleness: int, number: int) -> Contribution:
        """Decode an update for a merge. ``number`` is its position in the merge, and selects its buffer."""
        if (last := self.own_updates.last) is not None and last[0] == manifest.digest:
            _, delta, part, is_whole = last
        else:
            frame, shape = self._shaped(manifest)
            in_ranges = shape.codec.in_ranges and not self._exchange.robust
            if in_ranges and shape.part == slice(None) and not shape.whole:
                later = Decoding(shape.codec, frame.tensors, shape.size)
                return self._weighted(manifest, staleness, _NOTHING, later=later)
            delta = decoded(shape.codec, frame.tensors, shape.size, self._decode_buffers.get(number))
            part, is_whole = shape.part, shape.whole
            if number < len(self.setup.regions) and delta.flags.owndata:
                self._decode_buffers[number] = delta
        return self._weighted(manifest, staleness, expanded(delta, part, self._replica().model.size), is_whole)

    def _weighted(
        self,
        manifest: Manifest,
        staleness: int,
        delta: Vector,
        is_whole: bool = False,
        later: Decoding | None = None,
    ) -> Contribution:
        background, replica = self.setup.background, self._replica()
        by_shares = background or self._weighs_by_shares
        weight = self._shares[manifest.region] if by_shares else manifest.weight
        drift = None
        if self._exchange.compensation and manifest.region != self.setup.region:
            then = self._history.get(manifest.saw.get(self.setup.region, 0))
            drift = None if then is None else replica.model - then
        return Contribution(
            manifest.region, weight, delta, staleness, drift, manifest.rounds, is_whole, later,
            self._local_steps.get(manifest.region, 0.0), self._data_shares.get(manifest.region, 0.0),
        )  # fmt: skip

    def _sum_up(self, action: SumUp) -> Summed | None:
        if not self._sums_fit:
            # Without an answer the state machine requests no further sums.
            return None
        try:
            updates = [self._sent(manifest) for manifest in action.manifests]
        except FileNotFoundError:
            # One was deleted meanwhile, because the peer that the sum is for has acknowledged it.
            return Summed(action.peer, None)
        last, weight = action.manifests[-1], sum(manifest.weight for manifest in action.manifests)
        codec, facts = Exact(), {"sequence": last.sequence, "weight": weight}
        pieces = framing.encode(codec.encode_sum(updates, self._replica().model.size), {**facts, "codec": codec.mark})
        bytes_, digest = sum(piece.nbytes for piece in pieces), framing.digest_of(pieces)
        first = action.manifests[0].begins
        made = replace(last, digest=digest, total_bytes=bytes_, weight=weight, first=first)
        try:
            self.storage.keep_sum(made, pieces)
        except GeofedError as error:
            # A sum only saves bytes on a link, and the updates themselves are stored, so the job continues.
            _log.warning("cannot store a sum of updates; they are sent one by one from now on: %s", error)
            self._sums_fit = False
            return None
        return Summed(action.peer, made)

    def _sent(self, manifest: Manifest) -> tuple[Vector | Decoding, slice]:
        """Return the values of an update, and the coordinates that it covers."""
        frame, shape = self._shaped(manifest)
        if shape.codec.in_ranges:
            return Decoding(shape.codec, frame.tensors, shape.size), shape.part
        return decoded(shape.codec, frame.tensors, shape.size), shape.part

    def _shaped(self, manifest: Manifest) -> tuple[framing.Frame, UpdateShape]:
        frame = framing.decode(self.storage.update(manifest))
        return frame, shape_of(frame, self.storage.layout)

    def _checkpoint(self, action: MergeUpdates) -> str:
        """Write a checkpoint and return the model's digest, or "" if another thread writes it or none is due."""
        state = self._replica().state
        if not self.setup.background:
            return self.storage.keep_checkpoint(state, action)
        if action.complete or action.sequence == 0:
            self._checkpoints.settle()
            return self.storage.keep_checkpoint(state, action, self._ended, self._attempt)
        self._checkpoints.begin_if_due(state, action, self._ended, self._attempt)
        return ""

    def _restart(self, action: Restart) -> Restarted:
        self._checkpoints.settle(written=True)
        replica = self._replica()
        self.storage.log(action)
        replica.restart()
        self._attempt = action.attempt
        sequence = self._ended.sequence if self._ended is not None else 0
        return Restarted(action.attempt, *self._channel_store.publish_start(action.attempt, replica.start, sequence))


def _after(recovered: Recovered, entry: MergeUpdates) -> Recovered:
    """Return the recovered state after a merge of the log has been repeated."""
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
