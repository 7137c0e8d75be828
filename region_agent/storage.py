"""What an agent keeps in its state directory beside its identity and database, and what of it is removed when."""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from geofed_pb.files.task_folder import kept_parts
from geofed_pb.storage import Found, Keep, Stored, Total, due, found, left_after, remove, totals, used_bytes
from geofed_pb.v1 import agent_pb2
from region_agent.config import FileChannelConfig, RegionConfig, RetentionConfig
from region_agent.gateway.owner import function_name
from region_agent.partition.shards import SHARDS
from region_agent.shards.indexing import INDEXES
from region_agent.state.store import stored_messages
from region_agent.tasks.environments import FOLDER as ENVIRONMENTS
from region_agent.tasks.folder import BUNDLES

__all__ = ["SENDING", "Held", "RegionStorage", "channel_folder", "held_by"]

SENDING = "sending"
"""Folder in the state directory for temporary files of shards that are sent to other regions."""
_SHARED_MEMORY = Path("/dev/shm")
_DAY_SECONDS = 86_400.0
"""Seconds of a day: ages in region files are in days."""
_LEAST_SECONDS = 60.0
"""Shortest time for which anything is kept, so that a sweep takes nothing of a job that is just beginning."""
_LEAST_CHANNEL_SECONDS = 3600.0
"""The same for the channel: a profile, which has no job, takes minutes there."""
_log = structlog.get_logger("geofed.storage")
_FIRST_RUN = re.compile(r"[0-9a-f]{64}\.approved")
"""What `approve: first-run` has approved: user, key, code and dataset."""
_PART = re.compile(r"-w[0-9]+$")
"""End of the name of a job's further functions."""
_WRITTEN = re.compile(r"\..*\.partial|.*\.part(ial)?")
"""Files that are being written."""


def channel_folder(channel: FileChannelConfig, state_dir: Path) -> Path:
    """Return the folder of a channel of files: in shared memory, one for each agent, or in the state directory."""
    if channel.path is not None:
        return channel.path
    if not os.access(_SHARED_MEMORY, os.W_OK):
        return state_dir / "channel"
    mark = hashlib.sha256(str(state_dir).encode()).hexdigest()[:12]
    return _SHARED_MEMORY / f"geofed-{os.getuid()}-{mark}"


@dataclass(frozen=True)
class Held:
    """What the jobs need whose partition, or whose shard's transfer, is in this region."""

    jobs: frozenset[str] = frozenset()
    bundles: frozenset[str] = frozenset()
    """Digests of the files of their code, without ``sha256:``."""


def held_by(state_dir: Path, *, without: str = "") -> Held:
    """Return what the jobs in the agent's database need, which may be in use; ``without``: but for this job."""
    starts, sendings = stored_messages(state_dir / "agent.db")
    read = [agent_pb2.StartPartition.FromString(one) for one in starts]
    jobs = [*(one.job for one in read), *(agent_pb2.SendShard.FromString(one).job for one in sendings)]
    bundles = {one.task.bundle_digest.removeprefix("sha256:") for one in read if one.job != without}
    return Held(frozenset(jobs) - {without}, frozenset(bundles | _parts(state_dir, bundles)))


def _parts(state_dir: Path, bundles: Iterable[str]) -> set[str]:
    """Return the digests, without ``sha256:``, of the files that belong to kept archives of task folders."""
    found = (kept_parts(state_dir / BUNDLES / name) for name in bundles)
    return {part.digest.removeprefix("sha256:") for parts in found for part in parts}


