"""Content-addressed files: code of jobs and models. A file with its final name is complete and verified."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from weakref import WeakValueDictionary

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import flush_folder
from geofed_pb.files.task_folder import Part, parts_of
from geofed_pb.rpc import CHUNK_BYTES
from geofed_pb.storage import Found, found, is_nearly_full
from geofed_pb.v1 import common_pb2

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REMOVED = "removed-"
"""Prefix of files that remain to be deleted."""
_DAY_SECONDS = 86_400.0
"""Seconds of a day: files are kept by days."""
_KNOWN_FOLDERS = 64
"""Archives whose lists of parts, of 10,000 digests at most, are held in memory."""


class BlobStore:
    """Blobs in one folder. Interrupted uploads are resumed by whoever has begun them.

    Each uploader has partial files of its own, since what one has sent says nothing about another's bytes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = self._whole = folder
        self._partial = folder / "partial"
        self._whole.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._whole.chmod(0o700)
        self._partial.mkdir(exist_ok=True)
        self._locks: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
        """Locks of the uploads under way."""
        self._held = Counter[str]()
        """Digests of blobs that requests under way need, with the number of these requests."""
        self._listed = lru_cache(_KNOWN_FOLDERS)(self._read_parts)
        self._received: dict[str, tuple[float, int]] = {}
        """By uploader and kind of blob: when its day began, on the monotonic clock, and the bytes since then."""

    def path(self, digest: str) -> Path:
        """Return the path of a complete blob, which need not exist. Raises ``GeofedError("FRAME_INVALID")``."""
        return self._whole / _name(digest)

    def size(self, digest: str) -> int | None:
        """Return the size of a complete blob; None if it is missing or incomplete."""
        return _size(self.path(digest))

    def remove(self, digest: str) -> None:
        """Delete a complete blob; one that is being sent is sent to its end."""
        self.path(digest).unlink(missing_ok=True)

    def stat(self, digest: str, uploader: str) -> common_pb2.BlobAck:
        """Return how many bytes of a blob are stored, as far as the uploader needs to know."""
        whole = self.size(digest)
        if whole is None:
            partial = _size(self._partial_of(digest, uploader))
            if partial is not None:
                return common_pb2.BlobAck(digest=digest, have_bytes=partial)
            # An upload may have been completed in between, and moved its file.
            whole = self.size(digest)
        if whole is not None:
            # Who asks for it is about to use it, so its retention begins again.
            with suppress(OSError):
                os.utime(self.path(digest))
        return common_pb2.BlobAck(digest=digest, have_bytes=whole or 0, complete=whole is not None)

    def incomplete(self, digests: Sequence[str], uploader: str) -> list[common_pb2.BlobAck]:
        """Return those of several blobs that are not complete. Blocks."""
        return [one for one in (self.stat(digest, uploader) for digest in dict.fromkeys(digests)) if not one.complete]

    def parts(self, bundle: str) -> frozenset[str]:
        """Return the digests of the files that belong to a complete archive of a task folder; none if it is missing, or
        nothing that a job can have. Blocks for as long as it takes to read a small file."""
        there = _DIGEST.fullmatch(bundle) and self.size(bundle) is not None
        return self._listed(bundle) if there else frozenset()

    def _read_parts(self, bundle: str) -> frozenset[str]:
        try:
            return frozenset(one.digest for one in parts_of(self.path(bundle)))
        except GeofedError:
            return frozenset()

    def missing_parts(self, bundle: str) -> list[Part]:
        """Return the files of a task folder whose archive is complete that are not, or not of the listed size."""
        return [one for one in parts_of(self.path(bundle)) if self.size(one.digest) != one.bytes]

    def _partial_of(self, digest: str, uploader: str) -> Path:
        mark = hashlib.sha256(uploader.encode()).hexdigest()[:16]
        return self._partial / f"{mark}-{_name(digest)}"

    async def receive(
        self,
        chunks: AsyncIterator[common_pb2.BlobChunk],
        *,
        limit_bytes: int,
        uploader: str,
        daily_bytes: int | None = None,
        counted: str = "",
        account: str = "",
    ) -> common_pb2.BlobAck:
        """Receive an upload. Received bytes are kept for its uploader if the stream is interrupted.

        Args:
            limit_bytes: limit of one blob.
            daily_bytes: limit of what the uploader sends of this kind within a day; None: none.
            counted: kind of the blob, each with a limit of its own.
            account: to whose daily limit it counts; empty: the uploader's.

        Raises ``GeofedError``: LIMIT_EXCEEDED; DISK_FULL; FRAME_INVALID for a gap; and, with the partial file dropped,
        FRAME_INVALID for more bytes than announced and DIGEST_MISMATCH.
        """
        first = await anext(aiter(chunks), None)
        if first is None:
            raise GeofedError("FRAME_INVALID", "the upload is empty")
        digest, total = first.digest, first.total_bytes
        if total > limit_bytes:
            raise GeofedError("LIMIT_EXCEEDED", f"the blob has {total} bytes and exceeds the limit of {limit_bytes}")
        partial = self._partial_of(digest, uploader)
        async with self._locks.setdefault(partial, asyncio.Lock()):
            if self.size(digest) is None:
                have = _size(partial) or 0
                account = f"{account or uploader} {counted}"
                self._check_space(total - have, account, daily_bytes)
                try:
                    await self._append_all(first, chunks, partial)
                finally:
                    began, sent = self._day(account)
                    self._received[account] = began, sent + max(0, (_size(partial) or total) - have)
        return self.stat(digest, uploader)

    def _day(self, account: str) -> tuple[float, int]:
        """Return when the day of an uploader and kind began, and the bytes that were sent since then."""
        began, sent = self._received.get(account, (-math.inf, 0))
        now = time.monotonic()
        return (began, sent) if now < began + _DAY_SECONDS else (now, 0)

    def _check_space(self, more_bytes: int, account: str, daily_bytes: int | None) -> None:
        began, sent = self._day(account)
        if daily_bytes is not None and sent + more_bytes > daily_bytes:
            hours = (began + _DAY_SECONDS - time.monotonic()) / 3600
            raise GeofedError(
                "LIMIT_EXCEEDED",
                f"{sent >> 20} MiB were uploaded within a day and {more_bytes} bytes more exceed the limit of "
                f"{daily_bytes >> 20} MiB",
                hint=f"upload it in {hours:.0f} h, or submit jobs with what is uploaded already",
            )
        if is_nearly_full(self.folder, more_bytes):
            raise GeofedError(
                "DISK_FULL",
                f"the control plane's disk has no space for {more_bytes} bytes more",
                hint="an operator frees space: see `geofed storage`, and `geofed delete JOB`",
            )

    async def send(self, digest: str, offset: int) -> AsyncIterator[common_pb2.BlobChunk]:
        """Yield the bytes of a complete blob from `offset` on. Raises ``GeofedError("MODEL_NOT_FOUND")``."""
        total = self.size(digest)
        if total is None:
            raise GeofedError("MODEL_NOT_FOUND", f"blob {digest} not found", hint="see `geofed status JOB`")
        with self.path(digest).open("rb") as file:
            file.seek(offset)
            while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield common_pb2.BlobChunk(digest=digest, total_bytes=total, offset=offset, data=data)
                offset += len(data)

    # --- removal

    @contextmanager
    def held(self, digest: str) -> Iterator[None]:
        """Keep a blob, and the files that it lists, while the context is open, although no job refers to it yet."""
        self._held[digest] += 1
        held = {digest}
        try:
            held |= (parts := self.parts(digest))
            self._held.update(parts)
            yield
        finally:
            self._held.subtract(held)
            self._held += Counter()  # drops what is held no more

    def whole(self, *, until: float = math.inf, digests: Iterable[str] | None = None) -> list[Found]:
        """Return the complete blobs, whose names are their digests, that were not used after a time. Blocks.

        ``digests``: only these.
        """
        names = os.listdir(self._whole) if digests is None else [one.removeprefix("sha256:") for one in digests]
        held = (_found(self._whole / name) for name in names if _DIGEST.fullmatch(f"sha256:{name}"))
        return [blob for blob in held if blob is not None and blob.changed_at <= until]

    def unfinished(self) -> list[Found]:
        """Return the files of uploads that are not complete, and of blobs that are being removed. Blocks."""
        return found(self._partial)

    def take_away(self, file: Path) -> Path | None:
        """Take a file of `whole` or `unfinished` away, at once; return the file that remains to be deleted.

        None: it is needed by a request or an upload under way. Raises ``OSError``.
        """
        if f"sha256:{file.name}" in self._held or file in self._locks:
            return None
        if file.name.startswith(_REMOVED):
            return file
        return file.rename(self._partial / f"{_REMOVED}{file.name}")

    async def _append_all(
        self, first: common_pb2.BlobChunk, chunks: AsyncIterator[common_pb2.BlobChunk], partial: Path
    ) -> None:
        digest, total = first.digest, first.total_bytes
        with partial.open("ab") as file:
            have = file.tell()
            chunk: common_pb2.BlobChunk | None = first
            while chunk is not None:
                try:
                    have = await asyncio.to_thread(_append, file.fileno(), chunk, have, total)
                except _TooLong as error:
                    partial.unlink(missing_ok=True)
                    raise GeofedError("FRAME_INVALID", str(error)) from None
                chunk = await anext(aiter(chunks), None)
            await asyncio.to_thread(os.fsync, file.fileno())
        if have == total:
            await asyncio.to_thread(self._adopt, partial, digest)

    def _adopt(self, partial: Path, digest: str) -> None:
        with partial.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != _name(digest):
            partial.unlink()
            raise GeofedError("DIGEST_MISMATCH", f"the upload of {digest} has the digest sha256:{found}")
        os.replace(partial, self._whole / _name(digest))
        flush_folder(self._whole)


class _TooLong(Exception):
    """More bytes came than were announced."""


def _append(descriptor: int, chunk: common_pb2.BlobChunk, have: int, total: int) -> int:
    """Write the new bytes of a chunk; return the number of stored bytes."""
    if chunk.offset > have:
        raise GeofedError("FRAME_INVALID", f"a chunk begins at {chunk.offset}, but only {have} bytes are stored")
    fresh = memoryview(chunk.data)[have - chunk.offset :]
    if have + len(fresh) > total:
        raise _TooLong(f"the upload has more than the announced {total} bytes")
    while fresh:
        written = os.write(descriptor, fresh)
        have += written
        fresh = fresh[written:]
    return have


def _found(path: Path) -> Found | None:
    with suppress(FileNotFoundError):
        stat = path.stat()
        # st_blocks counts units of 512 bytes.
        return Found(path, stat.st_blocks * 512, stat.st_mtime)
    return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _name(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise GeofedError("FRAME_INVALID", f"{digest[:80]!r} is not a digest")
    return digest.removeprefix("sha256:")
