"""Files are replaced as a whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.failures import filled
from support.small_disk import small_disk

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably


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
