"""The region's record of every release that was made of its data. It belongs to the region: the agent grants releases
to a job, and the job's parameter server takes them before each update that leaves. What cannot be read is refused.

The file is one JSON object with a digest of its rows. It is replaced as a whole, durably, under a lock. The number of
its rows, and what ended jobs have spent, which never fall, are in a file beside its folder, so that a ledger that is
lost or older is not taken for the present one.
"""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably
from sync.privacy._account import Release

__all__ = ["LedgerRow", "PrivacyLedger"]

_VERSION = 1
"""Version of the ledger's file format."""
_MOST_BYTES = 256 << 20
"""Limit of the size of a ledger that is read into memory."""
_DAMAGED = "restore it from a backup that is not older than its last job; without it, nothing more may be released"
_DOUBTED = "restore a newer backup; or, if its owner accepts that these releases are not counted, remove that file"
_LOST = "run the job again, with train.initialModel from this one"


@dataclass(frozen=True)
class LedgerRow:
    """The releases of one job of one dataset."""

    job: str
    dataset: str
    level: str
    """What is protected: "region" or "sample"."""
    noise: float
    """Noise multiplier, see `Release`."""
    rate: float
    """Sampling rate."""
    delta: float
    """That of the job file."""
    planned: int
    """Releases that the job's plan makes."""
    granted: int
    """Releases that the job may make."""
    spent: int = 0
    """Releases that it has made."""
    last: int = 0
    """The last round that was paid for."""
    stored: int = 0
    """The last round whose update was stored, so that it may have left: it is never made again."""
    open: bool = True
    """Whether the job may make more."""
    at: float = 0.0
    """Begin of the job, in Unix seconds."""

    @property
    def release(self) -> Release:
        """One of its releases."""
        return Release(self.noise, self.rate)

    @property
    def counted(self) -> int:
        """Releases that count against the budget: an open job's granted ones, since it may make them at any time."""
        return max(self.spent, self.granted) if self.open else self.spent


