"""What a parameter server keeps on disk, and in which order it becomes durable.

::

    layout.json                  of the flat model, written before anything else
    checkpoint-SEQ-DIGEST.frame  model and WAN policy's memory after round SEQ; the newest whole one counts
    state-SEQ.frame              the workers' optimiser state at the end of round SEQ
    residual-SEQ.frame           what a lossy codec has held back of our changes, up to our update of round SEQ
    metrics.json                 of the last evaluation
    inbox/REGION/SEQ.{frame,json}  another region's update; durable once its .json is there
    outbox/SEQ.{frame,json}        ours, the same

Every file is written beside its place, flushed with fsync, renamed, and the folder flushed. A round's state and
updates are durable before its checkpoint, and are deleted only after the next one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from sync import framing
from sync.layout import Layout, Vector
from sync.ps.events import Keep, Manifest
from sync.ps.machine import Recovered, Setup
from sync.wan import Outer

__all__ = ["PartialUpdate", "Storage", "disk_full_is_told", "write_durably"]

_KEPT_CHECKPOINTS = 2
_MEMORY = "memory/"
"""Before the names of what the WAN policy remembers, in a checkpoint."""


class Storage:
    """The durable state of one partition. Calls are made from one thread at a time."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        self._folder, self._setup = folder, setup
        for part in (folder, folder / "inbox", folder / "outbox"):
            part.mkdir(parents=True, exist_ok=True)
        self.model: Vector | None = None
        self.memory: Mapping[str, Vector] = {}
        """What the WAN policy remembers, as of the model."""
        self.layout: Layout | None = None

    def recover(self) -> Recovered:
        """Read back what was durable when the process ended.

        A checkpoint that is damaged is made again from the one before it and the round's updates, which are kept that
        long. Raises ``GeofedError("STATE_INVALID")`` where that is not possible either.
        """
        for left in (*self._folder.glob(".*.partial"), *self._folder.glob("*/**/.*.partial")):
            left.unlink()
        try:
            return self._recover()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GeofedError("STATE_INVALID", f"{self._folder} is damaged: {error}") from None

    def _recover(self) -> Recovered:
        inbox = tuple(_manifests(sorted(self._folder.glob("inbox/*/*.json"))))
        outbox = tuple(_manifests(sorted(self._folder.glob("outbox/*.json"))))
        with contextlib.suppress(FileNotFoundError):
            self.layout = Layout.from_json((self._folder / "layout.json").read_text())
        metrics = None
        with contextlib.suppress(FileNotFoundError):
            metrics = Keep(**json.loads((self._folder / "metrics.json").read_text()))
        base = Recovered(
            layout_digest=self.layout.digest if self.layout else "", inbox=inbox, outbox=outbox, metrics=metrics
        )
        damaged: list[int] = []
        for sequence, path in sorted(self._checkpoints(), reverse=True):
            if (frame := _whole(path)) is None:
                damaged.append(sequence)
                continue
            self.model = np.array(frame.tensors["model"], np.float32)
            remembered = {name: frame.tensors[name] for name in frame.tensors if name.startswith(_MEMORY)}
            self.memory = {name.removeprefix(_MEMORY): np.array(v, np.float32) for name, v in remembered.items()}
            facts = frame.facts
            base = replace(
                base,
                sequence=sequence,
                step=int(facts["step"]),
                samples=facts["samples"],
                applied=int(facts["applied"]),
                model_digest=framing.digest_of([self.model.data.cast("B")]),
            )
            break
        self._require_updates(base, damaged)
        return base

    def _require_updates(self, base: Recovered, damaged: list[int]) -> None:
        """Damaged rounds can be made again only while all of their updates are here."""
        here = {(manifest.region, manifest.sequence) for manifest in (*base.inbox, *base.outbox)}
        for sequence in range(base.sequence + 1, max(damaged, default=base.sequence) + 1):
            if any((region, sequence) not in here for region in self._setup.contributors(sequence)):
                text = f"the checkpoint of round {sequence} in {self._folder} is damaged, and its updates are gone"
                raise GeofedError("STATE_INVALID", text)

    def _checkpoints(self) -> Iterator[tuple[int, Path]]:
        for path in self._folder.glob("checkpoint-*.frame"):
            yield int(path.name.split("-")[1]), path

    def keep_layout(self, layout: Layout) -> None:
        """Store the layout once; it never changes."""
        if self.layout is None:
            write_durably(self._folder / "layout.json", [layout.to_json().encode()])
            self.layout = layout

    def keep_metrics(self, metrics: Keep) -> None:
        write_durably(self._folder / "metrics.json", [json.dumps(asdict(metrics)).encode()])

    def keep_update(self, manifest: Manifest, pieces: Sequence[framing.Buffer]) -> None:
        """Make our own update durable."""
        write_durably(self._folder / "outbox" / f"{manifest.sequence}.frame", pieces)
        self._keep_manifest(self._folder / "outbox" / f"{manifest.sequence}.json", manifest)

    def keep_state(self, sequence: int, state: framing.Buffer) -> None:
        """Make the optimiser state at the end of a round durable."""
        write_durably(self._folder / f"state-{sequence}.frame", [state])

    def state(self, sequence: int) -> bytes | None:
        """Optimiser state at the end of a round, if one was kept."""
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / f"state-{sequence}.frame").read_bytes()
        return None

    def keep_residual(self, sequence: int, residual: npt.NDArray[np.float64]) -> None:
        """Make durable what the codec has held back once our update of a round is made; before the update itself."""
        write_durably(self._folder / f"residual-{sequence}.frame", framing.encode({"residual": residual}))

    def residual(self, sequence: int) -> npt.NDArray[np.float64] | None:
        """What was held back once our update of a round was made, if anything was."""
        with contextlib.suppress(FileNotFoundError):
            frame = framing.decode((self._folder / f"residual-{sequence}.frame").read_bytes())
            return np.array(frame.tensors["residual"], np.float64)
        return None

    def keep_checkpoint(self, sequence: int, outer: Outer, facts: dict[str, float]) -> str:
        """Make a round's model, the policy's memory and the watermark durable; returns the model's digest."""
        model = np.array(outer.model)
        digest = framing.digest_of([model.data.cast("B")])
        name = f"checkpoint-{sequence}-{digest.removeprefix('sha256:')}.frame"
        remembered = {f"{_MEMORY}{name}": vector for name, vector in outer.memory.items()}
        checked = {**facts, "memory_crc": _crc(remembered)}
        write_durably(self._folder / name, framing.encode({"model": model, **remembered}, checked))
        self.model, self.memory = model, outer.memory
        for old, path in self._checkpoints():
            if old <= sequence - _KEPT_CHECKPOINTS:
                path.unlink(missing_ok=True)
                for kind in ("state", "residual"):
                    (self._folder / f"{kind}-{old}.frame").unlink(missing_ok=True)
        return digest

    def update_path(self, region: str, sequence: int) -> Path:
        """Where the bytes of a durable update are."""
        folder = self._folder / "outbox" if region == self._setup.region else self._folder / "inbox" / region
        return folder / f"{sequence}.frame"

    def update(self, manifest: Manifest) -> bytes:
        """The bytes of a durable update, verified: one that has changed here would part this region's model from the
        others'."""
        data = self.update_path(manifest.region, manifest.sequence).read_bytes()
        if framing.digest_of([data]) != manifest.digest:
            raise GeofedError("STATE_INVALID", f"update {manifest.sequence} of {manifest.region} was damaged on disk")
        return data

    def incoming(self, manifest: Manifest) -> PartialUpdate:
        """The part of another region's update that is here already."""
        return PartialUpdate(self._folder / "inbox" / manifest.region, manifest)

    def forget(self, inbox_up_to: int, outbox_up_to: int) -> None:
        """Delete updates that nobody needs any more."""
        for pattern, up_to in (("inbox/*/*.*", inbox_up_to), ("outbox/*.*", outbox_up_to)):
            for path in self._folder.glob(pattern):
                # A name that begins with a dot is a file that another thread is writing.
                if not path.name.startswith(".") and int(path.name.split(".")[0]) <= up_to:
                    path.unlink(missing_ok=True)

    @staticmethod
    def _keep_manifest(path: Path, manifest: Manifest) -> None:
        write_durably(path, [json.dumps(asdict(manifest)).encode()])


