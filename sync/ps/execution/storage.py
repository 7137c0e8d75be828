"""The files of a parameter server, and the order in which they become durable.

::

    begun                        empty; marks the folder as the one that the partition began in
    layout.json                  layout of the flat model; written before anything else
    base-GROUP.frame             tensors that never change, as workers have made them (`sync.ps.execution.base`)
    checkpoint-V-DIGEST.frame    state of the replica and watermarks after merge V; the newest undamaged one counts
    spare/                       old checkpoints, residuals and updates, to be overwritten by new ones
    log-V.jsonl                  ends of rounds and merges since merge V, one line each; background exchange only
    state-SEQ.frame              the workers' optimiser state at the end of round SEQ
    residual-SEQ.frame           residual of a lossy codec after our update of round SEQ; synchronous exchange only,
                                 with background exchange it is part of the checkpoint
    metrics.json                 metrics of the last evaluation
    round-SEQ.frame              model of one of the last evaluated rounds; not flushed, since a lost one harms nothing
    inbox/REGION/SEQ.{frame,json}  another region's update; durable once its .json exists
    inbox/REGION/SEQ.from-FIRST.*  the sum of another region's updates of rounds FIRST to SEQ; likewise
    outbox/SEQ.{frame,json}        our own update; likewise
    mask-key.json                with secure aggregation: this region's key, and the last round that was masked with it
                                 (`sync.ps.execution.mask_file`); mask-keys.json: the other regions' public keys
    evidence/REGION-SEQ.{frame,json}  an update that cannot be merged, with the reason; or two manifests of one number
    sums/DIGEST.frame              sums of updates that we send; computed again after a restart

Every file is written under a temporary name, flushed with fsync and renamed, and then its folder is flushed. Only a
residual is not flushed: after a failure of the machine, what was held back until then is lost, and training continues.
A line of the log is flushed with fsync before the server acts on it. A round's optimiser state and updates are durable
before the round's checkpoint, and are deleted only after the next checkpoint.

With synchronous exchange every merge writes a checkpoint. With background exchange the log is enough to repeat a merge,
so checkpoints are written only from time to time, concurrently with other work. When one is begun, the log continues in
a new file; the older log files stay until the checkpoint is durable.

Large files are overwritten instead of deleted, unless something still reads them (`sync.channel_clients.BufferPool`):
most of the cost of a file of a model's size is allocating page cache and disk blocks. A large checkpoint that the
exchange waits for bypasses the page cache, and is deleted. Only what no recovery needs is
overwritten. If the machine crashes before the end of the old name is durable, that name may be of
other content: a checkpoint has its digest in its name, and an update is compared with its manifest's digest before a
merge.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import (
    disk_full_as_error,
    flush_folder,
    write_blocks_durably,
    write_durably,
    write_unflushed,
)
from sync import framing
from sync.channel_clients import BufferPool
from sync.file_transfer.manifest import Manifest
from sync.layout import Layout, Vector
from sync.mapped_files import map_file, pieces_of, windows
from sync.ps.config import OWN_MODEL
from sync.ps.core.actions import LogRoundEnd, MergeUpdates, Restart, StoreMetrics
from sync.ps.core.machine import Recovered, Setup
from sync.ps.execution import checkpoint_file
from sync.ps.execution.checkpoint_file import (
    PendingCheckpoint,
    checksum,
    ended_round_of,
    numbers_named,
    read_checkpoint,
)
from sync.ps.execution.frames import check_received
from sync.ps.execution.records import Entry, entry_of, metrics_of, stored_manifests
from sync.ps.execution.replica import WHOLE_MODEL, ReplicaState

__all__ = ["Storage"]

_log = logging.getLogger("geofed.ps")
_KEPT_CHECKPOINTS = 2
"""Checkpoints on disk: if the newest one is damaged, the merges since the one before it are repeated."""
_KEPT_ROUNDS = 4
"""Models of evaluated rounds on disk. The control plane fetches one soon after its evaluation, if it wants it."""
_HASHED_BYTES = 1 << 20
"""Bytes of an update that are hashed and then written, so that they are still in the CPU's cache. A choice."""
_MEMORY = "memory/"
"""Prefix, in a checkpoint, of tensors that the WAN policy and the guard keep between merges."""
_MARK = "mark/"
"""Prefix, in a checkpoint, of each region's watermark: the last of its updates that the model holds."""
_LAST = "last/"
"""Prefix, in a checkpoint, of the regions whose last update the model holds."""

