"""What a parameter server keeps on disk, and in which order it becomes durable.

::

    begun                        empty; without it the folder is not the one that the partition began in
    layout.json                  of the flat model, written before anything else
    checkpoint-V-DIGEST.frame    the replica's numbers and the watermarks after merge V; the newest whole one counts
    .spare.partial               a checkpoint that is not needed any more, to be written again; background exchange only
    log-V.jsonl                  ends of rounds and merges since merge V, one line each; background exchange only
    state-SEQ.frame              the workers' optimiser state at the end of round SEQ
    residual-SEQ.frame           what a lossy codec has held back of our changes, up to our update of round SEQ;
                                 synchronous exchange only, otherwise it is in the checkpoint
    metrics.json                 of the last evaluation
    inbox/REGION/SEQ.{frame,json}  another region's update; durable once its .json is there
    inbox/REGION/SEQ.from-FIRST.*  one that sums up rounds FIRST to SEQ, the same
    outbox/SEQ.{frame,json}        ours, the same
    sums/DIGEST.frame              updates that are sent summed up; made again after a restart

Every file is written beside its place, flushed with fsync, renamed, and the folder flushed; a line of the log is
flushed with fsync before what it tells is acted upon. A round's state and updates are durable before its checkpoint,
and are deleted only after the next one. With synchronous exchange every merge makes a checkpoint; in the background
the log is enough to make a merge again, so that checkpoints are made now and then, beside what else is done: the log
continues in a new file when one is begun, and the older ones stay until it is durable. There the checkpoint that is not
needed any more is written again as the next one, in place: what a file of a model's size costs is the memory and the
place on the disk that are found for it. By then its old name is gone for good: the folder is flushed when a file of
the log is begun.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from sync import framing
from sync.durable import begin_write, disk_full_is_told, flush_folder, put_in_place, write_durably
from sync.layout import Layout, Vector
from sync.ps.core.actions import Apply, Keep, Log, Restart
from sync.ps.core.machine import Recovered, Setup
from sync.ps.execution.replica import Numbers
from sync.transfer.manifest import Manifest

__all__ = ["Draft", "Entry", "Storage", "correction_key"]

_KEPT_CHECKPOINTS = 2
_SPARE = ".spare.partial"
"""A checkpoint that is to be written again."""
_MEMORY, _MARK, _LAST = "memory/", "mark/", "last/"
"""Before the names, in a checkpoint: of what policy and guard remember, of watermarks, of regions that are done."""

Entry = Log | Apply | Restart
"""A line of the log."""


class Storage:
    """The durable state of one partition. Calls are made from one thread at a time, but for a `Draft`'s."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        self._folder, self._setup = folder, setup
        self._sums = folder / "sums"
        shutil.rmtree(self._sums, ignore_errors=True)
        for part in (folder, folder / "inbox", folder / "outbox"):
            part.mkdir(parents=True, exist_ok=True)
        self.layout: Layout | None = None
        self._marks: dict[int, dict[str, int]] = {}
        """Watermarks of the checkpoints that are kept, ours included, by version."""
        self._log: int | None = None
        """Descriptor of the log's newest file."""

    def recover(self) -> tuple[Recovered, Numbers | None, list[Entry]]:
        """Read back what was durable when the process ended: as of the last checkpoint, and what the log has since.

        A checkpoint that is damaged is made again from the one before it and the round's updates, which are kept that
        long. Raises ``GeofedError("STATE_INVALID")`` where that is not possible either.
        """
        for left in (*self._folder.glob(".*.partial"), *self._folder.glob("*/**/.*.partial")):
            left.unlink()
        try:
            return self._recover()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GeofedError("STATE_INVALID", f"{self._folder} is damaged: {error}") from None

    def _recover(self) -> tuple[Recovered, Numbers | None, list[Entry]]:
        inbox = tuple(_manifests(sorted(self._folder.glob("inbox/*/*.json"))))
        outbox = tuple(_manifests(sorted(self._folder.glob("outbox/*.json"))))
        with contextlib.suppress(FileNotFoundError):
            self.layout = Layout.from_json((self._folder / "layout.json").read_text())
        metrics = None
        with contextlib.suppress(FileNotFoundError):
            metrics = Keep(**json.loads((self._folder / "metrics.json").read_text()))
        base = Recovered(inbox=inbox, outbox=outbox, metrics=metrics)
        damaged: list[int] = []
        numbers: Numbers | None = None
        for version, path in sorted(self._checkpoints(), reverse=True):
            if (frame := _whole(path)) is None:
                damaged.append(version)
                continue
            self._marks[version] = marks = _named(frame, _MARK)
            if numbers is None:
                base, numbers = self._of_checkpoint(base, frame, version, marks)
        if not self._setup.background:
            self._require_updates(base, damaged)
            return base, numbers, []
        entries = self._entries(base.version)
        self._open_log(max([base.version, *(int(path.stem.split("-")[1]) for path in self._logs())]))
        return base, numbers, entries

    def _of_checkpoint(
        self, base: Recovered, frame: framing.Frame, version: int, marks: dict[str, int]
    ) -> tuple[Recovered, Numbers]:
        facts, model = frame.facts, np.array(frame.tensors["model"], np.float32)
        remembered = {name: frame.tensors[name] for name in frame.tensors if name.startswith(_MEMORY)}
        sequence = int(facts["sequence"])
        numbers = Numbers(
            model,
            np.array(frame.tensors["start"], np.float32) if "start" in frame.tensors else model,
            np.array(frame.tensors["residual"], np.float64) if "residual" in frame.tensors else None,
            {name.removeprefix(_MEMORY): np.array(v, np.float32) for name, v in remembered.items()},
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
            lasts=tuple(sorted(_named(frame, _LAST))),
            ends=int(facts.get("ends", 0)),
            attempt=int(facts.get("attempt", 1)),
            ended=_ended_of(facts) if self._setup.background and sequence > 0 else None,
        )
        return recovered, numbers

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

    @property
    def marked(self) -> bool:
        """Whether this folder is where the partition began, or came back: what it lacks was never there."""
        return (self._folder / "begun").exists()

    def mark(self) -> None:
        """Say so, durably."""
        if not self.marked:
            write_durably(self._folder / "begun", [])

    def newest_checkpoint(self) -> Path | None:
        """The file of the last merge; None: there is none."""
        return max(self._checkpoints(), default=(0, None), key=lambda found: found[0])[1]

    def take_over(self, data: bytes, digest: str, layout: Layout, updates: Sequence[tuple[Manifest, bytes]]) -> None:
        """Begin from another region's checkpoint, as if we had made it, and with updates that others may lack.

        Synchronous exchange only: there one round's model is the same in all regions, and tells our place in the data.
        The checkpoint comes last, so that a crash before it leaves a state that counts as lost still.
        ``digest`` is that of its model. Raises ``GeofedError("STATE_INVALID")`` where it is damaged.
        """
        try:
            frame = framing.decode(data)
            sequence, model = int(frame.facts["sequence"]), np.array(frame.tensors["model"], np.float32)
        except (GeofedError, KeyError, ValueError) as error:
            raise GeofedError("STATE_INVALID", f"another region's checkpoint is damaged: {error}") from None
        rest = {name: array for name, array in frame.tensors.items() if name != "model"}
        whole = framing.digest_of([model.data.cast("B")]) == digest and frame.facts.get("memory_crc") == _crc(rest)
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
        apply = Apply(
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
        self.keep_checkpoint(Numbers(model, model, None, memory), apply)
        self.mark()

    def keep_layout(self, layout: Layout) -> None:
        """Store the layout once; it never changes."""
        if self.layout is None:
            write_durably(self._folder / "layout.json", [layout.to_json().encode()])
            self.layout = layout

    def keep_metrics(self, metrics: Keep) -> None:
        write_durably(self._folder / "metrics.json", [json.dumps(asdict(metrics)).encode()])

    def keep_update(
        self, manifest: Manifest, pieces: Sequence[framing.Buffer], first: Callable[[], None] = lambda: None
    ) -> None:
        """Make our own update durable; ``first`` waits for what must be durable by then, and raises where it is not."""
        write_durably(self._folder / "outbox" / f"{manifest.sequence}.frame", pieces)
        first()
        self._keep_manifest(self._folder / "outbox" / f"{manifest.sequence}.json", manifest)

    def keep_state(self, sequence: int, state: Sequence[framing.Buffer]) -> None:
        """Make the optimiser state at the end of a round durable."""
        write_durably(self._folder / f"state-{sequence}.frame", state)

    def newest_state(self, sequence: int) -> bytes | None:
        """Optimiser state at the end of a round, or of the last one before it that was kept."""
        kept = [int(path.stem.split("-")[1]) for path in self._folder.glob("state-*.frame")]
        found = max((number for number in kept if number <= sequence), default=None)
        return None if found is None else (self._folder / f"state-{found}.frame").read_bytes()

    def keep_residual(self, sequence: int, residual: npt.NDArray[np.float64]) -> None:
        """Make durable what the codec has held back once our update of a round is made; before the update itself."""
        write_durably(self._folder / f"residual-{sequence}.frame", framing.encode({"residual": residual}))

    def residual(self, sequence: int) -> npt.NDArray[np.float64] | None:
        """What was held back once our update of a round was made, if anything was."""
        with contextlib.suppress(FileNotFoundError):
            frame = framing.decode((self._folder / f"residual-{sequence}.frame").read_bytes())
            return np.array(frame.tensors["residual"], np.float64)
        return None

    def keep_checkpoint(self, numbers: Numbers, apply: Apply, ended: Log | None = None, attempt: int = 1) -> str:
        """Make a merge's numbers and watermarks durable; returns the model's digest.

        With background exchange, ``ended``: the last round that has ended; ``attempt``: the last that began from these
        numbers.
        """
        draft = self.draft(numbers, apply, ended, attempt)
        digest = draft.write()
        draft.flush()
        self.keep(draft)
        if apply.complete:
            (self._folder / _SPARE).unlink(missing_ok=True)
        return digest

    def draft(self, numbers: Numbers, apply: Apply, ended: Log | None = None, attempt: int = 1) -> Draft:
        """A checkpoint that another thread can `write` and `flush`, and that is to be kept here after that.

        What is logged from here on comes after it; until it is kept, the one before counts, and all that follows on it.
        """
        rest: dict[str, framing.Array] = {f"{_MEMORY}{name}": vector for name, vector in numbers.memory.items()}
        if self._setup.background:
            rest |= {"start": numbers.start} | ({} if numbers.residual is None else {"residual": numbers.residual})
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
        return Draft(self._folder, apply.version, marks, numbers.model, rest, facts)

    def keep(self, draft: Draft) -> None:
        """It is durable: what came before the one before it is not needed any more."""
        self._marks[draft.version] = draft.marks
        for old in sorted(self._marks)[:-_KEPT_CHECKPOINTS]:
            self._forget_checkpoint(old)

    def _forget_checkpoint(self, version: int) -> None:
        sequence = self._marks.pop(version).get(self._setup.region, version)
        for old, path in self._checkpoints():
            if old > version:
                continue
            if self._setup.background:
                path.replace(self._folder / _SPARE)
            else:
                # Another region may be reading it.
                path.unlink(missing_ok=True)
        for path in self._logs():
            if int(path.stem.split("-")[1]) <= version:
                path.unlink(missing_ok=True)
        # Not every round hands its optimiser's state over: the newest one stays.
        states = sorted(int(path.stem.split("-")[1]) for path in self._folder.glob("state-*.frame"))
        newest = max((number for number in states if number <= sequence + 1), default=0)
        for kind, last in (("state", min(newest - 1, sequence)), ("residual", sequence)):
            for path in self._folder.glob(f"{kind}-*.frame"):
                if int(path.stem.split("-")[1]) <= last:
                    path.unlink(missing_ok=True)

    def durable_sequence(self) -> int:
        """Rounds of ours that every kept checkpoint holds: what lies before them is not needed to make them again."""
        return min((marks.get(self._setup.region, -1) for marks in self._marks.values()), default=-1)

    # The log

    def log(self, entry: Entry) -> None:
        """Make a line durable."""
        if self._log is None:
            raise GeofedError("INTERNAL", "the log is not open")
        kind = {Log: "end", Apply: "merge", Restart: "restart"}[type(entry)]
        body = json.dumps({kind: asdict(entry)}, separators=(",", ":"))
        line = f"{zlib.crc32(body.encode()):08x} {body}\n".encode()
        with disk_full_is_told(self._folder):
            os.write(self._log, line)
            os.fdatasync(self._log)

    def _logs(self) -> list[Path]:
        return sorted(self._folder.glob("log-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))

    def _open_log(self, version: int) -> None:
        if self._log is not None:
            os.close(self._log)
        path = self._folder / f"log-{max(0, version)}.jsonl"
        self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        flush_folder(self._folder)

    def _entries(self, version: int) -> list[Entry]:
        """What was logged after a merge; a line that the process died in ends it."""
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
                found.append(_entry(json.loads(body)))
                whole += len(line) + 1
            if whole < path.stat().st_size:
                os.truncate(path, whole)
        return found

    def update_path(self, region: str, sequence: int, first: int = 0) -> Path:
        """Where the bytes of a durable update are; ``first``: of the rounds that it sums up, 0 if it does not."""
        folder = self._folder / "outbox" if region == self._setup.region else self._folder / "inbox" / region
        return folder / (f"{sequence}.from-{first}.frame" if first else f"{sequence}.frame")

    def path_of(self, manifest: Manifest) -> Path:
        """Where the bytes of an update are that is kept, or of a sum that was made here."""
        made = self._sum_path(manifest.digest)
        if manifest.first and made.exists():
            return made
        return self.update_path(manifest.region, manifest.sequence, manifest.first)

    def _sum_path(self, digest: str) -> Path:
        return self._sums / f"{digest.removeprefix('sha256:')}.frame"

    def hold_sum(self, manifest: Manifest, pieces: Sequence[framing.Buffer]) -> None:
        """Keep a sum of updates for as long as the process lives: what it is of is durable.

        Raises ``GeofedError("DISK_FULL")``, and leaves nothing behind.
        """
        path = self._sum_path(manifest.digest)
        partial = path.with_suffix(".partial")
        try:
            with disk_full_is_told(path):
                self._sums.mkdir(exist_ok=True)
                with partial.open("wb") as file:
                    for piece in pieces:
                        file.write(piece)
        except GeofedError:
            partial.unlink(missing_ok=True)
            raise
        partial.replace(path)

    def update(self, manifest: Manifest) -> bytes:
        """The bytes of a durable update, verified: one that has changed here would part this region's model from the
        others'."""
        data = self.path_of(manifest).read_bytes()
        if framing.digest_of([data]) != manifest.digest:
            raise GeofedError("STATE_INVALID", f"update {manifest.sequence} of {manifest.region} was damaged on disk")
        return data

    def forget(self, up_to: Mapping[str, int], sums: Iterable[str] = ()) -> None:
        """Delete updates that nobody needs any more, nor a kept checkpoint to make the merges after it again.

        ``sums``: digests of those that are not sent any more.
        """
        for digest in sums:
            self._sum_path(digest).unlink(missing_ok=True)
        kept = self._marks.values()
        for region, wanted in up_to.items():
            last = min([wanted, *(marks.get(region, -1) for marks in kept)])
            folder = self._folder / "outbox" if region == self._setup.region else self._folder / "inbox" / region
            for path in folder.glob("*.*"):
                # A name that begins with a dot is a file that another thread is writing.
                if not path.name.startswith(".") and int(path.name.split(".")[0]) <= last:
                    path.unlink(missing_ok=True)

    @staticmethod
    def _keep_manifest(path: Path, manifest: Manifest) -> None:
        write_durably(path, [json.dumps(asdict(manifest)).encode()])


@dataclass(frozen=True)
class Draft:
    """A checkpoint on its way to the disk. Its methods may be called from any one thread, in this order."""

    folder: Path
    version: int
    marks: dict[str, int]
    model: Vector
    rest: dict[str, framing.Array]
    facts: dict[str, float]
    written: list[tuple[Path, BinaryIO]] = field(default_factory=list)
    """Its place, and the open file beside that."""

    def write(self) -> str:
        """Read the numbers, which must not change until this returns; the model's digest."""
        model = np.ascontiguousarray(self.model)
        digest = framing.digest_of([model.data.cast("B")])
        pieces = framing.encode({"model": model, **self.rest}, {**self.facts, "memory_crc": _crc(self.rest)})
        place = self.folder / f"checkpoint-{self.version}-{digest.removeprefix('sha256:')}.frame"
        self.written.append((place, begin_write(place, pieces, self.folder / _SPARE)))
        return digest

    def flush(self, *, beside: bool = False) -> None:
        """Make durable what was written; ``beside`` other work, so that what is made durable there waits for little."""
        put_in_place(*self.written.pop(), beside=beside)


def _whole(path: Path) -> framing.Frame | None:
    """The checkpoint in a file, unless it is damaged."""
    try:
        frame = framing.decode(path.read_bytes())
        digest = framing.digest_of([np.array(frame.tensors["model"], np.float32).data.cast("B")])
    except (GeofedError, KeyError, ValueError):
        return None
    whole = digest.removeprefix("sha256:") == path.stem.rpartition("-")[2]
    rest = {name: array for name, array in frame.tensors.items() if name != "model"}
    return frame if whole and frame.facts.get("memory_crc") == _crc(rest) else None


def _crc(tensors: Mapping[str, framing.Array]) -> int:
    crc = 0
    for name, array in sorted(tensors.items()):
        crc = zlib.crc32(np.ascontiguousarray(array).data.cast("B"), zlib.crc32(name.encode(), crc))
    return crc


def _manifests(paths: list[Path]) -> Iterator[Manifest]:
    for path in paths:
        if path.with_suffix(".frame").exists():
            yield _manifest(json.loads(path.read_text()))


def _manifest(values: dict[str, Any]) -> Manifest:
    seen = tuple((str(region), int(sequence)) for region, sequence in values.get("seen", ()))
    return Manifest(**{**values, "seen": seen})


def _entry(values: dict[str, Any]) -> Entry:
    if "end" in values:
        return Log(**values["end"])
    if "restart" in values:
        return Restart(**values["restart"])
    merge = values["merge"]
    pairs = tuple((region, mark) for region, mark in merge["watermarks"])
    manifests = tuple(_manifest(manifest) for manifest in merge["manifests"])
    known = {"watermarks": pairs, "manifests": manifests}
    return Apply(**{**merge, **known, "lasts": tuple(merge["lasts"]), "staleness": tuple(merge["staleness"])})


def _named(frame: framing.Frame, prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): int(value) for name, value in frame.facts.items() if name.startswith(prefix)}


def _ended_of(facts: Mapping[str, float]) -> Log:
    """The last round before a checkpoint, as far as anyone still asks for it."""
    step, until, correction = int(facts["ended_step"]), int(facts["until_step"]), int(facts["correction"])
    key = correction_key(correction) if correction >= 0 else ""
    return Log(int(facts["sequence"]), "", "", 0.0, step, key, until, bool(facts.get("ended_last", 0)))


def correction_key(version: int) -> str:
    """Channel key of what leads the workers to the model after a merge."""
    return f"correction/{version}"
