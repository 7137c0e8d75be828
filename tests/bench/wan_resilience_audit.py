"""What parameter servers have made durable, read while they run: ends of rounds, merges, and what is in their model."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Journal", "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """What the journal of one parameter server tells of all updates."""

    lost: int
    twice: int
    unseen: int
    """Merges whose line was deleted before it was read; then nothing is known of their updates."""


@dataclass
class Journal:
    """Follows the log in a state folder."""

    state: Path
    region: str
    ended: int = 0
    """The last round whose end is durable."""
    marks: dict[str, int] = field(default_factory=dict)
    """The last update of every region that is in the model."""
    merged: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How often each update was merged."""
    merges: list[dict[str, Any]] = field(default_factory=list)
    _files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Descriptor and offset of each file of the log."""

    def read(self) -> bool:
        """Read what is new; True where something is."""
        news = False
        paths = sorted(self.state.glob("log-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
        for path in paths:
            if path.name not in self._files:
                try:
                    self._files[path.name] = os.open(path, os.O_RDONLY), 0
                except FileNotFoundError:
                    continue
        for name, (descriptor, offset) in list(self._files.items()):
            data = os.pread(descriptor, 1 << 22, offset)
            whole = data[: data.rfind(b"\n") + 1]
            self._files[name] = descriptor, offset + len(whole)
            for line in whole.splitlines():
                news = self._line(line) or news
        for name in list(self._files)[:-8]:
            os.close(self._files.pop(name)[0])
        return news

    def _line(self, line: bytes) -> bool:
        crc, _, body = line.partition(b" ")
        if f"{zlib.crc32(body):08x}".encode() != crc:
            return False
        entry = json.loads(body)
        if "end" in entry:
            self.ended = max(self.ended, entry["end"]["sequence"])
        if "merge" in entry:
            merge = entry["merge"]
            self.marks |= dict(merge["watermarks"]) | {self.region: merge["sequence"]}
            for found in merge["manifests"]:
                # One that sums up several rounds counts for each.
                rounds = range(found["first"] or found["sequence"], found["sequence"] + 1)
                self.merged.update((found["region"], round_) for round_ in rounds)
            self.merges.append({"at": time.monotonic(), "version": merge["version"], "marks": dict(self.marks)})
        return True

    def verdict(self, regions: tuple[str, ...], rounds: int) -> Verdict:
        """Every update of every region must have been merged once."""
        names = {(region, sequence) for region in regions for sequence in range(1, rounds + 1)}
        versions = {merge["version"] for merge in self.merges}
        unseen = len(set(range(1, max(versions, default=0) + 1)) - versions)
        lost = sum(1 for name in names if not self.merged[name])
        return Verdict(lost, sum(count - 1 for count in self.merged.values() if count > 1), unseen)

    def backlog(self, other: str, mark: int) -> int:
        """Bytes of our updates that another region has not merged, of those that are durable here."""
        found = 0
        for path in (self.state / "outbox").glob("*.json"):
            if not path.name.startswith(".") and int(path.stem) > mark:
                try:
                    found += int(json.loads(path.read_text())["total_bytes"])
                except (OSError, ValueError):
                    continue
        return found

    def checkpoint_marks(self) -> dict[str, int]:
        """Watermarks of the newest checkpoint."""
        from sync import framing

        newest = max(self.state.glob("checkpoint-*.frame"), key=lambda path: int(path.name.split("-")[1]))
        facts = framing.decode(newest.read_bytes()).facts
        return {name.removeprefix("mark/"): int(value) for name, value in facts.items() if name.startswith("mark/")}

    def close(self) -> None:
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()