class PartialUpdate:
    """Another region's update while it arrives; survives the process, so that a cut resumes at its offset."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.manifest = manifest
        self._folder = folder
        self._path = folder / f"{manifest.sequence}.{manifest.digest.removeprefix('sha256:')[:16]}.part"

    @property
    def have_bytes(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return min(self._path.stat().st_size, self.manifest.total_bytes)
        return 0

    def append(self, offset: int, data: bytes) -> None:
        """Write a chunk; raises ``GeofedError`` where it does not continue what is here, or the disk is full."""
        if offset != self.have_bytes or offset + len(data) > self.manifest.total_bytes:
            raise GeofedError("FRAME_INVALID", f"chunk at {offset}, expected at {self.have_bytes}")
        with disk_full_is_told(self._path), self._path.open("ab") as file:
            file.write(data)

    def complete(self) -> None:
        """Verify the bytes and make them durable; damaged ones are dropped and must be sent again."""
        with self._path.open("rb") as file:
            digest = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.manifest.digest:
            self._path.unlink()
            raise GeofedError(
                "DIGEST_MISMATCH", f"update {self.manifest.sequence} of {self.manifest.region} was damaged"
            )
        with self._path.open("rb") as file, disk_full_is_told(self._path):
            os.fsync(file.fileno())
        os.replace(self._path, self._folder / f"{self.manifest.sequence}.frame")
        Storage._keep_manifest(self._folder / f"{self.manifest.sequence}.json", self.manifest)


def write_durably(path: Path, pieces: Sequence[framing.Buffer]) -> None:
    """Replace a file so that after a crash either the old or the new content is there, whole."""
    partial = path.with_name(f".{path.name}.partial")
    with disk_full_is_told(path):
        with partial.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def disk_full_is_told(path: Path) -> Iterator[None]:
    """Turn a full disk into its error of the catalogue."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise GeofedError("DISK_FULL", f"no space left for {path}") from None
        raise


def _whole(path: Path) -> framing.Frame | None:
    """The checkpoint in a file, unless it is damaged."""
    try:
        frame = framing.decode(path.read_bytes())
        digest = framing.digest_of([np.array(frame.tensors["model"], np.float32).data.cast("B")])
    except (GeofedError, KeyError, ValueError):
        return None
    whole = digest.removeprefix("sha256:") == path.stem.rpartition("-")[2]
    remembered = {name: array for name, array in frame.tensors.items() if name.startswith(_MEMORY)}
    return frame if whole and frame.facts.get("memory_crc") == _crc(remembered) else None


def _crc(tensors: Mapping[str, framing.Array]) -> int:
    crc = 0
    for name, array in sorted(tensors.items()):
        crc = zlib.crc32(np.ascontiguousarray(array).data.cast("B"), zlib.crc32(name.encode(), crc))
    return crc


def _manifests(paths: list[Path]) -> Iterator[Manifest]:
    for path in paths:
        if path.with_suffix(".frame").exists():
            yield Manifest(**json.loads(path.read_text()))
