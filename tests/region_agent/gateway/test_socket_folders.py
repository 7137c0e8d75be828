"""Folders whose paths are short enough for sockets, wherever temporary files are."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from geofed_pb.errors import GeofedError
from region_agent.gateway import socket_folders
from region_agent.gateway.socket_folders import remove_short_folder, short_folder


def test_a_folder_lasts_until_the_next_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    first = short_folder(tmp_path / "record")
    assert len(str(first)) < 60
    assert first.stat().st_mode & 0o777 == 0o700
    (first / "link").symlink_to(tmp_path)
    second = short_folder(tmp_path / "record")
    assert second.exists()
    assert not first.exists()
    assert tmp_path.exists()
    remove_short_folder(tmp_path / "record")
    assert not second.exists()
    remove_short_folder(tmp_path / "record")


def test_a_record_of_something_else_removes_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "record").write_text(str(tmp_path / "mine"))
    remove_short_folder(tmp_path / "record")
    assert (tmp_path / "mine").exists()


def test_where_there_is_no_place_for_one_tmpdir_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    monkeypatch.setattr(socket_folders, "_FALLBACKS", ("/nowhere",))
    with pytest.raises(GeofedError, match="/nowhere: No such file or directory") as raised:
        short_folder(tmp_path / "record")
    assert raised.value.code == "CONFIG_INVALID"
    assert "TMPDIR" in raised.value.hint
