"""Sums over all active jobs, kept up to date with each change, so that pages and scrapes need not visit every job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from control_plane.service.state._entries import JobEntry

__all__ = ["JobSums"]


class JobSums:
    """Costs, workers, rounds and sent bytes of the active jobs. Other threads may read while the event loop changes."""

    def __init__(self, entries: Iterable[JobEntry] = ()) -> None:
        self.usd = 0.0
        """US dollars that they have cost so far."""
        self._workers = Counter[str]()
        self._rounds = Counter[str]()
        self._partitions = Counter[str]()
        self._sent = Counter[tuple[str, str]]()
        for entry in entries:
            self._add(entry, 1)

    def replace(self, before: JobEntry | None, now: JobEntry | None) -> None:
        """Take a job's new entry instead of the one before; None: it is not active."""
        if before is not None:
            self._add(before, -1)
        if now is not None:
            self._add(now, 1)

    def workers(self) -> dict[str, int]:
        """Return the workers that the regions have reported, by region; those without any are left out."""
        return {region: count for region, count in dict(self._workers).items() if count}

    def rounds(self) -> dict[str, int]:
        """Return the completed rounds, by region that has reported a partition."""
        rounds = dict(self._rounds)
        return {region: rounds[region] for region, count in dict(self._partitions).items() if count}

    def sent_bytes(self) -> dict[tuple[str, str], int]:
        """Return the bytes that were sent over the WAN, by link as (source, destination)."""
        return {link: count for link, count in dict(self._sent).items() if count}

    def _add(self, entry: JobEntry, sign: int) -> None:
        state = entry.state
        # Not below 0 by rounding, once all have ended.
        self.usd = max(0.0, self.usd + sign * state.usd)
        for part in state.partitions:
            if part.report is not None:
                self._workers[part.region] += sign * part.report.workers
                self._rounds[part.region] += sign * part.report.round
                self._partitions[part.region] += sign
        sources = [(part.region, part.report) for part in state.partitions]
        sources += [(copy.source, copy.report) for copy in state.copies]
        for source, report in sources:
            if report is not None:
                for other, count in report.totals.sent_bytes.items():
                    link = (source, other)
                    self._sent[link] += sign * count
                    if not self._sent[link]:
                        # Links are many: each pair of regions that ever had a job.
                        del self._sent[link]
