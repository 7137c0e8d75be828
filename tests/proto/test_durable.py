"""Files are replaced as a whole, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.failures import filled
from support.small_disk import small_disk

from geofed_pb.errors import GeofedError
from geofed_pb.files import durable
from geofed_pb.files.durable import begin_write, commit_write, write_blocks_durably, write_durably


def test_writing_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, [b"long before"])
    write_durably(path, [b"a", b"b"])
    assert path.read_bytes() == b"ab"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.processes
@pytest.mark.parametrize("count", [100, 100_000])
def test_a_full_disk_is_told_of_small_files_too(tmp_path: Path, count: int) -> None:
    """What is written first stays in the process for a while."""
    with small_disk(tmp_path / "small", bytes_=1 << 18) as folder:
        (folder / "kept").write_bytes(b"before")
        with filled(folder), pytest.raises(GeofedError) as raised:
            write_durably(folder / "kept", [b"x" * count])
        assert raised.value.code == "DISK_FULL"
        assert (folder / "kept").read_bytes() == b"before"
        write_durably(folder / "kept", [b"x" * count])
        assert (folder / "kept").read_bytes() == b"x" * count


def test_a_private_file_is_private_before_there_is_anything_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a crash has left the beginning of a public one."""
    path, modes, chmod = tmp_path / "key", list[tuple[int, int]](), os.fchmod
    (tmp_path / ".key.partial").write_bytes(b"")
    (tmp_path / ".key.partial").chmod(0o644)

    def fchmod(descriptor: int, mode: int) -> None:
        chmod(descriptor, mode)
        modes.append((mode, os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fchmod", fchmod)
    write_durably(path, [b"secret"], mode=0o600)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"secret", 0o600)
    assert modes == [(0o600, 0)]
    write_durably(path, [b"public"], mode=0o644)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("refusal", ["none", "of the flag", "of a block"])
@pytest.mark.parametrize("size", [0, 1, 4096, 3 * 4096, 3 * 4096 + 77])
def test_what_passes_by_the_page_cache_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, refusal: str
) -> None:
    """Whatever the file system takes, and over whatever a crash has left."""
    monkeypatch.setattr(durable, "_DIRECT_BYTES", 4096)
    path, content, control, pwrite = tmp_path / "file", os.urandom(size), fcntl.fcntl, os.pwrite
    (tmp_path / ".file.partial").write_bytes(b"x" * 5 * 4096)
    refused = []

    def fcntl_(descriptor: int, command: int, flags: int = 0) -> int:
        if refusal == "of the flag" and flags & os.O_DIRECT:
            refused.append(command)
            raise OSError(errno.EINVAL, "no direct writes")
        return control(descriptor, command, flags)

    def write(descriptor: int, data: memoryview, at: int) -> int:
        if refusal == "of a block" and control(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(at)
            raise OSError(errno.EINVAL, "another size")
        return pwrite(descriptor, data, at)

    monkeypatch.setattr(fcntl, "fcntl", fcntl_)
    monkeypatch.setattr(os, "pwrite", write)
    commit_write(path, begin_write(path, [content[:100], content[100:]], direct=True))
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
    assert bool(refused) == (refusal == "of the flag" or (refusal == "of a block" and size >= 4096))


def test_a_disk_that_fails_direct_writes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_DIRECT_BYTES", 4096)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(GeofedError) as raised:
        begin_write(tmp_path / "file", [b"x" * 5000], direct=True)
    assert raised.value.code == "DISK_FULL"
    assert not (tmp_path / "file").exists()


def test_blocks_are_written_while_they_are_made_and_count_once_all_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_WINDOW_BYTES", 64)
    path, sizes = tmp_path / "file", []
    path.write_bytes(b"before")

    def blocks(number: int) -> Iterator[bytes]:
        for block in range(number):
            sizes.append((tmp_path / ".file.partial").stat().st_size)
            yield bytes([block]) * 64
        if number == 3:
            raise GeofedError("TASK_FAILED", "not finite")

    with pytest.raises(GeofedError, match="not finite"):
        write_blocks_durably(path, blocks(3), 256)
    assert path.read_bytes() == b"before"
    sizes.clear()
    write_blocks_durably(path, blocks(2), 128, lambda size, partial: partial.write_bytes(b"x" * size * 2))
    assert path.read_bytes() == bytes(64) + b"\1" * 64
    assert sizes == [256, 256]
