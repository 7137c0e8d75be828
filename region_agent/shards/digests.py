"""Digests of what is in a region's splits, by which a model can be bound to the data that it was made of."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably
from region_agent.config import DatasetConfig, StoreConfig
from region_agent.shards.indexing import INDEXES, private_folder
from region_agent.shards.reading import shard_files
from region_agent.worker.data.sources import version_of
from region_agent.worker.invocation import ShardFile

__all__ = ["DATA_KEY", "DataDigests", "JobDigests"]

DATA_KEY = "data.key"
"""Name of the file, in the agent's state directory, with the key of digests with a key: 64 hexadecimal digits."""
_KEY_BYTES = 32
"""Bytes of the key of HMAC-SHA-256: as many as its digest has."""
_BLOCK_BYTES = 1 << 20
"""Bytes that are read at a time."""


class DataDigests:
    """Computes the digests of splits, and keeps them until their files change.

    A split's digest is SHA-256 over the JSON of its files, in the order of their names: name, bytes and SHA-256 of each
    or, of an object in a store, the ETag that the store gives it. With a key it is HMAC-SHA256 of that.
    """

    _lock = threading.Lock()
    """Of the process: jobs that begin together on the same data read them once."""

    def __init__(self, state_dir: Path, ends: Callable[[], bool] = lambda: False) -> None:
        """``ends``: whether nobody waits for digests any more; what is being read then is given up (UNAVAILABLE)."""
        self._state_dir, self._ends = state_dir, ends

    def of(self, dataset: DatasetConfig, stores: Mapping[str, StoreConfig], rule: str = "") -> dict[str, str]:
        """Return the digest of each split as ``ALGORITHM:HEX``; empty if the region tells none. Blocks, for new files
        as long as reading them takes.

        Args:
            rule: `plain`, `keyed` or `none`; empty: as the dataset's `digest` says.

        Raises ``GeofedError``: SHARD_UNREADABLE; STATE_INVALID for a damaged key; UNAVAILABLE.
        """
        rule = rule or dataset.digest
        if rule == "none":
            return {}
        found = {}
        for split, files in shard_files(dataset, dict(stores), versions=True).items():
            with self._lock:
                digest = self._kept(files)
            kind = "-etags" if any(file.url for file in files) else ""
            if rule == "keyed":
                kind, digest = f"hmac-sha256{kind}", hmac.new(self._key(), digest.encode(), "sha256").hexdigest()
            else:
                kind = f"sha256{kind}"
            found[split] = f"{kind}:{digest}"
        return found

    def _kept(self, files: Sequence[ShardFile]) -> str:
        """Return the digest of a split's files, from the last time if they are the same by name, size and time."""
        named = sorted([file.name, file.size or 0, file.version, file.path] for file in files)
        mark = hashlib.sha256(json.dumps(named).encode()).hexdigest()
        path = self._state_dir / INDEXES / f"{mark}.digest"
        with suppress(OSError):
            os.utime(path)
            return path.read_text()
        digest = hashlib.sha256(json.dumps(sorted(self._named(file) for file in files)).encode()).hexdigest()
        private_folder(path.parent)
        write_durably(path, [digest.encode()], mode=0o600)
        return digest

    def _named(self, file: ShardFile) -> list[object]:
        """Return a file's name, bytes and digest."""
        if file.url:
            return [file.name, file.size, file.version]
        try:
            with Path(file.path).open("rb") as opened:
                digest = hashlib.sha256()
                while block := opened.read(_BLOCK_BYTES):
                    if self._ends():
                        raise GeofedError("UNAVAILABLE", f"{file.name} is not read any more: its job has ended here")
                    digest.update(block)
                changed = version_of(os.fstat(opened.fileno())) != file.version
        except OSError as error:
            raise GeofedError("SHARD_UNREADABLE", f"{file.path}: {error.strerror}") from None
        if changed:
            raise GeofedError("SHARD_UNREADABLE", f"{file.name} changes while it is read")
        return [file.name, file.size, digest.hexdigest()]

    def _key(self) -> bytes:
        """Return the region's key, which is made when it is first used."""
        path = self._state_dir / DATA_KEY
        try:
            if not path.exists():
                write_durably(path, [secrets.token_hex(_KEY_BYTES).encode()], mode=0o600)
            key = bytes.fromhex(path.read_text().strip())
        except (OSError, ValueError) as error:
            raise GeofedError("STATE_INVALID", f"{path} is no key: {error}") from None
        if len(key) != _KEY_BYTES:
            raise GeofedError("STATE_INVALID", f"{path} is no key of {_KEY_BYTES} bytes")
        return key


class JobDigests:
    """The digests of a job's data, which are computed beside its training: large files take minutes."""

    def __init__(self, state_dir: Path, dataset: DatasetConfig | None, stores: Mapping[str, StoreConfig]) -> None:
        """``dataset``: None: none of the region's is used."""
        self.values: dict[str, str] = {}
        """By split, as they are told; empty: not known yet."""
        self._ends, self._done, self._begun = threading.Event(), asyncio.Event(), False
        self._digests, self._dataset, self._stores = DataDigests(state_dir, self._ends.is_set), dataset, stores

    @property
    def known(self) -> bool:
        """Whether they are computed, or cannot be."""
        return self._done.is_set()

    async def compute(self) -> None:
        """Compute them, unless somebody does already. Raises as `DataDigests.of`."""
        if self._begun:
            await self._done.wait()
            return
        self._begun = True
        try:
            if self._dataset is not None:
                self.values = await asyncio.to_thread(self._digests.of, self._dataset, self._stores)
        finally:
            self._done.set()

    def close(self) -> None:
        """Give up what is being read."""
        self._ends.set()