class PrivacyLedger:
    """A ledger in a folder of its own. May be used by several processes at the same time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "ledger.json"
        self._least = folder.with_name(f"{folder.name}.jobs")
        """Least number of its rows, and of the releases in them; it is there once there are any."""
        self._doubt = folder.with_name(f"{folder.name}.restored")
        """Says that releases may be missing."""

    def rows(self, *, doubted: bool = False) -> tuple[LedgerRow, ...]:
        """Return all rows, the oldest job first. ``doubted``: also where `doubt` says that releases may be missing.

        Raises ``GeofedError("STATE_INVALID")`` if the ledger is damaged or lost.
        """
        if not self._folder.exists():
            return tuple(self._read(doubted))
        with self._locked():
            return tuple(self._read(doubted))

    def change(self, made: Callable[[Sequence[LedgerRow]], Sequence[LedgerRow]]) -> None:
        """Replace all rows by those that ``made`` returns for the present ones; durable when this returns.

        Raises ``GeofedError``: STATE_INVALID, DISK_FULL, or what ``made`` raises; nothing is changed then.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked():
            before = self._read()
            after = list(made(tuple(before)))
            if after != before:
                self._write(after)

    def spend(self, job: str, sequence: int, count: int) -> None:
        """Take releases for a round of a job, before its update is made; durable when this returns.

        A round that is made again takes none if its update was not stored: nothing of it has left. Raises
        ``GeofedError``: PRIVACY_EXHAUSTED if they are not granted; STATE_INVALID if the ledger is damaged, has a later
        round, or the update was stored.
        """

        def taken(rows: Sequence[LedgerRow]) -> Sequence[LedgerRow]:
            row = next((one for one in rows if one.job == job and one.open), None)
            if row is None:
                raise GeofedError("PRIVACY_EXHAUSTED", f"the region has granted {job} no release of its data")
            if sequence < row.last or sequence <= row.stored:
                text = f"round {sequence} of {job} was released before, and {row.last - sequence} rounds after it"
                text += ": the region's state is lost, or older than its ledger"
                raise GeofedError("STATE_INVALID", text, hint=_LOST)
            if sequence == row.last:
                return rows
            if row.spent + count > row.granted:
                text = f"{job} has made {row.spent} releases of {row.dataset}, and may make {row.granted}"
                raise GeofedError("PRIVACY_EXHAUSTED", text)
            paid = replace(row, spent=row.spent + count, last=sequence)
            return [paid if one is row else one for one in rows]

        self.change(taken)

    def store(self, job: str, sequence: int) -> None:
        """Note that the update of a round is stored, before it may leave; durable when this returns.

        Raises ``GeofedError("STATE_INVALID")`` if the ledger is damaged, or the round was not paid for.
        """

        def noted(rows: Sequence[LedgerRow]) -> Sequence[LedgerRow]:
            row = next((one for one in rows if one.job == job), None)
            if row is None or row.last < sequence:
                text = f"the ledger has not round {sequence} of {job}, which is stored: it is older than the job"
                raise GeofedError("STATE_INVALID", text, hint=_DAMAGED)
            return [replace(one, stored=max(one.stored, sequence)) if one is row else one for one in rows]

        self.change(noted)

    def close(self, job: str) -> None:
        """Note that a job makes no more releases."""
        if self.rows():
            self.change(lambda rows: [replace(one, open=False) if one.job == job else one for one in rows])

    def require(self, jobs: int, releases: int) -> None:
        """From now on, refuse a ledger that has fewer jobs or releases, as others have recorded them; durable when this
        returns. Raises ``GeofedError("DISK_FULL")``."""
        if not jobs:
            return
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked():
            self._raise_least(jobs, releases)

    def doubt(self) -> None:
        """From now on, refuse the ledger: it is of an older copy of the region's state, and may lack releases; durable
        when this returns. Raises ``GeofedError("DISK_FULL")``."""
        write_durably(
            self._doubt, [b"The state directory was older than what the control plane had of it.\n"], mode=0o600
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self, doubted: bool = False) -> list[LedgerRow]:
        if self._doubt.exists() and not doubted:
            text = (
                f"what is spent of privacy is not known: the state directory was restored from a copy ({self._doubt})"
            )
            raise GeofedError("STATE_INVALID", text, hint=_DOUBTED)
        try:
            if self._path.stat().st_size > _MOST_BYTES:
                raise ValueError(f"more than {_MOST_BYTES >> 20} MiB")
            held = json.loads(self._path.read_bytes())
            rows = held["rows"]
            if held["version"] != _VERSION or held["digest"] != _digest(rows):
                raise ValueError("its digest does not fit, or it is of a newer version")
            checked = [_checked(LedgerRow(**row)) for row in rows]
            jobs, releases = self._known()
            if len(checked) < jobs:
                raise ValueError(f"it is older than {self._least}: it has {len(checked)} of {jobs} jobs")
            if (spent := sum(row.spent for row in checked)) < releases:
                raise ValueError(f"it is older than {self._least}: it has {spent} of {releases} releases")
            return checked
        except FileNotFoundError:
            if self._least.exists():
                raise GeofedError("STATE_INVALID", f"{self._path} is lost", hint=_DAMAGED) from None
            return []
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            text = f"the ledger of what is spent of privacy, {self._path}, cannot be read: {error}"
            raise GeofedError("STATE_INVALID", text, hint=_DAMAGED) from None

    def _write(self, rows: Sequence[LedgerRow]) -> None:
        plain = [asdict(row) for row in rows]
        content = json.dumps({"version": _VERSION, "digest": _digest(plain), "rows": plain}, indent=1)
        write_durably(self._path, [content.encode()], mode=0o600)
        # What open jobs spend is noted at their end: their own parameter servers know it until then.
        self._raise_least(len(rows), sum(row.spent for row in rows if not row.open))

    def _raise_least(self, jobs: int, releases: int) -> None:
        known = self._known()
        least = max(jobs, known[0]), max(releases, known[1])
        if least != known:
            write_durably(self._least, [f"{least[0]} {least[1]}".encode()], mode=0o600)

    def _known(self) -> tuple[int, int]:
        """Return the numbers of rows and of releases that there were at least; 0 before the first one."""
        jobs, _, releases = self._least.read_text().partition(" ") if self._least.exists() else ("0", "", "")
        return int(jobs), int(releases or 0)


def _digest(rows: Any) -> str:
    return sha256(json.dumps(rows, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _checked(row: LedgerRow) -> LedgerRow:
    counts = (row.planned, row.granted, row.spent, row.last, row.stored)
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError(f"negative counts of {row.job}")
    if not (math.isfinite(row.noise) and row.noise > 0 and 0 < row.rate <= 1):
        raise ValueError(f"impossible noise of {row.job}")
    return row