_Key = tuple[str, int, str]

_BOOT = "boot"
"""Name, in the file of a residual, of the id of the machine's start in which it was written."""


class Storage:
    """The durable state of one partition. Must be called from one thread at a time; a `PendingCheckpoint` may be
    written by another thread."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        self._log: int | None = None
        """File descriptor of the newest log file; None: it is not open."""
        self.folder, self._setup = folder, setup
        self._sums = folder / "sums"
        # As many as a round writes: all regions' updates, a residual and a checkpoint.
        self.buffer_pool = BufferPool(folder / "spare", max_bytes=math.inf, max_files=len(setup.regions) + 2)
        shutil.rmtree(self._sums, ignore_errors=True)
        for part in (folder, folder / "inbox", folder / "outbox"):
            part.mkdir(parents=True, exist_ok=True)
        self.layout: Layout | None = None
        self._marks: dict[int, dict[str, int]] = {}
        """Watermarks of all regions, this one included, in each kept checkpoint, by the checkpoint's version."""
        self._hashed: set[_Key] = set()
        """Stored updates whose digest this process has computed or compared."""

    def __del__(self) -> None:
        if self._log is not None:
            os.close(self._log)

    def recover(self) -> tuple[Recovered, ReplicaState | None, list[Entry]]:
        """Read what was durable when the process ended: the newest undamaged checkpoint, and the log entries since it.

        Updates are kept until two checkpoints hold them, so that the state machine can repeat the merges of a damaged
        checkpoint. Raises ``GeofedError("STATE_INVALID")`` if such updates are missing, or another file is damaged.
        """
        for left in self.folder.rglob(".*"):
            if left.is_file():
                left.unlink()
        self._sweep()
        try:
            return self._recover()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GeofedError("STATE_INVALID", f"{self.folder} is damaged: {error}") from None

    def _sweep(self) -> None:
        """Delete incomplete updates that can't be continued: those of unknown regions, those that are complete by now,
        and of several under one number all but the newest."""
        for folder in (self.folder / "inbox").iterdir():
            if folder.name not in self._setup.regions:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            newest: dict[str, Path] = {}
            for part in sorted(folder.glob("*.part"), key=lambda path: path.stat().st_mtime):
                number = part.name.split(".")[0]
                complete = (folder / f"{number}.json").exists()
                for old in [*([newest[number]] if number in newest else []), *([part] if complete else [])]:
                    old.unlink(missing_ok=True)
                    old.with_suffix(".have").unlink(missing_ok=True)
                newest[number] = part

    def _recover(self) -> tuple[Recovered, ReplicaState | None, list[Entry]]:
        inbox = tuple(stored_manifests(sorted(self.folder.glob("inbox/*/*.json"))))
        outbox = tuple(stored_manifests(sorted(self.folder.glob("outbox/*.json"))))
        with contextlib.suppress(FileNotFoundError):
            self.layout = Layout.from_json((self.folder / "layout.json").read_text())
        metrics = None
        with contextlib.suppress(FileNotFoundError):
            metrics = metrics_of(json.loads((self.folder / "metrics.json").read_text()))
        base = Recovered(inbox=inbox, outbox=outbox, metrics=metrics)
        damaged: list[int] = []
        replica_state: ReplicaState | None = None
        for version, path in sorted(self._checkpoints(), reverse=True):
            if (frame := read_checkpoint(path)) is None:
                damaged.append(version)
                continue
            self._marks[version] = marks = numbers_named(frame, _MARK)
            if replica_state is None:
                base, replica_state = self._of_checkpoint(base, frame, version, marks)
        if not self._setup.background:
            self._require_updates(base, damaged)
            return base, replica_state, []
        entries = self._entries(base.version)
        self._open_log(max([base.version, *(int(path.stem.split("-")[1]) for path in self._logs())]))
        return base, replica_state, entries

    def _of_checkpoint(
        self, base: Recovered, frame: framing.Frame, version: int, marks: dict[str, int]
    ) -> tuple[Recovered, ReplicaState]:
        facts, model = frame.facts, _in_memory(frame.tensors["model"])
        remembered = {
            name.removeprefix(_MEMORY): np.asarray(array, np.float32)
            for name, array in frame.tensors.items()
            if name.startswith(_MEMORY)
        }
        sequence = int(facts["sequence"])
        replica_state = ReplicaState(
            model,
            _in_memory(frame.tensors["start"]) if "start" in frame.tensors else model,
            _in_memory(frame.tensors["residual"]) if "residual" in frame.tensors else None,
            {n: self.aside(vector) if n == WHOLE_MODEL else _in_memory(vector) for n, vector in remembered.items()},
        )
        recovered = replace(
            base,
            sequence=sequence,
            version=version,
            step=int(facts["step"]),
            samples=facts["samples"],
            applied=int(facts["applied"]),
            model_digest=framing.digest_of([model.data.cast("B")]),
            marks=tuple(sorted((name, mark) for name, mark in marks.items() if name != self._setup.region)),
            lasts=tuple(sorted(numbers_named(frame, _LAST))),
            ends=int(facts.get("ends", 0)),
            attempt=int(facts.get("attempt", 1)),
            ended=ended_round_of(facts) if self._setup.background and sequence > 0 else None,
        )
        return recovered, replica_state

    def _require_updates(self, base: Recovered, damaged: list[int]) -> None:
        """Raise ``GeofedError("STATE_INVALID")`` unless all updates are stored from which the rounds of the damaged
        checkpoints can be merged again."""
        here = {(manifest.region, manifest.sequence) for manifest in (*base.inbox, *base.outbox)}
        for sequence in range(base.sequence + 1, max(damaged, default=base.sequence) + 1):
            if any((region, sequence) not in here for region in self._setup.contributors(sequence)):
                text = f"the checkpoint of round {sequence} in {self.folder} is damaged, and its updates were deleted"
                raise GeofedError("STATE_INVALID", text)

    def _checkpoints(self) -> Iterator[tuple[int, Path]]:
        for path in self.folder.glob("checkpoint-*.frame"):
            yield int(path.name.split("-")[1]), path

    @property
    def marked(self) -> bool:
        """Whether the partition began in this folder, or restored its state into it.

        If not, the folder is new, and an empty one means that the state was lost.
        """
        return (self.folder / "begun").exists()

    def mark(self) -> None:
        """Mark the folder durably as the one that the partition began in."""
        if not self.marked:
            write_durably(self.folder / "begun", [])

    def newest_checkpoint(self) -> Path | None:
        """Return the path of the newest checkpoint, or None if there is none."""
        return max(self._checkpoints(), default=(0, None), key=lambda found: found[0])[1]

    def take_over(self, data: bytes, digest: str, layout: Layout, updates: Sequence[tuple[Manifest, bytes]]) -> None:
        """Restore a lost state from another region's checkpoint, and store updates that other regions may lack.

        Works with synchronous exchange only, where the model after a round is the same in all regions and the number of
        the round determines this region's position in its data. The checkpoint is written last, so that after a crash
        in between the state still counts as lost. ``digest`` is the digest of the model in the checkpoint.
        Raises ``GeofedError("STATE_INVALID")`` if the checkpoint is damaged.
        """
        try:
            frame = framing.decode(data)
            sequence, model = int(frame.facts["sequence"]), np.array(frame.tensors["model"], np.float32)
        except (GeofedError, KeyError, ValueError) as error:
            raise GeofedError("STATE_INVALID", f"another region's checkpoint is damaged: {error}") from None
        rest = {name: array for name, array in frame.tensors.items() if name != "model"}
        whole = framing.digest_of([model.data.cast("B")]) == digest and frame.facts.get("memory_crc") == checksum(rest)
        if not whole or model.size != layout.size:
            raise GeofedError("STATE_INVALID", "another region's checkpoint is damaged")
        self.keep_layout(layout)
        for manifest, update in updates:
            path = self.update_path(manifest.region, manifest.sequence)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, [update])
            self._keep_manifest(path.with_suffix(".json"), manifest)
        setup = self._setup
        weight = next((m.weight for m, _ in updates if (m.region, m.sequence) == (setup.region, sequence)), 0.0)
        apply = MergeUpdates(
            sequence,
            (),
            step=sequence * setup.steps_per_round,
            samples=sequence * weight,
            applied=sequence * (len(setup.regions) - 1) + (setup.region != setup.regions[0]),
            version=sequence,
            watermarks=tuple((region, sequence) for region in setup.others),
            ends=int(frame.facts.get("ends", 0)),
        )
        memory = {name.removeprefix(_MEMORY): np.array(array, np.float32) for name, array in rest.items()}
        self.keep_checkpoint(ReplicaState(model, model, None, memory), apply)
        self.mark()

    def aside(self, vector: Vector) -> Vector:
        """Return a copy of a vector, shape (n,), for reading a part at a time: a large one in a file that has no name,
        whose pages the system can write and drop, or in memory where the disk has no space for it."""
        if vector.nbytes < checkpoint_file.DIRECT_BYTES:
            return vector.copy()
        path = self.folder / ".aside"
        try:
            with path.open("w+b") as file:
                path.unlink()
                file.writelines(pieces_of(vector))
                file.flush()
                return np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.float32)
        except OSError as error:
            _log.warning("no file for a copy of the model, which is in memory instead: %s", error)
            return vector.copy()

    def keep_layout(self, layout: Layout) -> None:
        """Store the layout. Of one that is stored already, only digests of the base may be completed."""
        if self.layout != layout:
            write_durably(self.folder / "layout.json", [layout.to_json().encode()])
            self.layout = layout

    def accepts(self, sequence: int) -> bool:
        """Whether a received update of a round can be checked: before the model's layout is known, only the initial
        model can."""
        return self.layout is not None or sequence == 0

    def inspect(self, manifest: Manifest, path: Path) -> None:
        """Check a received update. Raises ``GeofedError("FRAME_INVALID")`` if it cannot be merged; the file is then
        moved to the folder ``evidence``, if that holds no other one of its region."""
        try:
            check_received(path, manifest.sequence, self.layout, self._setup.masked)
            # Its digest was compared before.
            self._hashed.add(_key_of(manifest))
        except GeofedError as error:
            folder = self.folder / "evidence"
            folder.mkdir(exist_ok=True)
            if not any(folder.glob(f"{manifest.region}-*.frame")):
                kept = folder / f"{manifest.region}-{manifest.sequence}.frame"
                os.replace(path, kept)
                facts = {"reason": error.message, "manifest": asdict(manifest)}
                write_durably(kept.with_suffix(".json"), [json.dumps(facts, indent=1).encode()])
            raise

    def keep_own_model(self, file: Sequence[framing.Buffer]) -> None:
        """Keep the region's own model, the pieces of a safetensors file, in place of the one before."""
        write_durably(self.folder / OWN_MODEL, file)

    def keep_metrics(self, metrics: StoreMetrics) -> None:
        """Make the metrics of an evaluation durable, in place of those before."""
        write_durably(self.folder / "metrics.json", [json.dumps(asdict(metrics)).encode()])

    def keep_model(self, sequence: int, model: Vector) -> None:
        """Keep the model of an evaluated round, in place of older ones. One that does not fit on the disk is left
        out, as is one that an interruption has damaged."""
        path = self.folder / f"round-{sequence}.frame"
        try:
            with path.open("wb") as file:
                file.writelines(framing.encode({"model": model}, {"crc": checksum({"model": model})}))
        except OSError as error:
            _log.warning("the model of round %d is not kept: %s", sequence, error)
            path.unlink(missing_ok=True)
        for old in sorted(self._rounds())[:-_KEPT_ROUNDS]:
            (self.folder / f"round-{old}.frame").unlink(missing_ok=True)

    def model_of(self, sequence: int) -> Vector | None:
        """Return the model of an evaluated round, shape (n,), mapped from its file, or None if it is not here (any
        more)."""
        with contextlib.suppress(FileNotFoundError, GeofedError, KeyError, ValueError):
            frame = framing.decode(map_file(self.folder / f"round-{sequence}.frame"))
            model = np.asarray(frame.tensors["model"], np.float32)
            return model if frame.facts["crc"] == checksum({"model": model}) else None
        return None

    def _rounds(self) -> set[int]:
        return {int(path.stem.split("-")[1]) for path in self.folder.glob("round-*.frame")}

    def write_update(self, sequence: int, pieces: Iterable[framing.Buffer], total_bytes: int) -> str:
        """Make the bytes of our own update durable and return their digest; `keep_update` must follow.

        Each piece is hashed while it is in the CPU's cache.
        """
        digest = hashlib.sha256()

        def hashed() -> Iterator[memoryview]:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                for at in range(0, len(view), _HASHED_BYTES):
                    part = view[at : at + _HASHED_BYTES]
                    digest.update(part)
                    yield part

        path = self.folder / "outbox" / f"{sequence}.frame"
        write_blocks_durably(path, hashed(), total_bytes, self.buffer_pool.take)
        return f"sha256:{digest.hexdigest()}"

    def keep_update(self, manifest: Manifest, first: Callable[[], None] = lambda: None) -> None:
        """Make our own update, whose bytes are written, count.

        ``first`` is called before the manifest is written: it waits until everything is durable that must be durable
        before the update counts, or raises.
        """
        self._hashed.add(_key_of(manifest))
        first()
        self._keep_manifest(self.folder / "outbox" / f"{manifest.sequence}.json", manifest)

    def keep_state(self, sequence: int, state: Sequence[framing.Buffer]) -> None:
        """Make the optimiser state at the end of a round durable."""
        write_durably(self.folder / f"state-{sequence}.frame", state)

    def newest_state(self, sequence: int) -> memoryview | None:
        """Return the framed optimiser state at the end of a round, or of the last earlier round that has one."""
        kept = [int(path.stem.split("-")[1]) for path in self.folder.glob("state-*.frame")]
        found = max((number for number in kept if number <= sequence), default=None)
        return None if found is None else map_file(self.folder / f"state-{found}.frame")

    def keep_residual(self, sequence: int, residual: Vector) -> None:
        """Store the codec's residual after our update of a round. Must be called before `keep_update`.

        It has four times the bytes of an update in int8 and is replaced in each round, so it is not flushed: it
        survives this process, but not a failure of the machine.
        """
        boot = np.frombuffer(_boot_id(), np.uint8)
        pieces = framing.encode({"residual": residual, _BOOT: boot})
        write_unflushed(self.folder / f"residual-{sequence}.frame", pieces, self.buffer_pool.take)

    def residual(self, sequence: int) -> Vector | None:
        """Return the codec's residual after our update of a round, shape (n,), or None if none was stored since the
        machine has started."""
        with contextlib.suppress(FileNotFoundError):
            tensors = framing.decode(map_file(self.folder / f"residual-{sequence}.frame")).tensors
            if np.asarray(tensors[_BOOT], np.uint8).tobytes() == _boot_id():
                return _in_memory(tensors["residual"])
        return None

    def keep_checkpoint(
        self, replica_state: ReplicaState, apply: MergeUpdates, ended: LogRoundEnd | None = None, attempt: int = 1
    ) -> str:
        """Make the state and the watermarks after a merge durable, and return the digest of the model.

        Only with background exchange, ``ended`` is the last round that the workers have ended, and ``attempt`` the
        last attempt whose workers began from this state.
        """
        checkpoint = self.begin_checkpoint(replica_state, apply, ended, attempt)
        digest = checkpoint.store()
        self.finish_checkpoint(checkpoint)
        if apply.complete:
            self.buffer_pool.clear()
        return digest

    def begin_checkpoint(
        self, replica_state: ReplicaState, apply: MergeUpdates, ended: LogRoundEnd | None = None, attempt: int = 1
    ) -> PendingCheckpoint:
        """Return a checkpoint that another thread can ``write`` and ``flush``; `finish_checkpoint` must follow.

        The log continues in a new file, for the entries after this checkpoint. Until `finish_checkpoint`, the
        checkpoint before this one and all log entries since it are kept.
        """
        rest: dict[str, framing.Array] = {f"{_MEMORY}{name}": vector for name, vector in replica_state.memory.items()}
        if self._setup.background:
            rest |= {"start": replica_state.start} | (
                {} if replica_state.residual is None else {"residual": replica_state.residual}
            )
        marks = dict(apply.watermarks) | {self._setup.region: apply.sequence}
        facts = {"sequence": apply.sequence, "step": apply.step, "samples": apply.samples, "applied": apply.applied}
        facts |= {f"{_MARK}{region}": mark for region, mark in marks.items()}
        facts |= {f"{_LAST}{region}": 1 for region in apply.lasts}
        facts |= {"ends": apply.ends} if apply.ends else {}
        facts |= {"attempt": attempt} if self._setup.background else {}
        if ended is not None:
            correction = int(ended.correction_key.rpartition("/")[2] or -1)
            facts |= {"ended_step": ended.step, "until_step": ended.until_step, "correction": correction}
            facts |= {"ended_last": int(ended.last)}
        if self._setup.background:
            self._open_log(apply.version)
        return PendingCheckpoint(self.folder, self.buffer_pool, apply.version, marks, replica_state.model, rest, facts)

    def finish_checkpoint(self, checkpoint: PendingCheckpoint) -> None:
        """Record that a checkpoint is durable, and delete what only the dropped checkpoints needed."""
        self._marks[checkpoint.version] = checkpoint.marks
        for old in sorted(self._marks)[:-_KEPT_CHECKPOINTS]:
            self._forget_checkpoint(old)

    def _forget_checkpoint(self, version: int) -> None:
        sequence = self._marks.pop(version).get(self._setup.region, version)
        for old, path in self._checkpoints():
            if old <= version:
                # Of one that was written past the page cache, nothing is worth to be used again.
                if not self._setup.background and path.stat().st_size >= checkpoint_file.DIRECT_BYTES:
                    path.unlink()
                else:
                    self._drop(path)
        for path in self._logs():
            if int(path.stem.split("-")[1]) <= version:
                path.unlink(missing_ok=True)
        # Workers don't submit their optimiser's state in every round, so the newest one stays.
        states = sorted(int(path.stem.split("-")[1]) for path in self.folder.glob("state-*.frame"))
        newest = max((number for number in states if number <= sequence + 1), default=0)
        for kind, last in (("state", min(newest - 1, sequence)), ("residual", sequence)):
            for path in self.folder.glob(f"{kind}-*.frame"):
                if int(path.stem.split("-")[1]) <= last:
                    self._drop(path)

    def _drop(self, path: Path) -> None:
        """Delete a file, or have it overwritten later."""
        with contextlib.suppress(FileNotFoundError):
            if not self.buffer_pool.keep(path):
                path.unlink()

    def durable_sequence(self) -> int:
        """Return the number of our rounds that the newest checkpoint holds, or -1: recovery repeats them only if it is
        damaged."""
        return max((marks.get(self._setup.region, -1) for marks in self._marks.values()), default=-1)

    # The log

    def log(self, entry: Entry) -> None:
        """Append an entry to the log and flush it."""
        if self._log is None:
            raise GeofedError("INTERNAL", "the log is not open")
        kind = {LogRoundEnd: "end", MergeUpdates: "merge", Restart: "restart"}[type(entry)]
        if isinstance(entry, MergeUpdates):
            # Signatures are stored with the updates.
            entry = replace(entry, manifests=tuple(replace(m, signature="", certificate="") for m in entry.manifests))
        body = json.dumps({kind: asdict(entry)}, separators=(",", ":"))
        line = f"{zlib.crc32(body.encode()):08x} {body}\n".encode()
        with disk_full_as_error(self.folder):
            os.write(self._log, line)
            os.fdatasync(self._log)

    def _logs(self) -> list[Path]:
        return sorted(self.folder.glob("log-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))

    def _open_log(self, version: int) -> None:
        if self._log is not None:
            os.close(self._log)
        path = self.folder / f"log-{max(0, version)}.jsonl"
        self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        flush_folder(self.folder)

    def _entries(self, version: int) -> list[Entry]:
        """Return the log entries after merge ``version``; a log file is cut off at its first incomplete line."""
        found: list[Entry] = []
        for path in self._logs():
            if int(path.stem.split("-")[1]) < version:
                continue
            lines = path.read_bytes().split(b"\n")
            whole = 0
            for line in lines[:-1]:
                crc, _, body = line.partition(b" ")
                if f"{zlib.crc32(body):08x}".encode() != crc:
                    break
                found.append(entry_of(json.loads(body)))
                whole += len(line) + 1
            if whole < path.stat().st_size:
                os.truncate(path, whole)
        return found

    def update_path(self, region: str, sequence: int, first: int = 0) -> Path:
        """Return the path of a received update or of our own; ``first`` is the first round of a sum, else 0."""
        folder = self.folder / "outbox" if region == self._setup.region else self.folder / "inbox" / region
        return folder / (f"{sequence}.from-{first}.frame" if first else f"{sequence}.frame")

    def path_of(self, manifest: Manifest) -> Path:
        """Return the path of a stored update, or of a sum that was computed here."""
        made = self._sum_path(manifest.digest)
        if manifest.first and made.exists():
            return made
        return self.update_path(manifest.region, manifest.sequence, manifest.first)

    def _sum_path(self, digest: str) -> Path:
        return self._sums / f"{digest.removeprefix('sha256:')}.frame"

    def keep_sum(self, manifest: Manifest, pieces: Sequence[framing.Buffer]) -> None:
        """Store a sum of updates without flushing it: after a crash it can be computed again from durable updates.

        Raises ``GeofedError("DISK_FULL")`` if the disk is full, and then leaves no file behind.
        """
        path = self._sum_path(manifest.digest)
        partial = path.with_suffix(".partial")
        try:
            with disk_full_as_error(path):
                self._sums.mkdir(exist_ok=True)
                with partial.open("wb") as file:
                    for piece in pieces:
                        file.write(piece)
        except GeofedError:
            partial.unlink(missing_ok=True)
            raise
        partial.replace(path)

    def update(self, manifest: Manifest) -> memoryview:
        """Return the bytes of a stored update, mapped from its file.

        Raises ``GeofedError("STATE_INVALID")`` if they don't have the manifest's digest: merging them would make this
        region's model differ from the others'. They are hashed once in a process: when they are made or received, or
        here.
        """
        data, key = map_file(self.path_of(manifest)), _key_of(manifest)
        if key not in self._hashed:
            if framing.digest_of(pieces_of(data)) != manifest.digest:
                text = f"update {manifest.sequence} of {manifest.region} was damaged on disk"
                raise GeofedError("STATE_INVALID", text)
            self._hashed.add(key)
        return data

    def forget(self, up_to: Mapping[str, int], sums: Iterable[str] = ()) -> None:
        """Delete the updates up to a sequence per region, unless merges after a kept checkpoint may still be repeated
        from them.

        ``sums`` are the digests of sums that are not sent any more.
        """
        for digest in sums:
            self._sum_path(digest).unlink(missing_ok=True)
        kept = self._marks.values()
        for region, wanted in up_to.items():
            last = min([wanted, *(marks.get(region, -1) for marks in kept)])
            # Of a copy, which is made at once: other threads add what they receive meanwhile.
            self._hashed -= {key for key in self._hashed.copy() if key[0] == region and key[1] <= last}
            folder = self.folder / "outbox" if region == self._setup.region else self.folder / "inbox" / region
            for path in folder.glob("*.*"):
                # Another thread is still writing files whose name begins with a dot.
                if not path.name.startswith(".") and int(path.name.split(".")[0]) <= last:
                    self._drop(path)

    @staticmethod
    def _keep_manifest(path: Path, manifest: Manifest) -> None:
        write_durably(path, [json.dumps(asdict(manifest)).encode()])


def _in_memory(array: framing.Array) -> Vector:
    """Return a copy of a vector of a mapped file, which is read a part at a time."""
    vector = np.empty(array.size, np.float32)
    for window in windows(array.size, array):
        vector[window] = array[window]
    return vector


def _boot_id() -> bytes:
    """Return what tells the machine's starts apart; empty where the system has nothing of the kind."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    return b""


def _key_of(manifest: Manifest) -> _Key:
    return manifest.region, manifest.sequence, manifest.digest
