"""Makes the updates of the own region: finite, private where that is asked, encoded, and durable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from geofed_pb.errors import GeofedError
from sync import framing
from sync.codec import Codec, Float32, Tensors
from sync.file_transfer.manifest import Manifest
from sync.layout import Vector
from sync.mapped_files import windows
from sync.ps.core.actions import StoreOwnUpdate
from sync.ps.core.machine import FIRST_WEIGHT, Setup
from sync.ps.execution.checkpoints import Checkpoints
from sync.ps.execution.frames import LAYOUT, WHOLE
from sync.ps.execution.mask_file import MaskFile
from sync.ps.execution.releases import Releases
from sync.ps.execution.replica import OwnUpdate, Replica
from sync.ps.execution.storage import Storage
from sync.secure import PairMasks, SharedScale, first_codec

__all__ = ["FramedUpdate", "LastUpdate", "OwnUpdates", "is_finite"]

_NOTHING: Vector = np.empty(0, np.float32)
_Made = tuple[int, Iterable[memoryview], tuple[Vector, slice, bool] | None]
"""Bytes of an update, its pieces, and what `OwnUpdates.last` keeps of it: None if it is read from the file."""
LastUpdate = tuple[str, Vector, slice, bool]
"""Digest of an update, its decoded values, the coordinates that it covers, and whether it is a whole model."""


@dataclass(frozen=True)
class FramedUpdate:
    """An encoded update."""

    pieces: Sequence[memoryview]
    """The bytes, as consecutive buffers."""
    total_bytes: int
    digest: str


class OwnUpdates:
    """Makes and stores the own region's updates. `make` must be called from one thread at a time."""

    def __init__(
        self,
        setup: Setup,
        storage: Storage,
        checkpoints: Checkpoints,
        codec: Codec,
        scale: SharedScale | None,
        releases: Releases | None,
    ) -> None:
        """
        ``codec``: of the first update. ``scale``: with secure aggregation. ``releases``: see `ActionExecutor`.
        """
        self._setup, self._storage, self._checkpoints = setup, storage, checkpoints
        self._scale, self._releases = scale, releases
        self.codec_wanted = codec
        """Codec of the next update; may be set at any time by another thread."""
        self.mask_file: MaskFile | None = None
        """With secure aggregation: which rounds' masks were used."""
        self.masks: PairMasks | None = None
        """With secure aggregation: the masks of our updates, once the keys of all other regions are known. May be set
        by another thread before our first update is requested."""
        self.last: LastUpdate | None = None
        """The last update, so that it needn't be decoded. The values' memory is used again for the next one."""

    def make(self, end: Vector, replica: Replica | None, action: StoreOwnUpdate, storing: Future[None]) -> Manifest:
        """Make an update of the model that a round ended with, and return its manifest once it is durable.

        ``end``: shape (n,). ``replica``: None before the first merge; the update is then the initial model.
        ``storing``: stores the optimiser's state, and must end before the manifest is durable.
        """
        made = None
        if replica is not None and self._scale is None and self._releases is None:
            made = self._plain_update(end, replica, action)
        if made is None:
            end = self._releasable(end, replica, action)
            made = self._coded_update(end, replica, action)
        total_bytes, pieces, sent = made
        digest = self._storage.write_update(action.sequence, pieces, total_bytes)
        manifest = Manifest(
            self._setup.region,
            action.epoch,
            action.sequence,
            digest,
            total_bytes,
            action.weight,
            action.seen,
            action.last,
            action.stretch,
            ends=action.ends,
            takes_sums=self._setup.sums,
            round_seconds=action.round_seconds,
        )
        self._storage.keep_update(manifest, storing.result)
        if self._releases is not None:
            self._releases.stored(action.sequence)
        if self.mask_file is not None:
            self.mask_file.use(action.sequence)
        if sent is not None and (sent[0].size or not end.size):
            self.last = digest, *sent
        return manifest

    def initial(self, begin: Vector) -> FramedUpdate:
        """Return the update that sends the initial model."""
        codec = Float32()
        facts = {"sequence": 0, "weight": FIRST_WEIGHT, "codec": codec.mark}
        pieces = framing.encode({**codec.encode(begin), **self._layout_tensors()}, facts)
        return FramedUpdate(pieces, sum(piece.nbytes for piece in pieces), framing.digest_of(pieces))

    def _layout_tensors(self) -> Tensors:
        """Return the layout as a tensor that is sent with the initial model, so that each region can compare its
        own."""
        layout = self._storage.layout
        return {} if layout is None else {LAYOUT: np.frombuffer(layout.to_json().encode(), np.uint8)}

    def _plain_update(self, end: Vector, replica: Replica, action: StoreOwnUpdate) -> _Made | None:
        """Return an update that holds the change as it is, made block by block while it is written; None: it is to be
        encoded."""
        replica.codec = self.codec_wanted
        changes = replica.plain_update(end, action.sequence, last=action.last)
        if changes is None:
            return None
        self._checkpoints.settle(written=True)
        self.last = None

        def checked() -> Iterator[Vector]:
            for block, change in changes:
                if not _all_finite(block):
                    self._check_finite(end, action.sequence)
                yield change

        facts = {"sequence": action.sequence, "weight": action.weight, "codec": replica.codec.mark}
        return *framing.encode_blocks("delta", end.size, checked(), facts), None

    def _coded_update(self, end: Vector, replica: Replica | None, action: StoreOwnUpdate) -> _Made:
        """Return an update that is encoded as a whole."""
        facts = {"sequence": action.sequence, "weight": action.weight}
        codec: Codec
        tensors: Tensors
        if replica is not None and self._scale is not None:
            tensors, codec, sent = self._masked_update(end, replica, action.sequence, self._scale)
        elif replica is None:
            # The initial model is sent whole.
            codec = Float32()
            tensors, sent = {**codec.encode(end), **self._layout_tensors()}, (end, slice(None), True)
        else:
            made = self._encoded_update(end, replica, action.sequence, last=action.last)
            tensors, codec = made.tensors, made.codec
            sent = made.sent, made.part, made.whole
            if made.part != slice(None):
                facts |= {"from": made.part.start, "to": made.part.stop}
            if made.whole:
                facts[WHOLE] = 1
        pieces = framing.encode(tensors, {**facts, "codec": codec.mark})
        return sum(piece.nbytes for piece in pieces), pieces, sent

    def _releasable(self, end: Vector, replica: Replica | None, action: StoreOwnUpdate) -> Vector:
        """Return the model that a round ended with, as others may see it: finite, and private where that is asked."""
        self._check_finite(end, action.sequence)
        if self._releases is not None:
            self._releases.check(self._storage.layout)
            if replica is not None and action.sequence > 0:
                end = self._releases.released(end, replica.start, action.sequence)
        return end

    def _encoded_update(self, end: Vector, replica: Replica, sequence: int, *, last: bool) -> OwnUpdate:
        """Encode what the round has changed, and keep what a lossy codec has left out."""
        self._checkpoints.settle(written=True)
        replica.codec = self.codec_wanted
        buffer, self.last = self.last[1] if self.last is not None else None, None
        made = replica.own_update(end, sequence, last=last, buffer=buffer, decoded=False)
        residual = replica.state.residual
        if residual is not None and not self._setup.background:
            self._storage.keep_residual(sequence, residual)
        return made

    def _masked_update(
        self, end: Vector, replica: Replica, sequence: int, scale: SharedScale
    ) -> tuple[Tensors, Codec, tuple[Vector, slice, bool]]:
        """Return our masked update, its codec, and that its values are not kept."""
        if self.masks is None or self.mask_file is None:
            raise GeofedError("INTERNAL", "the mask keys of other regions are not known")
        self.mask_file.check(sequence)
        self.last = None
        tensors = replica.masked_update(end, sequence, scale, self.masks)
        if (residual := replica.state.residual) is not None:
            self._storage.keep_residual(sequence, residual)
        return tensors, first_codec(self._setup.masked, sequence), (_NOTHING, slice(None), False)

    def _check_finite(self, model: Vector, sequence: int) -> None:
        """Raise ``GeofedError`` with the first tensor that is not finite: TASK_INVALID before training, TASK_FAILED
        after a round."""
        if is_finite(model):
            return
        layout = self._storage.layout
        name = "the model" if layout is None else layout.slot_at(int(np.argmin(np.isfinite(model)))).name
        if sequence == 0:
            text = f"{name} holds values that are not finite before the first step"
            raise GeofedError("TASK_INVALID", text, hint="initialise all parameters with finite values")
        text = f"{name} is not finite after round {sequence}"
        raise GeofedError("TASK_FAILED", text, hint="training diverged: lower the learning rate")


def is_finite(vector: Vector) -> bool:
    """Whether all values of a vector are finite; one that is mapped from a file is read in parts."""
    return all(_all_finite(vector[part]) for part in windows(vector.size, vector))


def _all_finite(vector: Vector) -> bool:
    # If the sum of squares is finite, all elements are; if not, it may only have overflowed.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(vector, vector)) or np.isfinite(vector).all())
