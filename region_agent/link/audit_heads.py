"""Heads of the control plane's audit log, which a region keeps: they show later whether the log was rewritten
(`geofed audit verify --witness`)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from geofed_pb.files.durable import write_durably
from geofed_pb.security.audit import AuditBroken, Head

__all__ = ["AUDIT_HEADS", "WitnessFile"]

AUDIT_HEADS = "audit-heads.jsonl"
"""Name of the file, in the folder of the region's identity."""
_PERIOD_SECONDS = 3600.0
"""Of a period, the first and the last head are kept: however many a control plane sends, it can't displace earlier
ones. A year has 17,520 at most, about 7 MB."""
_MOST = 100_000
"""Heads in the file, of six years at least. Then the oldest but the first are dropped."""


@dataclass(frozen=True)
class _Kept:
    received: float
    """Unix seconds on this machine's clock."""
    head: Head

    @property
    def period(self) -> int:
        return int(self.received // _PERIOD_SECONDS)

    @property
    def line(self) -> bytes:
        return (json.dumps({"received": self.received, **asdict(self.head)}) + "\n").encode()


class WitnessFile:
    """The heads in a file, one on each line, oldest first."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self.damage = ""
        """What was wrong with the file; empty: nothing."""
        self._kept = self._read()

    def add(self, value: Mapping[str, object]) -> str:
        """Keep a head, durably; return what is wrong with it, as far as earlier heads show: empty if nothing.

        Raises ``OSError``.
        """
        try:
            head = Head.read(dict(value))
        except AuditBroken as error:
            return f"the control plane has sent no valid head of its audit log: {error}"
        last = self._kept[-1].head if self._kept else None
        if last is not None and (head.seq, head.hash) == (last.seq, last.hash):
            return ""
        wrong = _conflict([one.head for one in self._kept], head)
        new, kept = _Kept(self._clock(), head), list(self._kept)
        # A head that contradicts others stays, and so does the one before it.
        replaces = not wrong and len(kept) >= 2 and kept[-1].period == kept[-2].period == new.period
        if replaces:
            kept.pop()
        kept.append(new)
        if len(kept) > _MOST:
            del kept[1]
            replaces = True
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if replaces or len(kept) == 1:
            write_durably(self._path, [one.line for one in kept], mode=0o600)
        else:
            with self._path.open("ab") as file:
                file.write(new.line)
                file.flush()
                os.fsync(file.fileno())
        self._kept = kept
        return wrong

    def _read(self) -> list[_Kept]:
        """Return what can be read. A last line without its end was interrupted, and is dropped."""
        try:
            *lines, torn = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            self.damage = f"{self._path} cannot be read: {error}"
            return []
        kept, bad = [], 0
        for line in lines:
            try:
                value = json.loads(line)
                kept.append(_Kept(float(value.pop("received")), Head.read(value)))
            except (AuditBroken, ValueError, KeyError, TypeError, AttributeError):
                bad += 1
        if bad:
            aside = self._path.with_suffix(f".damaged-{int(self._clock())}")
            self._path.replace(aside)
            self.damage = f"{bad} heads of the audit log in {self._path} were damaged; the file is kept as {aside}"
        if bad or torn:
            write_durably(self._path, [one.line for one in kept], mode=0o600)
        return kept


def _conflict(known: list[Head], head: Head) -> str:
    if known and known[0].public_key != head.public_key:
        return f"the control plane signs its audit log with another key, {head.public_key}"
    same = next((one for one in reversed(known) if one.seq == head.seq), None)
    if (same is not None and same.hash != head.hash) or (known and head.seq < known[-1].seq):
        return (
            f"the control plane's audit log of {head.seq} entries is another one than before: it was restored from a "
            "backup, or rewritten"
        )
    return ""