def _is_own(folder: Path) -> bool:
    """Whether it is a folder of this user, and not a link."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


class RegionStorage:
    """The files of one state directory. Methods block."""

    def __init__(
        self,
        state_dir: Path,
        retention: RetentionConfig,
        channel: Path | None = None,
        own_channel: Path | None = None,
    ) -> None:
        """Give ``channel``, if the channel's folder is on the disk, and ``own_channel``, if no other agent uses it."""
        self._state_dir, self._channel, self._own_channel = state_dir, channel, own_channel
        self._functions = state_dir / "gateway" / "state"
        days = {
            # Other regions' data, which are removed with their job.
            "shards": 0.0,
            "jobs": retention.jobs_days,
            "bundles": retention.bundles_days,
            "logs": retention.logs_days,
            "approvals": retention.approvals_days,
            "indexes": retention.indexes_days,
            "channel": retention.channel_days,
            "unfinished": retention.unfinished_days,
        }
        self.keep: Keep = {kind: max(_LEAST_SECONDS, kept * _DAY_SECONDS) for kind, kept in days.items()}
        self.keep["channel"] = max(_LEAST_CHANNEL_SECONDS, self.keep["channel"] or 0.0)

    @classmethod
    def of(cls, config: RegionConfig, state_dir: Path) -> RegionStorage:
        """Return the storage of a region with its channel, if that is one of files."""
        if not isinstance(config.channel, FileChannelConfig):
            return cls(state_dir, config.retention)
        folder = channel_folder(config.channel, state_dir)
        on_disk = folder if not folder.is_relative_to(_SHARED_MEMORY) else None
        # A folder that the region file names may hold what is not the agent's.
        return cls(state_dir, config.retention, on_disk, folder if config.channel.path is None else None)

    def items(self, held: Held) -> Iterator[Stored]:
        """Yield what is kept; ``name`` is the path in the state directory, or an absolute one."""
        place = self._state_dir
        for kind, folder in (("jobs", "jobs"), ("shards", SHARDS), ("shards", SENDING)):
            for one in found(place / folder):
                yield self._item(kind, one, in_use=one.path.name in held.jobs)
        for one in found(place / BUNDLES):
            kind = "unfinished" if _WRITTEN.fullmatch(one.path.name) else "bundles"
            yield self._item(kind, one, in_use=one.path.name in held.bundles)
        functions = {function_name(job) for job in held.jobs}
        for one in found(self._functions / "logs"):
            yield self._item("logs", one, in_use=_first(one.path.name.partition(".log")[0]) in functions)
        for one in found(place / "approvals"):
            if not _FIRST_RUN.fullmatch(one.path.name):
                yield self._item("approvals", one, in_use=one.path.stem in held.jobs)
        for one in found(place / ENVIRONMENTS):
            # Whole ones are removed where they need the space, by `Environments`.
            yield self._item("unfinished" if _WRITTEN.fullmatch(one.path.name) else ENVIRONMENTS, one)
        for one in found(place / INDEXES):
            yield self._item("indexes", one)
        # In shared memory anybody may have made a link of that name.
        for one in found(self._own_channel) if self._own_channel is not None and _is_own(self._own_channel) else ():
            yield self._item("channel", one, in_use=one.path.name in held.jobs)
        for one in found(place, ".*.partial"):
            yield self._item("unfinished", one)

    def totals(self, now: float) -> list[Total]:
        """Return the sums by kind."""
        return totals(self.items(held_by(self._state_dir)), self.keep, now)

    def sweep(self, now: float) -> list[Stored]:
        """Remove what the rules no longer keep, and return it; what cannot be removed is logged, and tried again by the
        next sweep."""
        try:
            held = held_by(self._state_dir)
        except sqlite3.Error as error:
            _log.warning("nothing was swept: the jobs cannot be read", error=str(error))
            return []
        return self._removed(due(self.items(held), self.keep, now))

    def delete_job(self, job: str, bundle_digest: str) -> list[Stored]:
        """Delete all files of a job, and its code unless another job here has the same (empty: one elsewhere has).

        Returns what was deleted.
        """
        held = held_by(self._state_dir, without=job)
        names = {job, function_name(job)}
        if bundle_digest:
            digest = bundle_digest.removeprefix("sha256:")
            names |= {digest, *_parts(self._state_dir, [digest])}
        return self._removed([one for one in self.items(held) if not one.in_use and _names(one, names)])

    def job_bytes(self, job: str) -> int:
        """Return the disk space that a job takes."""
        replicas = re.compile(rf"{re.escape(function_name(job))}(-w[0-9]+)?-[0-9]+")
        folders = [self._state_dir / "jobs" / job, self._state_dir / SHARDS / job]
        folders += [self._channel / job] if self._channel is not None else []
        with suppress(FileNotFoundError):
            folders += [path for path in (self._functions / "r").iterdir() if replicas.fullmatch(path.name)]
        return sum(used_bytes(folder) for folder in folders)

    def _item(self, kind: str, one: Found, *, in_use: bool = False) -> Stored:
        place = self._state_dir
        name = one.path.relative_to(place) if one.path.is_relative_to(place) else one.path
        return Stored(kind, str(name), one.bytes, one.changed_at, in_use=in_use)

    def _removed(self, items: list[Stored]) -> list[Stored]:
        left = set(left_after(items, self._remove))
        return [item for item in items if item not in left]

    def _remove(self, item: Stored) -> None:
        remove(self._state_dir / item.name)


def _names(item: Stored, names: set[str]) -> bool:
    """Whether an item's file has one of the names, but for a suffix."""
    return _first(Path(item.name).name.split(".")[0]) in names


def _first(function: str) -> str:
    """Return the name of a job's first function for any of them."""
    return _PART.sub("", function)
