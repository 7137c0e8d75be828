"""Blobs of the control plane: what is told of them while they arrive."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from control_plane.blobs import BlobStore

CONTENT = b"the code of a job"
NAME = hashlib.sha256(CONTENT).hexdigest()
DIGEST = f"sha256:{NAME}"


def test_what_arrived_is_told(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    assert (store.stat(DIGEST).have_bytes, store.stat(DIGEST).complete) == (0, False)
    (tmp_path / "partial" / NAME).write_bytes(CONTENT[:5])
    assert (store.stat(DIGEST).have_bytes, store.stat(DIGEST).complete) == (5, False)


def test_an_upload_that_ends_while_it_is_asked_about_is_told_as_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, size = BlobStore(tmp_path), BlobStore.size
    partial = tmp_path / "partial" / NAME
    partial.write_bytes(CONTENT)

    def ends_then(self: BlobStore, digest: str) -> int | None:
        found = size(self, digest)
        if partial.exists():
            partial.replace(tmp_path / NAME)
        return found

    monkeypatch.setattr(BlobStore, "size", ends_then)
    told = store.stat(DIGEST)
    assert (told.have_bytes, told.complete) == (len(CONTENT), True)
