"""Heads of the control plane's audit log, which a region keeps: they show later whether the log was written anew
(`geofed audit verify --witness`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from geofed_pb.audit import AuditBroken, Head
from geofed_pb.durable import write_durably

__all__ = ["AUDIT_HEADS", "Witness"]

AUDIT_HEADS = "audit-heads.jsonl"
"""Name of the file, in the folder of the region's identity."""
_MOST, _KEPT = 20_000, 10_000
"""Heads in the file before the oldest ones are dropped, and those that stay then. Later heads cover all earlier
entries, so that only changes between two dropped ones could no longer be told apart."""


class Witness:
    """The heads in a file, one on each line, oldest first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._heads = _read(path)

    def add(self, value: Mapping[str, object]) -> str:
        """Keep a head, durably; return what is wrong with it, as far as earlier heads show: empty if nothing."""
        try:
            head = Head.read(dict(value))
        except AuditBroken as error:
            return f"the control plane has sent no valid head of its audit log: {error}"
        last = self._heads[-1] if self._heads else None
        if last is not None and (head.seq, head.hash) == (last.seq, last.hash):
            return ""
        wrong = _conflict(self._heads, head)
        self._heads.append(head)
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if len(self._heads) > _MOST or len(self._heads) == 1:
            self._heads = self._heads[-_KEPT:]
            write_durably(self._path, [(_line(one) + "\n").encode() for one in self._heads], mode=0o600)
        else:
            with self._path.open("ab") as file:
                file.write((_line(head) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        return wrong


def _conflict(known: list[Head], head: Head) -> str:
    if known and known[0].public_key != head.public_key:
        return f"the control plane signs its audit log with another key, {head.public_key}"
    same = next((one for one in known if one.seq == head.seq), None)
    if (same is not None and same.hash != head.hash) or (known and head.seq < known[-1].seq):
        return (
            f"the control plane's audit log of {head.seq} entries is another one than before: it was restored from a "
            "backup, or written anew"
        )
    return ""


def _line(head: Head) -> str:
    return json.dumps(asdict(head))


def _read(path: Path) -> list[Head]:
    try:
        return [Head.read(json.loads(line)) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        # Of a new region. A damaged file is not continued, so that it can be looked at.
        if path.exists():
            path.replace(path.with_suffix(".damaged"))
        return []
